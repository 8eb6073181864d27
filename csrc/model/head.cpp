#include "model/head.h"

#include <algorithm>

#include "model/lora.h"

namespace surogate {

namespace {

/// The adapter of the head over the ids that count: a range of the rows of B.
Adapter valid_adapter(const Adapter& adapter, std::int64_t valid_vocab) {
    return adapter.present() ? Adapter{adapter.a, first_rows(adapter.b, valid_vocab)} : Adapter{};
}

}  // namespace

Head::Chunk Head::slice(const Pass& pass, std::int64_t first, std::int64_t count) const {
    const std::int64_t n = std::min(chunk_rows(), count - first);
    const auto values = [&](const Tensor& tensor) { return first_values(tensor.column_range(first, n), n); };
    Chunk chunk;
    chunk.count = n;
    chunk.rows = first_rows(buffers_.rows, n);
    chunk.normed = first_rows(buffers_.normed, n);
    chunk.rstd = first_values(buffers_.rstd, n);
    // Ids from valid_vocab on are left out of the product altogether.
    chunk.logits = matrix(buffers_.logits.data, n, pass.valid_vocab, DType::Float32, buffers_.logits.device);
    if (!buffers_.low.empty()) chunk.low = first_rows(buffers_.low, n);
    chunk.index = values(buffers_.index);
    chunk.targets = values(buffers_.targets);
    chunk.logp = values(buffers_.logp);
    chunk.lse = values(buffers_.lse);
    chunk.d_logp = values(buffers_.d_logp);
    if (pass.entropy) {
        chunk.entropy = values(buffers_.entropy);
        chunk.d_entropy = values(buffers_.d_entropy);
    }
    return chunk;
}

void Head::compute_logits(const Pass& pass, const Chunk& chunk) const {
    backend_.gather_rows(chunk.rows, pass.hidden, chunk.index);
    backend_.rmsnorm_forward(chunk.normed, chunk.rstd, chunk.rows, pass.weights.final_norm, spec_.norm_eps);
    backend_.linear_forward(chunk.logits, chunk.normed, first_rows(pass.weights.head, pass.valid_vocab), {}, 1.0f, 0.0f);
    const Adapter adapter = valid_adapter(pass.weights.head_lora, pass.valid_vocab);
    adapter_forward(backend_, {{adapter, 0}}, chunk.logits, chunk.low, chunk.normed, pass.lora_scale);
}

void Head::compute_stats(const Pass& pass, const Chunk& chunk) const {
    backend_.logprob_forward(chunk.logp, chunk.entropy, chunk.lse, chunk.logits, chunk.targets, pass.temperature, pass.valid_vocab);
}

void Head::push_back(const Pass& pass, const Chunk& chunk) const {
    const ModelWeights& gradients = *pass.gradients;
    const bool below = !pass.d_hidden.empty();
    const Tensor& d_logits = chunk.logits;
    backend_.logprob_backward(d_logits, chunk.lse, chunk.entropy, chunk.targets, chunk.d_logp, chunk.d_entropy, pass.temperature,
                              pass.valid_vocab);
    if (!gradients.head.empty())
        backend_.linear_backward_weight(first_rows(gradients.head, pass.valid_vocab), d_logits, chunk.normed, 1.0f);
    const Tensor d_normed = below ? first_rows(buffers_.d_normed, chunk.count) : Tensor{};
    if (below) backend_.linear_backward_input(d_normed, d_logits, first_rows(pass.weights.head, pass.valid_vocab), 1.0f, 0.0f);
    const Adapter adapter = valid_adapter(pass.weights.head_lora, pass.valid_vocab);
    if (adapter.present()) {
        const Adapter d_adapter = valid_adapter(gradients.head_lora, pass.valid_vocab);
        adapter_backward(backend_, {{adapter, 0}}, {{d_adapter, 0}}, d_normed, buffers_.d_low.row_range(0, chunk.count), d_logits,
                         chunk.normed, chunk.low, pass.lora_scale);
    }
    if (!below) return;
    const Tensor d_rows = first_rows(buffers_.d_rows, chunk.count);
    backend_.fill(d_rows, 0.0f);
    backend_.rmsnorm_backward(d_rows, gradients.final_norm, d_normed, chunk.rows, pass.weights.final_norm, chunk.rstd);
    backend_.scatter_add_rows(pass.d_hidden, d_rows, chunk.index);
}

void Head::forward(const Pass& pass, std::int64_t count) const {
    for (std::int64_t first = 0; first < count; first += chunk_rows()) {
        const Chunk chunk = slice(pass, first, count);
        compute_logits(pass, chunk);
        compute_stats(pass, chunk);
    }
}

void Head::backward(const Pass& pass, std::int64_t count, bool kept) const {
    for (std::int64_t first = 0; first < count; first += chunk_rows()) {
        const Chunk chunk = slice(pass, first, count);
        if (!kept) compute_logits(pass, chunk);
        push_back(pass, chunk);
    }
}

}  // namespace surogate
