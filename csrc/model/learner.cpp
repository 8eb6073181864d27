#include "model/learner.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/random.h"
#include "model/activations.h"
#include "model/batch_check.h"
#include "model/decoder.h"
#include "model/head.h"
#include "model/layout.h"
#include "optim/adamw.h"

namespace surogate {

namespace {

/// Flat buffers of a learner's parameters.
struct ParameterBuffers {
    Tensor base, adapter, initial_adapter;  // [n]
    Tensor gradient, m, v;                  // [n] of what is trained: the base weights, or the adapter alone
    Tensor rope_cos, rope_sin;
};

ParameterBuffers lay_out_parameters(Arena& arena, const ModelSpec& spec, const LearnerOptions& options) {
    ParameterBuffers buffers;
    const bool lora = options.lora.enabled();
    const std::int64_t base = base_size(spec).total(), adapter = adapter_size(spec, options.lora).total();
    const std::int64_t trained = lora ? adapter : base;
    arena.item("weights");
    buffers.base = arena.take_vector(base);
    if (lora) {
        arena.item("adapter");
        buffers.adapter = arena.take_vector(adapter);
        arena.item("initial adapter");
        buffers.initial_adapter = arena.take_vector(adapter);
    }
    if (options.trainable) {
        arena.item("gradients");
        buffers.gradient = arena.take_vector(trained);
        arena.item("optimizer state");
        buffers.m = arena.take_vector(trained);
        buffers.v = arena.take_vector(trained);
    }
    arena.item("rotary tables");
    buffers.rope_cos = arena.take(spec.max_positions, spec.head_dim / 2);
    buffers.rope_sin = arena.take(spec.max_positions, spec.head_dim / 2);
    return buffers;
}

/// Angles in float32 as the models were trained with (position times frequency, rounded), their cosine and sine exactly.
void fill_rope(Backend& backend, const ModelSpec& spec, const Tensor& cos, const Tensor& sin) {
    const std::int64_t half = spec.head_dim / 2;
    std::vector<float> cosines(static_cast<std::size_t>(spec.max_positions * half)), sines(cosines.size());
    for (std::int64_t position = 0; position < spec.max_positions; ++position) {
        for (std::int64_t i = 0; i < half; ++i) {
            const float angle = static_cast<float>(position) * static_cast<float>(spec.rope_inv_freq[static_cast<std::size_t>(i)]);
            const auto at = static_cast<std::size_t>(position * half + i);
            cosines[at] = static_cast<float>(std::cos(static_cast<double>(angle))) * spec.rope_attention_scale;
            sines[at] = static_cast<float>(std::sin(static_cast<double>(angle))) * spec.rope_attention_scale;
        }
    }
    backend.upload(cos, cosines.data());
    backend.upload(sin, sines.data());
}

std::uint64_t hash_name(const std::string& name) {  // FNV-1a
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
}

/// A uniform in +-1/sqrt(in), which is Kaiming's with a = sqrt(5) as PEFT draws it; B zero. A tensor's values depend on seed and name
/// alone.
void initialise_adapters(Backend& backend, const std::vector<NamedTensor>& names, std::uint64_t seed) {
    for (const NamedTensor& named : names) {
        if (!named.name.ends_with(".lora_A")) continue;
        const Philox random(seed, hash_name(named.name));
        const double bound = 1.0 / std::sqrt(static_cast<double>(named.tensor.columns));
        std::vector<float> values(static_cast<std::size_t>(named.tensor.size()));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((2.0 * random.uniform(i) - 1.0) * bound);
        backend.upload(named.tensor, values.data());
    }
}

std::string advice(const LearnerOptions& options) {
    std::string text = "To need less: lower per_device_train_batch_size or sequence_len (together they set the " +
                       std::to_string(options.max_tokens) + " tokens planned for)";
    if (options.trainable && !options.recompute) text += ", set recompute (a layer's activations are then computed twice and not kept)";
    if (options.trainable && !options.lora.enabled()) text += ", train an adapter (lora: true)";
    return text + ".";
}

bool targets_any(const LoraOptions& lora, std::initializer_list<Linear> linears) {
    return std::any_of(linears.begin(), linears.end(),
                       [&](Linear linear) { return std::find(lora.targets.begin(), lora.targets.end(), linear) != lora.targets.end(); });
}

std::vector<float> pick(const float* values, const std::vector<std::int32_t>& index) {
    std::vector<float> picked;
    picked.reserve(index.size());
    for (const std::int32_t row : index) picked.push_back(values[row]);
    return picked;
}

}  // namespace

struct Learner::Impl {
    /// One forward pass that waits for its backward.
    struct Pending {
        std::int64_t tokens = 0;
        std::vector<std::int32_t> cu_seqlens;
        PassOptions options;
        std::vector<std::int32_t> index, targets;  // rows with a target, and the target
        std::vector<float> lse, entropy;           // of these rows
        bool logits_kept = false;
    };

    Impl(std::shared_ptr<Backend> backend_in, ModelSpec spec_in, LearnerOptions options_in)
        : backend(std::move(backend_in)), spec(std::move(spec_in)), options(std::move(options_in)) {
        check_options(spec, options);
        if (spec.windows.empty()) spec.windows.assign(static_cast<std::size_t>(spec.layers), 0);
        lay_out_parameters(arena, spec, options);
        lay_out_activations(arena, spec, options);
        items = arena.items();
        require_memory(items, options.memory_limit, advice(options));
        arena.allocate(*backend);
        buffers = lay_out_parameters(arena, spec, options);
        activations = lay_out_activations(arena, spec, options);
        name_parameters();
        fill_rope(*backend, spec, buffers.rope_cos, buffers.rope_sin);
        initialise_adapters(*backend, tensors, options.seed);
    }

    void name_parameters() {
        const Device device = backend->device();
        const bool lora = options.lora.enabled();
        lay_out_base(spec, buffers.base.f32(), device, live, tensors);
        live.rope_cos = buffers.rope_cos;
        live.rope_sin = buffers.rope_sin;
        off = initial = live;
        const auto first_adapter = static_cast<std::ptrdiff_t>(tensors.size());
        if (lora) {
            lay_out_adapters(spec, options.lora, buffers.adapter.f32(), device, live, tensors);
            std::vector<NamedTensor> unnamed;
            lay_out_adapters(spec, options.lora, buffers.initial_adapter.f32(), device, initial, unnamed);
        }
        for (auto named = tensors.begin() + (lora ? first_adapter : 0); named != tensors.end(); ++named)
            named->trainable = options.trainable;
        trained.blocks.resize(static_cast<std::size_t>(spec.layers));
        if (!options.trainable) return;

        ModelWeights first_moment, second_moment;
        std::vector<NamedTensor> m_names, v_names;
        const auto lay_out = [&](const Tensor& buffer, ModelWeights& weights, std::vector<NamedTensor>& names) {
            if (lora) {
                lay_out_adapters(spec, options.lora, buffer.f32(), device, weights, names);
            } else {
                lay_out_base(spec, buffer.f32(), device, weights, names);
            }
        };
        lay_out(buffers.gradient, trained, gradients);
        lay_out(buffers.m, first_moment, m_names);
        lay_out(buffers.v, second_moment, v_names);
        for (NamedTensor& named : gradients) named.trainable = true;
        for (std::size_t i = 0; i < m_names.size(); ++i) {
            optimizer.push_back({m_names[i].name + ".exp_avg", m_names[i].tensor, true, m_names[i].is_vector});
            optimizer.push_back({v_names[i].name + ".exp_avg_sq", v_names[i].tensor, true, v_names[i].is_vector});
        }
        const ParameterSize size = lora ? adapter_size(spec, options.lora) : base_size(spec);
        const Tensor& weights = lora ? buffers.adapter : buffers.base;
        const auto add_span = [&](std::int64_t first, std::int64_t count, bool decay) {
            if (count == 0) return;
            const auto part = [&](const Tensor& buffer) { return first_values(buffer.column_range(first, count), count); };
            spans.push_back({part(weights), part(buffers.gradient), part(buffers.m), part(buffers.v), decay});
        };
        add_span(0, size.matrices, true);
        add_span(size.matrices, size.vectors, false);
    }

    const ModelWeights& select(const char* op, AdapterUse use) const {
        if (use == AdapterUse::Live) return live;
        if (!options.lora.enabled()) {
            fail(op,
                 ": adapter: 'initial' and 'off' need a learner with an adapter (lora_rank > 0); this one trains all weights, so it no "
                 "longer has "
                 "the initial ones");
        }
        if (use == AdapterUse::Off) return off;
        if (snapshot_taken) return initial;
        if (adapter_loaded)
            fail(op, ": adapter: 'initial' is not known: an adapter was loaded, and snapshot_adapter() was not called after that");
        return off;
    }

    void require_no_pending(const char* op) const {
        if (pending) {
            fail(op, ": a forward pass is pending and holds the activation buffers; call backward() or discard_pending() first");
        }
    }

    void require_trainable(const char* op) const {
        if (!options.trainable) fail(op, ": this learner was made with trainable = false; it can only score");
    }

    PassContext context(const std::int32_t* cu_seqlens, std::int64_t segments, std::int64_t tokens) const {
        return {*backend,
                spec,
                options.lora.enabled() ? options.lora.scale() : 0.0f,
                live.rope_cos,
                live.rope_sin,
                first_values(activations.positions, tokens),
                {cu_seqlens, segments}};
    }

    PassContext context(const Pending& pass) const {
        return context(pass.cu_seqlens.data(), static_cast<std::int64_t>(pass.cu_seqlens.size()) - 1, pass.tokens);
    }

    /// The residual stream behind the last block, [T, C]. `keep`: what backward needs stays in the buffers.
    Tensor decode(const Pending& pass, const Batch& batch, const ModelWeights& weights, bool keep) {
        const std::int64_t tokens = pass.tokens;
        const Tensor ids = first_values(activations.tokens, tokens);
        backend->upload(ids, batch.tokens);
        backend->upload(first_values(activations.positions, tokens), batch.positions);
        const PassContext shared = context(pass);
        const Scratch scratch = activations.scratch.first(tokens);
        const auto stream = [&](std::int64_t i) { return first_rows(activations.stream[keep ? static_cast<std::size_t>(i) : 0], tokens); };
        backend->embedding_forward(stream(0), weights.embedding, ids);
        for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
            const auto slot = keep && !options.recompute ? static_cast<std::size_t>(layer) : 0;
            block_forward(shared, layer, weights.blocks[static_cast<std::size_t>(layer)], stream(layer + 1),
                          activations.blocks[slot].first(tokens), scratch, stream(layer));
        }
        return stream(spec.layers);
    }

    Head::Pass head_pass(const Pending& pass, const ModelWeights& weights, const Tensor& hidden) const {
        Head::Pass result{weights,
                          &trained,
                          hidden,
                          {},
                          pass.options.temperature,
                          pass.options.valid_vocab,
                          pass.options.entropy,
                          options.lora.enabled() ? options.lora.scale() : 0.0f};
        if (result.valid_vocab == 0) result.valid_vocab = spec.vocab;
        if (decoder_trained()) result.d_hidden = first_rows(activations.scratch.d_stream, pass.tokens);
        return result;
    }

    /// Whether anything below the head is trained.
    bool decoder_trained() const {
        if (!options.trainable) return false;
        return !options.lora.enabled() ||
               targets_any(options.lora, {Linear::Q, Linear::K, Linear::V, Linear::O, Linear::Gate, Linear::Up, Linear::Down});
    }

    Depth depth(std::int64_t layer) const {
        if (layer > 0 || !options.lora.enabled()) return Depth::Input;
        if (targets_any(options.lora, {Linear::Q, Linear::K, Linear::V})) return Depth::Qkv;
        return targets_any(options.lora, {Linear::O}) ? Depth::AttentionOutput : Depth::Mlp;
    }

    Pending open(const char* op, const Batch& batch, const PassOptions& pass_options) const {
        require_no_pending(op);
        check_batch(op, spec, options, batch, pass_options);
        Pending pass;
        pass.tokens = batch.size;
        pass.cu_seqlens.assign(batch.segments.cu_seqlens, batch.segments.cu_seqlens + batch.segments.count + 1);
        pass.options = pass_options;
        for (std::int64_t t = 0; t < batch.size; ++t) {
            if (batch.targets[t] < 0) continue;
            pass.index.push_back(static_cast<std::int32_t>(t));
            pass.targets.push_back(batch.targets[t]);
        }
        return pass;
    }

    void upload_rows(const std::vector<std::int32_t>& index, const std::vector<std::int32_t>& targets) {
        const auto count = static_cast<std::int64_t>(index.size());
        backend->upload(first_values(activations.head.index, count), index.data());
        backend->upload(first_values(activations.head.targets, count), targets.data());
    }

    void upload_values(const Tensor& out, const std::vector<float>& values) {
        backend->upload(first_values(out, static_cast<std::int64_t>(values.size())), values.data());
    }

    std::vector<float> download_values(const Tensor& in, std::size_t count) const {
        std::vector<float> values(count);
        if (count > 0) backend->download(values.data(), first_values(in, static_cast<std::int64_t>(count)));
        return values;
    }

    TokenStats collect(const Pending& pass) const {
        const auto tokens = static_cast<std::size_t>(pass.tokens);
        const auto spread = [&](const Tensor& in) {
            std::vector<float> result(tokens, 0.0f);
            const std::vector<float> values = download_values(in, pass.index.size());
            for (std::size_t i = 0; i < values.size(); ++i) result[static_cast<std::size_t>(pass.index[i])] = values[i];
            return result;
        };
        return {spread(activations.head.logp), pass.options.entropy ? spread(activations.head.entropy) : std::vector<float>{}};
    }

    TokenStats pass_forward(Pending& pass, const Batch& batch, const ModelWeights& weights, bool keep) {
        if (pass.index.empty()) return collect(pass);
        const Tensor hidden = decode(pass, batch, weights, keep);
        upload_rows(pass.index, pass.targets);
        const Head head(*backend, spec, activations.head);
        const auto count = static_cast<std::int64_t>(pass.index.size());
        head.forward(head_pass(pass, weights, hidden), count);
        if (keep) {
            pass.lse = download_values(activations.head.lse, pass.index.size());
            if (pass.options.entropy) pass.entropy = download_values(activations.head.entropy, pass.index.size());
            pass.logits_kept = count <= head.chunk_rows();
        }
        return collect(pass);
    }

    /// Gradients of the head, with the seeds as they came, over rows that have one; scratch.d_stream is then the gradient of the last
    /// block's output.
    void head_backward(const Pending& pass, const float* d_logp, const float* d_entropy) {
        std::vector<std::int32_t> index = pass.index, targets = pass.targets;
        std::vector<float> lse = pass.lse, entropy = pass.entropy;
        if (!pass.logits_kept) {
            // The logits are computed again, so rows without a seed can be left out.
            std::size_t live_rows = 0;
            for (std::size_t i = 0; i < index.size(); ++i) {
                const auto row = static_cast<std::size_t>(index[i]);
                if (d_logp[row] == 0.0f && (d_entropy == nullptr || d_entropy[row] == 0.0f)) continue;
                index[live_rows] = index[i];
                targets[live_rows] = targets[i];
                lse[live_rows] = lse[i];
                if (!entropy.empty()) entropy[live_rows] = entropy[i];
                ++live_rows;
            }
            if (live_rows < index.size()) {
                index.resize(live_rows);
                targets.resize(live_rows);
                lse.resize(live_rows);
                if (!entropy.empty()) entropy.resize(live_rows);
                upload_rows(index, targets);
                upload_values(activations.head.lse, lse);
                if (!entropy.empty()) upload_values(activations.head.entropy, entropy);
            }
        }
        upload_seeds(index, d_logp, d_entropy);
        const Tensor hidden = first_rows(activations.stream.back(), pass.tokens);
        Head::Pass shared = head_pass(pass, live, hidden);
        shared.entropy = d_entropy != nullptr;
        const Head head(*backend, spec, activations.head);
        head.backward(shared, static_cast<std::int64_t>(index.size()), pass.logits_kept);
    }

    void upload_seeds(const std::vector<std::int32_t>& index, const float* d_logp, const float* d_entropy) {
        upload_values(activations.head.d_logp, pick(d_logp, index));
        if (d_entropy != nullptr) upload_values(activations.head.d_entropy, pick(d_entropy, index));
    }

    void zero_d_stream(std::int64_t tokens) {
        if (decoder_trained()) backend->fill(first_rows(activations.scratch.d_stream, tokens), 0.0f);
    }

    /// From scratch.d_stream down to the embedding, or to the lowest adapter.
    void decoder_backward(const Pending& pass) {
        if (!decoder_trained()) return;
        const std::int64_t tokens = pass.tokens;
        const PassContext shared = context(pass);
        const Scratch scratch = activations.scratch.first(tokens);
        for (std::int64_t layer = spec.layers - 1; layer >= 0; --layer) {
            const auto at = static_cast<std::size_t>(layer);
            const BlockActivations kept = activations.blocks[options.recompute ? 0 : at].first(tokens);
            const Tensor x = first_rows(activations.stream[at], tokens);
            if (options.recompute) block_forward(shared, layer, live.blocks[at], {}, kept, scratch, x);
            block_backward(shared, layer, live.blocks[at], trained.blocks[at], kept, scratch, x, depth(layer), options.recompute);
        }
        if (!trained.embedding.empty()) {
            backend->embedding_backward(trained.embedding, scratch.d_stream, first_values(activations.tokens, tokens));
        }
    }

    static bool any_seed(const std::vector<std::int32_t>& index, const float* d_logp, const float* d_entropy, std::size_t first,
                         std::size_t count) {
        for (std::size_t i = first; i < first + count; ++i) {
            const auto row = static_cast<std::size_t>(index[i]);
            if (d_logp[row] != 0.0f || (d_entropy != nullptr && d_entropy[row] != 0.0f)) return true;
        }
        return false;
    }

    std::shared_ptr<Backend> backend;
    ModelSpec spec;
    LearnerOptions options;
    Arena arena;
    std::vector<MemoryItem> items;
    ParameterBuffers buffers;
    Activations activations;
    ModelWeights live, initial, off;  // the same base weights, three choices of adapter
    ModelWeights trained;             // gradients; empty where frozen
    std::vector<NamedTensor> tensors, gradients, optimizer;
    std::vector<ParameterSpan> spans;
    std::int64_t updates = 0;
    bool snapshot_taken = false, adapter_loaded = false;
    std::optional<Pending> pending;
};

Learner::Learner(std::shared_ptr<Backend> backend, ModelSpec spec, LearnerOptions options)
    : impl_(std::make_unique<Impl>(std::move(backend), std::move(spec), std::move(options))) {}

Learner::~Learner() = default;

std::vector<MemoryItem> Learner::plan(const ModelSpec& spec, const LearnerOptions& options) {
    check_options(spec, options);
    Arena arena;
    lay_out_parameters(arena, spec, options);
    lay_out_activations(arena, spec, options);
    return arena.items();
}

TokenStats Learner::score(const Batch& batch, const PassOptions& options) {
    const ModelWeights& weights = impl_->select("score", options.adapter);
    Impl::Pending pass = impl_->open("score", batch, options);
    return impl_->pass_forward(pass, batch, weights, false);
}

TokenStats Learner::forward(const Batch& batch, const PassOptions& options) {
    impl_->require_trainable("forward");
    require(options.adapter == AdapterUse::Live, "forward", "adapter", "the live one, which is what backward trains", "another");
    Impl::Pending pass = impl_->open("forward", batch, options);
    TokenStats stats = impl_->pass_forward(pass, batch, impl_->live, true);
    impl_->pending = std::move(pass);
    return stats;
}

void Learner::backward(const float* dlogp, const float* dentropy) {
    impl_->require_trainable("backward");
    if (!impl_->pending) fail("backward: no forward pass is pending; call forward() first, once for each backward()");
    if (dentropy != nullptr && !impl_->pending->options.entropy) {
        fail("backward: dentropy: the pending forward pass was run without entropy; run it with entropy = true");
    }
    const Impl::Pending pass = *std::exchange(impl_->pending, std::nullopt);
    if (!Impl::any_seed(pass.index, dlogp, dentropy, 0, pass.index.size())) return;
    impl_->zero_d_stream(pass.tokens);
    impl_->head_backward(pass, dlogp, dentropy);
    impl_->decoder_backward(pass);
}

TokenStats Learner::forward_backward(const Batch& batch, const PassOptions& options, const float* dlogp, const float* dentropy) {
    impl_->require_trainable("forward_backward");
    require(options.adapter == AdapterUse::Live, "forward_backward", "adapter", "the live one, which is what backward trains", "another");
    PassOptions effective = options;
    effective.entropy = options.entropy || dentropy != nullptr;
    const Impl::Pending pass = impl_->open("forward_backward", batch, effective);
    if (pass.index.empty()) return impl_->collect(pass);

    const Tensor hidden = impl_->decode(pass, batch, impl_->live, true);
    impl_->upload_rows(pass.index, pass.targets);
    impl_->upload_seeds(pass.index, dlogp, dentropy);
    if (effective.entropy && dentropy == nullptr) {
        impl_->upload_values(impl_->activations.head.d_entropy, std::vector<float>(pass.index.size(), 0.0f));
    }
    impl_->zero_d_stream(pass.tokens);
    const Head head(*impl_->backend, impl_->spec, impl_->activations.head);
    head.forward_backward(impl_->head_pass(pass, impl_->live, hidden), static_cast<std::int64_t>(pass.index.size()),
                          [&](std::int64_t first, std::int64_t count) {
                              return Impl::any_seed(pass.index, dlogp, dentropy, static_cast<std::size_t>(first),
                                                    static_cast<std::size_t>(count));
                          });
    TokenStats stats = impl_->collect(pass);
    if (Impl::any_seed(pass.index, dlogp, dentropy, 0, pass.index.size())) impl_->decoder_backward(pass);
    return stats;
}

std::int64_t Learner::pending_tokens() const { return impl_->pending ? impl_->pending->tokens : -1; }

void Learner::discard_pending() { impl_->pending.reset(); }

StepStats Learner::step(const StepOptions& options) {
    impl_->require_trainable("step");
    impl_->require_no_pending("step");
    return adamw_step(*impl_->backend, impl_->spans, options, impl_->updates);
}

void Learner::zero_gradients() { surogate::zero_gradients(*impl_->backend, impl_->spans); }

void Learner::load(const std::string& name, const float* values) {
    impl_->require_no_pending("load");
    impl_->backend->upload(find(impl_->tensors, "load", name).tensor, values);
    if (name.ends_with(".lora_A") || name.ends_with(".lora_B")) impl_->adapter_loaded = true;
}

const NamedTensor& Learner::find(const std::vector<NamedTensor>& tensors, const char* op, const std::string& name) {
    const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const NamedTensor& named) { return named.name == name; });
    if (found != tensors.end()) return *found;
    if (tensors.empty()) fail(op, ": there is no '", name, "': this learner has no tensors of that kind (is it trainable?)");
    fail(op, ": there is no '", name, "'; there are ", tensors.size(), " names, from '", tensors.front().name, "' to '",
         tensors.back().name, "'");
}

const std::vector<NamedTensor>& Learner::tensors() const { return impl_->tensors; }

const std::vector<NamedTensor>& Learner::gradients() const { return impl_->gradients; }

const std::vector<NamedTensor>& Learner::optimizer_state() const { return impl_->optimizer; }

std::int64_t Learner::update_count() const { return impl_->updates; }

void Learner::set_update_count(std::int64_t count) {
    require(count >= 0, "Learner", "update_count", "a number that is not negative", count);
    impl_->updates = count;
}

void Learner::snapshot_adapter() {
    if (!impl_->options.lora.enabled()) fail("snapshot_adapter: this learner has no adapter (lora_rank is 0)");
    impl_->backend->copy(impl_->buffers.initial_adapter, impl_->buffers.adapter);
    impl_->snapshot_taken = true;
}

const ModelSpec& Learner::spec() const { return impl_->spec; }

const LearnerOptions& Learner::options() const { return impl_->options; }

const ModelWeights& Learner::weights() const { return impl_->live; }

Backend& Learner::backend() const { return *impl_->backend; }

const std::vector<MemoryItem>& Learner::memory() const { return impl_->items; }

}  // namespace surogate
