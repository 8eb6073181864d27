#include <limits>

#include "backend/cpu/kernels.h"
#include "tests/reference.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

/// All sets that this processor can run; each must give right values, whichever the back-end would choose.
template <typename Body>
void for_each_set(const Body& body) {
    int sets = 0;
    for (const char* name : {"generic", "avx2", "avx512"}) {
        if (const Kernels* kernels = find_kernels(name)) {
            CHECK_EQ(std::string(kernels->name), std::string(name));
            body(*kernels);
            ++sets;
        }
    }
    CHECK(sets > 0);
}

}  // namespace

TEST(unknown_sets_are_not_found) {
    CHECK(find_kernels("none") == nullptr);
    CHECK(find_kernels(best_kernels().name) == &best_kernels());
}

TEST(exp_is_right_to_a_few_units_in_the_last_place) {
    for_each_set([](const Kernels& k) {
        std::vector<float> x, y;
        for (double at = -87.3; at < 88.7; at += 0.00317) x.push_back(static_cast<float>(at));
        for (double at = 1e-10; at < 1.0; at *= 1.7) {
            x.push_back(static_cast<float>(at));
            x.push_back(static_cast<float>(-at));
        }
        y.resize(x.size());
        k.exp_shifted(y.data(), x.data(), 0.0f, static_cast<std::int64_t>(x.size()));
        for (std::size_t i = 0; i < x.size(); ++i) {
            const double expected = std::exp(static_cast<double>(x[i]));
            CHECK_NEAR(y[i], expected, 2.5e-7 * expected);
        }
    });
}

TEST(exp_at_its_ends) {
    for_each_set([](const Kernels& k) {
        const float infinity = std::numeric_limits<float>::infinity();
        const float x[] = {-infinity, -1e30f, -104.0f, -88.0f, 0.0f, 88.7f, 89.0f, 1e30f, infinity, std::nanf("")};
        float y[10];
        k.exp_shifted(y, x, 0.0f, 10);
        for (int i = 0; i < 3; ++i) CHECK_EQ(y[i], 0.0f);
        CHECK_NEAR(y[3], 0.0, 1.2e-38);
        CHECK_EQ(y[4], 1.0f);
        CHECK_NEAR(y[5] / std::exp(88.7f), 1.0, 1e-5);
        for (int i = 6; i < 9; ++i) CHECK(y[i] > 3.0e38f);
        CHECK(std::isnan(y[9]));
    });
}

TEST(reductions_of_all_lengths) {
    for_each_set([](const Kernels& k) {
        for (std::int64_t n = 1; n < 150; ++n) {
            Data x = Data::dense(1, n, 1), y = Data::dense(1, n, 2);
            double dot = 0.0, largest = -1e30, sum = 0.0, weighted = 0.0, squares = 0.0;
            for (std::int64_t i = 0; i < n; ++i) {
                const double a = static_cast<double>(x(0, i));
                dot += a * static_cast<double>(y(0, i));
                largest = std::max(largest, a);
                squares += a * a;
                sum += std::exp(0.5 * a - 0.25);
                weighted += std::exp(0.5 * a - 0.25) * (0.5 * a - 0.25);
            }
            const float* at = x.tensor().f32();
            CHECK_NEAR(k.dot(at, y.tensor().f32(), n), dot, 1e-6 * static_cast<double>(n));
            CHECK_EQ(static_cast<double>(k.max(at, n)), largest);
            CHECK_NEAR(k.sum_of_squares(at, n), squares, 1e-9);
            double got_weighted = 0.0;
            CHECK_NEAR(k.exp_sum(&got_weighted, at, 0.5f, 0.25f, n), sum, 1e-6 * sum);
            CHECK_NEAR(got_weighted, weighted, 2e-6 * sum);
            CHECK_NEAR(k.exp_sum(nullptr, at, 0.5f, 0.25f, n), sum, 1e-6 * sum);
            std::vector<float> e(static_cast<std::size_t>(n) + 1, 9.0f);
            const double total = static_cast<double>(k.exp_shifted(e.data(), at, 0.0f, n));
            double by_hand = 0.0;
            for (std::int64_t i = 0; i < n; ++i) by_hand += static_cast<double>(e[static_cast<std::size_t>(i)]);
            CHECK_NEAR(total, by_hand, 1e-6 * by_hand);
            CHECK_EQ(e.back(), 9.0f);
            for (const std::int64_t where : {std::int64_t{0}, n / 2, n - 1}) {
                Data bad = x;
                bad(0, where) = std::nanf("");
                CHECK(std::isnan(k.max(bad.tensor().f32(), n)));
            }
        }
    });
}

TEST(sets_agree_on_rows_of_all_lengths) {
    const Kernels& reference = *find_kernels("generic");
    for_each_set([&](const Kernels& k) {
        for (std::int64_t n = 1; n < 70; ++n) {
            const auto close = [&](const char* what, const Data& a, const Data& b) { check_close(what, a, Exact(b), 1e-6); };
            Data x = Data::random(1, n, 1), w = Data::random(1, n, 2), d = Data::random(1, n, 3), a(1, n), b(1, n), aw(1, n), bw(1, n);
            const float rstd = k.rmsnorm(a.tensor().f32(), nullptr, x.tensor().f32(), nullptr, w.tensor().f32(), n, 1e-6f);
            CHECK_NEAR(rstd, reference.rmsnorm(b.tensor().f32(), nullptr, x.tensor().f32(), nullptr, w.tensor().f32(), n, 1e-6f),
                       1e-6 * static_cast<double>(rstd));
            close("rmsnorm", a, b);
            k.rmsnorm_backward(a.tensor().f32(), aw.tensor().f32(), d.tensor().f32(), x.tensor().f32(), w.tensor().f32(), rstd, n);
            reference.rmsnorm_backward(b.tensor().f32(), bw.tensor().f32(), d.tensor().f32(), x.tensor().f32(), w.tensor().f32(), rstd, n);
            close("rmsnorm_backward", a, b);
            close("dweight", aw, bw);
            k.swiglu(a.tensor().f32(), x.tensor().f32(), w.tensor().f32(), n);
            reference.swiglu(b.tensor().f32(), x.tensor().f32(), w.tensor().f32(), n);
            close("swiglu", a, b);
            k.swiglu_backward(a.tensor().f32(), aw.tensor().f32(), d.tensor().f32(), x.tensor().f32(), w.tensor().f32(), n);
            reference.swiglu_backward(b.tensor().f32(), bw.tensor().f32(), d.tensor().f32(), x.tensor().f32(), w.tensor().f32(), n);
            close("swiglu_backward", a, b);
            close("dup", aw, bw);
            a = b = x;
            k.logprob_backward(a.tensor().f32(), 0.7f, 2.0f, 1.5f, 0.3f, 0.2f, 0.7f, n);
            reference.logprob_backward(b.tensor().f32(), 0.7f, 2.0f, 1.5f, 0.3f, 0.2f, 0.7f, n);
            close("logprob_backward", a, b);
        }
    });
}
