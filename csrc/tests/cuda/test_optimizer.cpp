#include "tests/cuda/device.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

AdamWOptions numbers(std::int64_t step, std::uint64_t seed) {
    AdamWOptions options{};
    options.learning_rate = 1e-2f;
    options.beta1 = 0.9f;
    options.beta2 = 0.95f;
    options.epsilon = 1e-8f;
    options.weight_decay = 0.1f;
    options.step = step;
    options.gradient_scale = 0.5f;
    options.seed = seed;
    return options;
}

}  // namespace

TEST(adamw_float32_and_master_weights) {
    for (const std::int64_t size : {1, 7, 1000, 100003}) {
        for (const DType gradient_type : kTypes) {
            Host w = Host::random(1, size, 1, DType::Float32), m(1, size), v(1, size);
            const OnDevice gw(gpu(), w, DType::Float32, 0), gm(gpu(), m, DType::Float32, 0), gv(gpu(), v, DType::Float32, 0);
            // The same weights again, bfloat16 with a float32 master.
            const OnDevice copy(gpu(), w, DType::BFloat16, 0), master(gpu(), w, DType::Float32, 0), cm(gpu(), m, DType::Float32, 0),
                cv(gpu(), v, DType::Float32, 0);
            for (std::int64_t step = 1; step <= 3; ++step) {
                Host g = Host::random(1, size, 10 + static_cast<std::uint64_t>(step), gradient_type);
                const OnDevice gg(gpu(), g, gradient_type, 0);
                cpu().adamw(w.tensor(), {}, m.tensor(), v.tensor(), g.tensor(), numbers(step, 0));
                gpu().adamw(gw.tensor(), {}, gm.tensor(), gv.tensor(), gg.tensor(), numbers(step, 0));
                gpu().adamw(copy.tensor(), master.tensor(), cm.tensor(), cv.tensor(), gg.tensor(), numbers(step, 0));
            }
            compare(shape_name("adamw weight", {size}, name_of(gradient_type)), gw, w, 1e-6);
            compare(shape_name("adamw m", {size}, name_of(gradient_type)), gm, m, 1e-6);
            compare(shape_name("adamw v", {size}, name_of(gradient_type)), gv, v, 1e-6);
            compare(shape_name("adamw master", {size}, name_of(gradient_type)), master, w, 1e-6);
            Host rounded = master.read();
            for (float& value : rounded.values) value = to_bf16(value);
            compare(shape_name("adamw weight beside its master", {size}, name_of(gradient_type)), copy, rounded, 0.0);
        }
    }
}

TEST(adamw_rounds_stochastically_and_without_bias) {
    // Weights just above 1 and updates of a fifth of their spacing: rounding to nearest would never move them.
    const std::int64_t size = 1 << 20;
    const auto run = [&](std::uint64_t seed, std::int64_t step) {
        const OnDevice w(gpu(), Host(1, size, 1.5f), DType::BFloat16, 0), m(gpu(), Host(1, size), DType::BFloat16, 0),
            v(gpu(), Host(1, size), DType::BFloat16, 0), g(gpu(), Host(1, size, 1.0f), DType::BFloat16, 0);
        AdamWOptions options = numbers(step, seed);
        options.beta1 = options.beta2 = 0.5f;
        options.weight_decay = 0.0f;
        options.gradient_scale = 1.0f;
        options.epsilon = 0.0f;
        options.learning_rate = 0.2f * 0.0078125f;
        gpu().adamw(w.tensor(), {}, m.tensor(), v.tensor(), g.tensor(), options);
        return w.read();
    };
    const Host first = run(1, 1), same = run(1, 1), other_seed = run(2, 1);
    CHECK(first.values == same.values);
    CHECK(first.values != other_seed.values);
    double moved = 0.0;
    for (const float value : first.values) {
        CHECK(value == 1.5f || value == 1.5f - 0.0078125f);
        moved += value == 1.5f ? 0.0 : 1.0;
    }
    const double share = moved / static_cast<double>(size);
    std::printf("  %-74s %.5f (0.2 expected)\n", "share of weights rounded down", share);
    CHECK_NEAR(share, 0.2, 0.002);  // five standard deviations
}

TEST(adamw_bfloat16_states_keep_their_mean) {
    const std::int64_t size = 1 << 18;
    for (const DType weight_type : kTypes) {
        const Host g(1, size, 1.0f), zero(1, size);  // m = 0.1 and v = 0.05 lie between two bfloat16
        const OnDevice w(gpu(), Host(1, size, 1.0f), weight_type, 0), m(gpu(), zero, DType::BFloat16, 0),
            v(gpu(), zero, DType::BFloat16, 0), gg(gpu(), g, DType::Float32, 0);
        AdamWOptions options = numbers(1, 5);
        options.gradient_scale = 1.0f;
        gpu().adamw(w.tensor(), {}, m.tensor(), v.tensor(), gg.tensor(), options);
        double got_m = 0.0, want_m = 0.0, got_v = 0.0, want_v = 0.0;
        const Host ms = m.read(), vs = v.read();
        for (std::size_t i = 0; i < g.values.size(); ++i) {
            const double x = static_cast<double>(g.values[i]);
            got_m += static_cast<double>(ms.values[i]);
            got_v += static_cast<double>(vs.values[i]);
            want_m += 0.1 * x;
            want_v += 0.05 * x * x;
        }
        std::printf("  %-74s %.2e %.2e (<= 5e-5)\n", "relative error of the means of m and v", std::abs(got_m / want_m - 1.0),
                    std::abs(got_v / want_v - 1.0));
        CHECK_NEAR(got_m / want_m, 1.0, 5e-5);
        CHECK_NEAR(got_v / want_v, 1.0, 5e-5);
    }
}

TEST(sum_of_squares) {
    for (const DType dtype : kTypes) {
        for (const auto& [rows, columns, pad] :
             {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1, 1, 0}, {1, 999, 0}, {1, 3000001, 0}, {17, 50, 3}, {64, 512, 0}}) {
            Host x = Host::random(rows, columns, 1, dtype);
            const OnDevice gx(gpu(), x, dtype, pad);
            const double got = gpu().sum_of_squares(gx.tensor()), expected = cpu().sum_of_squares(x.tensor());
            const double error = std::abs(got / expected - 1.0);
            std::printf("  %-74s %-8s %.2e (<= 1e-7)\n", shape_name("sum_of_squares", {rows, columns, pad}).c_str(), name_of(dtype), error);
            CHECK(error <= 1e-7);
            CHECK(got == gpu().sum_of_squares(gx.tensor()));
        }
    }
    Host x(1, 10);
    x(0, 3) = std::numeric_limits<float>::quiet_NaN();
    const OnDevice gx(gpu(), x, DType::BFloat16, 0);
    CHECK(std::isnan(gpu().sum_of_squares(gx.tensor())));
}
