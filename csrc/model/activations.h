#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "model/arena.h"
#include "model/learner.h"
#include "model/spec.h"

namespace surogate {

/// What backward needs of one block, [T, ...] each, for the planned number of tokens or (by `first`) fewer. With adapters in borders, what
/// a linear reads has room for R more columns, and its `low` is what lies there.
struct BlockActivations {
    Tensor attention_in;     // [T, C], normed; or the memory of mlp_in, if that is dearer than to norm it again
    Tensor attention_rstd;   // [T]
    Tensor qkv;              // [T, (H+2K)*D], rotated
    Tensor raw_qk, qk_rstd;  // [T, (H+K)*D], [T, H+K]; only with qk_norm
    Tensor attention_out;    // [T, H*D]
    Tensor lse;              // [T, H]
    Tensor middle;           // [T, C], the residual stream between attention and MLP
    Tensor mlp_in;           // [T, C], normed
    Tensor mlp_rstd;         // [T]
    Tensor gate_up;          // [T, 2F]
    // Inputs times A of the adapters, [T, r] for each that is present, side by side; with borders scaled, and down's a copy of it.
    Tensor qkv_low, o_low, gate_up_low, down_low;

    // Not kept: in memory whose own contents come later or are done with. In that of gate_up, while it is not computed yet:
    Tensor branch;  // [T, C]
    // In that of scratch.activated or gate_up, after the backward of the MLP (or apart, where neither is wide enough):
    Tensor d_attention_out;  // [T, H*D]
    Tensor d_qkv;            // [T, (H+2K)*D], with room beside it if adapters are in borders
    Tensor spare;            // flat: what is left of gate_up then

    BlockActivations first(std::int64_t tokens) const;
};

/// Buffers of a pass that outlive no block. With borders, what a linear reads in either direction has room beside it.
struct Scratch {
    Tensor activated;  // [T, F]; in backward first its gradient, then itself again
    // Backward only.
    Tensor d_stream;  // [T, C]
    Tensor d_low;     // [T, 3r]

    Scratch first(std::int64_t tokens) const;
};

/// Buffers of the LM head: of one chunk of R rows, or of all rows if the logits are kept.
struct HeadBuffers {
    std::int64_t chunk = 0;  // R
    bool kept = false;       // the buffers hold every row's, not a chunk's
    Tensor rows, normed;     // [R, C]: gathered rows of the last block's output, and normed
    Tensor rstd;             // [R]
    Tensor logits;           // [R, V]
    Tensor low;              // [R, r]
    Tensor d_normed;         // [R, C] of one chunk; backward only
    Tensor d_rows;           // [R, C] of one chunk, or of all rows if forward computes them
    Tensor d_low;            // [R, r] of one chunk
};

struct Activations {
    Tensor indices;                        // int32: ids, positions, ... of the present batch, see PassInputs
    Tensor values;                         // float32: log-probabilities, ... and their gradients, see RowValues
    std::vector<Tensor> stream;            // the residual stream before each block and behind the last; a single one without a backward
    std::vector<BlockActivations> blocks;  // one per layer, or a single one if nothing is kept
    Scratch scratch;
    HeadBuffers head;
};

/// Rows of logits computed at a time: options.head_rows, or a number that depends on vocabulary and recipe alone; never more than
/// max_tokens.
std::int64_t head_chunk_rows(const ModelSpec& spec, const LearnerOptions& options);

/// Columns of a bfloat16 matrix whose rows all start on a 128-byte line.
constexpr std::int64_t padded_columns(std::int64_t columns) { return (columns + 63) / 64 * 64; }

/// Whether forward computes the gradient of every row for a seed of 1.
bool head_gradient_in_forward(const LearnerOptions& options);

/// Whether anything below the head is trained.
bool decoder_trained(const LearnerOptions& options);

bool targets_any(const LoraOptions& lora, std::initializer_list<Linear> linears);

/// `gradient`: the buffer that options.lend_gradients is about.
Activations lay_out_activations(Arena& arena, const ModelSpec& spec, const LearnerOptions& options, const Tensor& gradient);

/// The first `count` rows of a [T, ...] matrix.
inline Tensor first_rows(const Tensor& tensor, std::int64_t count) { return tensor.row_range(0, count); }
/// The first `count` numbers of a vector.
inline Tensor first_values(const Tensor& tensor, std::int64_t count) {
    Tensor view = tensor.column_range(0, count);
    view.stride = count;
    return view;
}

}  // namespace surogate
