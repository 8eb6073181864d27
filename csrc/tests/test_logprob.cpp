#include "tests/reference.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

struct Case {
    std::int64_t rows, vocab, valid;
    double temperature;
};
const Case kCases[] = {{1, 1, 0, 1.0}, {3, 7, 0, 1.0}, {5, 33, 30, 0.7}, {4, 100, 1, 1.0}, {7, 257, 250, 1.5}, {2, 9000, 8999, 0.9}};

struct Inputs {
    explicit Inputs(const Case& c, double scale = 3.0)
        : logits(Data::random(c.rows, c.vocab, 1, scale)), valid(c.valid == 0 ? c.vocab : c.valid) {
        for (std::int64_t r = 0; r < c.rows; ++r) targets.push_back(static_cast<std::int32_t>((r * 31 + 3) % valid));
    }
    Data logits;
    std::int64_t valid;
    std::vector<std::int32_t> targets;
};

/// Columns: log-probability, entropy, log of the sum of exponentials.
Exact naive(const Inputs& in, const Exact& logits, double temperature) {
    Exact result(logits.rows(), 3);
    for (std::int64_t r = 0; r < logits.rows(); ++r) {
        double largest = -1e300, sum = 0.0;
        for (std::int64_t v = 0; v < in.valid; ++v) largest = std::max(largest, logits(r, v) / temperature);
        for (std::int64_t v = 0; v < in.valid; ++v) sum += std::exp(logits(r, v) / temperature - largest);
        const double lse = largest + std::log(sum);
        double entropy = 0.0;
        for (std::int64_t v = 0; v < in.valid; ++v) {
            const double logp = logits(r, v) / temperature - lse;
            entropy -= std::exp(logp) * logp;
        }
        result(r, 0) = logits(r, in.targets[static_cast<std::size_t>(r)]) / temperature - lse;
        result(r, 1) = entropy;
        result(r, 2) = lse;
    }
    return result;
}

struct Stats {
    explicit Stats(std::int64_t rows) : logp(1, rows, 0), entropy(1, rows, 0), lse(1, rows, 0) {}
    Data logp, entropy, lse;
};

}  // namespace

TEST(logprob_forward) {
    for (const Case& c : kCases) {
        Inputs in(c);
        Stats s(c.rows), without(c.rows);
        const Exact expected = naive(in, Exact(in.logits), c.temperature);
        backend().logprob_forward(s.logp.tensor(), s.entropy.tensor(), s.lse.tensor(), in.logits.tensor(), ids_of(in.targets),
                                  static_cast<float>(c.temperature), c.valid);
        for (std::int64_t r = 0; r < c.rows; ++r) {
            CHECK_NEAR(s.logp(0, r), expected(r, 0), 3e-6 * (1.0 + std::abs(expected(r, 0))));
            CHECK_NEAR(s.entropy(0, r), expected(r, 1), 3e-6 * (1.0 + std::abs(expected(r, 1))));
            CHECK_NEAR(s.lse(0, r), expected(r, 2), 3e-6 * (1.0 + std::abs(expected(r, 2))));
        }
        backend().logprob_forward(without.logp.tensor(), {}, without.lse.tensor(), in.logits.tensor(), ids_of(in.targets),
                                  static_cast<float>(c.temperature), c.valid);
        CHECK(without.logp.same_bits(s.logp) && without.lse.same_bits(s.lse));
    }
}

TEST(logprob_backward) {
    for (const Case& c : kCases) {
        for (const bool with_entropy : {false, true}) {
            Inputs in(c);
            Stats s(c.rows);
            const Exact before(in.logits);
            Data dlogp = Data::dense(1, c.rows, 5), dentropy = Data::dense(1, c.rows, 6);
            Exact seed(c.rows, 3);
            for (std::int64_t r = 0; r < c.rows; ++r) {
                seed(r, 0) = static_cast<double>(dlogp(0, r));
                seed(r, 1) = with_entropy ? static_cast<double>(dentropy(0, r)) : 0.0;
            }
            const float temperature = static_cast<float>(c.temperature);
            backend().logprob_forward(s.logp.tensor(), s.entropy.tensor(), s.lse.tensor(), in.logits.tensor(), ids_of(in.targets),
                                      temperature, c.valid);
            backend().logprob_backward(in.logits.tensor(), in.logits.tensor(), s.lse.tensor(), s.entropy.tensor(), ids_of(in.targets),
                                       dlogp.tensor(), with_entropy ? dentropy.tensor() : Tensor{}, temperature, c.valid);
            if (in.valid == 1) {
                for (std::int64_t r = 0; r < c.rows; ++r) {
                    for (std::int64_t v = 0; v < c.vocab; ++v) CHECK_NEAR(in.logits(r, v), 0.0, 1e-6);
                }
            } else if (c.vocab < 1000) {
                check_close("logits", in.logits,
                            numeric_gradient(before, seed, [&](const Exact& at) { return naive(in, at, c.temperature); }), 5e-6);
            }
            for (std::int64_t r = 0; r < c.rows; ++r) {
                double sum = 0.0;  // a softmax's gradient sums to zero
                for (std::int64_t v = 0; v < c.vocab; ++v) {
                    sum += static_cast<double>(in.logits(r, v));
                    if (v >= in.valid) CHECK_EQ(in.logits(r, v), 0.0f);
                }
                CHECK_NEAR(sum, 0.0, 1e-5);
            }
        }
    }
}

TEST(logprob_with_extreme_logits) {
    const Case c{1, 40, 0, 1.0};
    Inputs in(c);
    in.targets[0] = 0;
    for (const float top : {80.0f, 1000.0f, -1000.0f}) {
        in.logits.fill([&](std::int64_t, std::int64_t v) { return v == 0 ? top : top - 200.0; });
        Stats s(1);
        backend().logprob_forward(s.logp.tensor(), s.entropy.tensor(), s.lse.tensor(), in.logits.tensor(), ids_of(in.targets), 1.0f, 0);
        CHECK_NEAR(s.logp(0, 0), 0.0, 1e-7);
        CHECK_NEAR(s.entropy(0, 0), 0.0, 1e-7);
        in.targets[0] = 5;
        backend().logprob_forward(s.logp.tensor(), {}, s.lse.tensor(), in.logits.tensor(), ids_of(in.targets), 1.0f, 0);
        CHECK_NEAR(s.logp(0, 0), -200.0, 1e-4);
        in.targets[0] = 0;
    }
}

TEST(logprob_shows_what_is_not_finite) {
    for (const std::int64_t where : {0, 17, 38, 39}) {
        const Case c{1, 40, 0, 1.0};
        Inputs in(c);
        in.logits(0, where) = std::nanf("");
        Stats s(1);
        backend().logprob_forward(s.logp.tensor(), s.entropy.tensor(), s.lse.tensor(), in.logits.tensor(), ids_of(in.targets), 1.0f, 0);
        CHECK(std::isnan(s.logp(0, 0)) && std::isnan(s.entropy(0, 0)));
        Data dlogp = Data::dense(1, 1, 5);
        backend().logprob_backward(in.logits.tensor(), in.logits.tensor(), s.lse.tensor(), {}, ids_of(in.targets), dlogp.tensor(), {}, 1.0f,
                                   0);
        CHECK(std::isnan(in.logits(0, 3)));
    }
}

TEST(logprob_of_a_row_without_a_seed_gives_zeros) {
    const Case c{2, 40, 0, 1.0};
    Inputs in(c);
    in.logits(0, 3) = std::nanf("");
    Stats s(2);
    Data dlogp(1, 2, 0);
    dlogp(0, 1) = 1.0f;
    backend().logprob_forward(s.logp.tensor(), {}, s.lse.tensor(), in.logits.tensor(), ids_of(in.targets), 1.0f, 0);
    backend().logprob_backward(in.logits.tensor(), in.logits.tensor(), s.lse.tensor(), {}, ids_of(in.targets), dlogp.tensor(), {}, 1.0f, 0);
    for (std::int64_t v = 0; v < 40; ++v) CHECK_EQ(in.logits(0, v), 0.0f);
    CHECK(in.logits(1, in.targets[1]) > 0.0f);
}

TEST(logprob_bits_do_not_depend_on_threads) {
    check_any_thread_count([](CpuBackend& cpu) {
        const Case c{37, 5003, 5000, 0.8};
        Inputs in(c);
        Stats s(c.rows);
        Data dlogp = Data::dense(1, c.rows, 5), dentropy = Data::dense(1, c.rows, 6);
        cpu.logprob_forward(s.logp.tensor(), s.entropy.tensor(), s.lse.tensor(), in.logits.tensor(), ids_of(in.targets), 0.8f, 5000);
        cpu.logprob_backward(in.logits.tensor(), in.logits.tensor(), s.lse.tensor(), s.entropy.tensor(), ids_of(in.targets), dlogp.tensor(),
                             dentropy.tensor(), 0.8f, 5000);
        return std::vector<Data>{s.logp, s.entropy, s.lse, in.logits};
    });
}

TEST(logprob_takes_empty_inputs_and_refuses_bad_arguments) {
    Data none(0, 9), empty(1, 0, 0);
    std::vector<std::int32_t> no_targets;
    backend().logprob_forward(empty.tensor(), empty.tensor(), empty.tensor(), none.tensor(), ids_of(no_targets), 1.0f, 0);
    const Case c{2, 9, 0, 1.0};
    Inputs in(c);
    Stats s(2);
    const auto forward = [&](float temperature, std::int64_t valid) {
        backend().logprob_forward(s.logp.tensor(), {}, s.lse.tensor(), in.logits.tensor(), ids_of(in.targets), temperature, valid);
    };
    CHECK_THROWS(forward(0.0f, 0), "temperature");
    CHECK_THROWS(forward(NAN, 0), "temperature");
    CHECK_THROWS(forward(1.0f, 10), "valid_vocab");
    in.targets[1] = 8;
    CHECK_THROWS(forward(1.0f, 8), "logprob_forward: targets[1]: expected 0 to 7, got 8");
    in.targets[1] = -100;
    CHECK_THROWS(forward(1.0f, 0), "targets[1]");
}
