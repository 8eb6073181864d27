#include "generate/decode_pass.h"

#include <algorithm>
#include <cmath>

#include "model/lora.h"

namespace surogate {

namespace {

Tensor first(const Tensor& t, std::int64_t rows) { return t.row_range(0, rows); }

Tensor first_values(const Tensor& t, std::int64_t count) {
    Tensor view = t.column_range(0, count);
    view.stride = count;
    return view;
}

/// y += scale * (x A^T) B^T for every adapter of the group
void add_adapters(Backend& backend, const AdapterGroup& group, const Tensor& y, const Tensor& low, const Tensor& x, float scale) {
    if (group.count == 0) return;
    const Tensor joined = matrix(low.data, x.rows, group.a.rows, DType::Float32, low.device);
    backend.decode_linear(joined, x, group.a, {}, 1.0f, 0.0f);
    for (std::int64_t i = 0; i < group.count; ++i) {
        const AdapterGroup::Member& member = group.members[static_cast<std::size_t>(i)];
        const std::int64_t rank = member.b.columns;
        backend.decode_linear(y.column_range(member.first, member.b.rows), joined.column_range(i * rank, rank), member.b, {}, scale, 1.0f);
    }
}

}  // namespace

DecodePass::DecodePass(Arena& arena, const ModelSpec& spec, const LoraOptions& lora, std::int64_t rows, std::int64_t head_rows,
                       std::int64_t valid_vocab)
    : valid_vocab_(valid_vocab) {
    arena.item("working buffers of the sampler (" + std::to_string(rows) + " rows)");
    tokens_ = arena.take_vector(rows, DType::Int32);
    positions_ = arena.take_vector(rows, DType::Int32);
    slots_ = arena.take_vector(rows, DType::Int32);
    stream_ = arena.take(rows, spec.hidden);
    normed_ = arena.take(rows, spec.hidden);
    branch_ = arena.take(rows, spec.hidden);
    rstd_ = arena.take_vector(rows);
    qkv_ = arena.take(rows, spec.qkv_columns());
    if (spec.qk_norm) {
        raw_qk_ = arena.take(rows, spec.q_columns() + spec.kv_columns());
        qk_rstd_ = arena.take(rows, spec.heads + spec.kv_heads);
    }
    attention_ = arena.take(rows, spec.q_columns());
    gate_up_ = arena.take(rows, 2 * spec.ffn);
    activated_ = arena.take(rows, spec.ffn);
    if (lora.enabled()) low_ = arena.take(rows, 3 * lora.rank);
    arena.item("head of the sampler (logits of " + std::to_string(head_rows) + " rows x " + std::to_string(valid_vocab) + " ids)");
    picked_ = arena.take(head_rows, spec.hidden);
    picked_normed_ = arena.take(head_rows, spec.hidden);
    picked_rstd_ = arena.take_vector(head_rows);
    picked_index_ = arena.take_vector(head_rows, DType::Int32);
    logits_ = arena.take(head_rows, valid_vocab);
}

void DecodePass::prepare(Backend& backend, std::int64_t block_size, std::span<const DecodeRow> rows) {
    const std::size_t n = rows.size();
    for (std::vector<std::int32_t>* values : {&host_tokens_, &host_positions_, &host_slots_, &lengths_}) values->resize(n);
    std::size_t width = 0;
    for (const DecodeRow& row : rows) width = std::max(width, static_cast<std::size_t>(row.position / block_size + 1));
    table_width_ = static_cast<std::int64_t>(width);
    tables_.resize(n * width);
    for (std::size_t i = 0; i < n; ++i) {
        const DecodeRow& row = rows[i];
        const auto used = static_cast<std::size_t>(row.position / block_size + 1);
        host_tokens_[i] = row.token;
        host_positions_[i] = row.position;
        host_slots_[i] = static_cast<std::int32_t>(row.blocks[used - 1] * block_size + row.position % block_size);
        lengths_[i] = row.position + 1;
        std::copy_n(row.blocks.begin(), used, tables_.begin() + static_cast<std::ptrdiff_t>(i * width));
    }
    const auto count = static_cast<std::int64_t>(n);
    backend.upload(first_values(tokens_, count), host_tokens_.data());
    backend.upload(first_values(positions_, count), host_positions_.data());
    backend.upload(first_values(slots_, count), host_slots_.data());
}

void DecodePass::block(const Learner& learner, const KvCache& cache, std::int64_t layer, std::int64_t rows) const {
    Backend& backend = learner.backend();
    const ModelSpec& spec = learner.spec();
    const ModelWeights& weights = learner.weights();
    const BlockWeights& w = weights.blocks[static_cast<std::size_t>(layer)];
    const LoraOptions& lora = learner.options().lora;
    const float lora_scale = lora.enabled() ? lora.scale() : 0.0f;
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.head_dim)));
    const std::int64_t window = spec.windows.empty() ? 0 : spec.windows[static_cast<std::size_t>(layer)];
    const AttentionShape shape{spec.heads, spec.kv_heads, spec.head_dim, scale, window};

    const Tensor stream = first(stream_, rows), normed = first(normed_, rows), branch = first(branch_, rows);
    const Tensor rstd = first_values(rstd_, rows), qkv = first(qkv_, rows), attention = first(attention_, rows);
    const Tensor gate_up = first(gate_up_, rows), activated = first(activated_, rows);
    const Tensor raw_qk = spec.qk_norm ? first(raw_qk_, rows) : Tensor{}, qk_rstd = spec.qk_norm ? first(qk_rstd_, rows) : Tensor{};

    backend.rmsnorm_forward(normed, rstd, stream, w.input_norm, spec.norm_eps);
    backend.decode_linear(qkv, normed, w.qkv, w.qkv_bias, 1.0f, 0.0f);
    const std::int64_t q = spec.q_columns(), kv = spec.kv_columns();
    add_adapters(backend, {{w.q_lora, 0}, {w.k_lora, q}, {w.v_lora, q + kv}}, qkv, low_, normed, lora_scale);
    backend.qk_norm_rope_forward(qkv, raw_qk, qk_rstd, w.q_norm, w.k_norm, weights.rope_cos, weights.rope_sin,
                                 first_values(positions_, rows), shape, spec.norm_eps);
    PagedCache paged = cache.layer(layer);
    paged.block_tables = tables_.data();
    paged.max_blocks = table_width_;
    paged.lengths = lengths_.data();
    backend.cache_write(paged, qkv, first_values(slots_, rows), shape);
    backend.paged_attention(attention, qkv, paged, shape);
    backend.decode_linear(branch, attention, w.o, w.o_bias, 1.0f, 0.0f);
    add_adapters(backend, {{w.o_lora, 0}}, branch, low_, attention, lora_scale);

    backend.add_rmsnorm_forward(stream, normed, rstd, branch, stream, w.post_norm, spec.norm_eps);
    backend.decode_linear(gate_up, normed, w.gate_up, w.gate_up_bias, 1.0f, 0.0f);
    add_adapters(backend, {{w.gate_lora, 0}, {w.up_lora, spec.ffn}}, gate_up, low_, normed, lora_scale);
    backend.swiglu_forward(activated, gate_up);
    backend.decode_linear(stream, activated, w.down, w.down_bias, 1.0f, 1.0f);
    add_adapters(backend, {{w.down_lora, 0}}, stream, low_, activated, lora_scale);
}

void DecodePass::head(const Learner& learner, std::span<const DecodeSample> samples, std::vector<SampledToken>& out) {
    Backend& backend = learner.backend();
    const ModelWeights& weights = learner.weights();
    const LoraOptions& lora = learner.options().lora;
    const auto total = static_cast<std::int64_t>(samples.size());
    for (std::int64_t begin = 0; begin < total; begin += logits_.rows) {
        const std::int64_t n = std::min(logits_.rows, total - begin);
        index_.clear();
        how_.clear();
        for (const DecodeSample& sample : samples.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n))) {
            index_.push_back(static_cast<std::int32_t>(sample.row));
            how_.push_back(sample.how);
        }
        sampled_.resize(static_cast<std::size_t>(n));
        logps_.resize(static_cast<std::size_t>(n));
        const Tensor index = first_values(picked_index_, n), picked = first(picked_, n), normed = first(picked_normed_, n);
        const Tensor logits = first(logits_, n);
        backend.upload(index, index_.data());
        backend.gather_rows(picked, stream_, index);
        backend.rmsnorm_forward(normed, first_values(picked_rstd_, n), picked, weights.final_norm, learner.spec().norm_eps);
        // Ids from valid_vocab on are left out of the product altogether, as in the learner.
        backend.decode_linear(logits, normed, first(weights.head, valid_vocab_), {}, 1.0f, 0.0f);
        if (weights.head_lora.present()) {
            const Adapter adapter{weights.head_lora.a, first(weights.head_lora.b, valid_vocab_)};
            add_adapters(backend, {{adapter, 0}}, logits, low_, normed, lora.scale());
        }
        backend.sample(sampled_.data(), logps_.data(), logits, how_.data(), valid_vocab_);
        for (std::size_t i = 0; i < sampled_.size(); ++i) out.push_back({sampled_[i], logps_[i]});
    }
}

void DecodePass::run(const Learner& learner, const KvCache& cache, std::span<const DecodeRow> rows, std::span<const DecodeSample> samples,
                     std::vector<SampledToken>& out) {
    out.clear();
    if (rows.empty()) return;
    Backend& backend = learner.backend();
    const auto n = static_cast<std::int64_t>(rows.size());
    prepare(backend, cache.block_size(), rows);
    backend.embedding_forward(first(stream_, n), learner.weights().embedding, first_values(tokens_, n));
    for (std::int64_t layer = 0; layer < learner.spec().layers; ++layer) block(learner, cache, layer, n);
    head(learner, samples, out);
}

}  // namespace surogate
