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

namespace {

/// exp(x) as the kernels compute it in whole vectors: a sum of 64 equal values, which is exact.
double exp_of(const Kernels& k, float x) {
    const std::vector<float> copies(64, x);
    return k.exp_sum(nullptr, copies.data(), 1.0f, 0.0f, 64) / 64.0;
}

}  // namespace

TEST(exp_is_right_to_a_few_units_in_the_last_place) {
    for_each_set([](const Kernels& k) {
        std::vector<float> x;
        for (double at = -87.3; at < 84.0; at += 0.00317) x.push_back(static_cast<float>(at));
        for (double at = 1e-10; at < 1.0; at *= 1.7) {
            x.push_back(static_cast<float>(at));
            x.push_back(static_cast<float>(-at));
        }
        for (const float at : x) {
            const double expected = std::exp(static_cast<double>(at));
            CHECK_NEAR(exp_of(k, at), expected, 2.5e-7 * expected);
        }
    });
}

TEST(exp_at_its_ends) {
    for_each_set([](const Kernels& k) {
        const float infinity = std::numeric_limits<float>::infinity();
        for (const float x : {-infinity, -1e30f, -104.0f}) CHECK_EQ(exp_of(k, x), 0.0);
        CHECK_NEAR(exp_of(k, -88.0f), 0.0, 1.2e-38);
        CHECK_EQ(exp_of(k, 0.0f), 1.0);
        const float largest = 88.7f;
        CHECK_NEAR(k.exp_sum(nullptr, &largest, 1.0f, 0.0f, 1) / std::exp(88.7), 1.0, 1e-5);
        for (const float x : {89.0f, 1e30f, infinity}) CHECK(k.exp_sum(nullptr, &x, 1.0f, 0.0f, 1) > 3.0e38);
        CHECK(std::isnan(exp_of(k, std::nanf(""))));
    });
}

TEST(reductions_of_all_lengths) {
    for_each_set([](const Kernels& k) {
        for (std::int64_t n = 1; n < 150; ++n) {
            Data x = Data::dense(1, n, 1);
            double largest = -1e30, sum = 0.0, weighted = 0.0, squares = 0.0;
            for (std::int64_t i = 0; i < n; ++i) {
                const double a = static_cast<double>(x(0, i));
                largest = std::max(largest, a);
                squares += a * a;
                sum += std::exp(0.5 * a - 0.25);
                weighted += std::exp(0.5 * a - 0.25) * (0.5 * a - 0.25);
            }
            const float* at = x.tensor().f32();
            CHECK_EQ(static_cast<double>(k.max(at, n)), largest);
            CHECK_NEAR(k.sum_of_squares(at, n), squares, 1e-9);
            double got_weighted = 0.0;
            CHECK_NEAR(k.exp_sum(&got_weighted, at, 0.5f, 0.25f, n), sum, 1e-6 * sum);
            CHECK_NEAR(got_weighted, weighted, 2e-6 * sum);
            CHECK_NEAR(k.exp_sum(nullptr, at, 0.5f, 0.25f, n), sum, 1e-6 * sum);
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
            k.swiglu_backward(a.tensor().f32(), aw.tensor().f32(), nullptr, d.tensor().f32(), x.tensor().f32(), w.tensor().f32(), n);
            reference.swiglu_backward(b.tensor().f32(), bw.tensor().f32(), nullptr, d.tensor().f32(), x.tensor().f32(), w.tensor().f32(),
                                      n);
            close("swiglu_backward", a, b);
            close("dup", aw, bw);
            a = b = x;
            k.logprob_backward(a.tensor().f32(), 0.7f, 2.0f, 1.5f, 0.3f, 0.2f, 0.7f, n);
            reference.logprob_backward(b.tensor().f32(), 0.7f, 2.0f, 1.5f, 0.3f, 0.2f, 0.7f, n);
            close("logprob_backward", a, b);
        }
    });
}
