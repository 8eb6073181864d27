#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "generate/decode_pass.h"
#include "generate/generator.h"
#include "generate/kv_cache.h"

namespace surogate {

/// A prompt that is being computed, or is kept because further requests may bring it again. It holds one reference to each of its blocks.
struct SharedPrompt {
    std::vector<std::int32_t> tokens;
    std::vector<std::int32_t> blocks;
    std::int64_t computed = 0;  // positions in the cache
    std::int64_t waiting = 0;   // running sequences that wait for it to be complete
    std::uint64_t last_use = 0;
    std::int64_t last_row = -1;  // of the planned pass, if that completes it
    bool planned = false;        // for the coming pass

    bool complete() const { return computed == static_cast<std::int64_t>(tokens.size()); }
};

struct Sequence {
    std::uint64_t id = 0;
    std::uint64_t arrival = 0;
    SamplingParams params;
    std::vector<std::int32_t> tokens;  // prompt, then what was sampled
    std::int64_t prompt_size = 0;
    std::shared_ptr<SharedPrompt> prompt;  // while it waits for that
    std::vector<std::int32_t> blocks;
    std::int64_t computed = 0;  // positions in the cache

    std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
    std::int64_t sampled() const { return size() - prompt_size; }
};

/// What the next pass computes and samples.
struct PassPlan {
    struct Sample {
        Sequence* sequence;
        std::int64_t row;
    };
    std::vector<DecodeRow> rows;
    std::vector<Sample> samples;

    // What `commit` marks as computed.
    struct PromptPart {
        std::shared_ptr<SharedPrompt> prompt;
        std::int64_t count;
    };
    struct SequencePart {
        Sequence* sequence;
        std::int64_t count;
    };
    std::vector<PromptPart> prompts;
    std::vector<SequencePart> sequences;
};

/// Decides which rows are computed next, and owns who holds which cache block.
///
/// Sequences are admitted in the order of arrival. Equal prompts are computed once; a sequence then takes a reference to each of the
/// prompt's blocks and copies the last, partly filled one when it first writes to it. When no block is left, prompts that nobody waits for
/// are forgotten, and then the youngest running sequence gives up its blocks and goes back to the queue. Any request that `add` accepts
/// fits on its own, so the oldest sequence always goes on.
class Scheduler {
   public:
    Scheduler(KvCache cache, std::int64_t max_sequences, std::int64_t chunk, std::int64_t max_positions, std::int64_t vocab);

    const KvCache& cache() const { return cache_; }

    void add(GenerateRequest request);
    bool abort(std::uint64_t id);
    std::int64_t unfinished() const { return static_cast<std::int64_t>(waiting_.size() + running_.size()); }
    std::int64_t preemptions() const { return preemptions_; }

    /// Forgets prompts computed so far; one that is being computed starts again.
    void forget_prompts();

    /// Admits, makes room, and fills in the plan. Changes nothing in what counts as computed: a pass that fails can be planned again.
    void plan(Backend& backend, PassPlan& plan);

    /// The pass was computed: sequences that waited for a prompt get its blocks. Before the samples are appended.
    void commit(const PassPlan& plan);

    /// Takes a finished sequence out and gives back its blocks.
    void finish(Sequence& sequence);

   private:
    using Queue = std::map<std::uint64_t, std::unique_ptr<Sequence>>;  // by arrival

    void admit();
    std::int64_t blocks_for(std::int64_t positions) const;
    std::int64_t blocks_wanted(const Sequence& sequence) const;
    std::int64_t evictable_blocks(const SharedPrompt* except) const;
    bool evict_prompt(const SharedPrompt* except);
    std::int32_t take_block(const SharedPrompt* except);
    bool make_writable(Backend& backend, Sequence& sequence, std::int64_t index);
    void attach(Sequence& sequence, std::vector<std::int32_t> prompt_tokens);
    void share_prompt(Sequence& sequence, SharedPrompt& prompt, std::int64_t computed);
    void plan_prompt(PassPlan& plan, const std::shared_ptr<SharedPrompt>& prompt, std::int64_t& chunk);
    bool plan_sequence(Backend& backend, PassPlan& plan, Sequence& sequence, std::int64_t& chunk);
    void release(Sequence& sequence);
    void preempt(Queue::iterator victim);

    KvCache cache_;
    std::int64_t max_sequences_, chunk_, max_positions_, vocab_;
    Queue waiting_, running_;
    std::unordered_map<std::uint64_t, std::uint64_t> arrivals_;  // by id, of all unfinished
    std::map<std::vector<std::int32_t>, std::shared_ptr<SharedPrompt>> prompts_;
    std::uint64_t next_arrival_ = 0;
    std::uint64_t clock_ = 0;
    std::int64_t preemptions_ = 0;
};

}  // namespace surogate
