#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/learner.h"

namespace surogate {

struct SamplingParams {
    float temperature = 1.0f;  // 0: greedy
    float top_p = 1.0f;        // evaluation only, like the two below; the caller refuses them for training
    std::int32_t top_k = 0;    // 0: off
    float min_p = 0.0f;
    std::uint64_t seed = 0;  // a sample depends on seed, prompt and parameters alone
    std::int32_t max_new_tokens = 0;
    std::vector<std::int32_t> stop_ids;
};

struct GenerateRequest {
    std::uint64_t id = 0;
    std::vector<std::int32_t> prompt;
    SamplingParams params;
};

enum class Finish : std::uint8_t { None, Stop, Length, Aborted };

/// One token of one request. logp: at the sampling temperature over valid ids, untouched by top-p, top-k and min-p (greedy: temperature 1).
struct TokenEvent {
    std::uint64_t id;
    std::int32_t token;
    float logp;
    Finish finish;  // not None: this was the last one
};

struct GeneratorOptions {
    std::int64_t max_sequences = 32;  // decoded together
    /// Positions that the KV cache holds, rounded up to whole blocks. 0: 512 for each of max_sequences, and enough for one of 4096 (both:
    /// or as many as the model has).
    std::int64_t cache_tokens = 0;
    std::int64_t block_size = 16;      // a multiple of 16
    std::int64_t valid_vocab = 0;      // 0: all
    std::int64_t prefill_chunk = 256;  // positions of prompts computed in one step, beside the decoding sequences
};

/// Continuous batching over the learner's own weights. Requests with equal prompts (a group) share one prefill and its cache blocks.
/// Requests can be added and aborted between any two steps; when the cache is full the youngest one waits and is computed again later
/// (its tokens are kept). The learner must not step while a `step` of this runs; after one, `weights_changed` drops cached prompts.
///
/// Every row of a pass is computed by itself, so tokens and log-probabilities have the same bits whatever else runs, in whatever order
/// requests came, whether or not one had to wait in between, and for any number of threads.
class Generator {
   public:
    /// Takes all memory; OutOfMemory itemises what does not fit. The learner must outlive the generator.
    Generator(Learner& learner, GeneratorOptions options);
    ~Generator();
    Generator(const Generator&) = delete;
    Generator& operator=(const Generator&) = delete;

    static std::vector<MemoryItem> plan(const ModelSpec& spec, const GeneratorOptions& options, const LoraOptions& lora = {});

    /// Throws std::invalid_argument for parameters out of range, and for a request that could never fit.
    void add(GenerateRequest request);
    /// Drops the request; nothing more is said of it. False if it is unknown or finished.
    bool abort(std::uint64_t id);
    /// Admits what fits, computes up to `prefill_chunk` positions of prompts and one token of every running sequence. May be empty while a
    /// long prompt is being computed: `unfinished` says whether anything is left to do. Throws std::runtime_error if logits are not finite;
    /// nothing is lost then, and the step can be tried again with other weights.
    std::vector<TokenEvent> step();
    std::int64_t unfinished() const;
    /// Times that a running sequence had to make room and was computed again.
    std::int64_t preemptions() const;
    /// Drops cached prompts. Sequences that are running keep the keys and values of what they computed so far.
    void weights_changed();

    const GeneratorOptions& options() const;  // with the automatic ones filled in
    const std::vector<MemoryItem>& memory() const;

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace surogate
