#pragma once

#include <cstdint>

#include "model/activations.h"
#include "model/parameters.h"
#include "model/pass_buffers.h"
#include "model/spec.h"

namespace surogate {

/// The LM head over the rows of the last block's output that have a target, in chunks: each chunk's logits are computed as a whole, and
/// those of more than one exist at once only if they are kept. Nothing here waits for the device.
class Head {
   public:
    struct Pass {
        const ModelWeights& weights;
        const ModelWeights* gradients = nullptr;  // backward only; an empty one is frozen
        Tensor hidden;                            // [T, C]
        Tensor d_hidden;                          // [T, C], +=; empty: nothing below the head is trained
        Tensor index, targets;                    // [n]: the rows, and what they predict
        RowValues values;                         // [n]
        float temperature = 1.0f;
        std::int64_t valid_vocab = 0;  // in (0, V]
        bool entropy = false;
        float lora_scale = 0.0f;
        bool add_gradients = true;  // to that of the head; false: what it held does not count

        std::int64_t count() const { return index.size(); }
    };

    Head(Backend& backend, const ModelSpec& spec, const HeadBuffers& buffers) : backend_(backend), spec_(spec), buffers_(buffers) {}

    /// logp, lse and, if asked for, entropy
    void forward(const Pass& pass) const;
    /// Gradients, given d_logp and (if pass.entropy) d_entropy. `kept`: the buffers still hold the forward's logits.
    void backward(const Pass& pass, bool kept) const;
    /// Both at once: each chunk's logits are computed a single time. Chunks for which `live(first, count)` is false get no backward.
    template <typename Live>
    void forward_backward(const Pass& pass, const Live& live) const {
        bool add = pass.add_gradients;
        for (std::int64_t first = 0; first < pass.count(); first += buffers_.chunk) {
            const Chunk chunk = slice(pass, first);
            compute_logits(pass, chunk);
            compute_stats(pass, chunk);
            if (!live(first, chunk.count)) continue;
            push_back(pass, chunk, add);
            add = true;
        }
    }

    /// forward, and every row's gradient for d_logp = 1, which stays in the buffers (head_gradient_in_forward).
    void forward_with_gradient(const Pass& pass) const;
    /// d_hidden += d_logp * what forward_with_gradient left
    void scale_gradient(const Pass& pass) const;

    /// Whether the logits of a pass over `count` rows are there until the next one.
    bool keeps(std::int64_t count) const { return buffers_.kept || count <= buffers_.chunk; }

   private:
    struct Chunk {
        std::int64_t first, count;
        Tensor rows, normed, rstd, logits, d_logits, low, index, targets, logp, entropy, lse, d_logp, d_entropy;
    };
    Chunk slice(const Pass& pass, std::int64_t first) const;
    void compute_logits(const Pass& pass, const Chunk& chunk) const;
    void compute_stats(const Pass& pass, const Chunk& chunk) const;
    void push_back(const Pass& pass, const Chunk& chunk, bool add) const;
    /// d_rows = the gradient of the head's input, given chunk.d_logits; adds to that of the norm
    void through_norm(const Pass& pass, const Chunk& chunk, const Tensor& d_rows, const Tensor& d_normed) const;

    Backend& backend_;
    const ModelSpec& spec_;
    const HeadBuffers& buffers_;
};

}  // namespace surogate
