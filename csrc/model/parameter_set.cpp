#include "model/parameter_set.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/random.h"
#include "model/activations.h"
#include "model/layout.h"

namespace surogate {

namespace {

std::uint64_t hash_name(const std::string& name) {  // FNV-1a
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
}

/// Whether what computes are the borders, and the adapter's own buffer only holds their exact values.
bool border_holds_copies(const LearnerOptions& options) { return options.border_adapters && options.lora.enabled(); }

/// Between the matrices in `whole`, a vector.
std::vector<Tensor> gaps(const Tensor& whole, std::vector<Tensor> matrices) {
    std::vector<Tensor> result;
    const auto offset = [&](const Tensor& t) {
        return (t.as<const char>() - whole.as<const char>()) / static_cast<std::ptrdiff_t>(size_of(whole.dtype));
    };
    std::sort(matrices.begin(), matrices.end(), [&](const Tensor& a, const Tensor& b) { return offset(a) < offset(b); });
    for (std::size_t i = 0; i < matrices.size(); ++i) {
        const std::int64_t end = offset(matrices[i]) + matrices[i].size();
        const std::int64_t next = i + 1 < matrices.size() ? offset(matrices[i + 1]) : whole.size();
        if (next > end) result.push_back(first_values(whole.column_range(end, next - end), next - end));
    }
    return result;
}

}  // namespace

ParameterBuffers lay_out_parameters(Arena& arena, const ModelSpec& spec, const LearnerOptions& options) {
    const Recipe& recipe = options.recipe;
    const std::int64_t padding = parameter_padding(recipe);
    const bool lora = options.lora.enabled();
    const std::int64_t base = base_size(spec, padding, BorderOptions(options)).total();
    const std::int64_t adapter = adapter_size(spec, options.lora, padding).total();
    const std::int64_t trained = lora ? adapter : base;
    ParameterBuffers buffers;
    arena.item("weights");
    buffers.base = arena.take_vector(base, recipe.compute);
    if (lora) {
        arena.item("adapter");
        buffers.adapter = arena.take_vector(adapter, border_holds_copies(options) && recipe.master ? DType::Float32 : recipe.compute);
        arena.item("initial adapter");
        buffers.initial_adapter = arena.take_vector(adapter, recipe.compute);
    }
    if (options.trainable) {
        if (recipe.has_master() && !border_holds_copies(options)) {
            arena.item("float32 master weights");
            buffers.master = arena.take_vector(trained);
        }
        arena.item("gradients");
        buffers.gradient = arena.take_vector(trained, recipe.gradient);
        arena.item("optimizer state");
        buffers.m = arena.take_vector(trained, recipe.state);
        buffers.v = arena.take_vector(trained, recipe.state);
    }
    arena.item("rotary tables");
    buffers.rope_cos = arena.take(spec.max_positions, spec.head_dim / 2);
    buffers.rope_sin = arena.take(spec.max_positions, spec.head_dim / 2);
    return buffers;
}

ParameterSet::ParameterSet(const ModelSpec& spec, const LearnerOptions& options, const ParameterBuffers& buffers) {
    const std::int64_t padding = parameter_padding(options.recipe);
    const bool lora = options.lora.enabled();
    // What is trained, or something of its shape, in a flat buffer.
    const auto lay_out = [&](const Tensor& buffer, ModelWeights& weights, std::vector<NamedTensor>& names) {
        if (lora) {
            lay_out_adapters(spec, options.lora, buffer, padding, weights, names);
        } else {
            lay_out_base(spec, buffer, padding, {}, weights, names);
        }
    };
    lay_out_base(spec, buffers.base, padding, BorderOptions(options), live, tensors);
    live.rope_cos = buffers.rope_cos;
    live.rope_sin = buffers.rope_sin;
    off = live;
    off.head_lora = {};
    for (BlockWeights& block : off.blocks) block.qkv_border = block.o_border = block.gate_up_border = block.down_border = {};
    initial = off;
    const std::size_t first_trained = lora ? tensors.size() : 0;
    if (lora) {
        lay_out_adapters(spec, options.lora, buffers.adapter, padding, live, tensors);
        std::vector<NamedTensor> unnamed;
        lay_out_adapters(spec, options.lora, buffers.initial_adapter, padding, initial, unnamed);
    }
    if (border_holds_copies(options)) {
        ModelWeights unused;
        std::vector<NamedTensor> exact;
        lay_out_adapters(spec, options.lora, buffers.adapter, padding, unused, exact);
        for (std::size_t i = 0; i < exact.size(); ++i) {
            NamedTensor& named = tensors[first_trained + i];
            named.master = exact[i].tensor;
            borders.push_back({named.tensor, named.master});
        }
    }
    trained.blocks.resize(static_cast<std::size_t>(spec.layers));
    if (!options.trainable) return;

    ModelWeights unused;
    std::vector<NamedTensor> m_names, v_names, master_names;
    lay_out(buffers.gradient, trained, gradients);
    lay_out(buffers.m, unused, m_names);
    lay_out(buffers.v, unused, v_names);
    if (!buffers.master.empty()) lay_out(buffers.master, unused, master_names);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
        NamedTensor& named = tensors[first_trained + i];
        gradients[i].trainable = named.trainable = true;
        if (!master_names.empty()) named.master = master_names[i].tensor;
        optimizer.push_back({m_names[i].name + ".exp_avg", m_names[i].tensor, {}, true, m_names[i].is_vector});
        optimizer.push_back({v_names[i].name + ".exp_avg_sq", v_names[i].tensor, {}, true, v_names[i].is_vector});
    }
    const ParameterSize size = lora ? adapter_size(spec, options.lora, padding) : base_size(spec, padding, {});
    const auto add_span = [&](std::int64_t first, std::int64_t count, bool decay) {
        if (count == 0) return;
        const auto part = [&](const Tensor& buffer) {
            return buffer.empty() ? Tensor{} : first_values(buffer.column_range(first, count), count);
        };
        spans.push_back({part(lora ? buffers.adapter : buffers.base), part(buffers.master), part(buffers.gradient), part(buffers.m),
                         part(buffers.v), decay});
    };
    add_span(0, size.matrices, true);
    add_span(size.matrices, size.vectors, false);
    if (lora) return;
    std::vector<Tensor> matrices = {trained.embedding};
    for (const BlockWeights& block : trained.blocks) {
        for (const Tensor& matrix : {block.qkv, block.o, block.gate_up, block.down}) matrices.push_back(matrix);
    }
    if (!spec.tied) matrices.push_back(trained.head);
    gradient_gaps = gaps(spans.front().gradient, std::move(matrices));
}

void load_parameter(Backend& backend, const NamedTensor& named, const float* values) {
    if (!named.master.empty()) backend.upload(named.master, values);
    backend.upload(named.tensor, values);
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

void initialise_adapters(Backend& backend, const std::vector<NamedTensor>& names, std::uint64_t seed) {
    for (const NamedTensor& named : names) {
        if (!named.name.ends_with(".lora_A")) continue;
        const Philox random(seed, hash_name(named.name));
        const double bound = 1.0 / std::sqrt(static_cast<double>(named.tensor.columns));
        std::vector<float> values(static_cast<std::size_t>(named.tensor.size()));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((2.0 * random.uniform(i) - 1.0) * bound);
        load_parameter(backend, named, values.data());
    }
}

}  // namespace surogate
