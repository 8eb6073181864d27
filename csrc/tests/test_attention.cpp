#include <algorithm>

#include "tests/reference.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

struct Case {
    std::vector<std::int32_t> bounds;
    std::int64_t heads, kv_heads, size, window;
    AttentionShape shape() const { return {heads, kv_heads, size, static_cast<float>(1.0 / std::sqrt(static_cast<double>(size))), window}; }
    std::int64_t tokens() const { return bounds.back(); }
    std::int64_t columns() const { return (heads + 2 * kv_heads) * size; }
    Segments segments() const { return {bounds.data(), static_cast<std::int64_t>(bounds.size()) - 1}; }
};

/// What a naive evaluation gives: out and lse side by side, so that both can be differentiated.
Exact naive(const Case& c, const Exact& qkv, Exact* lse = nullptr) {
    Exact out(qkv.rows(), c.heads * c.size);
    if (lse != nullptr) *lse = Exact(qkv.rows(), c.heads);
    const std::int64_t keys = c.heads * c.size, values = (c.heads + c.kv_heads) * c.size;
    const double scale = static_cast<double>(c.shape().scale);
    for (std::size_t s = 0; s + 1 < c.bounds.size(); ++s) {
        for (std::int64_t t = c.bounds[s]; t < c.bounds[s + 1]; ++t) {
            const std::int64_t first = c.window > 0 ? std::max<std::int64_t>(c.bounds[s], t - c.window + 1) : c.bounds[s];
            for (std::int64_t h = 0; h < c.heads; ++h) {
                const std::int64_t k = h / (c.heads / c.kv_heads) * c.size;
                std::vector<double> p;
                double largest = -1e300, sum = 0.0;
                for (std::int64_t u = first; u <= t; ++u) {
                    double score = 0.0;
                    for (std::int64_t i = 0; i < c.size; ++i) score += qkv(t, h * c.size + i) * qkv(u, keys + k + i);
                    p.push_back(score * scale);
                    largest = std::max(largest, p.back());
                }
                for (double& value : p) sum += value = std::exp(value - largest);
                for (std::int64_t u = first; u <= t; ++u) {
                    for (std::int64_t i = 0; i < c.size; ++i) {
                        out(t, h * c.size + i) += p[static_cast<std::size_t>(u - first)] / sum * qkv(u, values + k + i);
                    }
                }
                if (lse != nullptr) (*lse)(t, h) = largest + std::log(sum);
            }
        }
    }
    return out;
}

/// Analytic gradient in double precision, for sizes where differences would take too long.
Exact naive_backward(const Case& c, const Exact& qkv, const Exact& dout) {
    Exact gradient(qkv.rows(), qkv.columns());
    const std::int64_t keys = c.heads * c.size, values = (c.heads + c.kv_heads) * c.size;
    const double scale = static_cast<double>(c.shape().scale);
    Exact lse;
    naive(c, qkv, &lse);
    for (std::size_t s = 0; s + 1 < c.bounds.size(); ++s) {
        for (std::int64_t t = c.bounds[s]; t < c.bounds[s + 1]; ++t) {
            const std::int64_t first = c.window > 0 ? std::max<std::int64_t>(c.bounds[s], t - c.window + 1) : c.bounds[s];
            for (std::int64_t h = 0; h < c.heads; ++h) {
                const std::int64_t k = h / (c.heads / c.kv_heads) * c.size;
                std::vector<double> p, dp;
                double delta = 0.0;
                for (std::int64_t u = first; u <= t; ++u) {
                    double score = 0.0, seed = 0.0;
                    for (std::int64_t i = 0; i < c.size; ++i) {
                        score += qkv(t, h * c.size + i) * qkv(u, keys + k + i);
                        seed += dout(t, h * c.size + i) * qkv(u, values + k + i);
                    }
                    p.push_back(std::exp(score * scale - lse(t, h)));
                    dp.push_back(seed);
                    delta += p.back() * seed;
                }
                for (std::int64_t u = first; u <= t; ++u) {
                    const double weight = p[static_cast<std::size_t>(u - first)];
                    const double ds = weight * (dp[static_cast<std::size_t>(u - first)] - delta) * scale;
                    for (std::int64_t i = 0; i < c.size; ++i) {
                        gradient(t, h * c.size + i) += ds * qkv(u, keys + k + i);
                        gradient(u, keys + k + i) += ds * qkv(t, h * c.size + i);
                        gradient(u, values + k + i) += weight * dout(t, h * c.size + i);
                    }
                }
            }
        }
    }
    return gradient;
}

// Single tokens, empty segments, grouped heads, windows of one, below, at and above block sizes.
const Case kSmall[] = {
    {{0, 1}, 1, 1, 4, 0},  {{0, 1, 3, 3, 8}, 2, 1, 3, 0}, {{0, 11, 12}, 4, 2, 5, 0},
    {{0, 13}, 3, 3, 4, 1}, {{0, 6, 15}, 6, 2, 3, 4},      {{0, 9}, 2, 2, 8, 100},
};
const Case kLarge[] = {
    {{0, 5, 300, 301, 420}, 9, 3, 64, 0},
    {{0, 600}, 4, 1, 16, 0},
    {{0, 530, 700}, 2, 2, 24, 40},
    {{0, 1100}, 2, 1, 8, 300},
    {{0, 700}, 16, 1, 8, 513},
    {{0, 1300}, 1, 1, 8, 0},
};

struct Results {
    Data out, lse, dqkv;
};

Results run(CpuBackend& cpu, const Case& c, double scale = 1.0) {
    Data qkv = Data::random(c.tokens(), c.columns(), 1, scale), dout = Data::random(c.tokens(), c.heads * c.size, 2);
    Results r{Data(c.tokens(), c.heads * c.size), Data(c.tokens(), c.heads), Data::random(c.tokens(), c.columns(), 3)};
    cpu.attention_forward(r.out.tensor(), r.lse.tensor(), qkv.tensor(), c.segments(), c.shape());
    cpu.attention_backward(r.dqkv.tensor(), dout.tensor(), r.out.tensor(), r.lse.tensor(), qkv.tensor(), c.segments(), c.shape());
    return r;
}

}  // namespace

TEST(attention_small) {
    for (const Case& c : kSmall) {
        const Exact qkv(Data::random(c.tokens(), c.columns(), 1)), dout(Data::random(c.tokens(), c.heads * c.size, 2));
        const Results r = run(backend(), c);
        Exact lse;
        check_close("out", r.out, naive(c, qkv, &lse));
        check_close("lse", r.lse, lse);
        check_close("dqkv", r.dqkv, numeric_gradient(qkv, dout, [&](const Exact& at) { return naive(c, at); }), 5e-6);
    }
}

TEST(attention_large) {
    for (const Case& c : kLarge) {
        const Exact qkv(Data::random(c.tokens(), c.columns(), 1)), dout(Data::random(c.tokens(), c.heads * c.size, 2));
        const Results r = run(backend(), c);
        Exact lse;
        check_close("out", r.out, naive(c, qkv, &lse));
        check_close("lse", r.lse, lse);
        check_close("dqkv", r.dqkv, naive_backward(c, qkv, dout), 5e-6);
    }
}

TEST(attention_reference_gradient_is_that_of_differences) {
    const Case& c = kSmall[4];
    const Exact qkv(Data::random(c.tokens(), c.columns(), 1)), dout(Data::random(c.tokens(), c.heads * c.size, 2));
    const Exact analytic = naive_backward(c, qkv, dout),
                numeric = numeric_gradient(qkv, dout, [&](const Exact& at) { return naive(c, at); });
    for (std::int64_t r = 0; r < qkv.rows(); ++r) {
        for (std::int64_t i = 0; i < qkv.columns(); ++i) CHECK_NEAR(analytic(r, i), numeric(r, i), 1e-7);
    }
}

TEST(attention_with_large_scores) {
    // Scores in the hundreds: without the running maximum, exp would overflow.
    const Case c{{0, 310}, 2, 1, 16, 0};
    const Exact qkv(Data::random(c.tokens(), c.columns(), 1, 8.0));
    check_close("out", run(backend(), c, 8.0).out, naive(c, qkv), 2e-5);
}

TEST(attention_segments_do_not_see_each_other) {
    const Case packed{{0, 200, 500}, 4, 2, 16, 0};
    Data qkv = Data::random(500, packed.columns(), 1), out(500, 64), lse(500, 4), alone(300, 64), alone_lse(300, 4);
    backend().attention_forward(out.tensor(), lse.tensor(), qkv.tensor(), packed.segments(), packed.shape());
    const std::vector<std::int32_t> bounds = {0, 300};
    backend().attention_forward(alone.tensor(), alone_lse.tensor(), qkv.tensor().row_range(200, 300), {bounds.data(), 1}, packed.shape());
    for (std::int64_t t = 0; t < 300; ++t) {
        for (std::int64_t i = 0; i < 64; ++i) CHECK_EQ(out(200 + t, i), alone(t, i));
    }
    for (std::int64_t t = 0; t < 200; ++t) {
        for (std::int64_t i = 0; i < packed.columns(); ++i) qkv(t, i) = std::nanf("");
    }
    Data again(500, 64);
    backend().attention_forward(again.tensor(), lse.tensor(), qkv.tensor(), packed.segments(), packed.shape());
    for (std::int64_t t = 200; t < 500; ++t) {
        for (std::int64_t i = 0; i < 64; ++i) CHECK_EQ(again(t, i), out(t, i));
    }
}

TEST(attention_shows_what_is_not_finite) {
    const Case c{{0, 400}, 2, 1, 8, 0};
    Data qkv = Data::random(400, c.columns(), 1), out(400, 16), lse(400, 2);
    qkv(100, 16) = std::nanf("");  // a key
    backend().attention_forward(out.tensor(), lse.tensor(), qkv.tensor(), c.segments(), c.shape());
    CHECK(std::isfinite(lse(99, 0)) && std::isfinite(out(99, 0)));
    for (std::int64_t t = 100; t < 400; ++t) CHECK(std::isnan(lse(t, 0)) && std::isnan(lse(t, 1)) && std::isnan(out(t, 0)));
}

TEST(attention_bits_do_not_depend_on_threads) {
    for (const Case& c : kLarge) {
        check_any_thread_count([&](CpuBackend& cpu) {
            const Results r = run(cpu, c);
            return std::vector<Data>{r.out, r.lse, r.dqkv};
        });
    }
}

TEST(attention_takes_empty_inputs_and_refuses_bad_arguments) {
    const Case none{{0}, 2, 1, 4, 0};
    run(backend(), none);
    Data qkv(5, 16), out(5, 8), lse(5, 2);
    AttentionShape shape{2, 1, 4, 1.0f, 0};
    const std::vector<std::int32_t> short_bounds = {0, 4}, backwards = {0, 4, 3, 5}, late = {1, 5};
    const auto forward = [&](const std::vector<std::int32_t>& bounds) {
        backend().attention_forward(out.tensor(), lse.tensor(), qkv.tensor(), {bounds.data(), static_cast<std::int64_t>(bounds.size()) - 1},
                                    shape);
    };
    CHECK_THROWS(forward(short_bounds), "cu_seqlens: expected 5, got 4");
    CHECK_THROWS(forward(backwards), "cu_seqlens[2]");
    CHECK_THROWS(forward(late), "cu_seqlens");
    shape.heads = 3;
    CHECK_THROWS(forward({0, 5}), "attention_forward: qkv");
    shape.kv_heads = 2;
    CHECK_THROWS(forward({0, 5}), "a multiple of kv_heads");
}
