#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/spec.h"

namespace surogate {

/// The adapter beside one linear: y += scale * (x A^T) B^T.
struct Adapter {
    Tensor a;  // [r, in]
    Tensor b;  // [out, r]
    bool present() const { return !a.empty(); }
};

/// A frozen linear [N, K] and its adapters as one matrix,
///
///     W  B     N rows
///     A  0     R rows, R the adapters' ranks together, rounded up
///
/// so that y = [x, s x A^T] [W, B]^T and dx = [dy, s dy B] [W; A] are single products, if there is room for R more columns beside x and dy.
/// Where several linears write side by side, B is block-diagonal and the A lie one below the other.
struct Border {
    Tensor whole;            // [N + R, K + R]
    std::int64_t width = 0;  // R

    bool present() const { return width > 0; }
    std::int64_t rows() const { return whole.rows - width; }
    std::int64_t columns() const { return whole.columns - width; }
    Tensor weight() const { return whole.row_range(0, rows()).column_range(0, columns()); }
    Tensor a() const { return whole.row_range(rows(), width).column_range(0, columns()); }
    Tensor b() const { return whole.row_range(0, rows()).column_range(columns(), width); }
    Tensor forward() const { return whole.row_range(0, rows()); }
    Tensor backward() const { return whole.column_range(0, columns()); }
};

/// One block's weights. q, k and v lie in one buffer [(H+2K)*D, C], gate and up in one [2F, C], each a range of rows; adapters likewise:
/// the A of q, k and v (those present) lie one below the other, so that x A^T is one product.
struct BlockWeights {
    Tensor input_norm;             // [C]
    Tensor qkv, qkv_bias;          // [(H+2K)*D, C], [(H+2K)*D]
    Tensor q_norm, k_norm;         // [D]
    Tensor o, o_bias;              // [C, H*D], [C]
    Tensor post_norm;              // [C]
    Tensor gate_up, gate_up_bias;  // [2F, C], [2F]
    Tensor down, down_bias;        // [C, F], [C]
    Adapter q_lora, k_lora, v_lora, o_lora, gate_lora, up_lora, down_lora;
    Border qkv_border, o_border, gate_up_border, down_border;
};

struct ModelWeights {
    Tensor embedding;  // [V, C]
    std::vector<BlockWeights> blocks;
    Tensor final_norm;  // [C]
    Tensor head;        // [V, C]; the embedding itself if tied
    Adapter head_lora;
    Tensor rope_cos, rope_sin;  // [max_positions, D/2]; not trained, the same for every layer
};

/// A tensor that Python can load and export by name: a view of a weight, of its gradient, or of optimiser state.
struct NamedTensor {
    std::string name;
    Tensor tensor;
    Tensor master{};  // the exact values, where `tensor` is only a rounded or a bordering copy of them; empty: `tensor` holds them
    bool trainable = false;
    bool is_vector = false;  // its shape is [columns]

    const Tensor& exact() const { return master.empty() ? tensor : master; }
};

}  // namespace surogate
