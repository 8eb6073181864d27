#include "model/learner.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"
#include "model/activations.h"
#include "model/batch_check.h"
#include "model/decoder.h"
#include "model/head.h"
#include "model/parameter_set.h"
#include "model/pass_buffers.h"
#include "optim/adamw.h"

namespace surogate {

namespace {

std::string advice(const LearnerOptions& options) {
    std::string text = "To need less: lower per_device_train_batch_size or sequence_len (together they set the " +
                       std::to_string(options.max_tokens) + " tokens planned for)";
    if (options.trainable && !options.recompute) text += ", set recompute (a layer's activations are then computed twice and not kept)";
    if (options.keep_logits) text += ", do not keep the logits";
    if (options.trainable && !options.lora.enabled()) {
        const Recipe& recipe = options.recipe;
        if (recipe.compute != DType::Float32 && recipe.state == DType::Float32) text += ", set optimizer_state_dtype: bfloat16";
        text += ", train an adapter (lora: true)";
    }
    return text + ".";
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
        PassInputs inputs;                         // all this on the device
        HostValues values;                         // of these rows
        bool logits_kept = false, gradient_kept = false;

        std::int64_t rows() const { return static_cast<std::int64_t>(index.size()); }
    };

    Impl(std::shared_ptr<Backend> backend_in, ModelSpec spec_in, LearnerOptions options_in)
        : backend(std::move(backend_in)), spec(std::move(spec_in)), options(std::move(options_in)) {
        check_options(spec, options);
        if (options.recipe.compute != DType::Float32 && backend->device().kind == Device::Kind::Cpu) {
            fail("Learner: recipe: the cpu computes in float32, got ", name_of(options.recipe.compute));
        }
        if (spec.windows.empty()) spec.windows.assign(static_cast<std::size_t>(spec.layers), 0);
        lay_out_activations(arena, spec, options, lay_out_parameters(arena, spec, options).gradient);
        items = arena.items();
        require_memory(items, options.memory_limit, *backend, advice(options));
        arena.allocate(*backend);
        buffers = lay_out_parameters(arena, spec, options);
        activations = lay_out_activations(arena, spec, options, buffers.gradient);
        parameters = ParameterSet(spec, options, buffers);
        fill_rope(*backend, spec, buffers.rope_cos, buffers.rope_sin);
        initialise_adapters(*backend, parameters.tensors, options.seed);
        gradients_unset = options.trainable && !options.lora.enabled();
    }

    const ModelWeights& select(const char* op, AdapterUse use) const {
        if (use == AdapterUse::Live) return parameters.live;
        if (!options.lora.enabled()) {
            fail(op,
                 ": adapter: 'initial' and 'off' need a learner with an adapter (lora_rank > 0); this one trains all weights, so it no "
                 "longer has "
                 "the initial ones");
        }
        if (use == AdapterUse::Off) return parameters.off;
        if (snapshot_taken) return parameters.initial;
        if (adapter_loaded)
            fail(op, ": adapter: 'initial' is not known: an adapter was loaded, and snapshot_adapter() was not called after that");
        return parameters.off;
    }

    void require_no_pending(const char* op) const {
        if (pending) {
            fail(op, ": a forward pass is pending and holds the activation buffers; call backward() or discard_pending() first");
        }
    }

    void require_trainable(const char* op) const {
        if (!options.trainable) fail(op, ": this learner was made with trainable = false; it can only score");
    }

    /// Before the first of a step's backward passes writes anything; afterwards gradients are added to.
    bool begin_gradients() {
        if (!gradients_unset) return true;
        for (const ParameterSpan& span : parameters.spans) {
            if (!span.decay) backend->fill(span.gradient, 0.0f);  // vectors, which are always added to
        }
        gradients_unset = false;
        return false;
    }

    /// After a step: with all weights trained nothing is cleared, since the next backward sets what it would otherwise add to.
    void drop_gradients() {
        if (options.lora.enabled()) {
            surogate::zero_gradients(*backend, parameters.spans);
        } else {
            gradients_unset = true;
        }
    }

    /// Gradients are what a reader expects: zeros, if there was no backward pass since they were dropped.
    void settle_gradients(const char* op) {
        if (!gradients_unset) return;
        if (options.lend_gradients && pending) {
            fail(op, ": gradients: their memory holds the activations of a pending forward pass (lend_gradients); call backward() first");
        }
        surogate::zero_gradients(*backend, parameters.spans);
        gradients_unset = false;
    }
    void settle_if_gradient(const char* op, const Tensor& tensor) {
        const auto place = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data); };
        const Tensor& all = buffers.gradient;
        const std::uintptr_t first = place(all.data), end = first + static_cast<std::size_t>(all.size()) * size_of(all.dtype);
        if (all.data != nullptr && place(tensor.data) >= first && place(tensor.data) < end) settle_gradients(op);
    }

    float lora_scale() const { return options.lora.enabled() ? options.lora.scale() : 0.0f; }

    PassContext context(const Pending& pass, bool add_gradients = true) const {
        const auto segments = static_cast<std::int64_t>(pass.cu_seqlens.size()) - 1;
        return {*backend,
                spec,
                lora_scale(),
                parameters.live.rope_cos,
                parameters.live.rope_sin,
                pass.inputs.positions,
                {pass.cu_seqlens.data(), segments},
                add_gradients};
    }

    /// The residual stream behind the last block, [T, C]. `keep`: what backward needs stays in the buffers.
    Tensor decode(Pending& pass, const Batch& batch, const ModelWeights& weights, bool keep) {
        const std::int64_t tokens = pass.tokens;
        pass.inputs = PassInputs(*backend, activations.indices, batch.tokens, batch.positions, tokens, pass.index, pass.targets);
        const PassContext shared = context(pass);
        const Scratch scratch = activations.scratch.first(tokens);
        const auto stream = [&](std::int64_t i) { return first_rows(activations.stream[keep ? static_cast<std::size_t>(i) : 0], tokens); };
        backend->embedding_forward(stream(0), weights.embedding, pass.inputs.tokens);
        for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
            const auto slot = keep && !options.recompute ? static_cast<std::size_t>(layer) : 0;
            block_forward(shared, layer, weights.blocks[static_cast<std::size_t>(layer)], stream(layer + 1),
                          activations.blocks[slot].first(tokens), scratch, stream(layer));
        }
        return stream(spec.layers);
    }

    Head::Pass head_pass(const Pending& pass, const ModelWeights& weights, const Tensor& hidden) const {
        Head::Pass result{weights,
                          &parameters.trained,
                          hidden,
                          {},
                          pass.inputs.index,
                          pass.inputs.targets,
                          RowValues(activations.values, pass.inputs.index.size()),
                          pass.options.temperature,
                          pass.options.valid_vocab,
                          pass.options.entropy,
                          lora_scale(),
                          true};
        if (result.valid_vocab == 0) result.valid_vocab = spec.vocab;
        if (decoder_trained(options)) result.d_hidden = first_rows(activations.scratch.d_stream, pass.tokens);
        return result;
    }

    Depth depth(std::int64_t layer) const {
        if (layer > 0 || !options.lora.enabled()) return Depth::Input;
        if (targets_any(options.lora, {Linear::Q, Linear::K, Linear::V})) return Depth::Qkv;
        return targets_any(options.lora, {Linear::O}) ? Depth::AttentionOutput : Depth::Mlp;
    }

    Pending open(const char* op, const Batch& batch, const PassOptions& pass_options) const {
        require_no_pending(op);
        if (options.lend_gradients && !gradients_unset) {
            fail(op,
                 ": gradients of an earlier pass wait for step() where this pass would put its activations (lend_gradients: one backward "
                 "per "
                 "step, and no other pass between the two); call step() or zero_gradients() first");
        }
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

    static TokenStats spread(const Pending& pass) {
        const auto of_tokens = [&](const std::vector<float>& values) {
            std::vector<float> result(static_cast<std::size_t>(pass.tokens), 0.0f);
            for (std::size_t i = 0; i < values.size(); ++i) result[static_cast<std::size_t>(pass.index[i])] = values[i];
            return result;
        };
        return {of_tokens(pass.values.logp), pass.options.entropy ? of_tokens(pass.values.entropy) : std::vector<float>{}};
    }

    TokenStats pass_forward(Pending& pass, const Batch& batch, const ModelWeights& weights, bool keep) {
        if (pass.index.empty()) return spread(pass);
        const Tensor hidden = decode(pass, batch, weights, keep);
        const Head head(*backend, spec, activations.head);
        const Head::Pass shared = head_pass(pass, weights, hidden);
        if (keep && head_gradient_in_forward(options)) {
            head.forward_with_gradient(shared);
            pass.gradient_kept = true;
        } else {
            head.forward(shared);
            pass.logits_kept = keep && head.keeps(pass.rows());
        }
        pass.values = shared.values.download(*backend, pass.options.entropy);
        return spread(pass);
    }

    /// Gradients of the head; scratch.d_stream is then the gradient of the last block's output.
    void head_backward(Pending& pass, const float* d_logp, const float* d_entropy, bool add_gradients) {
        const Tensor hidden = first_rows(activations.stream.back(), pass.tokens);
        const Head head(*backend, spec, activations.head);
        if (pass.gradient_kept && d_entropy == nullptr) {
            const Head::Pass shared = head_pass(pass, parameters.live, hidden);
            shared.values.upload_seeds(*backend, pick(d_logp, pass.index), {});
            head.scale_gradient(shared);
            return;
        }
        // Logits that are computed again are so only for the rows with a seed.
        const bool dropped = !pass.logits_kept && drop_rows_without_seed(pass, d_logp, d_entropy);
        if (dropped) pass.inputs.replace_rows(*backend, pass.index, pass.targets);
        Head::Pass shared = head_pass(pass, parameters.live, hidden);
        shared.add_gradients = add_gradients;
        shared.entropy = d_entropy != nullptr;
        const std::vector<float> seeds = pick(d_logp, pass.index);
        const std::vector<float> entropy_seeds = d_entropy != nullptr ? pick(d_entropy, pass.index) : std::vector<float>{};
        if (dropped) {
            shared.values.upload(*backend, pass.values.lse, pass.values.entropy, seeds, entropy_seeds);
        } else {
            shared.values.upload_seeds(*backend, seeds, entropy_seeds);
        }
        head.backward(shared, pass.logits_kept);
    }

    /// Whether there were any.
    static bool drop_rows_without_seed(Pending& pass, const float* d_logp, const float* d_entropy) {
        std::size_t live = 0;
        for (std::size_t i = 0; i < pass.index.size(); ++i) {
            if (!any_seed(pass.index, d_logp, d_entropy, i, 1)) continue;
            pass.index[live] = pass.index[i];
            pass.targets[live] = pass.targets[i];
            pass.values.lse[live] = pass.values.lse[i];
            if (!pass.values.entropy.empty()) pass.values.entropy[live] = pass.values.entropy[i];
            ++live;
        }
        if (live == pass.index.size()) return false;
        pass.index.resize(live);
        pass.targets.resize(live);
        pass.values.lse.resize(live);
        if (!pass.values.entropy.empty()) pass.values.entropy.resize(live);
        return true;
    }

    void zero_d_stream(std::int64_t tokens) {
        if (decoder_trained(options)) backend->fill(first_rows(activations.scratch.d_stream, tokens), 0.0f);
    }

    /// From scratch.d_stream down to the embedding, or to the lowest adapter.
    void decoder_backward(const Pending& pass, bool add_gradients) {
        if (!decoder_trained(options)) return;
        const std::int64_t tokens = pass.tokens;
        const PassContext shared = context(pass, add_gradients);
        const Scratch scratch = activations.scratch.first(tokens);
        for (std::int64_t layer = spec.layers - 1; layer >= 0; --layer) {
            const auto at = static_cast<std::size_t>(layer);
            const BlockActivations kept = activations.blocks[options.recompute ? 0 : at].first(tokens);
            const Tensor x = first_rows(activations.stream[at], tokens);
            // The last block's activations are still there.
            if (options.recompute && layer + 1 < spec.layers) {
                block_forward(shared, layer, parameters.live.blocks[at], {}, kept, scratch, x);
            }
            block_backward(shared, layer, parameters.live.blocks[at], parameters.trained.blocks[at], kept, scratch, x, depth(layer));
        }
        if (!parameters.trained.embedding.empty()) {
            if (!add_gradients && !spec.tied) backend->fill(parameters.trained.embedding, 0.0f);  // a tied one is the head's, and set
            backend->embedding_backward(parameters.trained.embedding, scratch.d_stream, pass.inputs.tokens);
        }
        if (options.lend_gradients) {
            for (const Tensor& gap : parameters.gradient_gaps) backend->fill(gap, 0.0f);  // activations may have lain there
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
    ParameterSet parameters;
    std::int64_t updates = 0;
    bool snapshot_taken = false, adapter_loaded = false;
    bool gradients_unset = false;  // what their memory holds does not count: they are zero
    std::optional<Pending> pending;
};

Learner::Learner(std::shared_ptr<Backend> backend, ModelSpec spec, LearnerOptions options)
    : impl_(std::make_unique<Impl>(std::move(backend), std::move(spec), std::move(options))) {}

Learner::~Learner() = default;

std::vector<MemoryItem> Learner::plan(const ModelSpec& spec, const LearnerOptions& options) {
    check_options(spec, options);
    Arena arena;
    lay_out_activations(arena, spec, options, lay_out_parameters(arena, spec, options).gradient);
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
    TokenStats stats = impl_->pass_forward(pass, batch, impl_->parameters.live, true);
    impl_->pending = std::move(pass);
    return stats;
}

void Learner::backward(const float* dlogp, const float* dentropy) {
    impl_->require_trainable("backward");
    if (!impl_->pending) fail("backward: no forward pass is pending; call forward() first, once for each backward()");
    if (dentropy != nullptr && !impl_->pending->options.entropy) {
        fail("backward: dentropy: the pending forward pass was run without entropy; run it with entropy = true");
    }
    Impl::Pending pass = *std::exchange(impl_->pending, std::nullopt);
    if (!Impl::any_seed(pass.index, dlogp, dentropy, 0, pass.index.size())) return;
    const bool add = impl_->begin_gradients();
    impl_->zero_d_stream(pass.tokens);
    impl_->head_backward(pass, dlogp, dentropy, add);
    impl_->decoder_backward(pass, add);
}

TokenStats Learner::forward_backward(const Batch& batch, const PassOptions& options, const float* dlogp, const float* dentropy) {
    impl_->require_trainable("forward_backward");
    require(options.adapter == AdapterUse::Live, "forward_backward", "adapter", "the live one, which is what backward trains", "another");
    PassOptions effective = options;
    effective.entropy = options.entropy || dentropy != nullptr;
    Impl::Pending pass = impl_->open("forward_backward", batch, effective);
    if (pass.index.empty()) return Impl::spread(pass);

    const Tensor hidden = impl_->decode(pass, batch, impl_->parameters.live, true);
    Head::Pass shared = impl_->head_pass(pass, impl_->parameters.live, hidden);
    const bool any = Impl::any_seed(pass.index, dlogp, dentropy, 0, pass.index.size());
    const bool add = !any || impl_->begin_gradients();
    shared.add_gradients = add;
    // Where the entropy is asked for without a seed, its seeds are zeros.
    shared.values.upload_seeds(*impl_->backend, pick(dlogp, pass.index),
                               dentropy != nullptr ? pick(dentropy, pass.index) : std::vector<float>{});
    impl_->zero_d_stream(pass.tokens);
    const Head head(*impl_->backend, impl_->spec, impl_->activations.head);
    head.forward_backward(shared, [&](std::int64_t first, std::int64_t count) {
        return Impl::any_seed(pass.index, dlogp, dentropy, static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    });
    if (any) impl_->decoder_backward(pass, add);
    pass.values = shared.values.download(*impl_->backend, effective.entropy);
    return Impl::spread(pass);
}

std::int64_t Learner::pending_tokens() const { return impl_->pending ? impl_->pending->tokens : -1; }

void Learner::discard_pending() { impl_->pending.reset(); }

StepStats Learner::step(const StepOptions& options) {
    impl_->require_trainable("step");
    impl_->require_no_pending("step");
    impl_->settle_gradients("step");
    const StepStats stats = adamw_step(*impl_->backend, impl_->parameters.spans, options, impl_->options.seed, impl_->updates);
    impl_->drop_gradients();
    if (stats.applied) impl_->backend->copy_all(impl_->parameters.borders);
    return stats;
}

void Learner::zero_gradients() { impl_->drop_gradients(); }

void Learner::load(const std::string& name, const float* values) {
    impl_->require_no_pending("load");
    load_parameter(*impl_->backend, find(impl_->parameters.tensors, "load", name), values);
    if (name.ends_with(".lora_A") || name.ends_with(".lora_B")) impl_->adapter_loaded = true;
}

void Learner::read(float* values, const NamedTensor& named) const {
    impl_->settle_if_gradient("read", named.tensor);
    impl_->backend->download(values, named.exact());
}

void Learner::write(const NamedTensor& named, const float* values) {
    impl_->settle_if_gradient("write", named.tensor);
    impl_->backend->upload(named.tensor, values);
}

void Learner::export_to(const std::vector<Export>& exports) const {
    std::vector<Backend::CopyItem> items;
    items.reserve(exports.size());
    for (const auto& [named, out] : exports) {
        impl_->settle_if_gradient("export_to", named->tensor);
        items.push_back({out, named->exact()});
    }
    impl_->backend->copy_all(items);
    impl_->backend->synchronize();
}

const NamedTensor& Learner::find(const std::vector<NamedTensor>& tensors, const char* op, const std::string& name) {
    const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const NamedTensor& named) { return named.name == name; });
    if (found != tensors.end()) return *found;
    if (tensors.empty()) fail(op, ": there is no '", name, "': this learner has no tensors of that kind (is it trainable?)");
    fail(op, ": there is no '", name, "'; there are ", tensors.size(), " names, from '", tensors.front().name, "' to '",
         tensors.back().name, "'");
}

const std::vector<NamedTensor>& Learner::tensors() const { return impl_->parameters.tensors; }

const std::vector<NamedTensor>& Learner::gradients() const { return impl_->parameters.gradients; }

const std::vector<NamedTensor>& Learner::optimizer_state() const { return impl_->parameters.optimizer; }

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

const ModelWeights& Learner::weights() const { return impl_->parameters.live; }

Backend& Learner::backend() const { return *impl_->backend; }

const std::vector<MemoryItem>& Learner::memory() const { return impl_->items; }

}  // namespace surogate
