// The learner on a device of its own and in bfloat16, over a stand-in for a GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "generate/generator.h"
#include "tests/bfloat16.h"
#include "tests/harness.h"
#include "tests/learner_cases.h"
#include "tests/shadow_backend.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

std::unique_ptr<Learner> shadow_learner(const ModelSpec& spec, const LearnerOptions& options) {
    return make_learner(std::make_shared<ShadowBackend>(), spec, options);
}

bool is_bfloat16(float value) { return from_bfloat16(to_bfloat16(value)) == value; }

}  // namespace

TEST(float32_on_a_device_has_the_bits_of_the_cpu) {
    for (const Case& c : cases()) {
        const auto cpu = make_learner(make_cpu_backend({1}), c.spec, c.options);
        const auto device = shadow_learner(c.spec, c.options);
        check_same(run(*cpu), run(*device));
    }
}

TEST(bfloat16_is_near_float32) {
    for (const Case& c : cases()) {
        const auto cpu = make_learner(make_cpu_backend({1}), c.spec, c.options);
        const Outcome exact = run(*cpu);
        for (const bool wide_logits : {false, true}) {
            LearnerOptions options = in_bfloat16(c.options);
            if (wide_logits) {
                options.recipe.logits = DType::Float32;
            } else {
                options.recipe.gradient = DType::BFloat16;
            }
            const auto device = shadow_learner(c.spec, options);
            const Outcome rounded = run(*device);
            CHECK(relative(rounded.stats.logp, exact.stats.logp) < 0.02);
            CHECK(relative(rounded.stats.entropy, exact.stats.entropy) < 0.02);
            // Large adapters make large logits, where rounding costs most; of one matrix the gradient can be a small difference.
            check_near(rounded.gradients, exact.gradients, 0.4);
            CHECK(relative(joined(rounded.gradients), joined(exact.gradients)) < 0.2);
        }
    }
}

TEST(exact_values_are_exported_to_memory_of_somebody_else) {
    for (const Case& c : cases()) {
        const auto learner = shadow_learner(c.spec, in_bfloat16(c.options));
        run(*learner);
        Backend& device = learner->backend();
        for (const NamedTensor& named : learner->tensors()) {
            const std::int64_t rows = named.tensor.rows, columns = named.tensor.columns;
            const auto size = static_cast<std::size_t>(rows * columns);
            const Tensor wide = matrix(device.allocate(4 * size), rows, columns, DType::Float32, device.device());
            const Tensor narrow = matrix(device.allocate(2 * size), rows, columns, DType::BFloat16, device.device());
            learner->export_to({{&named, wide}, {&named, narrow}});
            std::vector<float> exact(size), as_wide(size), as_narrow(size);
            learner->read(exact.data(), named);
            device.download(as_wide.data(), wide);
            device.download(as_narrow.data(), narrow);
            CHECK(as_wide == exact);
            CHECK(std::equal(exact.begin(), exact.end(), as_narrow.begin(),
                             [](float value, float rounded) { return from_bfloat16(to_bfloat16(value)) == rounded; }));
            device.release(wide.data);
            device.release(narrow.data);
        }
    }
}

TEST(borders_are_the_same_mathematics) {
    for (Case c : bordered_cases()) {
        const auto bordered = shadow_learner(c.spec, c.options);
        c.options.border_adapters = false;
        const auto plain = make_learner(make_cpu_backend({1}), c.spec, c.options);
        const Outcome got = run(*bordered), expected = run(*plain);
        CHECK(relative(got.stats.logp, expected.stats.logp) < 2e-6);
        check_near(got.gradients, expected.gradients, 1e-5);
        check_near(got.weights, expected.weights, 1e-4);
        // The next pass is with what the step left.
        CHECK(relative(run(*bordered).stats.logp, run(*plain).stats.logp) < 1e-5);
    }
}

TEST(borders_in_bfloat16) {
    for (const Case& c : bordered_cases()) {
        const auto cpu = make_learner(make_cpu_backend({1}), c.spec, c.options);
        const auto device = shadow_learner(c.spec, in_bfloat16(c.options));
        const Outcome exact = run(*cpu), rounded = run(*device);
        CHECK(relative(rounded.stats.logp, exact.stats.logp) < 0.02);
        CHECK(relative(joined(rounded.gradients), joined(exact.gradients)) < 0.2);
    }
}

TEST(borders_save_products) {
    const auto products = [](bool border) {
        LearnerOptions options = adapter(all_linear());
        options.border_adapters = border;
        auto backend = std::make_shared<ShadowBackend>();
        const auto learner = make_learner(backend, small_spec(), options);
        const Arrays arrays = make_arrays({20}, 31, 3);
        const auto count = [&] {
            return backend->count("linear_forward") + backend->count("linear_backward_input") + backend->count("linear_backward_weight");
        };
        const int before = count();
        learner->forward_backward(arrays.batch(), {}, arrays.d_logp.data(), nullptr);
        return count() - before;
    };
    // Forward a B of each of the 7 adapters; backward the 7 dy B become 4, and 4 additions to dx go (the first layer has none for q, k, v).
    CHECK_EQ(products(false) - products(true), 2 * (7 + 3 + 4) - 1);
}

TEST(kept_logits_change_no_bit) {
    for (const Case& c : cases()) {
        for (const bool bfloat16 : {false, true}) {
            LearnerOptions options = bfloat16 ? in_bfloat16(c.options) : c.options;
            const auto plain = shadow_learner(c.spec, options);
            options.keep_logits = true;
            const auto keeping = shadow_learner(c.spec, options);
            check_same(run(*plain, true), run(*keeping, true));
        }
    }
}

TEST(head_gradient_in_forward) {
    for (const Case& c : cases()) {
        LearnerOptions options = c.options;
        const auto plain = make_learner(make_cpu_backend({1}), c.spec, options);
        options.head_gradient_in_forward = true;
        const auto ahead = make_learner(make_cpu_backend({1}), c.spec, options);
        const Outcome expected = run(*plain), got = run(*ahead);
        CHECK(expected.stats.logp == got.stats.logp);
        check_near(got.gradients, expected.gradients, 1e-5);
        // A seed of the entropy needs the logits themselves, and has the same bits as ever.
        const auto again = make_learner(make_cpu_backend({1}), c.spec, c.options);
        const auto ahead_again = make_learner(make_cpu_backend({1}), c.spec, options);
        check_same(run(*again, true), run(*ahead_again, true));
    }
}

TEST(head_gradient_in_forward_saves_a_product_over_the_vocabulary) {
    const auto products = [](bool ahead) {
        LearnerOptions options = adapter(all_linear());
        options.head_rows = 7;
        options.head_gradient_in_forward = ahead;
        auto backend = std::make_shared<ShadowBackend>();
        const auto learner = make_learner(backend, small_spec(), options);
        const Arrays arrays = make_arrays({20, 20}, 31, 3);
        const int before = backend->count("logprob_forward");
        const int linear = backend->count("linear_forward");
        learner->forward(arrays.batch(), {});
        const int chunks = backend->count("logprob_forward") - before;
        learner->backward(arrays.d_logp.data(), nullptr);
        CHECK(chunks > 2);
        return std::pair{backend->count("linear_forward") - linear, chunks};
    };
    const auto [with, chunks] = products(true);
    const auto [without, same] = products(false);
    CHECK_EQ(chunks, same);
    CHECK_EQ(without - with, chunks);
}

TEST(transfers_of_a_step) {
    std::vector<Case> all = cases();
    for (const Case& c : bordered_cases()) all.push_back(c);
    for (const Case& c : all) {
        auto backend = std::make_shared<ShadowBackend>();
        LearnerOptions options = in_bfloat16(c.options);
        options.keep_logits = options.head_gradient_in_forward = true;
        const auto learner = make_learner(backend, c.spec, options);
        const Arrays arrays = make_arrays({11, 1, 17}, 31, 3);
        const auto transfers = [&](auto&& act) {
            const int uploads = backend->count("upload"), downloads = backend->count("download");
            act();
            return std::pair{backend->count("upload") - uploads, backend->count("download") - downloads};
        };
        const auto check = [&](auto&& act, int uploads, int downloads) {
            const auto [up, down] = transfers(act);
            CHECK_EQ(up, uploads);
            CHECK_EQ(down, downloads);
        };
        PassOptions pass;
        pass.entropy = true;
        check([&] { learner->score(arrays.batch(), pass); }, 1, 1);
        check([&] { learner->forward(arrays.batch(), pass); }, 1, 1);
        check([&] { learner->backward(arrays.d_logp.data(), nullptr); }, 1, 0);
        check([&] { learner->forward_backward(arrays.batch(), pass, arrays.d_logp.data(), arrays.d_entropy.data()); }, 2, 1);
        check([&] { learner->step({}); }, 0, 0);
        CHECK(backend->count("sum_of_squares") <= 2 && backend->count("adamw") <= 2);
        CHECK_EQ(backend->count("synchronize"), 0);
    }
}

TEST(master_weights_hold_what_bfloat16_rounds_away) {
    for (const LearnerOptions& options : {LearnerOptions{}, adapter(all_linear()), bordered_cases().front().options}) {
        const auto learner = shadow_learner(small_spec(), in_bfloat16(options));
        const Arrays arrays = make_arrays({11, 17}, 31, 3);
        const Values before = read_all(*learner, learner->tensors());
        std::size_t inexact = 0;
        for (const NamedTensor& named : learner->tensors()) {
            for (const float value : before.at(named.name)) {
                if (!named.trainable) CHECK(is_bfloat16(value));
                if (!is_bfloat16(value)) ++inexact;
            }
        }
        CHECK(inexact > 100);
        // Far below bfloat16's spacing: only the master can take it up.
        StepOptions step;
        step.learning_rate = 1e-6f;
        learner->forward_backward(arrays.batch(), {}, arrays.d_logp.data(), nullptr);
        CHECK(learner->step(step).applied);
        for (const NamedTensor& named : learner->tensors()) {
            if (!named.trainable) continue;
            const std::vector<float> after = export_values(*learner, named);
            double moved = 0.0;
            for (std::size_t i = 0; i < after.size(); ++i)
                moved += std::abs(static_cast<double>(after[i]) - static_cast<double>(before.at(named.name)[i]));
            CHECK(moved > 0.0 && moved / static_cast<double>(after.size()) < 2e-6);
            std::vector<float> rounded(after.size());
            NamedTensor used = named;
            used.master = {};
            learner->read(rounded.data(), used);
            for (std::size_t i = 0; i < after.size(); ++i) CHECK_EQ(rounded[i], from_bfloat16(to_bfloat16(after[i])));
        }
    }
}

TEST(without_a_master_updates_are_rounded_stochastically) {
    LearnerOptions options = in_bfloat16({});
    options.recipe.master = false;
    options.recipe.state = DType::BFloat16;
    const auto learner = shadow_learner(small_spec(), options);
    for (const MemoryItem& item : learner->memory()) CHECK(item.name.find("master") == std::string::npos);
    const std::string name = "layers.0.mlp.up_proj.weight";
    const NamedTensor& named = Learner::find(learner->tensors(), "test", name);
    std::vector<float> ones(static_cast<std::size_t>(named.tensor.size()), 1.0f);
    learner->load(name, ones.data());
    const Arrays arrays = make_arrays({11, 17}, 31, 3);
    learner->forward_backward(arrays.batch(), {}, arrays.d_logp.data(), nullptr);
    StepOptions step;
    step.learning_rate = 1e-3f;  // Adam's first step is of that size; the spacing of bfloat16 at 1 is 2^-8 below and 2^-7 above
    CHECK(learner->step(step).applied);
    const std::vector<float> after = export_values(*learner, named);
    double moved = 0.0, size = 0.0;
    for (const float value : after) {
        CHECK(is_bfloat16(value));
        moved += value != 1.0f ? 1.0 : 0.0;
        size += std::abs(static_cast<double>(value) - 1.0);
    }
    const double n = static_cast<double>(after.size());
    CHECK(moved > 0.05 * n && moved < 0.5 * n);
    CHECK_NEAR(size / n, 1e-3, 3e-4);
    for (const NamedTensor& state : learner->optimizer_state()) CHECK_EQ(size_of(state.tensor.dtype), std::size_t{2});
}

TEST(state_comes_back_exactly) {
    for (const bool master : {false, true}) {
        for (const LearnerOptions& base : {LearnerOptions{}, bordered_cases().front().options}) {
            LearnerOptions options = in_bfloat16(base);
            options.recipe.master = master;
            options.recipe.state = DType::BFloat16;
            const auto first = shadow_learner(small_spec(), options);
            run(*first);
            const auto second = shadow_learner(small_spec(), options);
            for (const NamedTensor& named : first->tensors()) second->load(named.name, export_values(*first, named).data());
            for (const NamedTensor& named : first->optimizer_state()) {
                second->write(Learner::find(second->optimizer_state(), "test", named.name), export_values(*first, named).data());
            }
            second->set_update_count(first->update_count());
            check_same(run(*first), run(*second));
        }
    }
}

TEST(adapters_initial_and_off) {
    for (const bool border : {false, true}) {
        LearnerOptions options = adapter(all_linear());
        options.border_adapters = border;
        const auto learner = shadow_learner(small_spec(), in_bfloat16(options));
        const Arrays arrays = make_arrays({11, 17}, 31, 3);
        PassOptions initial, off;
        initial.adapter = AdapterUse::Initial;
        off.adapter = AdapterUse::Off;
        learner->snapshot_adapter();
        const std::vector<float> before = learner->score(arrays.batch(), {}).logp;
        // The initial adapter is always a product of its own, so of the border's it differs by rounding.
        const std::vector<float> start = learner->score(arrays.batch(), initial).logp;
        CHECK(border ? relative(start, before) < 0.02 : start == before);
        const std::vector<float> bare = learner->score(arrays.batch(), off).logp;
        learner->forward_backward(arrays.batch(), {}, arrays.d_logp.data(), nullptr);
        StepOptions step;
        step.learning_rate = 1e-2f;
        learner->step(step);
        CHECK(learner->score(arrays.batch(), {}).logp != before);
        CHECK(learner->score(arrays.batch(), initial).logp == start);
        CHECK(learner->score(arrays.batch(), off).logp == bare);
        CHECK(bare != before);
    }
}

TEST(lent_gradients_change_no_bit) {
    ModelSpec plain = small_spec(), tied = small_spec(), wide = small_spec();
    plain.qkv_bias = plain.o_bias = plain.mlp_bias = true;
    tied.tied = tied.qk_norm = true;
    wide.ffn = 80;
    wide.layers = 4;
    for (const ModelSpec& spec : {plain, tied, wide}) {
        for (const std::int64_t chunk : {0, 7}) {
            for (const bool bfloat16 : {false, true}) {
                LearnerOptions options;
                options.recompute = true;
                options.head_rows = chunk;
                if (bfloat16) {
                    options = in_bfloat16(options);
                    options.recipe.gradient = options.recipe.state = DType::BFloat16;
                }
                LearnerOptions lending = options;
                lending.lend_gradients = true;
                const auto one = shadow_learner(spec, options), other = shadow_learner(spec, lending);
                check_same(run_of_single_backwards(*one), run_of_single_backwards(*other));
                const auto total = [](const Learner& learner) {
                    std::size_t sum = 0;
                    for (const MemoryItem& item : learner.memory()) sum += item.bytes;
                    return sum;
                };
                CHECK(total(*other) < total(*one));
                if (bfloat16) continue;
                const auto cpu = make_learner(make_cpu_backend({2}), spec, options),
                           lending_cpu = make_learner(make_cpu_backend({2}), spec, lending);
                check_same(run_of_single_backwards(*cpu), run_of_single_backwards(*lending_cpu));
            }
        }
    }
}

TEST(lent_gradients_are_one_backwards) {
    LearnerOptions options;
    options.recompute = options.lend_gradients = true;
    const auto learner = shadow_learner(small_spec(), options);
    const Arrays arrays = make_arrays({11, 17}, 31, 3);
    learner->score(arrays.batch(), {});
    learner->forward(arrays.batch(), {});
    const NamedTensor gradient = learner->gradients().front();
    CHECK_THROWS(export_values(*learner, gradient), "pending");
    learner->backward(arrays.d_logp.data(), nullptr);
    CHECK(relative(export_values(*learner, gradient), std::vector<float>(static_cast<std::size_t>(gradient.tensor.size()), 1.0f)) > 0.0);
    for (const auto& pass :
         {+[](Learner& on, const Arrays& a) { on.score(a.batch(), {}); }, +[](Learner& on, const Arrays& a) { on.forward(a.batch(), {}); },
          +[](Learner& on, const Arrays& a) { on.forward_backward(a.batch(), {}, a.d_logp.data(), nullptr); }}) {
        CHECK_THROWS(pass(*learner, arrays), "one backward per step");
    }
    learner->zero_gradients();
    learner->score(arrays.batch(), {});
    // A step without a backward pass finds zeros, not what was lent.
    StepOptions step;
    step.learning_rate = 1e-3f;
    const StepStats stats = learner->step(step);
    CHECK(stats.applied && stats.grad_norm == 0.0);

    LearnerOptions wrong;
    wrong.max_tokens = 40;
    wrong.lend_gradients = true;
    CHECK_THROWS(Learner(make_cpu_backend({1}), small_spec(), wrong), "lend_gradients: expected recompute");
    wrong = adapter(all_linear());
    wrong.max_tokens = 40;
    wrong.recompute = wrong.lend_gradients = true;
    CHECK_THROWS(Learner(make_cpu_backend({1}), small_spec(), wrong), "an adapter");
}

TEST(gradients_are_zero_after_a_step) {
    for (const LearnerOptions& options : {LearnerOptions{}, adapter(all_linear())}) {
        const auto learner = shadow_learner(small_spec(), options);
        const Arrays arrays = make_arrays({11, 17}, 31, 3);
        const auto all_zero = [&] {
            bool zero = true;
            for (const NamedTensor& named : learner->gradients()) {
                for (const float value : export_values(*learner, named)) zero = zero && value == 0.0f;
            }
            return zero;
        };
        CHECK(all_zero());
        learner->forward_backward(arrays.batch(), {}, arrays.d_logp.data(), nullptr);
        CHECK(!all_zero());
        learner->step({});
        CHECK(all_zero());
        // Ids without a logit, and rows that no token reads, have a gradient of zero whatever was there before.
        learner->forward_backward(arrays.batch(), {}, arrays.d_logp.data(), nullptr);
        learner->zero_gradients();
        CHECK(all_zero());
    }
}

TEST(memory_is_the_devices) {
    auto backend = std::make_shared<ShadowBackend>();
    LearnerOptions options = in_bfloat16({});
    options.max_tokens = 40;
    std::size_t total = 0;
    for (const MemoryItem& item : Learner::plan(small_spec(), options)) total += item.bytes;
    backend->memory = total - 1;
    CHECK_THROWS(Learner(backend, small_spec(), options), "available. Needed for:");
    CHECK_THROWS(Learner(backend, small_spec(), options), "optimizer_state_dtype");
    CHECK_THROWS(Learner(backend, small_spec(), options), "float32 master weights: ");
    backend->memory = total;
    const Learner fits(backend, small_spec(), options);
}

TEST(what_a_device_lacks_is_said) {
    LearnerOptions options;
    options.max_tokens = 40;
    options.recipe.compute = options.recipe.logits = DType::BFloat16;
    CHECK_THROWS(Learner(make_cpu_backend({1}), small_spec(), options), "Learner: recipe: the cpu computes in float32, got bfloat16");
    options.recipe.compute = DType::Float32;
    CHECK_THROWS(Learner(make_cpu_backend({1}), small_spec(), options), "Learner: logits_dtype: expected float32 with the float32 recipe");
    const auto learner = shadow_learner(small_spec(), {});
    CHECK_THROWS(Generator(*learner, {}), "the native sampler runs on the cpu only");
    ShadowBackend backend;
    CHECK_THROWS(backend.decode_linear({}, {}, {}, {}, 1.0f, 0.0f), "decode_linear: the native sampler is not available on cuda");
    CHECK_THROWS(backend.sample(nullptr, nullptr, {}, nullptr, 0), "sample: the native sampler is not available on cuda");
}

TEST(bfloat16_conversion) {
    for (const auto& [value, expected] : std::vector<std::pair<float, float>>{{1.0f, 1.0f},
                                                                              {1.00390625f, 1.0f},        // halfway, to even
                                                                              {1.01171875f, 1.015625f},   // halfway, to even
                                                                              {1.00390637f, 1.0078125f},  // just above
                                                                              {-3.0e38f, -3.0040553e38f},
                                                                              {3.4e38f, INFINITY},
                                                                              {-0.0f, -0.0f}}) {
        const float got = from_bfloat16(to_bfloat16(value));
        CHECK(got == expected || std::abs(got - expected) < 1e-4f * std::abs(expected));
        CHECK_EQ(std::signbit(got), std::signbit(expected));
    }
    CHECK(std::isnan(from_bfloat16(to_bfloat16(std::bit_cast<float>(0x7f800001u)))));
    CHECK(std::isinf(from_bfloat16(to_bfloat16(INFINITY))));
}
