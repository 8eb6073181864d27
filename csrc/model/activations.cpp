#include "model/activations.h"

#include <algorithm>
#include <string>

namespace surogate {

namespace {

std::int64_t count_targets(const LoraOptions& lora, std::initializer_list<Linear> linears) {
    if (!lora.enabled()) return 0;
    return std::count_if(linears.begin(), linears.end(),
                         [&](Linear linear) { return std::find(lora.targets.begin(), lora.targets.end(), linear) != lora.targets.end(); });
}

BlockActivations take_block(Arena& arena, const ModelSpec& spec, const LoraOptions& lora, std::int64_t tokens) {
    BlockActivations block;
    block.attention_in = arena.take(tokens, spec.hidden);
    block.attention_rstd = arena.take_vector(tokens);
    block.qkv = arena.take(tokens, spec.qkv_columns());
    if (spec.qk_norm) {
        block.raw_qk = arena.take(tokens, spec.q_columns() + spec.kv_columns());
        block.qk_rstd = arena.take(tokens, spec.heads + spec.kv_heads);
    }
    block.attention_out = arena.take(tokens, spec.q_columns());
    block.lse = arena.take(tokens, spec.heads);
    block.middle = arena.take(tokens, spec.hidden);
    block.mlp_in = arena.take(tokens, spec.hidden);
    block.mlp_rstd = arena.take_vector(tokens);
    block.gate_up = arena.take(tokens, 2 * spec.ffn);
    const auto low = [&](std::initializer_list<Linear> linears) {
        const std::int64_t columns = count_targets(lora, linears) * lora.rank;
        return columns > 0 ? arena.take(tokens, columns) : Tensor{};
    };
    block.qkv_low = low({Linear::Q, Linear::K, Linear::V});
    block.o_low = low({Linear::O});
    block.gate_up_low = low({Linear::Gate, Linear::Up});
    block.down_low = low({Linear::Down});
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

std::int64_t head_chunk_rows(const ModelSpec& spec, const LearnerOptions& options) {
    // Must not depend on what memory is free: the chunks set the order in which the head's gradient is summed.
    constexpr std::int64_t automatic_floats = std::int64_t{1} << 26;  // 256 MiB
    const std::int64_t rows = options.head_rows > 0 ? options.head_rows : std::max<std::int64_t>(64, automatic_floats / spec.vocab);
    return std::min(rows, options.max_tokens);
}

Activations lay_out_activations(Arena& arena, const ModelSpec& spec, const LearnerOptions& options) {
    const std::int64_t tokens = options.max_tokens, rows = head_chunk_rows(spec, options);
    const std::int64_t kept = options.trainable && !options.recompute ? spec.layers : 1;
    const LoraOptions& lora = options.lora;
    Activations result;

    arena.item("activations (" + std::to_string(kept) + (kept == 1 ? " layer, " : " layers, ") + std::to_string(tokens) + " tokens)");
    for (std::int64_t layer = 0; layer < kept; ++layer) result.blocks.push_back(take_block(arena, spec, lora, tokens));

    arena.item("residual stream (" + std::to_string(tokens) + " tokens)");
    const std::int64_t streams = options.trainable ? spec.layers + 1 : 1;
    for (std::int64_t i = 0; i < streams; ++i) result.stream.push_back(arena.take(tokens, spec.hidden));

    arena.item("working buffers (" + std::to_string(tokens) + " tokens)");
    Scratch& scratch = result.scratch;
    scratch.activated = arena.take(tokens, spec.ffn);
    scratch.branch = arena.take(tokens, spec.hidden);
    if (options.trainable) {
        scratch.d_stream = arena.take(tokens, spec.hidden);
        scratch.d_branch = arena.take(tokens, spec.hidden);
        scratch.d_activated = arena.take(tokens, spec.ffn);
        scratch.d_gate_up = arena.take(tokens, 2 * spec.ffn);
        scratch.d_attention_out = arena.take(tokens, spec.q_columns());
        scratch.d_qkv = arena.take(tokens, spec.qkv_columns());
        if (lora.enabled()) scratch.d_low = arena.take(tokens, 3 * lora.rank);
    }
    result.tokens = arena.take_vector(tokens, DType::Int32);
    result.positions = arena.take_vector(tokens, DType::Int32);

    arena.item("head (logits of " + std::to_string(rows) + " rows x " + std::to_string(spec.vocab) + " ids)");
    HeadBuffers& head = result.head;
    head.logits = arena.take(rows, spec.vocab);
    head.rows = arena.take(rows, spec.hidden);
    head.normed = arena.take(rows, spec.hidden);
    head.rstd = arena.take_vector(rows);
    const bool adapter = count_targets(lora, {Linear::Head}) > 0;
    if (adapter) head.low = arena.take(rows, lora.rank);
    if (options.trainable) {
        head.d_normed = arena.take(rows, spec.hidden);
        head.d_rows = arena.take(rows, spec.hidden);
        if (adapter) head.d_low = arena.take(rows, lora.rank);
    }
    head.index = arena.take_vector(tokens, DType::Int32);
    head.targets = arena.take_vector(tokens, DType::Int32);
    for (Tensor* values : {&head.logp, &head.entropy, &head.lse, &head.d_logp, &head.d_entropy}) *values = arena.take_vector(tokens);
    return result;
}

}  // namespace surogate
