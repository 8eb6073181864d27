#pragma once

#include <cstdint>

#include "model/activations.h"
#include "model/parameters.h"
#include "model/spec.h"

namespace surogate {

/// The LM head over `count` rows of the last block's output, in chunks: logits of more than one chunk never exist at once.
/// buffers.index and buffers.targets name the rows and what they predict; row j's numbers lie at j of logp, entropy, lse.
class Head {
   public:
    struct Pass {
        const ModelWeights& weights;
        const ModelWeights* gradients = nullptr;  // backward only; an empty one is frozen
        Tensor hidden;                            // [T, C]
        Tensor d_hidden;                          // [T, C], +=; empty: nothing below the head is trained
        float temperature = 1.0f;
        std::int64_t valid_vocab = 0;  // in (0, V]
        bool entropy = false;
        float lora_scale = 0.0f;
    };

    Head(Backend& backend, const ModelSpec& spec, const HeadBuffers& buffers) : backend_(backend), spec_(spec), buffers_(buffers) {}

    /// logp, lse and, if asked for, entropy of rows [0, count)
    void forward(const Pass& pass, std::int64_t count) const;
    /// Gradients, given d_logp and (if pass.entropy) d_entropy. `kept`: the buffers still hold the forward's only chunk.
    void backward(const Pass& pass, std::int64_t count, bool kept) const;
    /// Both at once: each chunk's logits are computed a single time. Chunks for which `live(first, count)` is false get no backward.
    template <typename Live>
    void forward_backward(const Pass& pass, std::int64_t count, const Live& live) const {
        for (std::int64_t first = 0; first < count; first += chunk_rows()) {
            const Chunk chunk = slice(pass, first, count);
            compute_logits(pass, chunk);
            compute_stats(pass, chunk);
            if (live(first, chunk.count)) push_back(pass, chunk);
        }
    }

    std::int64_t chunk_rows() const { return buffers_.logits.rows; }

   private:
    struct Chunk {
        std::int64_t count;
        Tensor rows, normed, rstd, logits, low, index, targets, logp, entropy, lse, d_logp, d_entropy;
    };
    Chunk slice(const Pass& pass, std::int64_t first, std::int64_t count) const;
    void compute_logits(const Pass& pass, const Chunk& chunk) const;
    void compute_stats(const Pass& pass, const Chunk& chunk) const;
    void push_back(const Pass& pass, const Chunk& chunk) const;

    Backend& backend_;
    const ModelSpec& spec_;
    const HeadBuffers& buffers_;
};

}  // namespace surogate
