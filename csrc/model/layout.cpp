#include "model/layout.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"

namespace surogate {

namespace {

constexpr std::array<std::pair<Linear, const char*>, 8> kLinearNames = {{{Linear::Q, "q_proj"},
                                                                         {Linear::K, "k_proj"},
                                                                         {Linear::V, "v_proj"},
                                                                         {Linear::O, "o_proj"},
                                                                         {Linear::Gate, "gate_proj"},
                                                                         {Linear::Up, "up_proj"},
                                                                         {Linear::Down, "down_proj"},
                                                                         {Linear::Head, "lm_head"}}};

void place_base(const ModelSpec& spec, Cursor& matrices, Cursor& vectors, ModelWeights& weights, std::vector<NamedTensor>& names) {
    const auto q = spec.q_columns(), kv = spec.kv_columns();
    const auto add = [&](const std::string& name, const Tensor& tensor) { names.push_back({name, tensor, {}, false, false}); };
    const auto add_bias = [&](const std::string& name, const Tensor& tensor) { names.push_back({name, tensor, {}, false, true}); };
    const auto add_vector = [&](const std::string& name, std::int64_t size) {
        const Tensor tensor = vectors.take(1, size);
        names.push_back({name, tensor, {}, false, true});
        return tensor;
    };

    weights.embedding = matrices.take(spec.vocab, spec.hidden);
    add("embed_tokens.weight", weights.embedding);
    weights.blocks.resize(static_cast<std::size_t>(spec.layers));
    for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
        BlockWeights& block = weights.blocks[static_cast<std::size_t>(layer)];
        const std::string prefix = "layers." + std::to_string(layer) + ".";
        const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";

        block.input_norm = add_vector(prefix + "input_layernorm.weight", spec.hidden);
        block.qkv = matrices.take(spec.qkv_columns(), spec.hidden);
        add(attention + "q_proj.weight", block.qkv.row_range(0, q));
        add(attention + "k_proj.weight", block.qkv.row_range(q, kv));
        add(attention + "v_proj.weight", block.qkv.row_range(q + kv, kv));
        if (spec.qkv_bias) {
            block.qkv_bias = vectors.take(1, spec.qkv_columns());
            add_bias(attention + "q_proj.bias", block.qkv_bias.column_range(0, q));
            add_bias(attention + "k_proj.bias", block.qkv_bias.column_range(q, kv));
            add_bias(attention + "v_proj.bias", block.qkv_bias.column_range(q + kv, kv));
        }
        if (spec.qk_norm) {
            block.q_norm = add_vector(attention + "q_norm.weight", spec.head_dim);
            block.k_norm = add_vector(attention + "k_norm.weight", spec.head_dim);
        }
        block.o = matrices.take(spec.hidden, q);
        add(attention + "o_proj.weight", block.o);
        if (spec.o_bias) block.o_bias = add_vector(attention + "o_proj.bias", spec.hidden);

        block.post_norm = add_vector(prefix + "post_attention_layernorm.weight", spec.hidden);
        block.gate_up = matrices.take(2 * spec.ffn, spec.hidden);
        add(mlp + "gate_proj.weight", block.gate_up.row_range(0, spec.ffn));
        add(mlp + "up_proj.weight", block.gate_up.row_range(spec.ffn, spec.ffn));
        block.down = matrices.take(spec.hidden, spec.ffn);
        add(mlp + "down_proj.weight", block.down);
        if (spec.mlp_bias) {
            block.gate_up_bias = vectors.take(1, 2 * spec.ffn);
            add_bias(mlp + "gate_proj.bias", block.gate_up_bias.column_range(0, spec.ffn));
            add_bias(mlp + "up_proj.bias", block.gate_up_bias.column_range(spec.ffn, spec.ffn));
            block.down_bias = add_vector(mlp + "down_proj.bias", spec.hidden);
        }
    }
    weights.final_norm = add_vector("norm.weight", spec.hidden);
    if (spec.tied) {
        weights.head = weights.embedding;
    } else {
        weights.head = matrices.take(spec.vocab, spec.hidden);
        add("lm_head.weight", weights.head);
    }
}

struct AdapterSite {
    Linear linear;
    const char* name;
    std::int64_t out;
    Adapter BlockWeights::* adapter;
};

/// Adapters of linears that share an input: their A lie one below the other.
void place_group(const LoraOptions& lora, const std::string& prefix, std::int64_t in, const std::vector<AdapterSite>& sites,
                 BlockWeights& block, Cursor& cursor, std::vector<NamedTensor>& names) {
    std::vector<AdapterSite> present;
    for (const AdapterSite& site : sites) {
        if (std::find(lora.targets.begin(), lora.targets.end(), site.linear) != lora.targets.end()) present.push_back(site);
    }
    if (present.empty()) return;
    const Tensor joined = cursor.take(static_cast<std::int64_t>(present.size()) * lora.rank, in);
    for (std::size_t i = 0; i < present.size(); ++i) {
        Adapter& adapter = block.*present[i].adapter;
        adapter.a = joined.row_range(static_cast<std::int64_t>(i) * lora.rank, lora.rank);
        adapter.b = cursor.take(present[i].out, lora.rank);
        names.push_back({prefix + present[i].name + ".lora_A", adapter.a, {}, false, false});
        names.push_back({prefix + present[i].name + ".lora_B", adapter.b, {}, false, false});
    }
}

void place_adapters(const ModelSpec& spec, const LoraOptions& lora, Cursor& cursor, ModelWeights& weights,
                    std::vector<NamedTensor>& names) {
    weights.blocks.resize(static_cast<std::size_t>(spec.layers));
    if (!lora.enabled()) return;
    using B = BlockWeights;
    const auto q = spec.q_columns(), kv = spec.kv_columns();
    for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
        BlockWeights& block = weights.blocks[static_cast<std::size_t>(layer)];
        const std::string prefix = "layers." + std::to_string(layer) + ".";
        place_group(lora, prefix + "self_attn.", spec.hidden,
                    {{Linear::Q, "q_proj", q, &B::q_lora}, {Linear::K, "k_proj", kv, &B::k_lora}, {Linear::V, "v_proj", kv, &B::v_lora}},
                    block, cursor, names);
        place_group(lora, prefix + "self_attn.", q, {{Linear::O, "o_proj", spec.hidden, &B::o_lora}}, block, cursor, names);
        place_group(lora, prefix + "mlp.", spec.hidden,
                    {{Linear::Gate, "gate_proj", spec.ffn, &B::gate_lora}, {Linear::Up, "up_proj", spec.ffn, &B::up_lora}}, block, cursor,
                    names);
        place_group(lora, prefix + "mlp.", spec.ffn, {{Linear::Down, "down_proj", spec.hidden, &B::down_lora}}, block, cursor, names);
    }
    if (std::find(lora.targets.begin(), lora.targets.end(), Linear::Head) != lora.targets.end()) {
        weights.head_lora.a = cursor.take(lora.rank, spec.hidden);
        weights.head_lora.b = cursor.take(spec.vocab, lora.rank);
        names.push_back({"lm_head.lora_A", weights.head_lora.a, {}, false, false});
        names.push_back({"lm_head.lora_B", weights.head_lora.b, {}, false, false});
    }
}

}  // namespace

Tensor Cursor::take(std::int64_t rows, std::int64_t columns) {
    const Tensor view = buffer_.column_range(used_, rows * columns);
    used_ += (rows * columns + padding_ - 1) / padding_ * padding_;
    return matrix(view.data, rows, columns, buffer_.dtype, buffer_.device);
}

std::int64_t parameter_padding(const Recipe& recipe) {
    // A cache line of float32; beside bfloat16 ones, which a GPU reads, twice its 128-byte line.
    return recipe.compute == DType::Float32 ? 16 : 128;
}

ParameterSize base_size(const ModelSpec& spec, std::int64_t padding) {
    Cursor matrices(padding), vectors(padding);
    ModelWeights weights;
    std::vector<NamedTensor> names;
    place_base(spec, matrices, vectors, weights, names);
    return {matrices.used(), vectors.used()};
}

ParameterSize adapter_size(const ModelSpec& spec, const LoraOptions& lora, std::int64_t padding) {
    Cursor cursor(padding);
    ModelWeights weights;
    std::vector<NamedTensor> names;
    place_adapters(spec, lora, cursor, weights, names);
    return {cursor.used(), 0};
}

void lay_out_base(const ModelSpec& spec, const Tensor& buffer, std::int64_t padding, ModelWeights& weights,
                  std::vector<NamedTensor>& names) {
    Cursor matrices(padding, buffer), vectors(padding, buffer, base_size(spec, padding).matrices);
    place_base(spec, matrices, vectors, weights, names);
}

void lay_out_adapters(const ModelSpec& spec, const LoraOptions& lora, const Tensor& buffer, std::int64_t padding, ModelWeights& weights,
                      std::vector<NamedTensor>& names) {
    Cursor cursor(padding, buffer);
    place_adapters(spec, lora, cursor, weights, names);
}

const char* name_of(Linear linear) {
    for (const auto& [known, name] : kLinearNames) {
        if (known == linear) return name;
    }
    return "unknown";
}

Linear linear_from_name(const std::string& name) {
    std::string known_names;
    for (const auto& [linear, known] : kLinearNames) {
        if (name == known) return linear;
        known_names += (known_names.empty() ? "" : ", ") + std::string(known);
    }
    fail("lora_targets: expected names out of ", known_names, ", got '", name, "'");
}

}  // namespace surogate
