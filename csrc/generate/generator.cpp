#include "generate/generator.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/error.h"
#include "core/random.h"
#include "generate/decode_pass.h"
#include "generate/scheduler.h"
#include "model/arena.h"

namespace surogate {

namespace {

constexpr std::uint64_t kSamplingStream = 0x73616d706c65;  // "sample": apart from what else is drawn from the same seed

/// Checks the options and fills in what 0 stands for.
GeneratorOptions resolve(const ModelSpec& spec, GeneratorOptions options) {
    const auto positive = [](const char* name, std::int64_t value) { require(value > 0, "Generator", name, "a positive number", value); };
    positive("max_sequences", options.max_sequences);
    positive("prefill_chunk", options.prefill_chunk);
    require(options.block_size > 0 && options.block_size % 16 == 0, "Generator", "block_size", "a positive multiple of 16",
            options.block_size);
    require(options.cache_tokens >= 0, "Generator", "cache_tokens", "0 (automatic) or a positive number", options.cache_tokens);
    if (options.valid_vocab < 0 || options.valid_vocab > spec.vocab) {
        fail("Generator: valid_vocab: expected 0 (all) to ", spec.vocab, ", got ", options.valid_vocab);
    }
    if (options.valid_vocab == 0) options.valid_vocab = spec.vocab;
    if (options.cache_tokens == 0) {
        options.cache_tokens = std::max(options.max_sequences * std::min<std::int64_t>(spec.max_positions, 512),
                                        std::min<std::int64_t>(spec.max_positions, 4096));
    }
    const std::int64_t blocks = (options.cache_tokens + options.block_size - 1) / options.block_size;
    options.cache_tokens = blocks * options.block_size;
    require(options.cache_tokens <= INT32_MAX, "Generator", "cache_tokens", "fewer than 2^31", options.cache_tokens);
    return options;
}

struct Layout {
    KvCache cache;
    DecodePass pass;
};

Layout lay_out(Arena& arena, const ModelSpec& spec, const LoraOptions& lora, const GeneratorOptions& options) {
    constexpr std::int64_t kHeadRows = 64;  // logits alive at once: more gain nothing, the head's weights come from the caches no faster
    arena.item("KV cache (" + std::to_string(options.cache_tokens) + " tokens)");
    KvCache cache(arena, spec, options.cache_tokens / options.block_size, options.block_size);
    DecodePass pass(arena, spec, lora, options.max_sequences + options.prefill_chunk, std::min(options.max_sequences, kHeadRows),
                    options.valid_vocab);
    return {std::move(cache), std::move(pass)};
}

std::unique_ptr<Arena> take_memory(Learner& learner, const GeneratorOptions& options) {
    if (learner.backend().device().kind != Device::Kind::Cpu) {
        fail("Generator: the native sampler runs on the cpu only, this learner is on cuda");
    }
    auto arena = std::make_unique<Arena>();
    lay_out(*arena, learner.spec(), learner.options().lora, options);
    require_memory(arena->items(), 0, learner.backend(),
                   "To need less: lower rollouts.kv_cache_gb (cache_tokens), rollouts.max_sequences (max_sequences) or prefill_chunk.");
    arena->allocate(learner.backend());
    return arena;
}

}  // namespace

struct Generator::Impl {
    Impl(Learner& the_learner, const GeneratorOptions& the_options)
        : learner(the_learner),
          options(resolve(the_learner.spec(), the_options)),
          arena(take_memory(the_learner, options)),
          layout(lay_out(*arena, the_learner.spec(), the_learner.options().lora, options)),
          scheduler(std::move(layout.cache), options.max_sequences, options.prefill_chunk, the_learner.spec().max_positions,
                    the_learner.spec().vocab) {}

    Learner& learner;
    GeneratorOptions options;
    std::unique_ptr<Arena> arena;
    std::vector<MemoryItem> items = arena->items();
    Layout layout;
    Scheduler scheduler;

    // Kept between steps to spare allocations.
    PassPlan plan;
    std::vector<DecodeSample> samples;
    std::vector<SampledToken> sampled;

    std::vector<TokenEvent> step();
};

std::vector<TokenEvent> Generator::Impl::step() {
    if (scheduler.unfinished() == 0) return {};
    scheduler.plan(learner.backend(), plan);
    if (plan.rows.empty()) throw std::logic_error("Generator: requests are unfinished, but nothing was planned");
    samples.clear();
    for (const auto& [sequence, row] : plan.samples) {
        const SamplingParams& p = sequence->params;
        const double uniform = Philox(p.seed, kSamplingStream).uniform(static_cast<std::uint64_t>(sequence->sampled()));
        samples.push_back({row, {p.temperature, p.top_p, p.min_p, p.top_k, uniform}});
    }
    layout.pass.run(learner, scheduler.cache(), plan.rows, samples, sampled);
    for (std::size_t i = 0; i < sampled.size(); ++i) {
        if (sampled[i].token >= 0) continue;
        const Sequence& sequence = *plan.samples[i].sequence;
        throw std::runtime_error("Generator: request " + std::to_string(sequence.id) + ": the logits behind position " +
                                 std::to_string(sequence.size() - 1) +
                                 " are not finite; the weights or adapters hold NaN or infinity, or overflow");
    }
    scheduler.commit(plan);
    std::vector<TokenEvent> events;
    events.reserve(sampled.size());
    for (std::size_t i = 0; i < sampled.size(); ++i) {
        Sequence& sequence = *plan.samples[i].sequence;
        const std::int32_t token = sampled[i].token;
        sequence.tokens.push_back(token);
        const std::vector<std::int32_t>& stop = sequence.params.stop_ids;
        Finish finish = Finish::None;
        if (std::find(stop.begin(), stop.end(), token) != stop.end()) {
            finish = Finish::Stop;
        } else if (sequence.sampled() >= sequence.params.max_new_tokens) {
            finish = Finish::Length;
        }
        events.push_back({sequence.id, token, sampled[i].logp, finish});
        if (finish != Finish::None) scheduler.finish(sequence);
    }
    return events;
}

Generator::Generator(Learner& learner, GeneratorOptions options) : impl_(std::make_unique<Impl>(learner, options)) {}

Generator::~Generator() = default;

std::vector<MemoryItem> Generator::plan(const ModelSpec& spec, const GeneratorOptions& options, const LoraOptions& lora) {
    spec.validate();
    Arena arena;
    lay_out(arena, spec, lora, resolve(spec, options));
    return arena.items();
}

void Generator::add(GenerateRequest request) { impl_->scheduler.add(std::move(request)); }

bool Generator::abort(std::uint64_t id) { return impl_->scheduler.abort(id); }

std::vector<TokenEvent> Generator::step() { return impl_->step(); }

std::int64_t Generator::unfinished() const { return impl_->scheduler.unfinished(); }

std::int64_t Generator::preemptions() const { return impl_->scheduler.preemptions(); }

void Generator::weights_changed() { impl_->scheduler.forget_prompts(); }

const GeneratorOptions& Generator::options() const { return impl_->options; }

const std::vector<MemoryItem>& Generator::memory() const { return impl_->items; }

}  // namespace surogate
