#include "model/layout.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"
#include "model/activations.h"

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

bool targets(const LoraOptions& lora, Linear linear) {
    return lora.enabled() && std::find(lora.targets.begin(), lora.targets.end(), linear) != lora.targets.end();
}

/// `offsets`, if given, receives what block_offsets promises.
void place_base(const ModelSpec& spec, const BorderOptions& borders, Cursor& matrices, Cursor& vectors, ModelWeights& weights,
                std::vector<NamedTensor>& names, std::vector<std::int64_t>* offsets = nullptr) {
    const auto q = spec.q_columns(), kv = spec.kv_columns();
    const auto add = [&](const std::string& name, const Tensor& tensor) { names.push_back({name, tensor, {}, false, false}); };
    const auto add_bias = [&](const std::string& name, const Tensor& tensor) { names.push_back({name, tensor, {}, false, true}); };
    const auto add_vector = [&](const std::string& name, std::int64_t size) {
        const Tensor tensor = vectors.take(1, size);
        names.push_back({name, tensor, {}, false, true});
        return tensor;
    };

    const auto take_linear = [&](Border& border, std::int64_t rows, std::int64_t columns, std::initializer_list<Linear> linears) {
        border.width = borders.width(linears);
        if (!border.present()) return matrices.take(rows, columns);
        const std::int64_t all = columns + border.width;
        border.whole = matrices.take(rows + border.width, padded_columns(all)).column_range(0, all);
        return border.weight();
    };

    weights.embedding = matrices.take(spec.vocab, spec.hidden);
    add("embed_tokens.weight", weights.embedding);
    weights.blocks.resize(static_cast<std::size_t>(spec.layers));
    for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
        if (offsets != nullptr) offsets->push_back(matrices.used());
        BlockWeights& block = weights.blocks[static_cast<std::size_t>(layer)];
        const std::string prefix = "layers." + std::to_string(layer) + ".";
        const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";

        block.input_norm = add_vector(prefix + "input_layernorm.weight", spec.hidden);
        block.qkv = take_linear(block.qkv_border, spec.qkv_columns(), spec.hidden, {Linear::Q, Linear::K, Linear::V});
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
        block.o = take_linear(block.o_border, spec.hidden, q, {Linear::O});
        add(attention + "o_proj.weight", block.o);
        if (spec.o_bias) block.o_bias = add_vector(attention + "o_proj.bias", spec.hidden);

        block.post_norm = add_vector(prefix + "post_attention_layernorm.weight", spec.hidden);
        block.gate_up = take_linear(block.gate_up_border, 2 * spec.ffn, spec.hidden, {Linear::Gate, Linear::Up});
        add(mlp + "gate_proj.weight", block.gate_up.row_range(0, spec.ffn));
        add(mlp + "up_proj.weight", block.gate_up.row_range(spec.ffn, spec.ffn));
        block.down = take_linear(block.down_border, spec.hidden, spec.ffn, {Linear::Down});
        add(mlp + "down_proj.weight", block.down);
        if (spec.mlp_bias) {
            block.gate_up_bias = vectors.take(1, 2 * spec.ffn);
            add_bias(mlp + "gate_proj.bias", block.gate_up_bias.column_range(0, spec.ffn));
            add_bias(mlp + "up_proj.bias", block.gate_up_bias.column_range(spec.ffn, spec.ffn));
            block.down_bias = add_vector(mlp + "down_proj.bias", spec.hidden);
        }
    }
    if (offsets != nullptr) offsets->push_back(matrices.used());
    weights.final_norm = add_vector("norm.weight", spec.hidden);
    if (spec.tied) {
        weights.head = weights.embedding;
    } else {
        weights.head = matrices.take(spec.vocab, spec.hidden);
        add("lm_head.weight", weights.head);
    }
    if (targets(borders.lora, Linear::Head)) {
        // The head's product is cut into chunks of another shape, so its adapter stays apart.
        weights.head_lora = {matrices.take(borders.lora.rank, spec.hidden), matrices.take(spec.vocab, borders.lora.rank)};
    }
}

struct AdapterSite {
    Linear linear;
    const char* name;
    std::int64_t out;
    Adapter BlockWeights::* adapter;
};

/// Adapters of linears that share an input: their A lie one below the other, in the border or in a matrix of their own.
void place_group(const LoraOptions& lora, const std::string& prefix, std::int64_t in, const std::vector<AdapterSite>& sites,
                 const Border& border, BlockWeights& block, Cursor& cursor, std::vector<NamedTensor>& names) {
    const auto present = std::count_if(sites.begin(), sites.end(), [&](const AdapterSite& site) { return targets(lora, site.linear); });
    if (present == 0) return;
    const Tensor joined = border.present() ? border.a() : cursor.take(present * lora.rank, in);
    std::int64_t index = 0, first_row = 0;
    for (const AdapterSite& site : sites) {
        if (targets(lora, site.linear)) {
            Adapter& adapter = block.*site.adapter;
            adapter.a = joined.row_range(index * lora.rank, lora.rank);
            adapter.b = border.present() ? border.b().row_range(first_row, site.out).column_range(index * lora.rank, lora.rank)
                                         : cursor.take(site.out, lora.rank);
            names.push_back({prefix + site.name + ".lora_A", adapter.a, {}, false, false});
            names.push_back({prefix + site.name + ".lora_B", adapter.b, {}, false, false});
            ++index;
        }
        first_row += site.out;
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
        const auto place = [&](const char* part, std::int64_t in, const std::vector<AdapterSite>& sites, const Border& border) {
            place_group(lora, prefix + part, in, sites, border, block, cursor, names);
        };
        place("self_attn.", spec.hidden,
              {{Linear::Q, "q_proj", q, &B::q_lora}, {Linear::K, "k_proj", kv, &B::k_lora}, {Linear::V, "v_proj", kv, &B::v_lora}},
              block.qkv_border);
        place("self_attn.", q, {{Linear::O, "o_proj", spec.hidden, &B::o_lora}}, block.o_border);
        place("mlp.", spec.hidden, {{Linear::Gate, "gate_proj", spec.ffn, &B::gate_lora}, {Linear::Up, "up_proj", spec.ffn, &B::up_lora}},
              block.gate_up_border);
        place("mlp.", spec.ffn, {{Linear::Down, "down_proj", spec.hidden, &B::down_lora}}, block.down_border);
    }
    if (targets(lora, Linear::Head)) {
        if (!weights.head_lora.present()) weights.head_lora = {cursor.take(lora.rank, spec.hidden), cursor.take(spec.vocab, lora.rank)};
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

BorderOptions::BorderOptions(const LearnerOptions& options) {
    if (options.border_adapters) lora = options.lora;
}

std::int64_t BorderOptions::width(std::initializer_list<Linear> linears) const {
    const auto present = std::count_if(linears.begin(), linears.end(), [&](Linear linear) { return targets(lora, linear); });
    return (present * lora.rank + 7) / 8 * 8;  // what lies behind it stays aligned
}

ParameterSize base_size(const ModelSpec& spec, std::int64_t padding, const BorderOptions& border) {
    Cursor matrices(padding), vectors(padding);
    ModelWeights weights;
    std::vector<NamedTensor> names;
    place_base(spec, border, matrices, vectors, weights, names);
    return {matrices.used(), vectors.used()};
}

ParameterSize adapter_size(const ModelSpec& spec, const LoraOptions& lora, std::int64_t padding) {
    Cursor cursor(padding);
    ModelWeights weights;
    std::vector<NamedTensor> names;
    place_adapters(spec, lora, cursor, weights, names);
    return {cursor.used(), 0};
}

std::vector<std::int64_t> block_offsets(const ModelSpec& spec, std::int64_t padding) {
    Cursor matrices(padding), vectors(padding);
    ModelWeights weights;
    std::vector<NamedTensor> names;
    std::vector<std::int64_t> offsets;
    place_base(spec, {}, matrices, vectors, weights, names, &offsets);
    return offsets;
}

void lay_out_base(const ModelSpec& spec, const Tensor& buffer, std::int64_t padding, const BorderOptions& border, ModelWeights& weights,
                  std::vector<NamedTensor>& names) {
    Cursor matrices(padding, buffer), vectors(padding, buffer, base_size(spec, padding, border).matrices);
    place_base(spec, border, matrices, vectors, weights, names);
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
