#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "generate/generator.h"
#include "model/learner.h"
#include "tests/harness.h"

namespace surogate {
namespace {

ModelSpec tiny_spec() {
    ModelSpec spec;
    spec.layers = 3;
    spec.hidden = 36;
    spec.heads = 6;
    spec.kv_heads = 2;
    spec.head_dim = 10;
    spec.ffn = 50;
    spec.vocab = 61;
    spec.max_positions = 200;
    spec.qk_norm = true;
    spec.qkv_bias = true;
    spec.rope_inv_freq = {1.0, 0.3, 0.1, 0.03, 0.01};
    spec.windows = {0, 7, 0};
    return spec;
}

struct Model {
    std::shared_ptr<Backend> backend;
    Learner learner;

    static LearnerOptions options(bool lora) {
        LearnerOptions options;
        options.max_tokens = 200;
        options.trainable = false;
        if (lora) options.lora = {2, 3.0f, {Linear::Q, Linear::V, Linear::O, Linear::Up, Linear::Down, Linear::Head}};
        return options;
    }

    explicit Model(bool lora, int threads = 2) : backend(make_cpu_backend({threads})), learner(backend, tiny_spec(), options(lora)) {
        std::mt19937 generator(1);
        std::normal_distribution<float> normal;
        for (const NamedTensor& named : learner.tensors()) {
            const bool norm = named.name.find("norm") != std::string::npos;
            std::vector<float> values(static_cast<std::size_t>(named.tensor.size()));
            for (float& value : values) value = norm ? 1.0f + 0.1f * normal(generator) : 0.25f * normal(generator);
            learner.load(named.name, values.data());
        }
    }
};

struct Sample {
    std::vector<std::int32_t> tokens;
    std::vector<float> logps;
    Finish finish = Finish::None;
    bool operator==(const Sample&) const = default;
};

GenerateRequest make_request(std::uint64_t id) {
    GenerateRequest request;
    request.id = id;
    std::mt19937 generator(static_cast<std::uint32_t>(id / 3));  // groups of three
    request.prompt.resize(1 + (id / 3) * 13 % 50);
    for (std::int32_t& token : request.prompt) token = static_cast<std::int32_t>(generator() % 60);
    request.params.seed = id * 0x9E3779B97F4A7C15u;
    request.params.temperature = id % 3 == 0 ? 0.7f : 1.2f;
    request.params.max_new_tokens = static_cast<std::int32_t>(20 + id * 7 % 60);
    request.params.stop_ids = {11};
    return request;
}

std::map<std::uint64_t, Sample> generate(Generator& generator, const std::vector<std::uint64_t>& ids) {
    std::map<std::uint64_t, Sample> samples;
    for (const std::uint64_t id : ids) generator.add(make_request(id));
    while (generator.unfinished() > 0) {
        for (const TokenEvent& event : generator.step()) {
            Sample& sample = samples[event.id];
            CHECK(sample.finish == Finish::None);
            sample.tokens.push_back(event.token);
            sample.logps.push_back(event.logp);
            sample.finish = event.finish;
        }
    }
    CHECK(generator.step().empty());
    return samples;
}

std::vector<std::uint64_t> range(std::uint64_t count) {
    std::vector<std::uint64_t> ids(count);
    std::iota(ids.begin(), ids.end(), std::uint64_t{0});
    return ids;
}

GeneratorOptions options_of(std::int64_t sequences, std::int64_t cache_tokens, std::int64_t chunk) {
    GeneratorOptions options;
    options.max_sequences = sequences;
    options.cache_tokens = cache_tokens;
    options.valid_vocab = 59;
    options.prefill_chunk = chunk;
    return options;
}

TEST(sampled_logps_are_the_learners) {
    for (const bool lora : {false, true}) {
        Model model(lora);
        Generator generator(model.learner, options_of(8, 1024, 30));
        const auto samples = generate(generator, range(15));
        bool stopped = false, cut = false;
        for (const auto& [id, sample] : samples) {
            const GenerateRequest request = make_request(id);
            std::vector<std::int32_t> tokens = request.prompt;
            tokens.insert(tokens.end(), sample.tokens.begin(), sample.tokens.end());
            std::vector<std::int32_t> positions(tokens.size()), targets(tokens.size(), -100);
            std::iota(positions.begin(), positions.end(), 0);
            for (std::size_t t = request.prompt.size(); t < tokens.size(); ++t) targets[t - 1] = tokens[t];
            const std::int32_t ends[] = {0, static_cast<std::int32_t>(tokens.size())};
            const Batch batch{tokens.data(), positions.data(), targets.data(), static_cast<std::int64_t>(tokens.size()), {ends, 1}};
            PassOptions pass;
            pass.temperature = request.params.temperature;
            pass.valid_vocab = 59;
            const TokenStats stats = model.learner.score(batch, pass);
            for (std::size_t i = 0; i < sample.logps.size(); ++i) {
                CHECK_NEAR(sample.logps[i], stats.logp[request.prompt.size() - 1 + i], 1e-5);
                CHECK(sample.tokens[i] < 59);
                CHECK((sample.tokens[i] == 11) == (sample.finish == Finish::Stop && i + 1 == sample.tokens.size()));
            }
            stopped = stopped || sample.finish == Finish::Stop;
            if (sample.finish == Finish::Length) {
                cut = true;
                CHECK_EQ(static_cast<std::int32_t>(sample.tokens.size()), request.params.max_new_tokens);
            }
        }
        CHECK(stopped);
        CHECK(cut);
    }
}

TEST(samples_do_not_depend_on_what_else_runs) {
    Model model(true), one_thread(true, 1);
    Generator roomy(model.learner, options_of(18, 4096, 256));
    const auto expected = generate(roomy, range(18));
    CHECK_EQ(roomy.preemptions(), 0);

    Generator tight(one_thread.learner, options_of(7, 176, 9));
    std::vector<std::uint64_t> reversed = range(18);
    std::reverse(reversed.begin(), reversed.end());
    CHECK(generate(tight, reversed) == expected);
    CHECK(tight.preemptions() > 0);

    GeneratorOptions single = options_of(1, 160, 5);
    single.block_size = 32;
    Generator alone(model.learner, single);
    for (const std::uint64_t id : range(18)) CHECK(generate(alone, {id}).at(id) == expected.at(id));
}

}  // namespace
}  // namespace surogate
