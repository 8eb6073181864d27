#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "generate/kv_cache.h"
#include "model/learner.h"

namespace surogate {

/// One token to compute: its id, its position, and the blocks of the sequence that it belongs to (its own position's included).
struct DecodeRow {
    std::int32_t token;
    std::int32_t position;
    std::span<const std::int32_t> blocks;
};

/// One token to sample from what follows a row.
struct DecodeSample {
    std::int64_t row;
    SampleRow how;
};

struct SampledToken {
    std::int32_t token;  // -1: a logit is not finite
    float logp;
};

/// The model over rows that may belong to any mixture of sequences, prompts and single tokens alike: every operation treats a row by
/// itself, so its result has the same bits whatever rows are beside it. A row sees the earlier rows of its own sequence through the cache.
class DecodePass {
   public:
    /// Takes (or, in a measuring arena, plans) the buffers of `rows` rows, `head_rows` of which enter the head at once.
    DecodePass(Arena& arena, const ModelSpec& spec, const LoraOptions& lora, std::int64_t rows, std::int64_t head_rows,
               std::int64_t valid_vocab);

    /// Writes keys and values of all rows to the cache, then samples. `out` has the size of `samples`.
    void run(const Learner& learner, const KvCache& cache, std::span<const DecodeRow> rows, std::span<const DecodeSample> samples,
             std::vector<SampledToken>& out);

   private:
    void prepare(Backend& backend, std::int64_t block_size, std::span<const DecodeRow> rows);
    void block(const Learner& learner, const KvCache& cache, std::int64_t layer, std::int64_t rows) const;
    void head(const Learner& learner, std::span<const DecodeSample> samples, std::vector<SampledToken>& out);

    std::int64_t valid_vocab_;
    Tensor tokens_, positions_, slots_;                                    // [rows] int32
    Tensor stream_, normed_, branch_;                                      // [rows, C]
    Tensor rstd_;                                                          // [rows]
    Tensor qkv_, raw_qk_, qk_rstd_;                                        // [rows, (H+2K)*D], [rows, (H+K)*D], [rows, H+K]
    Tensor attention_;                                                     // [rows, H*D]
    Tensor gate_up_, activated_;                                           // [rows, 2F], [rows, F]
    Tensor low_;                                                           // [rows, 3r]
    Tensor picked_, picked_normed_, picked_rstd_, picked_index_, logits_;  // head_rows rows

    // Host side of a pass, kept to spare allocations.
    std::vector<std::int32_t> host_tokens_, host_positions_, host_slots_, lengths_, tables_, index_;
    std::int64_t table_width_ = 0;
    std::vector<SampleRow> how_;
    std::vector<std::int32_t> sampled_;
    std::vector<float> logps_;
};

}  // namespace surogate
