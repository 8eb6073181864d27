#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/random.h"
#include "model/learner.h"

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

}  // namespace surogate::testing
