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
    std::int64_t cache_tokens = 0;    // positions that the KV cache holds
    std::int64_t block_size = 16;
    std::int64_t valid_vocab = 0;  // 0: all
    std::int64_t prefill_chunk = 256;
};

/// Continuous batching over the learner's own weights. Requests with equal prompts (a group) share one prefill and its cache blocks.
/// Requests can be added and aborted between any two steps; when the cache is full the youngest one waits and is computed again later
/// (its tokens are kept). The learner must not step while a `step` of this runs; after one, `weights_changed` drops cached prompts.
class Generator {
   public:
    Generator(Learner& learner, GeneratorOptions options);
    ~Generator();

    static std::vector<MemoryItem> plan(const ModelSpec& spec, const GeneratorOptions& options);

    void add(GenerateRequest request);
    bool abort(std::uint64_t id);
    /// Admits and prefills what fits, decodes one token of every running sequence. Empty when nothing is left to do.
    std::vector<TokenEvent> step();
    std::int64_t unfinished() const;
    void weights_changed();

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace surogate
