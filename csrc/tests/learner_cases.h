#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/random.h"
#include "model/learner.h"
#include "tests/harness.h"

namespace surogate::testing {

struct Arrays {
    std::vector<std::int32_t> tokens, positions, targets, cu_seqlens;
    std::vector<float> d_logp, d_entropy;

    Batch batch() const {
        return {tokens.data(),
                positions.data(),
                targets.data(),
                static_cast<std::int64_t>(tokens.size()),
                {cu_seqlens.data(), static_cast<std::int64_t>(cu_seqlens.size()) - 1}};
    }
};

inline Arrays make_arrays(const std::vector<int>& lengths, std::int32_t vocab, std::uint64_t seed) {
    Arrays arrays;
    const Philox random(seed, 1);
    arrays.cu_seqlens.push_back(0);
    std::uint64_t draw = 0;
    for (const int length : lengths) {
        for (int i = 0; i < length; ++i) {
            arrays.tokens.push_back(static_cast<std::int32_t>(random.uniform(draw++) * vocab));
            arrays.positions.push_back(i);
            const bool has_target = random.uniform(draw++) < 0.7;
            arrays.targets.push_back(has_target ? static_cast<std::int32_t>(random.uniform(draw++) * vocab) : -100);
            arrays.d_logp.push_back(static_cast<float>(random.normal(draw++)));
            arrays.d_entropy.push_back(static_cast<float>(random.normal(draw++)));
        }
        arrays.cu_seqlens.push_back(static_cast<std::int32_t>(arrays.tokens.size()));
    }
    return arrays;
}

inline ModelSpec small_spec() {
    ModelSpec spec;
    spec.layers = 2;
    spec.hidden = 20;
    spec.heads = 4;
    spec.kv_heads = 2;
    spec.head_dim = 6;  // heads * head_dim is not hidden
    spec.ffn = 28;
    spec.vocab = 37;
    spec.max_positions = 32;
    spec.rope_inv_freq = {1.0, 0.3, 0.1};
    return spec;
}

/// A learner of 40 tokens with random weights and adapters, the same for any back-end and recipe.
inline std::unique_ptr<Learner> make_learner(std::shared_ptr<Backend> backend, const ModelSpec& spec, LearnerOptions options) {
    options.max_tokens = 40;
    auto learner = std::make_unique<Learner>(std::move(backend), spec, options);
    std::uint64_t stream = 0;
    for (const NamedTensor& named : learner->tensors()) {
        const Philox random(5, stream++);
        std::vector<float> values(static_cast<std::size_t>(named.tensor.size()));
        const double scale = named.is_vector ? 0.3 : 1.0 / std::sqrt(static_cast<double>(named.tensor.columns));
        const bool norm = named.name.ends_with("norm.weight");
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((norm ? 1.0 : 0.0) + scale * random.normal(i));
        learner->load(named.name, values.data());
    }
    return learner;
}

inline std::vector<float> export_values(const Learner& learner, const NamedTensor& named) {
    std::vector<float> values(static_cast<std::size_t>(named.tensor.size()));
    learner.read(values.data(), named);
    return values;
}

inline LearnerOptions adapter(std::vector<Linear> targets) {
    LearnerOptions options;
    options.lora = {3, 7.0f, std::move(targets)};
    return options;
}

inline std::vector<Linear> all_linear() { return {Linear::Q, Linear::K, Linear::V, Linear::O, Linear::Gate, Linear::Up, Linear::Down}; }

using Values = std::map<std::string, std::vector<float>>;

inline Values read_all(const Learner& learner, const std::vector<NamedTensor>& tensors) {
    Values values;
    for (const NamedTensor& named : tensors) values[named.name] = export_values(learner, named);
    return values;
}

struct Outcome {
    TokenStats stats, at_once;
    Values gradients, weights, state;
};

/// Two passes, one in two calls and one in one, and an update.
inline Outcome run(Learner& learner, bool entropy_seed = false) {
    const Arrays arrays = make_arrays({11, 1, 17}, 31, 3);
    PassOptions options;
    options.temperature = 0.8f;
    options.valid_vocab = 33;
    options.entropy = true;
    Outcome outcome;
    outcome.stats = learner.forward(arrays.batch(), options);
    learner.backward(arrays.d_logp.data(), entropy_seed ? arrays.d_entropy.data() : nullptr);
    outcome.at_once = learner.forward_backward(arrays.batch(), options, arrays.d_logp.data(), nullptr);
    outcome.gradients = read_all(learner, learner.gradients());
    StepOptions step;
    step.learning_rate = 1e-3f;
    step.weight_decay = 0.1f;
    step.max_grad_norm = 1.0f;
    CHECK(learner.step(step).applied);
    outcome.weights = read_all(learner, learner.tensors());
    outcome.state = read_all(learner, learner.optimizer_state());
    return outcome;
}

/// Two steps of one backward pass each, from forward and backward apart and at once: what lend_gradients allows.
inline Outcome run_of_single_backwards(Learner& learner) {
    const Arrays first = make_arrays({11, 1, 17}, 31, 3), second = make_arrays({8, 21}, 31, 4);
    PassOptions options;
    options.temperature = 0.8f;
    options.valid_vocab = 33;
    StepOptions step;
    step.learning_rate = 1e-3f;
    step.weight_decay = 0.1f;
    step.max_grad_norm = 1.0f;
    Outcome outcome;
    outcome.stats = learner.forward(first.batch(), options);
    learner.backward(first.d_logp.data(), nullptr);
    CHECK(learner.step(step).applied);
    learner.score(second.batch(), options);
    outcome.at_once = learner.forward_backward(second.batch(), options, second.d_logp.data(), nullptr);
    outcome.gradients = read_all(learner, learner.gradients());
    CHECK(learner.step(step).applied);
    outcome.weights = read_all(learner, learner.tensors());
    outcome.state = read_all(learner, learner.optimizer_state());
    return outcome;
}

inline double relative(const std::vector<float>& value, const std::vector<float>& truth) {
    double difference = 0.0, norm = 0.0;
    for (std::size_t i = 0; i < value.size(); ++i) {
        difference += std::pow(static_cast<double>(value[i]) - static_cast<double>(truth[i]), 2);
        norm += std::pow(static_cast<double>(truth[i]), 2);
    }
    return std::sqrt(difference / norm);
}

inline void check_same(const Values& one, const Values& other) {
    CHECK_EQ(one.size(), other.size());
    for (const auto& [name, values] : one) {
        if (values != other.at(name)) report(__FILE__, __LINE__, name, " differs");
    }
}

inline void check_same(const Outcome& one, const Outcome& other) {
    CHECK(one.stats.logp == other.stats.logp && one.stats.entropy == other.stats.entropy);
    CHECK(one.at_once.logp == other.at_once.logp);
    check_same(one.gradients, other.gradients);
    check_same(one.weights, other.weights);
    check_same(one.state, other.state);
}

inline void check_near(const Values& one, const Values& other, double tolerance) {
    CHECK_EQ(one.size(), other.size());
    for (const auto& [name, values] : one) {
        const double error = relative(values, other.at(name));
        if (!(error <= tolerance)) report(__FILE__, __LINE__, name, ": off by ", error, " of its norm");
    }
}

inline std::vector<float> joined(const Values& values) {
    std::vector<float> all;
    for (const auto& [name, part] : values) all.insert(all.end(), part.begin(), part.end());
    return all;
}

struct Case {
    const char* name;
    ModelSpec spec;
    LearnerOptions options;
};

inline std::vector<Case> cases() {
    std::vector<Case> all;
    ModelSpec biased = small_spec();
    biased.qkv_bias = biased.o_bias = biased.mlp_bias = true;
    ModelSpec normed = small_spec();
    normed.qk_norm = normed.tied = true;
    LearnerOptions chunks;
    chunks.head_rows = 7;
    all.push_back({"biased", biased, {}});
    all.push_back({"chunks", normed, chunks});
    chunks.recompute = true;
    all.push_back({"recompute", biased, chunks});
    all.push_back({"adapter", normed, adapter(all_linear())});
    std::vector<Linear> with_head = all_linear();
    with_head.push_back(Linear::Head);
    all.push_back({"adapter and head", biased, adapter(with_head)});
    LearnerOptions few = adapter({Linear::V, Linear::Up});
    few.head_rows = 7;
    few.recompute = true;
    all.push_back({"adapter on two", small_spec(), few});
    // MLPs that are wide enough for the gradients of attention to lie in their memory: in that of gate and up together, or of one.
    for (const std::int64_t ffn : {40, 80}) {
        ModelSpec wide = biased;
        wide.ffn = ffn;
        all.push_back({ffn == 40 ? "wide" : "wider", wide, {}});
        all.push_back({ffn == 40 ? "wide, adapter" : "wider, adapter", wide, adapter(all_linear())});
    }
    return all;
}

/// Those with adapters once more, as borders of the weights.
inline std::vector<Case> bordered_cases() {
    std::vector<Case> all;
    for (Case c : cases()) {
        c.options.border_adapters = true;
        if (c.options.lora.enabled()) all.push_back(c);
    }
    return all;
}

inline LearnerOptions in_bfloat16(LearnerOptions options) {
    options.recipe.compute = options.recipe.logits = DType::BFloat16;
    return options;
}

}  // namespace surogate::testing
