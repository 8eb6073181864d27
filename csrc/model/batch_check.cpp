#include "model/batch_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/error.h"
#include "model/layout.h"

namespace surogate {

void check_options(const ModelSpec& spec, const LearnerOptions& options) {
    spec.validate();
    constexpr std::int64_t most_tokens = std::numeric_limits<std::int32_t>::max();  // rows are counted in int32
    if (options.max_tokens <= 0 || options.max_tokens > most_tokens) {
        fail("Learner: max_tokens: expected a number in [1, ", most_tokens, "], got ", options.max_tokens);
    }
    require(options.head_rows >= 0, "Learner", "head_rows", "a positive number, or 0 to choose it", options.head_rows);
    options.recipe.validate();
    const LoraOptions& lora = options.lora;
    if (options.lend_gradients && (!options.trainable || !options.recompute || lora.enabled())) {
        fail("Learner: lend_gradients: expected recompute and all weights trained, got ", !options.trainable ? "trainable = false"
                                                                                          : lora.enabled()   ? "an adapter"
                                                                                                             : "recompute = false");
    }
    require(lora.rank >= 0, "Learner", "lora_rank", "a positive number, or 0 for no adapter", lora.rank);
    if (!lora.enabled()) {
        require(lora.targets.empty(), "Learner", "lora_targets", "none without a lora_rank",
                std::to_string(lora.targets.size()) + " targets");
        return;
    }
    require(std::isfinite(lora.alpha) && lora.alpha > 0.0f, "Learner", "lora_alpha", "a positive number", lora.alpha);
    require(!lora.targets.empty(), "Learner", "lora_targets", "at least one target", "none");
    for (std::size_t i = 0; i < lora.targets.size(); ++i) {
        const auto rest = lora.targets.begin() + static_cast<std::ptrdiff_t>(i) + 1;
        if (std::find(rest, lora.targets.end(), lora.targets[i]) != lora.targets.end()) {
            fail("Learner: lora_targets: '", name_of(lora.targets[i]), "' is named twice");
        }
        if (lora.targets[i] == Linear::Head && spec.tied) {
            fail(
                "Learner: lora_targets: 'lm_head' shares its weight with the embedding in this model, and an adapter on one of the two "
                "cannot be merged "
                "into the shared weight; leave it out of the targets");
        }
    }
}

void check_batch(const char* op, const ModelSpec& spec, const LearnerOptions& options, const Batch& batch, const PassOptions& pass) {
    const std::int64_t size = batch.size;
    if (size > options.max_tokens) {
        fail(op, ": tokens: expected at most max_tokens = ", options.max_tokens, " (what this learner's memory was planned for), got ",
             size);
    }
    require(std::isfinite(pass.temperature) && pass.temperature > 0.0f, op, "temperature", "a positive number", pass.temperature);
    if (pass.valid_vocab < 0 || pass.valid_vocab > spec.vocab) {
        fail(op, ": valid_vocab: expected a number in [0, ", spec.vocab, "], got ", pass.valid_vocab);
    }
    const std::int64_t valid = pass.valid_vocab > 0 ? pass.valid_vocab : spec.vocab;
    const Segments& segments = batch.segments;
    require(segments.count >= 0 && segments.cu_seqlens != nullptr, op, "cu_seqlens", "at least one number", "none");
    if (segments.cu_seqlens[0] != 0) fail(op, ": cu_seqlens[0]: expected 0, got ", segments.cu_seqlens[0]);
    for (std::int64_t s = 0; s < segments.count; ++s) {
        if (segments.cu_seqlens[s + 1] <= segments.cu_seqlens[s]) {
            fail(op, ": cu_seqlens[", s + 1, "]: expected more than the one before (", segments.cu_seqlens[s], "), got ",
                 segments.cu_seqlens[s + 1]);
        }
    }
    if (segments.cu_seqlens[segments.count] != size) {
        fail(op, ": cu_seqlens: expected to end with the number of tokens, ", size, ", got ", segments.cu_seqlens[segments.count]);
    }
    for (std::int64_t t = 0; t < size; ++t) {
        if (batch.tokens[t] < 0 || batch.tokens[t] >= spec.vocab) {
            fail(op, ": tokens[", t, "]: expected an id in [0, ", spec.vocab, "), got ", batch.tokens[t]);
        }
        if (batch.positions[t] < 0 || batch.positions[t] >= spec.max_positions) {
            fail(op, ": positions[", t, "]: expected a position in [0, ", spec.max_positions, "), got ", batch.positions[t]);
        }
        if (batch.targets[t] >= valid) {
            fail(op, ": targets[", t, "]: expected an id below ", pass.valid_vocab > 0 ? "valid_vocab = " : "the vocabulary's ", valid,
                 ", got ", batch.targets[t]);
        }
    }
}

}  // namespace surogate
