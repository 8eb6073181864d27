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

/// Where buffers come from: memory of gradients that nobody needs yet, as long as there is some, else the arena.
class Source {
   public:
    /// `gradient` is empty-handed (no rows) if nothing is lent.
    Source(Arena& arena, const ModelSpec& spec, const LearnerOptions& options, const Tensor& gradient) : arena_(arena) {
        if (!options.lend_gradients) return;
        gradient_ = gradient;
        for (const std::int64_t offset : block_offsets(spec, parameter_padding(options.recipe))) {
            block_bytes_.push_back(static_cast<std::size_t>(offset) * size_of(gradient.dtype));
        }
        // The gradient of the embedding is written last, unless it is the head's, which is written first.
        next_ = spec.tied ? block_bytes_.front() : 0;
    }

    Tensor take(std::int64_t rows, std::int64_t columns, DType dtype) {
        constexpr std::size_t kAlignment = 256;
        const std::size_t begin = (next_ + kAlignment - 1) / kAlignment * kAlignment;
        const std::size_t end = begin + static_cast<std::size_t>(rows * columns) * size_of(dtype);
        if (block_bytes_.empty() || end > limit_) return arena_.take(rows, columns, dtype);
        next_ = end;
        // Without data while the arena measures.
        void* data = gradient_.data != nullptr ? gradient_.as<char>() + begin : nullptr;
        return matrix(data, rows, columns, dtype, gradient_.device);
    }
    Tensor take_vector(std::int64_t size, DType dtype = DType::Float32) { return take(1, size, dtype); }

    /// From here on: what is needed until the backward of block `layer` is over. Blocks are written from the last to the first, each after
    /// the one above it is done.
    void until_block_is_done(std::int64_t layer) { limit(layer, layer > 0 ? 0 : -1); }
    /// What is needed until the backward of the head is over.
    void until_head_is_done() { limit(static_cast<std::int64_t>(block_bytes_.size()) - 1, 0); }

   private:
    /// Memory up to the start of block `layer`; from the first block on if `first` is one.
    void limit(std::int64_t layer, std::int64_t first) {
        if (block_bytes_.empty()) return;
        limit_ = block_bytes_[static_cast<std::size_t>(layer)];
        if (first >= 0) next_ = std::max(next_, block_bytes_[static_cast<std::size_t>(first)]);
    }

    Arena& arena_;
    Tensor gradient_{};
    std::vector<std::size_t> block_bytes_;  // where each block's gradients begin, and where the last one's end
    std::size_t next_ = 0, limit_ = 0;
};

/// Hands out parts of the memory of a buffer whose contents are not needed meanwhile.
class Reuse {
   public:
    /// A matrix with its rows whole, room beside them included.
    explicit Reuse(const Tensor& buffer) : buffer_(buffer), size_(buffer.rows * buffer.stride) {}

    bool fits(std::int64_t elements) const { return used_ + elements <= size_; }
    /// Elements that a part takes if another one follows.
    static std::int64_t padded(std::int64_t elements) { return (elements + kAlignment - 1) / kAlignment * kAlignment; }
    Tensor take(std::int64_t rows, std::int64_t columns) {
        Tensor part = rest();
        part.rows = rows;
        part.columns = part.stride = columns;
        used_ += padded(rows * columns);
        return part;
    }
    /// What was not taken, flat.
    Tensor rest() const {
        const std::int64_t count = std::max<std::int64_t>(0, size_ - used_);
        void* data = buffer_.data != nullptr ? buffer_.as<char>() + static_cast<std::size_t>(used_) * size_of(buffer_.dtype) : nullptr;
        return vector(count > 0 ? data : nullptr, count, buffer_.dtype, buffer_.device);
    }

   private:
    static constexpr std::int64_t kAlignment = 128;  // elements

    Tensor buffer_;
    std::int64_t size_, used_ = 0;
};

std::int64_t wide_columns(std::int64_t columns, std::int64_t border) { return border == 0 ? columns : padded_columns(columns + border); }

/// [T, columns] with room for `border` more columns in each row.
Tensor take_wide(Source& source, std::int64_t tokens, std::int64_t columns, std::int64_t border, DType dtype) {
    return source.take(tokens, wide_columns(columns, border), dtype).column_range(0, columns);
}

constexpr std::initializer_list<Linear> kQkv = {Linear::Q, Linear::K, Linear::V}, kGateUp = {Linear::Gate, Linear::Up};

/// Gradients inside of the blocks' attention, in memory that the MLP of the same block has done with.
void take_attention_gradients(Source& source, const ModelSpec& spec, const LearnerOptions& options, std::int64_t tokens,
                              const Scratch& scratch, std::vector<BlockActivations>& blocks) {
    const std::int64_t columns = wide_columns(spec.qkv_columns(), BorderOptions(options).width(kQkv)), out = spec.q_columns();
    const std::int64_t needed = Reuse::padded(tokens * columns) + tokens * out;
    const bool in_activated = Reuse(scratch.activated).fits(needed), in_gate_up = Reuse(blocks.front().gate_up).fits(needed);
    Tensor d_qkv, d_out;  // of all blocks, if neither is large enough
    if (!in_activated && !in_gate_up) {
        d_qkv = source.take(tokens, columns, options.recipe.compute);
        d_out = source.take(tokens, out, options.recipe.compute);
    }
    for (BlockActivations& block : blocks) {
        Reuse activated(scratch.activated), gate_up(block.gate_up);
        Reuse& place = in_activated ? activated : gate_up;
        const bool apart = !in_activated && !in_gate_up;
        block.d_qkv = (apart ? d_qkv : place.take(tokens, columns)).column_range(0, spec.qkv_columns());
        block.d_attention_out = apart ? d_out : place.take(tokens, out);
        block.spare = gate_up.rest();
    }
}

BlockActivations take_block(Source& source, const ModelSpec& spec, const LearnerOptions& options, std::int64_t tokens) {
    const DType dtype = options.recipe.compute;
    const BorderOptions border(options);
    // What a linear reads, and its input times A: in the border or apart.
    const auto take_input = [&](Tensor& input, Tensor& low, std::int64_t columns, std::initializer_list<Linear> linears) {
        const std::int64_t width = border.width(linears), ranks = count_targets(options.lora, linears) * options.lora.rank;
        input = take_wide(source, tokens, columns, width, dtype);
        if (width > 0) {
            low = input.column_range(columns, width);
        } else if (ranks > 0) {
            low = source.take(tokens, ranks, dtype);
        }
    };
    BlockActivations block;
    block.gate_up = take_wide(source, tokens, 2 * spec.ffn, border.width(kGateUp), dtype);
    if (!options.lend_gradients) take_input(block.attention_in, block.qkv_low, spec.hidden, kQkv);
    block.attention_rstd = source.take_vector(tokens);
    // With the stride of its gradient: attention's library wants both to lie alike.
    block.qkv = take_wide(source, tokens, spec.qkv_columns(), border.width(kQkv), dtype);
    if (spec.qk_norm) {
        block.raw_qk = source.take(tokens, spec.q_columns() + spec.kv_columns(), dtype);
        block.qk_rstd = source.take(tokens, spec.heads + spec.kv_heads, DType::Float32);
    }
    take_input(block.attention_out, block.o_low, spec.q_columns(), {Linear::O});
    block.lse = source.take(tokens, spec.heads, DType::Float32);
    block.middle = source.take(tokens, spec.hidden, dtype);
    take_input(block.mlp_in, block.gate_up_low, spec.hidden, kGateUp);
    if (options.lend_gradients) block.attention_in = block.mlp_in;  // and is normed once more in backward: memory comes first there
    block.mlp_rstd = source.take_vector(tokens);
    const std::int64_t down = std::max(border.width({Linear::Down}), count_targets(options.lora, {Linear::Down}) * options.lora.rank);
    if (down > 0) block.down_low = source.take(tokens, down, dtype);
    Reuse gate_up(block.gate_up);
    block.branch = gate_up.fits(tokens * spec.hidden) ? gate_up.take(tokens, spec.hidden) : source.take(tokens, spec.hidden, dtype);
    return block;
}

}  // namespace

BlockActivations BlockActivations::first(std::int64_t tokens) const {
    BlockActivations view = *this;
    for (Tensor* tensor :
         {&view.attention_in, &view.qkv, &view.raw_qk, &view.qk_rstd, &view.attention_out, &view.lse, &view.middle, &view.mlp_in,
          &view.gate_up, &view.qkv_low, &view.o_low, &view.gate_up_low, &view.down_low, &view.branch, &view.d_attention_out, &view.d_qkv}) {
        if (!tensor->empty()) *tensor = first_rows(*tensor, tokens);
    }
    for (Tensor* tensor : {&view.attention_rstd, &view.mlp_rstd}) *tensor = first_values(*tensor, tokens);
    return view;
}

Scratch Scratch::first(std::int64_t tokens) const {
    Scratch view = *this;
    for (Tensor* tensor : {&view.activated, &view.d_stream, &view.d_low}) {
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
    // 256 MiB of float32, 1 GiB of bfloat16; twice that if the head is trained, whose gradient every chunk reads and writes.
    const bool trained = options.trainable && (!options.lora.enabled() || targets_any(options.lora, {Linear::Head}));
    const std::int64_t elements = std::int64_t{1} << (small ? 26 : trained ? 30 : 29);
    std::int64_t rows = options.head_rows;
    if (rows == 0) rows = std::max<std::int64_t>(64, elements / spec.vocab);
    if (options.head_rows == 0 && !small) rows = (rows + 127) / 128 * 128;  // whole tiles of a product
    return std::min(rows, options.max_tokens);
}

Activations lay_out_activations(Arena& arena, const ModelSpec& spec, const LearnerOptions& options, const Tensor& gradient) {
    const std::int64_t tokens = options.max_tokens;
    const std::int64_t kept = options.trainable && !options.recompute ? spec.layers : 1;
    const LoraOptions& lora = options.lora;
    const DType dtype = options.recipe.compute;
    const BorderOptions border(options);
    Source source(arena, spec, options, gradient);
    Activations result;
    Scratch& scratch = result.scratch;

    // Large ones first, for lent memory may not take all.
    source.until_block_is_done(0);
    arena.item("working buffers (" + std::to_string(tokens) + " tokens)");
    scratch.activated = take_wide(source, tokens, spec.ffn, border.width({Linear::Down}), dtype);

    arena.item("activations (" + std::to_string(kept) + (kept == 1 ? " layer, " : " layers, ") + std::to_string(tokens) + " tokens)");
    for (std::int64_t layer = 0; layer < kept; ++layer) result.blocks.push_back(take_block(source, spec, options, tokens));

    arena.item("backward buffers (" + std::to_string(tokens) + " tokens)");
    if (options.trainable) {
        take_attention_gradients(source, spec, options, tokens, scratch, result.blocks);
        scratch.d_stream = take_wide(source, tokens, spec.hidden, std::max(border.width({Linear::O}), border.width({Linear::Down})), dtype);
        if (lora.enabled() && !options.border_adapters) scratch.d_low = source.take(tokens, 3 * lora.rank, dtype);
    }
    result.indices = arena.take_vector(kInputSections * section_size(tokens), DType::Int32);
    result.values = arena.take_vector(kValueSections * section_size(tokens));

    arena.item("residual stream (" + std::to_string(tokens) + " tokens)");
    const std::int64_t streams = options.trainable ? spec.layers + 1 : 1;
    for (std::int64_t i = 0; i < streams; ++i) {
        if (i > 0) i < spec.layers ? source.until_block_is_done(i) : source.until_head_is_done();
        result.stream.push_back(source.take(tokens, spec.hidden, dtype));
    }

    HeadBuffers& head = result.head;
    head.chunk = head_chunk_rows(spec, options);
    head.kept = options.keep_logits && options.trainable && !head_gradient_in_forward(options);
    const std::int64_t rows = head.kept ? tokens : head.chunk;
    arena.item("head (logits of " + std::to_string(rows) + " rows x " + std::to_string(spec.vocab) + " ids)");
    const auto take_logits = [&](std::int64_t count, DType format) {
        const std::int64_t width = dtype == DType::Float32 ? spec.vocab : padded_columns(spec.vocab);
        return source.take(count, width, format).column_range(0, spec.vocab);
    };
    source.until_head_is_done();
    head.logits = take_logits(rows, options.recipe.logits);
    head.rows = source.take(rows, spec.hidden, dtype);
    head.normed = source.take(rows, spec.hidden, dtype);
    head.rstd = source.take_vector(rows);
    const bool adapter = count_targets(lora, {Linear::Head}) > 0;
    if (adapter) head.low = source.take(rows, lora.rank, dtype);
    if (options.trainable) {
        head.d_normed = source.take(head.chunk, spec.hidden, dtype);
        head.d_rows = source.take(head_gradient_in_forward(options) ? tokens : head.chunk, spec.hidden, dtype);
        if (adapter) head.d_low = source.take(head.chunk, lora.rank, dtype);
    }
    return result;
}

}  // namespace surogate
