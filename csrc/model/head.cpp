#include "model/head.h"

#include <algorithm>

#include "model/lora.h"

namespace surogate {

namespace {

/// The adapter of the head over the first ids: a range of the rows of B.
Adapter first_ids(const Adapter& adapter, std::int64_t ids) {
    return adapter.present() ? Adapter{adapter.a, first_rows(adapter.b, ids)} : Adapter{};
}

/// Gradients of logits in the logits' own memory, in the dtype that the next product takes.
Tensor in_place(const Tensor& logits, DType dtype) {
    Tensor view = logits;
    if (logits.dtype == DType::Float32 && dtype == DType::BFloat16) view.stride *= 2;
    view.dtype = dtype;
    return view;
}

}  // namespace

Head::Chunk Head::slice(const Pass& pass, std::int64_t first) const {
    const std::int64_t n = std::min(buffers_.chunk, pass.count() - first);
    const std::int64_t at = buffers_.kept ? first : 0;
    const auto values = [&](const Tensor& tensor) { return first_values(tensor.column_range(first, n), n); };
    const auto logits = [&](const Tensor& buffer, std::int64_t row) {
        // Ids from valid_vocab on are left out of the product. In bfloat16 rows stay aligned and the product keeps whole tiles, with a few
        // ids too many, which the log-probability then ignores.
        if (buffers_.normed.dtype != DType::Float32) {
            return buffer.row_range(row, n).column_range(0, std::min(padded_columns(pass.valid_vocab), buffer.columns));
        }
        return matrix(buffer.row_range(row, 0).data, n, pass.valid_vocab, buffer.dtype, buffer.device);
    };
    Chunk chunk;
    chunk.first = first;
    chunk.count = n;
    chunk.rows = buffers_.rows.row_range(at, n);
    chunk.normed = buffers_.normed.row_range(at, n);
    chunk.rstd = first_values(buffers_.rstd.column_range(at, n), n);
    chunk.logits = logits(buffers_.logits, at);
    chunk.d_logits = in_place(chunk.logits, buffers_.normed.dtype);
    if (!buffers_.low.empty()) chunk.low = buffers_.low.row_range(at, n);
    chunk.index = values(pass.index);
    chunk.targets = values(pass.targets);
    chunk.logp = values(pass.values.logp);
    chunk.lse = values(pass.values.lse);
    chunk.d_logp = values(pass.values.d_logp);
    if (pass.entropy) {
        chunk.entropy = values(pass.values.entropy);
        chunk.d_entropy = values(pass.values.d_entropy);
    }
    return chunk;
}

void Head::compute_logits(const Pass& pass, const Chunk& chunk) const {
    const std::int64_t ids = chunk.logits.columns;
    backend_.gather_rows(chunk.rows, pass.hidden, chunk.index);
    backend_.rmsnorm_forward(chunk.normed, chunk.rstd, chunk.rows, pass.weights.final_norm, spec_.norm_eps);
    backend_.linear_forward(chunk.logits, chunk.normed, first_rows(pass.weights.head, ids), {}, 1.0f, 0.0f);
    const Adapter adapter = first_ids(pass.weights.head_lora, ids);
    adapter_forward(backend_, {{adapter, 0}}, chunk.logits, chunk.low, chunk.normed, pass.lora_scale);
}

void Head::compute_stats(const Pass& pass, const Chunk& chunk) const {
    backend_.logprob_forward(chunk.logp, chunk.entropy, chunk.lse, chunk.logits, chunk.targets, pass.temperature, pass.valid_vocab);
}

void Head::through_norm(const Pass& pass, const Chunk& chunk, const Tensor& d_rows, const Tensor& d_normed) const {
    backend_.fill(d_rows, 0.0f);
    backend_.rmsnorm_backward(d_rows, pass.gradients->final_norm, d_normed, chunk.rows, pass.weights.final_norm, chunk.rstd);
}

void Head::push_back(const Pass& pass, const Chunk& chunk, bool add) const {
    const ModelWeights& gradients = *pass.gradients;
    const bool below = !pass.d_hidden.empty();
    const Tensor& d_logits = chunk.d_logits;
    const std::int64_t ids = d_logits.columns;
    backend_.logprob_backward(d_logits, chunk.logits, chunk.lse, chunk.entropy, chunk.targets, chunk.d_logp, chunk.d_entropy,
                              pass.temperature, pass.valid_vocab);
    if (!gradients.head.empty()) {
        // Ids that no logit was computed for have a gradient, too.
        if (!add && ids < gradients.head.rows) backend_.fill(gradients.head.row_range(ids, gradients.head.rows - ids), 0.0f);
        backend_.linear_backward_weight(first_rows(gradients.head, ids), d_logits, chunk.normed, 1.0f, add ? 1.0f : 0.0f);
    }
    const Tensor d_normed = below ? first_rows(buffers_.d_normed, chunk.count) : Tensor{};
    if (below) backend_.linear_backward_input(d_normed, d_logits, first_rows(pass.weights.head, ids), 1.0f, 0.0f);
    const Adapter adapter = first_ids(pass.weights.head_lora, ids);
    if (adapter.present()) {
        const Adapter d_adapter = first_ids(gradients.head_lora, ids);
        adapter_backward(backend_, {{adapter, 0}}, {{d_adapter, 0}}, d_normed, buffers_.d_low.row_range(0, chunk.count), d_logits,
                         chunk.normed, chunk.low, pass.lora_scale);
    }
    if (!below) return;
    const Tensor d_rows = first_rows(buffers_.d_rows, chunk.count);
    through_norm(pass, chunk, d_rows, d_normed);
    backend_.scatter_add_rows(pass.d_hidden, d_rows, chunk.index);
}

void Head::forward(const Pass& pass) const {
    for (std::int64_t first = 0; first < pass.count(); first += buffers_.chunk) {
        const Chunk chunk = slice(pass, first);
        compute_logits(pass, chunk);
        compute_stats(pass, chunk);
    }
}

void Head::backward(const Pass& pass, bool kept) const {
    for (std::int64_t first = 0; first < pass.count(); first += buffers_.chunk) {
        const Chunk chunk = slice(pass, first);
        if (!kept) compute_logits(pass, chunk);
        push_back(pass, chunk, pass.add_gradients || first > 0);
    }
}

void Head::forward_with_gradient(const Pass& pass) const {
    backend_.fill(pass.values.d_logp, 1.0f);  // the seeds for now
    for (std::int64_t first = 0; first < pass.count(); first += buffers_.chunk) {
        const Chunk chunk = slice(pass, first);
        compute_logits(pass, chunk);
        compute_stats(pass, chunk);
        backend_.logprob_backward(chunk.d_logits, chunk.logits, chunk.lse, {}, chunk.targets, chunk.d_logp, {}, pass.temperature,
                                  pass.valid_vocab);
        const Tensor d_normed = first_rows(buffers_.d_normed, chunk.count);
        backend_.linear_backward_input(d_normed, chunk.d_logits, first_rows(pass.weights.head, chunk.logits.columns), 1.0f, 0.0f);
        through_norm(pass, chunk, buffers_.d_rows.row_range(first, chunk.count), d_normed);
    }
}

void Head::scale_gradient(const Pass& pass) const {
    backend_.scatter_add_scaled_rows(pass.d_hidden, first_rows(buffers_.d_rows, pass.count()), pass.index, pass.values.d_logp);
}

}  // namespace surogate
