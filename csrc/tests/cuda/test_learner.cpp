// Whole models on the GPU beside the CPU, in float32 and bfloat16, with everything that the GPU does otherwise.
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "tests/cuda/device.h"
#include "tests/learner_cases.h"
#include "tests/shadow_backend.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

std::unique_ptr<Learner> on_gpu(const ModelSpec& spec, const LearnerOptions& options, bool deterministic = false) {
    CudaOptions cuda;
    cuda.deterministic = deterministic;
    return make_learner(make_cuda_backend(cuda), spec, options);
}

/// A shape that cuDNN takes, with grouped queries; `small_spec` is one that it does not.
ModelSpec even_spec() {
    ModelSpec spec = small_spec();
    spec.hidden = 128;
    spec.heads = 4;
    spec.kv_heads = 2;
    spec.head_dim = 64;
    spec.ffn = 192;
    spec.vocab = 512;
    spec.qk_norm = true;
    spec.rope_inv_freq.assign(32, 0.1);
    return spec;
}

std::vector<Case> all_cases() {
    std::vector<Case> all = cases();
    for (const Case& c : bordered_cases()) all.push_back(c);
    LearnerOptions options = adapter(all_linear());
    options.border_adapters = options.head_gradient_in_forward = true;
    all.push_back({"even", even_spec(), {}});
    all.push_back({"even, adapter", even_spec(), options});
    return all;
}

}  // namespace

TEST(learner_in_float32_is_the_cpus) {
    for (const Case& c : all_cases()) {
        const auto cpu = make_learner(make_cpu_backend({1}), c.spec, c.options);
        const Outcome expected = run(*cpu), got = run(*on_gpu(c.spec, c.options));
        CHECK(relative(got.stats.logp, expected.stats.logp) < 1e-5);
        CHECK(relative(got.stats.entropy, expected.stats.entropy) < 1e-5);
        check_near(got.gradients, expected.gradients, 1e-3);
        CHECK(relative(joined(got.gradients), joined(expected.gradients)) < 1e-4);
    }
}

namespace {

/// Errors of log-probabilities and of all gradients in bfloat16, against float32 on the CPU: root mean squares over several batches, since
/// what large logits amplify is a few roundings, which fall this way or that.
struct Errors {
    double logp = 0.0, gradient = 0.0;
};

Errors errors_of(Learner& learner, Learner& exact) {
    constexpr int kBatches = 6;
    Errors sum;
    for (std::uint64_t seed = 1; seed <= kBatches; ++seed) {
        const Arrays arrays = make_arrays({11, 1, 17}, 31, seed);
        PassOptions pass;
        pass.temperature = 0.8f;
        pass.valid_vocab = 33;
        const auto run_on = [&](Learner& on) {
            on.zero_gradients();
            const TokenStats stats = on.forward_backward(arrays.batch(), pass, arrays.d_logp.data(), nullptr);
            return std::pair{stats.logp, joined(read_all(on, on.gradients()))};
        };
        const auto [right_logp, right] = run_on(exact);
        const auto [logp, gradient] = run_on(learner);
        sum.logp += std::pow(relative(logp, right_logp), 2) / kBatches;
        sum.gradient += std::pow(relative(gradient, right), 2) / kBatches;
    }
    return {std::sqrt(sum.logp), std::sqrt(sum.gradient)};
}

/// The gradient of each tensor, so that a failure says where.
void print_tensors(Learner& learner, Learner& exact) {
    const Arrays arrays = make_arrays({11, 1, 17}, 31, 1);
    PassOptions pass;
    pass.temperature = 0.8f;
    pass.valid_vocab = 33;
    const auto gradients = [&](Learner& on) {
        on.zero_gradients();
        on.forward_backward(arrays.batch(), pass, arrays.d_logp.data(), nullptr);
        return read_all(on, on.gradients());
    };
    const Values got = gradients(learner), right = gradients(exact);
    for (const auto& [name, values] : right) std::printf("      %-40s %.2e\n", name.c_str(), relative(got.at(name), values));
}

}  // namespace

// The bound is the arithmetic's own: the stand-in computes each operation in float32 and rounds its results to bfloat16, once. The GPU may
// round in other places, but not to more than twice the effect.
TEST(learner_in_bfloat16_errs_like_bfloat16) {
    for (const Case& c : all_cases()) {
        const auto cpu = make_learner(make_cpu_backend({1}), c.spec, c.options);
        for (const bool wide_logits : {false, true}) {
            LearnerOptions options = in_bfloat16(c.options);
            if (wide_logits) options.recipe.logits = DType::Float32;
            const auto rounded = make_learner(std::make_shared<ShadowBackend>(), c.spec, options);
            const Errors expected = errors_of(*rounded, *cpu), got = errors_of(*on_gpu(c.spec, options), *cpu);
            if (got.gradient > 2.0 * expected.gradient) print_tensors(*on_gpu(c.spec, options), *cpu);
            std::printf("  %-32s logp %.2e (stand-in %.2e)  gradients %.2e (stand-in %.2e)\n", c.name, got.logp, expected.logp,
                        got.gradient, expected.gradient);
            CHECK(got.logp <= 2.0 * expected.logp);
            CHECK(got.gradient <= 2.0 * expected.gradient);
        }
    }
}

TEST(learner_gives_the_same_bits_when_deterministic) {
    for (const Case& c : all_cases()) {
        const LearnerOptions options = in_bfloat16(c.options);
        check_same(run(*on_gpu(c.spec, options, true)), run(*on_gpu(c.spec, options, true)));
    }
}

TEST(learner_without_master_weights_learns) {
    LearnerOptions options = in_bfloat16({});
    options.recipe.master = false;
    options.recipe.state = options.recipe.gradient = DType::BFloat16;
    const auto learner = on_gpu(even_spec(), options);
    const Arrays arrays = make_arrays({11, 17}, 31, 3);
    const std::vector<float> seeds(arrays.tokens.size(), -1.0f);
    const auto loss = [&] {
        double sum = 0.0;
        for (const float value : learner->score(arrays.batch(), {}).logp) sum -= static_cast<double>(value);
        return sum;
    };
    const double before = loss();
    StepOptions step;
    step.learning_rate = 1e-3f;
    for (int i = 0; i < 20; ++i) {
        learner->forward_backward(arrays.batch(), {}, seeds.data(), nullptr);
        CHECK(learner->step(step).applied);
    }
    CHECK(loss() < 0.7 * before);
}

TEST(learner_with_lent_gradients_has_the_same_bits) {
    for (const ModelSpec& spec : {even_spec(), small_spec()}) {
        LearnerOptions options = in_bfloat16({});
        options.recompute = true;
        options.recipe.gradient = DType::BFloat16;
        LearnerOptions lending = options;
        lending.lend_gradients = true;
        check_same(run_of_single_backwards(*on_gpu(spec, options, true)), run_of_single_backwards(*on_gpu(spec, lending, true)));
    }
}

TEST(learner_knows_the_devices_memory) {
    LearnerOptions options;
    options.max_tokens = std::int64_t{1} << 28;
    CHECK_THROWS(Learner(make_cuda_backend({}), even_spec(), options), "available. Needed for:");
    CHECK(cuda_unavailable_reason().empty());
}
