// Gradients of whole models against finite differences along random directions, and what the learner owes its callers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/random.h"
#include "harness.h"
#include "model/learner.h"
#include "tests/learner_cases.h"

using namespace surogate;
using testing::adapter, testing::Arrays, testing::export_values, testing::make_arrays, testing::small_spec;

namespace {

std::unique_ptr<Learner> make_learner(const ModelSpec& spec, const LearnerOptions& options, int threads = 1) {
    return testing::make_learner(make_cpu_backend({threads}), spec, options);
}

double loss_of(Learner& learner, const Arrays& arrays, const PassOptions& options) {
    const TokenStats stats = learner.score(arrays.batch(), options);
    double loss = 0.0;
    for (std::size_t t = 0; t < stats.logp.size(); ++t) {
        loss += static_cast<double>(arrays.d_logp[t]) * static_cast<double>(stats.logp[t]);
        loss += static_cast<double>(arrays.d_entropy[t]) * static_cast<double>(stats.entropy[t]);
    }
    return loss;
}

/// For every trained tensor: the slope of the loss along the gradient's own signs, where differences are largest against rounding, and
/// along a random direction.
void check_gradients(const ModelSpec& spec, const LearnerOptions& learner_options) {
    const auto learner = make_learner(spec, learner_options);
    const Arrays arrays = make_arrays({11, 1, 17}, 31, 3);
    PassOptions options;
    options.temperature = 0.8f;
    options.valid_vocab = 33;
    options.entropy = true;
    learner->forward_backward(arrays.batch(), options, arrays.d_logp.data(), arrays.d_entropy.data());
    std::int64_t checked = 0;
    for (const NamedTensor& named : learner->tensors()) {
        if (!named.trainable) continue;
        const std::vector<float> gradient = export_values(*learner, Learner::find(learner->gradients(), "test", named.name));
        const std::vector<float> value = export_values(*learner, named);
        double norm = 0.0;
        for (const float g : gradient) norm += static_cast<double>(g) * static_cast<double>(g);
        norm = std::sqrt(norm);
        CHECK(norm > 0.0);
        for (const bool own_signs : {true, false}) {
            const Philox random(9, static_cast<std::uint64_t>(checked));
            std::vector<double> direction(value.size());
            double slope = 0.0;
            for (std::size_t i = 0; i < value.size(); ++i) {
                direction[i] = own_signs ? (gradient[i] > 0.0f ? 1.0 : gradient[i] < 0.0f ? -1.0 : 0.0) : random.normal(i);
                slope += direction[i] * static_cast<double>(gradient[i]);
            }
            const double length = std::sqrt(static_cast<double>(value.size())), h = 8e-3 / length;
            const auto at = [&](double offset) {
                std::vector<float> moved(value.size());
                for (std::size_t i = 0; i < value.size(); ++i)
                    moved[i] = static_cast<float>(static_cast<double>(value[i]) + offset * direction[i]);
                learner->load(named.name, moved.data());
                return loss_of(*learner, arrays, options);
            };
            // Of fourth order, so that h can be large against float32 rounding.
            const double difference = (8.0 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12.0 * h);
            learner->load(named.name, value.data());
            if (std::abs(difference - slope) > 6e-3 * norm * length) {
                testing::report(__FILE__, __LINE__, named.name, ": slope ", slope, ", by differences ", difference, ", norm ", norm);
            }
        }
        ++checked;
    }
    CHECK_EQ(checked, static_cast<std::int64_t>(learner->gradients().size()));
    CHECK(checked > 0);
}

}  // namespace

TEST(gradients_tied) {
    ModelSpec spec = small_spec();
    spec.tied = true;
    check_gradients(spec, {});
}

TEST(gradients_biases_and_untied_head) {
    ModelSpec spec = small_spec();
    spec.qkv_bias = spec.o_bias = spec.mlp_bias = true;
    LearnerOptions options;
    options.head_rows = 7;
    check_gradients(spec, options);
}

TEST(gradients_qk_norm_window_and_scaled_rotation) {
    ModelSpec spec = small_spec();
    spec.qk_norm = true;
    spec.windows = {0, 5};
    spec.rope_attention_scale = 1.2f;
    LearnerOptions options;
    options.recompute = true;
    check_gradients(spec, options);
}

TEST(gradients_adapter_everywhere) {
    ModelSpec spec = small_spec();
    spec.qk_norm = true;
    check_gradients(spec, adapter({Linear::Q, Linear::K, Linear::V, Linear::O, Linear::Gate, Linear::Up, Linear::Down, Linear::Head}));
}

TEST(gradients_adapter_on_one_linear) {
    for (const Linear target : {Linear::Q, Linear::K, Linear::V, Linear::O, Linear::Gate, Linear::Up, Linear::Down, Linear::Head}) {
        LearnerOptions options = adapter({target});
        check_gradients(small_spec(), options);
        options.recompute = true;
        check_gradients(small_spec(), options);
    }
}

TEST(segments_do_not_see_each_other) {
    const auto learner = make_learner(small_spec(), {});
    Arrays arrays = make_arrays({9, 12}, 31, 4);
    const TokenStats before = learner->score(arrays.batch(), {});
    for (std::size_t t = 0; t < 9; ++t) arrays.tokens[t] = (arrays.tokens[t] + 5) % 31;
    const TokenStats after = learner->score(arrays.batch(), {});
    bool first_changed = false;
    for (std::size_t t = 0; t < 21; ++t) {
        if (t < 9) {
            first_changed = first_changed || before.logp[t] != after.logp[t];
        } else {
            CHECK_EQ(after.logp[t], before.logp[t]);
        }
    }
    CHECK(first_changed);
}

TEST(an_error_leaves_no_trace) {
    const auto learner = make_learner(small_spec(), {});
    const Arrays arrays = make_arrays({6}, 31, 4);
    Arrays wrong = arrays;
    wrong.targets[3] = 37;
    CHECK_THROWS(learner->forward(wrong.batch(), {}), "targets[3]");
    CHECK_EQ(learner->pending_tokens(), std::int64_t{-1});
    CHECK_THROWS(learner->backward(arrays.d_logp.data(), nullptr), "no forward pass is pending");
    learner->forward(arrays.batch(), {});
    CHECK_EQ(learner->pending_tokens(), std::int64_t{6});
    CHECK_THROWS(learner->step({}), "pending");
    learner->backward(arrays.d_logp.data(), nullptr);
    CHECK(learner->step({}).applied);
}

TEST(a_limit_on_memory_is_kept) {
    LearnerOptions options;
    options.max_tokens = 40;
    std::size_t total = 0;
    for (const MemoryItem& item : Learner::plan(small_spec(), options)) total += item.bytes;
    options.memory_limit = total - 1;
    bool refused = false;
    try {
        make_learner(small_spec(), options);
    } catch (const OutOfMemory&) {
        refused = true;
    }
    CHECK(refused);
    options.memory_limit = total;
    make_learner(small_spec(), options);
}
