#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace surogate {

/// All in which the supported families differ. Python fills it from a Hugging Face config; the core knows no family's name.
struct ModelSpec {
    std::int64_t layers = 0;
    std::int64_t hidden = 0;
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;  // need not be hidden / heads
    std::int64_t ffn = 0;
    std::int64_t vocab = 0;  // rows of the embedding and of the head
    std::int64_t max_positions = 0;

    float norm_eps = 1e-6f;
    std::string activation = "silu";
    bool qk_norm = false;   // RMSNorm over head_dim on q and k, before the rotation
    bool qkv_bias = false;  // on q, k and v
    bool o_bias = false;
    bool mlp_bias = false;  // on gate, up and down
    bool tied = false;      // the head is the embedding

    /// Inverse frequencies of the rotation, [head_dim / 2], scaling (linear, llama3, yarn) already in them;
    /// cos and sin are multiplied by `rope_attention_scale` (yarn).
    std::vector<double> rope_inv_freq;
    float rope_attention_scale = 1.0f;

    /// Per layer: a token attends to itself and to the `window - 1` before it; 0 is the whole segment.
    std::vector<std::int64_t> windows;

    std::int64_t q_columns() const { return heads * head_dim; }
    std::int64_t kv_columns() const { return kv_heads * head_dim; }
    std::int64_t qkv_columns() const { return q_columns() + 2 * kv_columns(); }

    void validate() const;  // throws std::invalid_argument that names the field
};

/// The linears that can carry an adapter.
enum class Linear : std::uint8_t { Q, K, V, O, Gate, Up, Down, Head };

struct LoraOptions {
    std::int64_t rank = 0;  // 0: no adapter, full fine-tuning
    float alpha = 0.0f;     // the adapter's scale is alpha / rank
    std::vector<Linear> targets;
    bool enabled() const { return rank > 0; }
    float scale() const { return alpha / static_cast<float>(rank); }
};

}  // namespace surogate
