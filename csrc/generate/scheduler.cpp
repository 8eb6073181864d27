#include "generate/scheduler.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "core/error.h"

namespace surogate {

namespace {

constexpr float kLowestTemperature = 1e-3f;  // below, logits divided by it leave the range in which float32 tells tokens apart

void check_params(std::uint64_t id, const SamplingParams& p) {
    const auto refuse = [&](const char* name, const auto& expected, const auto& got) {
        fail("Generator: request ", id, ": ", name, ": expected ", expected, ", got ", got);
    };
    if (!(p.temperature == 0.0f || (p.temperature >= kLowestTemperature && std::isfinite(p.temperature)))) {
        refuse("temperature", "0 (greedy) or a finite number from 0.001 on", p.temperature);
    }
    if (!(p.top_p > 0.0f && p.top_p <= 1.0f)) refuse("top_p", "more than 0 and at most 1", p.top_p);
    if (!(p.min_p >= 0.0f && p.min_p <= 1.0f)) refuse("min_p", "0 to 1", p.min_p);
    if (p.top_k < 0) refuse("top_k", "0 (off) or a positive number", p.top_k);
    if (p.max_new_tokens < 1) refuse("max_new_tokens", "a positive number", p.max_new_tokens);
}

}  // namespace

Scheduler::Scheduler(KvCache cache, std::int64_t max_sequences, std::int64_t chunk, std::int64_t max_positions, std::int64_t vocab)
    : cache_(std::move(cache)), max_sequences_(max_sequences), chunk_(chunk), max_positions_(max_positions), vocab_(vocab) {}

std::int64_t Scheduler::blocks_for(std::int64_t positions) const { return (positions + cache_.block_size() - 1) / cache_.block_size(); }

void Scheduler::add(GenerateRequest request) {
    const std::uint64_t id = request.id;
    if (arrivals_.contains(id)) fail("Generator: request ", id, ": this id is in use by a request that is not finished");
    if (request.prompt.empty()) fail("Generator: request ", id, ": the prompt is empty; it must have at least one token");
    for (std::size_t i = 0; i < request.prompt.size(); ++i) {
        const std::int32_t token = request.prompt[i];
        if (token < 0 || token >= vocab_) {
            fail("Generator: request ", id, ": prompt[", i, "]: expected a token id of 0 to ", vocab_ - 1, ", got ", token);
        }
    }
    check_params(id, request.params);
    const auto prompt = static_cast<std::int64_t>(request.prompt.size());
    const std::int64_t positions = prompt + request.params.max_new_tokens, capacity = cache_.blocks() * cache_.block_size();
    if (positions > max_positions_) {
        fail("Generator: request ", id, ": a prompt of ", prompt, " tokens and max_new_tokens ", request.params.max_new_tokens, " make ",
             positions, " positions, but the model has max_positions ", max_positions_, "; shorten either");
    }
    if (positions > capacity) {
        fail("Generator: request ", id, ": a prompt of ", prompt, " tokens and max_new_tokens ", request.params.max_new_tokens, " make ",
             positions, " positions, but the KV cache holds ", capacity, " (cache_tokens); enlarge it or shorten either");
    }
    auto sequence = std::make_unique<Sequence>();
    sequence->id = id;
    sequence->arrival = next_arrival_++;
    sequence->params = std::move(request.params);
    sequence->prompt_size = prompt;
    sequence->tokens = std::move(request.prompt);
    arrivals_.emplace(id, sequence->arrival);
    waiting_.emplace(sequence->arrival, std::move(sequence));
}

bool Scheduler::abort(std::uint64_t id) {
    const auto found = arrivals_.find(id);
    if (found == arrivals_.end()) return false;
    const std::uint64_t arrival = found->second;
    arrivals_.erase(found);
    if (const auto it = running_.find(arrival); it != running_.end()) {
        release(*it->second);
        running_.erase(it);
    } else {
        waiting_.erase(arrival);
    }
    return true;
}

void Scheduler::finish(Sequence& sequence) {
    release(sequence);
    arrivals_.erase(sequence.id);
    running_.erase(sequence.arrival);
}

void Scheduler::release(Sequence& sequence) {
    for (const std::int32_t block : sequence.blocks) cache_.drop(block);
    sequence.blocks.clear();
    sequence.computed = 0;
    if (sequence.prompt) --sequence.prompt->waiting;
    sequence.prompt.reset();
}

void Scheduler::preempt(Queue::iterator victim) {
    release(*victim->second);
    waiting_.insert(running_.extract(victim));
    ++preemptions_;
}

void Scheduler::forget_prompts() {
    for (auto it = prompts_.begin(); it != prompts_.end();) {
        SharedPrompt& prompt = *it->second;
        prompt.computed = 0;
        if (prompt.waiting > 0) {
            ++it;
            continue;
        }
        for (const std::int32_t block : prompt.blocks) cache_.drop(block);
        it = prompts_.erase(it);
    }
}

/// Blocks that would come free if every prompt that nobody waits for were forgotten.
std::int64_t Scheduler::evictable_blocks(const SharedPrompt* except) const {
    std::int64_t count = 0;
    for (const auto& [tokens, prompt] : prompts_) {
        if (prompt->waiting > 0 || prompt.get() == except) continue;
        count += std::count_if(prompt->blocks.begin(), prompt->blocks.end(), [&](std::int32_t block) { return !cache_.shared(block); });
    }
    return count;
}

/// Forgets the prompt that was asked for longest ago, of those that nobody waits for.
bool Scheduler::evict_prompt(const SharedPrompt* except) {
    auto oldest = prompts_.end();
    for (auto it = prompts_.begin(); it != prompts_.end(); ++it) {
        if (it->second->waiting > 0 || it->second.get() == except) continue;
        if (oldest == prompts_.end() || it->second->last_use < oldest->second->last_use) oldest = it;
    }
    if (oldest == prompts_.end()) return false;
    for (const std::int32_t block : oldest->second->blocks) cache_.drop(block);
    prompts_.erase(oldest);
    return true;
}

std::int32_t Scheduler::take_block(const SharedPrompt* except) {
    std::int32_t block = cache_.take();
    while (block < 0 && evict_prompt(except)) block = cache_.take();
    return block;
}

/// Blocks that a running sequence still lacks before its next token is sampled, at the most.
std::int64_t Scheduler::blocks_wanted(const Sequence& sequence) const {
    if (!sequence.prompt && sequence.computed > sequence.prompt_size) {
        return std::max<std::int64_t>(0, blocks_for(sequence.size()) - static_cast<std::int64_t>(sequence.blocks.size()));
    }
    // All behind the prompt's whole blocks; one more where its very last position, in a whole block, is computed again.
    return blocks_for(sequence.size()) - sequence.prompt_size / cache_.block_size() + 1;
}

void Scheduler::admit() {
    if (waiting_.empty() || static_cast<std::int64_t>(running_.size()) >= max_sequences_) return;
    std::int64_t promised = 0;
    for (const auto& [arrival, sequence] : running_) promised += blocks_wanted(*sequence);
    while (!waiting_.empty() && static_cast<std::int64_t>(running_.size()) < max_sequences_) {
        Sequence& next = *waiting_.begin()->second;
        std::vector<std::int32_t> tokens(next.tokens.begin(), next.tokens.begin() + next.prompt_size);
        const auto found = prompts_.find(tokens);
        const SharedPrompt* known = found == prompts_.end() ? nullptr : found->second.get();
        const std::int64_t wanted = blocks_wanted(next), fresh = known == nullptr ? blocks_for(next.prompt_size) : 0;
        // Room for every running sequence to grow by a block, or those admitted now would soon be thrown out again.
        const std::int64_t reserve = static_cast<std::int64_t>(running_.size());
        const std::int64_t available = cache_.free_blocks() + evictable_blocks(known);
        if (!running_.empty() && wanted + fresh + promised + reserve > available) return;
        promised += wanted;
        const auto admitted = running_.insert(waiting_.extract(waiting_.begin())).position;
        attach(*admitted->second, std::move(tokens));
    }
}

void Scheduler::attach(Sequence& sequence, std::vector<std::int32_t> prompt_tokens) {
    auto& prompt = prompts_[prompt_tokens];
    if (!prompt) {
        prompt = std::make_shared<SharedPrompt>();
        prompt->tokens = std::move(prompt_tokens);
        const std::int64_t count = blocks_for(sequence.prompt_size);
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int32_t block = take_block(prompt.get());
            if (block < 0) throw std::logic_error("Scheduler: no block for a prompt that was admitted");
            prompt->blocks.push_back(block);
        }
    }
    prompt->last_use = ++clock_;
    if (prompt->complete()) {
        // Without anything sampled yet, the last position is computed again, for the logits behind it.
        share_prompt(sequence, *prompt, sequence.sampled() == 0 ? sequence.prompt_size - 1 : sequence.prompt_size);
    } else {
        sequence.prompt = prompt;
        ++prompt->waiting;
    }
}

void Scheduler::share_prompt(Sequence& sequence, SharedPrompt& prompt, std::int64_t computed) {
    sequence.blocks = prompt.blocks;
    for (const std::int32_t block : sequence.blocks) cache_.share(block);
    sequence.computed = computed;
}

/// Gives the sequence a block of its own at `index` of its table. False: it was the youngest and had to make room itself.
bool Scheduler::make_writable(Backend& backend, Sequence& sequence, std::int64_t index) {
    const auto at = static_cast<std::size_t>(index);
    for (;;) {
        const bool present = at < sequence.blocks.size();
        if (present && !cache_.shared(sequence.blocks[at])) return true;
        const std::int32_t block = cache_.take();
        if (block >= 0) {
            if (present) {
                cache_.copy_block(backend, block, sequence.blocks[at]);
                cache_.drop(std::exchange(sequence.blocks[at], block));
            } else {
                sequence.blocks.push_back(block);
            }
            return true;
        }
        // Forgetting a prompt may be enough without a free block: it may have been the other holder of this one.
        if (evict_prompt(nullptr)) continue;
        const auto youngest = std::prev(running_.end());
        const bool self = youngest->second.get() == &sequence;
        if (self && running_.size() == 1) throw std::logic_error("Scheduler: a sequence that fits on its own found no block");
        preempt(youngest);
        if (self) return false;
    }
}

void Scheduler::plan_prompt(PassPlan& plan, const std::shared_ptr<SharedPrompt>& prompt, std::int64_t& chunk) {
    if (prompt->planned || chunk == 0) return;
    prompt->planned = true;
    const auto size = static_cast<std::int64_t>(prompt->tokens.size());
    const std::int64_t count = std::min(chunk, size - prompt->computed);
    chunk -= count;
    for (std::int64_t position = prompt->computed; position < prompt->computed + count; ++position) {
        plan.rows.push_back({prompt->tokens[static_cast<std::size_t>(position)], static_cast<std::int32_t>(position), prompt->blocks});
    }
    if (prompt->computed + count == size) prompt->last_row = static_cast<std::int64_t>(plan.rows.size()) - 1;
    plan.prompts.push_back({prompt, count});
}

bool Scheduler::plan_sequence(Backend& backend, PassPlan& plan, Sequence& sequence, std::int64_t& chunk) {
    const std::int64_t pending = sequence.size() - sequence.computed;
    const std::int64_t count = pending == 1 ? 1 : std::min(pending, chunk);
    if (count == 0) return true;
    const std::int64_t end = sequence.computed + count;
    for (std::int64_t index = sequence.computed / cache_.block_size(); index < blocks_for(end); ++index) {
        if (!make_writable(backend, sequence, index)) return false;
    }
    if (pending > 1) chunk -= count;
    for (std::int64_t position = sequence.computed; position < end; ++position) {
        plan.rows.push_back({sequence.tokens[static_cast<std::size_t>(position)], static_cast<std::int32_t>(position), sequence.blocks});
    }
    plan.sequences.push_back({&sequence, count});
    if (count == pending) plan.samples.push_back({&sequence, static_cast<std::int64_t>(plan.rows.size()) - 1});
    return true;
}

void Scheduler::plan(Backend& backend, PassPlan& plan) {
    plan.rows.clear();
    plan.samples.clear();
    plan.prompts.clear();
    plan.sequences.clear();
    for (auto& [tokens, prompt] : prompts_) {
        prompt->planned = false;
        prompt->last_row = -1;
    }
    admit();
    std::int64_t chunk = chunk_;
    // Oldest first: who is thrown out is younger than all that were planned before, or the very sequence that lacks room.
    for (auto it = running_.begin(); it != running_.end();) {
        Sequence& sequence = *it->second;
        if (sequence.prompt) {
            plan_prompt(plan, sequence.prompt, chunk);
            if (sequence.prompt->last_row >= 0 && sequence.sampled() == 0) plan.samples.push_back({&sequence, sequence.prompt->last_row});
            ++it;
        } else if (plan_sequence(backend, plan, sequence, chunk)) {
            ++it;
        } else {
            break;
        }
    }
}

void Scheduler::commit(const PassPlan& plan) {
    for (const auto& [prompt, count] : plan.prompts) prompt->computed += count;
    for (const auto& [sequence, count] : plan.sequences) sequence->computed += count;
    for (auto& [arrival, sequence] : running_) {
        if (!sequence->prompt || !sequence->prompt->complete()) continue;
        const std::shared_ptr<SharedPrompt> prompt = std::exchange(sequence->prompt, nullptr);
        --prompt->waiting;
        share_prompt(*sequence, *prompt, sequence->prompt_size);
    }
}

}  // namespace surogate
