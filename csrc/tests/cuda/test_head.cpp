#include "tests/cuda/device.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

struct Size {
    std::int64_t rows, vocab, valid, pad;
};
const Size kSizes[] = {{1, 2, 0, 0}, {5, 37, 30, 1}, {64, 1000, 0, 8}, {33, 1003, 999, 5}, {20, 40000, 39999, 0}, {9, 151936, 151669, 0}};

}  // namespace

TEST(logprob_forward_and_backward) {
    for (const DType dtype : kTypes) {
        for (const Size& s : kSizes) {
            for (const float temperature : {1.0f, 0.7f}) {
                const std::int64_t valid = s.valid == 0 ? s.vocab : s.valid;
                Host logits = Host::random(s.rows, s.vocab, 1, dtype, 4.0f);
                logits(0, valid - 1) = 40.0f;  // one row where nearly all is one token's
                std::vector<std::int32_t> targets(static_cast<std::size_t>(s.rows));
                for (std::size_t i = 0; i < targets.size(); ++i)
                    targets[i] =
                        static_cast<std::int32_t>((i * 7919 + static_cast<std::size_t>(valid) - 1) % static_cast<std::size_t>(valid));
                Host logp(1, s.rows), entropy(1, s.rows), lse(1, s.rows), seed = Host::random(1, s.rows, 2, DType::Float32),
                                                                          entropy_seed = Host::random(1, s.rows, 3, DType::Float32);
                if (s.rows > 2) seed(0, 1) = entropy_seed(0, 1) = 0.0f;
                const OnDevice glogits(gpu(), logits, dtype, s.pad), gtargets(gpu(), targets), gseed(gpu(), seed, DType::Float32, 0),
                    gentropy_seed(gpu(), entropy_seed, DType::Float32, 0);
                const OnDevice glogp = OnDevice::poisoned(gpu(), 1, s.rows, DType::Float32, 0),
                               gentropy = OnDevice::poisoned(gpu(), 1, s.rows, DType::Float32, 0),
                               glse = OnDevice::poisoned(gpu(), 1, s.rows, DType::Float32, 0),
                               again = OnDevice::poisoned(gpu(), 1, s.rows, DType::Float32, 0);
                cpu().logprob_forward(logp.tensor(), entropy.tensor(), lse.tensor(), logits.tensor(), ids_of(targets), temperature,
                                      s.valid);
                gpu().logprob_forward(glogp.tensor(), gentropy.tensor(), glse.tensor(), glogits.tensor(), gtargets.tensor(), temperature,
                                      s.valid);
                gpu().logprob_forward(again.tensor(), {}, glse.tensor(), glogits.tensor(), gtargets.tensor(), temperature, s.valid);
                const std::string name = name_of(dtype);
                // Differences of numbers of the logits' size.
                const double absolute = 1e-6 * norm(logits) / temperature;
                compare(shape_name("logprob_forward logp", {s.rows, s.vocab, s.valid, s.pad}, name.c_str()), glogp, logp, 1e-6, absolute);
                compare(shape_name("logprob_forward logp, no entropy", {s.rows, s.vocab, s.valid, s.pad}, name.c_str()), again, logp, 1e-6,
                        absolute);
                compare(shape_name("logprob_forward lse", {s.rows, s.vocab, s.valid, s.pad}, name.c_str()), glse, lse, 1e-6);
                compare(shape_name("logprob_forward entropy", {s.rows, s.vocab, s.valid, s.pad}, name.c_str()), gentropy, entropy, 2e-6,
                        absolute);

                // p = exp(x / temperature - lse): either side rounds lse, and maybe x / temperature, to float32, each by 2^-24 of itself,
                // so that p may differ by p 2^-22 |lse| between the two. Where p is nearly 1 and the gradient, 1 - p, nearly nothing, that
                // is all there is. The seed of the entropy multiplies it by p (|log p + H| + 1) / p, at most 5 here.
                double cancellation = 0.0;
                for (std::int64_t r = 0; r < s.rows; ++r) {
                    const double seeds =
                        std::abs(static_cast<double>(seed(0, r))) + 5.0 * std::abs(static_cast<double>(entropy_seed(0, r)));
                    const double row = seeds / static_cast<double>(temperature) * std::abs(static_cast<double>(lse(0, r))) / 4194304.0;
                    cancellation += row * row;
                }
                cancellation = std::sqrt(cancellation);
                const auto gradient_bound = [&](DType type, const Host& expected) {
                    return 5e-6 + (type == DType::BFloat16 ? rounding_to_bfloat16(expected) : 0.0);
                };
                for (const bool with_entropy : {false, true}) {
                    Host d(s.rows, s.vocab);
                    const auto given = [&](const Tensor& t) { return with_entropy ? t : Tensor{}; };
                    const char* note = with_entropy ? "entropy" : "";
                    cpu().logprob_backward(d.tensor(), logits.tensor(), lse.tensor(), given(entropy.tensor()), ids_of(targets),
                                           seed.tensor(), given(entropy_seed.tensor()), temperature, s.valid);
                    for (const DType out_type : kTypes) {
                        const OnDevice gd = OnDevice::poisoned(gpu(), s.rows, s.vocab, out_type, s.pad);
                        gpu().logprob_backward(gd.tensor(), glogits.tensor(), glse.tensor(), given(gentropy.tensor()), gtargets.tensor(),
                                               gseed.tensor(), given(gentropy_seed.tensor()), temperature, s.valid);
                        compare(shape_name(("logprob_backward of " + name).c_str(), {s.rows, s.vocab, s.valid, s.pad}, note), gd, d,
                                gradient_bound(out_type, d), cancellation);
                    }
                    // In place, and narrower in place: each row's gradient at the start of its logits.
                    const OnDevice same(gpu(), logits, dtype, s.pad);
                    gpu().logprob_backward(same.tensor(), same.tensor(), glse.tensor(), given(gentropy.tensor()), gtargets.tensor(),
                                           gseed.tensor(), given(gentropy_seed.tensor()), temperature, s.valid);
                    compare(shape_name("logprob_backward in place", {s.rows, s.vocab, s.valid, s.pad}, note), same, d,
                            gradient_bound(dtype, d), cancellation);
                    if (dtype != DType::Float32) continue;
                    const OnDevice wide(gpu(), logits, dtype, s.pad);
                    Tensor narrow = wide.tensor();
                    narrow.dtype = DType::BFloat16;
                    narrow.stride *= 2;
                    gpu().logprob_backward(narrow, wide.tensor(), glse.tensor(), given(gentropy.tensor()), gtargets.tensor(),
                                           gseed.tensor(), given(gentropy_seed.tensor()), temperature, s.valid);
                    const OnDevice copied = OnDevice::poisoned(gpu(), s.rows, s.vocab, DType::Float32, 0);
                    gpu().copy(copied.tensor(), narrow);
                    compare(shape_name("logprob_backward in place, narrower", {s.rows, s.vocab, s.valid, s.pad}, note), copied, d,
                            gradient_bound(DType::BFloat16, d), cancellation);
                }
            }
        }
    }
}

TEST(logprob_shows_what_is_not_finite) {
    Host logits = Host::random(3, 500, 1, DType::Float32);
    logits(0, 7) = std::numeric_limits<float>::quiet_NaN();
    logits(1, 7) = std::numeric_limits<float>::infinity();
    logits(2, 7) = -std::numeric_limits<float>::infinity();  // an id that cannot be
    const OnDevice glogits(gpu(), logits, DType::Float32, 0), targets(gpu(), std::vector<std::int32_t>{1, 1, 1}),
        logp(gpu(), Host(1, 3), DType::Float32, 0), entropy(gpu(), Host(1, 3), DType::Float32, 0),
        lse(gpu(), Host(1, 3), DType::Float32, 0);
    gpu().logprob_forward(logp.tensor(), entropy.tensor(), lse.tensor(), glogits.tensor(), targets.tensor(), 1.0f, 0);
    const Host got = logp.read(), h = entropy.read();
    CHECK(!std::isfinite(got(0, 0)) && !std::isfinite(got(0, 1)));
    CHECK(std::isfinite(got(0, 2)) && std::isfinite(h(0, 2)));
}

TEST(logprob_refuses_bad_arguments) {
    const OnDevice logits(gpu(), Host(2, 10), DType::Float32, 0), other(gpu(), Host(1, 2), DType::Float32, 0),
        outside(gpu(), std::vector<std::int32_t>{1, 10});
    gpu().logprob_forward(other.tensor(), {}, other.tensor(), logits.tensor(), outside.tensor(), 1.0f, 0);
    CHECK_THROWS(gpu().synchronize(), "targets");
    CHECK_THROWS(gpu().logprob_forward(other.tensor(), {}, other.tensor(), logits.tensor(), outside.tensor(), 0.0f, 0), "temperature");
    // Gradients packed more densely than the rows that they would overwrite cannot be right for all rows.
    Tensor packed = logits.tensor();
    packed.dtype = DType::BFloat16;
    CHECK_THROWS(gpu().logprob_backward(packed, logits.tensor(), other.tensor(), {}, outside.tensor(), other.tensor(), {}, 1.0f, 0),
                 "overlap");
}
