#include "model/activations.h"

#include <algorithm>
#include <string>

#include "model/layout.h"
#include "model/pass_buffers.h"

namespace surogate {

namespace {

std::int64_t count_targets(const LoraOptions& lora, std::initializer_list<Linear> linears) {
    if (!lora.enabled()) return 0;
    return std::count_if(linears.begin(), linears.end(),
                         [&](Linear linear) { return std::find(lora.targets.begin(), lora.targets.end(), linear) != lora.targets.end(); });
}

/// [T, columns] with room for `border` more columns in each row.
Tensor take_wide(Arena& arena, std::int64_t tokens, std::int64_t columns, std::int64_t border, DType dtype) {
    if (border == 0) return arena.take(tokens, columns, dtype);
    return arena.take(tokens, padded_columns(columns + border), dtype).column_range(0, columns);
}

constexpr std::initializer_list<Linear> kQkv = {Linear::Q, Linear::K, Linear::V}, kGateUp = {Linear::Gate, Linear::Up};

BlockActivations take_block(Arena& arena, const ModelSpec& spec, const LearnerOptions& options, std::int64_t tokens) {
    const DType dtype = options.recipe.compute;
    const BorderOptions border(options);
    // What a linear reads, and its input times A: in the border or apart.
    const auto take_input = [&](Tensor& input, Tensor& low, std::int64_t columns, std::initializer_list<Linear> linears) {
        const std::int64_t width = border.width(linears), ranks = count_targets(options.lora, linears) * options.lora.rank;
        input = take_wide(arena, tokens, columns, width, dtype);
        if (width > 0) {
            low = input.column_range(columns, width);
        } else if (ranks > 0) {
            low = arena.take(tokens, ranks, dtype);
        }
    };
    BlockActivations block;
    take_input(block.attention_in, block.qkv_low, spec.hidden, kQkv);
    block.attention_rstd = arena.take_vector(tokens);
    block.qkv = arena.take(tokens, spec.qkv_columns(), dtype);
    if (spec.qk_norm) {
        block.raw_qk = arena.take(tokens, spec.q_columns() + spec.kv_columns(), dtype);
        block.qk_rstd = arena.take(tokens, spec.heads + spec.kv_heads);
    }
    take_input(block.attention_out, block.o_low, spec.q_columns(), {Linear::O});
    block.lse = arena.take(tokens, spec.heads);
    block.middle = arena.take(tokens, spec.hidden, dtype);
    take_input(block.mlp_in, block.gate_up_low, spec.hidden, kGateUp);
    block.mlp_rstd = arena.take_vector(tokens);
    block.gate_up = arena.take(tokens, 2 * spec.ffn, dtype);
    const std::int64_t down = std::max(border.width({Linear::Down}), count_targets(options.lora, {Linear::Down}) * options.lora.rank);
    if (down > 0) block.down_low = arena.take(tokens, down, dtype);
    return block;
}

}  // namespace

BlockActivations BlockActivations::first(std::int64_t tokens) const {
    BlockActivations view = *this;
    for (Tensor* tensor : {&view.attention_in, &view.qkv, &view.raw_qk, &view.qk_rstd, &view.attention_out, &view.lse, &view.middle,
                           &view.mlp_in, &view.gate_up, &view.qkv_low, &view.o_low, &view.gate_up_low, &view.down_low}) {
        if (!tensor->empty()) *tensor = first_rows(*tensor, tokens);
    }
    for (Tensor* tensor : {&view.attention_rstd, &view.mlp_rstd}) *tensor = first_values(*tensor, tokens);
    return view;
}

Scratch Scratch::first(std::int64_t tokens) const {
    Scratch view = *this;
    for (Tensor* tensor : {&view.activated, &view.branch, &view.d_stream, &view.d_branch, &view.d_activated, &view.d_gate_up,
                           &view.d_attention_out, &view.d_qkv, &view.d_low}) {
        if (!tensor->empty()) *tensor = first_rows(*tensor, tokens);
    }
    return view;
}

bool targets_any(const LoraOptions& lora, std::initializer_list<Linear> linears) { return count_targets(lora, linears) > 0; }

bool decoder_trained(const LearnerOptions& options) {
    if (!options.trainable || !options.lora.enabled()) return options.trainable;
    return targets_any(options.lora, {Linear::Q, Linear::K, Linear::V, Linear::O, Linear::Gate, Linear::Up, Linear::Down});
}

bool head_gradient_in_forward(const LearnerOptions& options) {
    const bool frozen = options.lora.enabled() && !targets_any(options.lora, {Linear::Head});
    return options.head_gradient_in_forward && frozen && decoder_trained(options);
}

std::int64_t head_chunk_rows(const ModelSpec& spec, const LearnerOptions& options) {
    // Must not depend on what memory is free: the chunks set the order in which the head's gradient is summed.
    const bool small = options.recipe.compute == DType::Float32;
    const std::int64_t elements = std::int64_t{1} << (small ? 26 : 29);  // 256 MiB of float32, 1 GiB of bfloat16
    std::int64_t rows = options.head_rows;
    if (rows == 0) rows = std::max<std::int64_t>(64, elements / spec.vocab);
    if (options.head_rows == 0 && !small) rows = (rows + 127) / 128 * 128;  // whole tiles of a product
    return std::min(rows, options.max_tokens);
}

Activations lay_out_activations(Arena& arena, const ModelSpec& spec, const LearnerOptions& options) {
    const std::int64_t tokens = options.max_tokens;
    const std::int64_t kept = options.trainable && !options.recompute ? spec.layers : 1;
    const LoraOptions& lora = options.lora;
    const DType dtype = options.recipe.compute;
    Activations result;

    arena.item("activations (" + std::to_string(kept) + (kept == 1 ? " layer, " : " layers, ") + std::to_string(tokens) + " tokens)");
    for (std::int64_t layer = 0; layer < kept; ++layer) result.blocks.push_back(take_block(arena, spec, options, tokens));

    arena.item("residual stream (" + std::to_string(tokens) + " tokens)");
    const std::int64_t streams = options.trainable ? spec.layers + 1 : 1;
    for (std::int64_t i = 0; i < streams; ++i) result.stream.push_back(arena.take(tokens, spec.hidden, dtype));

    arena.item("working buffers (" + std::to_string(tokens) + " tokens)");
    Scratch& scratch = result.scratch;
    const BorderOptions border(options);
    scratch.activated = take_wide(arena, tokens, spec.ffn, border.width({Linear::Down}), dtype);
    scratch.branch = arena.take(tokens, spec.hidden, dtype);
    if (options.trainable) {
        scratch.d_stream = take_wide(arena, tokens, spec.hidden, std::max(border.width({Linear::O}), border.width({Linear::Down})), dtype);
        scratch.d_branch = arena.take(tokens, spec.hidden, dtype);
        scratch.d_activated = arena.take(tokens, spec.ffn, dtype);
        scratch.d_gate_up = take_wide(arena, tokens, 2 * spec.ffn, border.width(kGateUp), dtype);
        scratch.d_attention_out = arena.take(tokens, spec.q_columns(), dtype);
        scratch.d_qkv = take_wide(arena, tokens, spec.qkv_columns(), border.width(kQkv), dtype);
        if (lora.enabled() && !options.border_adapters) scratch.d_low = arena.take(tokens, 3 * lora.rank, dtype);
    }
    result.indices = arena.take_vector(kInputSections * section_size(tokens), DType::Int32);
    result.values = arena.take_vector(kValueSections * section_size(tokens));

    HeadBuffers& head = result.head;
    head.chunk = head_chunk_rows(spec, options);
    head.kept = options.keep_logits && options.trainable && !head_gradient_in_forward(options);
    const std::int64_t rows = head.kept ? tokens : head.chunk;
    arena.item("head (logits of " + std::to_string(rows) + " rows x " + std::to_string(spec.vocab) + " ids)");
    const auto take_logits = [&](std::int64_t count, DType format) {
        const std::int64_t width = dtype == DType::Float32 ? spec.vocab : padded_columns(spec.vocab);
        return arena.take(count, width, format).column_range(0, spec.vocab);
    };
    head.logits = take_logits(rows, options.recipe.logits);
    head.rows = arena.take(rows, spec.hidden, dtype);
    head.normed = arena.take(rows, spec.hidden, dtype);
    head.rstd = arena.take_vector(rows);
    const bool adapter = count_targets(lora, {Linear::Head}) > 0;
    if (adapter) head.low = arena.take(rows, lora.rank, dtype);
    if (options.trainable) {
        head.d_normed = arena.take(head.chunk, spec.hidden, dtype);
        head.d_rows = arena.take(head_gradient_in_forward(options) ? tokens : head.chunk, spec.hidden, dtype);
        if (adapter) head.d_low = arena.take(head.chunk, lora.rank, dtype);
    }
    return result;
}

}  // namespace surogate
