#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "generate/scheduler.h"
#include "model/arena.h"
#include "tests/harness.h"

namespace surogate {
namespace {

constexpr std::int64_t kBlock = 16;

ModelSpec tiny_spec() {
    ModelSpec spec;
    spec.layers = 2;
    spec.kv_heads = 1;
    spec.head_dim = 2;
    return spec;
}

/// A scheduler with a model in its place that only notes, in the cache itself, which token each slot was computed for. So a row that reads
/// a slot of another sequence, or one that was overwritten, is found out.
struct Machine {
    explicit Machine(std::int64_t blocks, std::int64_t max_sequences, std::int64_t chunk)
        : scheduler(make_cache(blocks), max_sequences, chunk, 1 << 20, 1000), rows_allowed(max_sequences + chunk) {}

    KvCache make_cache(std::int64_t blocks) {
        KvCache measured(arena, measured_item(), blocks, kBlock);
        arena.allocate(*backend);
        measured_item();
        return KvCache(arena, tiny_spec(), blocks, kBlock);
    }
    ModelSpec measured_item() {
        arena.item("cache");
        return tiny_spec();
    }

    /// One mark for a token and all that comes before it.
    static float mark(const std::vector<std::int32_t>& tokens, std::int64_t position) {
        std::uint32_t hash = 17;
        for (std::int64_t i = 0; i <= position; ++i) hash = hash * 31 + static_cast<std::uint32_t>(tokens[static_cast<std::size_t>(i)]);
        return static_cast<float>(hash >> 9);
    }

    float& slot(std::int64_t layer, std::span<const std::int32_t> blocks, std::int64_t position) const {
        const PagedCache cache = scheduler.cache().layer(layer);
        const std::int64_t row = blocks[static_cast<std::size_t>(position / kBlock)] * kBlock + position % kBlock;
        return cache.values.f32()[row * 2];
    }

    void add(std::uint64_t id, std::vector<std::int32_t> prompt, std::int32_t new_tokens) {
        wanted[id] = new_tokens;
        sampled[id] = {};
        prompts[id] = prompt;
        GenerateRequest request;
        request.id = id;
        request.prompt = std::move(prompt);
        request.params.max_new_tokens = new_tokens;
        scheduler.add(request);
    }

    void step() {
        scheduler.plan(*backend, plan);
        CHECK(!plan.rows.empty() || scheduler.unfinished() == 0);
        CHECK(static_cast<std::int64_t>(plan.rows.size()) <= rows_allowed);
        rows_computed += static_cast<std::int64_t>(plan.rows.size());

        // Whose rows they are, in the order in which they were planned.
        std::vector<const std::vector<std::int32_t>*> texts;
        std::set<std::pair<std::int32_t, std::int64_t>> written;
        for (const DecodeRow& row : plan.rows) {
            const std::int32_t block = row.blocks[static_cast<std::size_t>(row.position / kBlock)];
            CHECK(written.insert({block, row.position % kBlock}).second);
        }
        for (const DecodeRow& row : plan.rows) {
            // All that the row sees must be there before it, or come with this pass.
            for (std::int64_t layer = 0; layer < 2; ++layer) slot(layer, row.blocks, row.position) = static_cast<float>(row.token);
        }
        std::vector<std::pair<std::uint64_t, std::int32_t>> tokens;
        for (const auto& [sequence, row] : plan.samples) {
            const DecodeRow& last = plan.rows[static_cast<std::size_t>(row)];
            CHECK_EQ(last.position, sequence->size() - 1);
            CHECK_EQ(last.token, sequence->tokens.back());
            for (std::int64_t p = 0; p < sequence->size(); ++p) {
                for (std::int64_t layer = 0; layer < 2; ++layer) {
                    CHECK_EQ(slot(layer, last.blocks, p), static_cast<float>(sequence->tokens[static_cast<std::size_t>(p)]));
                }
            }
            // What comes next depends on the sequence alone.
            tokens.emplace_back(sequence->id, static_cast<std::int32_t>(mark(sequence->tokens, sequence->size() - 1)) % 1000);
        }
        scheduler.commit(plan);
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            Sequence& sequence = *plan.samples[i].sequence;
            sequence.tokens.push_back(tokens[i].second);
            sampled[tokens[i].first].push_back(tokens[i].second);
            if (sequence.sampled() == wanted[tokens[i].first]) scheduler.finish(sequence);
        }
    }

    void check_sampled(std::uint64_t id) const {
        std::vector<std::int32_t> text = prompts.at(id);
        for (const std::int32_t token : sampled.at(id)) {
            CHECK_EQ(token, static_cast<std::int32_t>(mark(text, static_cast<std::int64_t>(text.size()) - 1)) % 1000);
            text.push_back(token);
        }
    }

    std::shared_ptr<Backend> backend = make_cpu_backend({1});
    Arena arena;
    Scheduler scheduler;
    std::int64_t rows_allowed;
    PassPlan plan;
    std::int64_t rows_computed = 0;
    std::map<std::uint64_t, std::int32_t> wanted;
    std::map<std::uint64_t, std::vector<std::int32_t>> sampled, prompts;
};

std::vector<std::int32_t> prompt_of(std::int64_t length, std::uint32_t seed) {
    std::mt19937 generator(seed);
    std::vector<std::int32_t> prompt(static_cast<std::size_t>(length));
    for (std::int32_t& token : prompt) token = static_cast<std::int32_t>(generator() % 1000);
    return prompt;
}

TEST(a_group_computes_its_prompt_once_and_shares_its_blocks) {
    Machine machine(64, 8, 256);
    for (std::uint64_t id = 0; id < 8; ++id) machine.add(id, prompt_of(37, 1), 5);
    machine.step();
    CHECK_EQ(machine.rows_computed, 37);
    CHECK_EQ(machine.plan.samples.size(), std::size_t{8});
    CHECK_EQ(machine.scheduler.cache().free_blocks(), 61);  // three blocks, all shared
    machine.step();
    CHECK_EQ(machine.rows_computed, 37 + 8);
    CHECK_EQ(machine.scheduler.cache().free_blocks(), 53);  // and each its own copy of the last one
    while (machine.scheduler.unfinished() > 0) machine.step();
    CHECK_EQ(machine.rows_computed, 37 + 8 * 4);
    for (std::uint64_t id = 0; id < 8; ++id) machine.check_sampled(id);
    // A late member finds the prompt still there and computes its last position only.
    machine.add(9, prompt_of(37, 1), 1);
    machine.step();
    CHECK_EQ(machine.rows_computed, 37 + 8 * 4 + 1);
    machine.scheduler.forget_prompts();
    CHECK_EQ(machine.scheduler.cache().free_blocks(), 64);
    machine.add(10, prompt_of(37, 1), 1);
    machine.step();
    CHECK_EQ(machine.rows_computed, 37 + 8 * 4 + 1 + 37);
}

TEST(long_prompts_are_computed_in_chunks_beside_the_others) {
    Machine machine(64, 4, 20);
    machine.add(0, prompt_of(3, 2), 30);
    machine.step();
    machine.add(1, prompt_of(70, 3), 3);
    for (int step = 0; step < 4; ++step) {
        const std::size_t before = machine.sampled[0].size();
        machine.step();
        CHECK_EQ(machine.sampled[0].size(), before + 1);  // it never waits for the long one
        CHECK_EQ(machine.sampled[1].size(), std::size_t{step == 3});
    }
    while (machine.scheduler.unfinished() > 0) machine.step();
    machine.check_sampled(0);
    machine.check_sampled(1);
}

TEST(the_youngest_makes_room_and_is_computed_again) {
    // Each needs 5 blocks in the end, and there are 12.
    Machine machine(12, 4, 64);
    for (std::uint64_t id = 0; id < 4; ++id) machine.add(id, prompt_of(20, static_cast<std::uint32_t>(10 + id)), 60);
    std::int64_t steps = 0;
    while (machine.scheduler.unfinished() > 0) {
        machine.step();
        // The oldest is never held up.
        ++steps;
        CHECK_EQ(static_cast<std::int64_t>(machine.sampled[0].size()), std::min<std::int64_t>(60, steps));
    }
    CHECK(machine.scheduler.preemptions() > 0);
    for (std::uint64_t id = 0; id < 4; ++id) {
        CHECK_EQ(machine.sampled[id].size(), std::size_t{60});
        machine.check_sampled(id);
    }
    machine.scheduler.forget_prompts();
    CHECK_EQ(machine.scheduler.cache().free_blocks(), 12);
}

TEST(a_request_may_fill_the_cache_to_the_last_position) {
    for (const std::int64_t length : {1, 15, 16, 17, 32, 63}) {
        Machine machine(4, 2, 64);
        machine.add(0, prompt_of(length, 5), static_cast<std::int32_t>(64 - length));
        machine.add(1, prompt_of(length, 5), static_cast<std::int32_t>(64 - length));
        while (machine.scheduler.unfinished() > 0) machine.step();
        machine.check_sampled(0);
        CHECK(machine.sampled[0] == machine.sampled[1]);
    }
}

TEST(any_mixture_of_requests_is_served_right) {
    for (std::uint32_t seed = 0; seed < 30; ++seed) {
        std::mt19937 random(seed);
        const auto below = [&](std::uint32_t limit) { return static_cast<std::int64_t>(random() % limit); };
        const std::int64_t blocks = 6 + below(20), capacity = blocks * kBlock;
        Machine machine(blocks, 1 + below(8), 1 + below(40));
        std::set<std::uint64_t> aborted;
        std::uint64_t next = 0;
        for (int round = 0; round < 200; ++round) {
            if (below(3) == 0 && next < 40) {
                const std::int64_t group = 1 + below(4), length = 1 + below(static_cast<std::uint32_t>(capacity - 1));
                const auto prompt = prompt_of(length, static_cast<std::uint32_t>(below(5)));
                for (std::int64_t i = 0; i < group; ++i) {
                    machine.add(next++, prompt, static_cast<std::int32_t>(1 + below(static_cast<std::uint32_t>(capacity - length))));
                }
            }
            if (below(20) == 0 && next > 0) {
                const auto victim = static_cast<std::uint64_t>(below(static_cast<std::uint32_t>(next)));
                if (machine.scheduler.abort(victim)) aborted.insert(victim);
            }
            if (below(50) == 0) machine.scheduler.forget_prompts();
            machine.step();
        }
        for (int step = 0; machine.scheduler.unfinished() > 0; ++step) {
            CHECK(step < 20000);
            machine.step();
        }
        for (std::uint64_t id = 0; id < next; ++id) {
            machine.check_sampled(id);
            if (!aborted.contains(id)) CHECK_EQ(static_cast<std::int32_t>(machine.sampled[id].size()), machine.wanted[id]);
        }
        machine.scheduler.forget_prompts();
        CHECK_EQ(machine.scheduler.cache().free_blocks(), blocks);
    }
}

}  // namespace
}  // namespace surogate
