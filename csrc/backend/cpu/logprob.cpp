#include <algorithm>
#include <cmath>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"

namespace surogate {

namespace {

constexpr std::int64_t kRowGrain = 2;  // a row is a whole vocabulary

std::int64_t check_logprob(const char* op, const Tensor& logits, const Tensor& lse, const Tensor& targets, float temperature,
                           std::int64_t valid_vocab) {
    check(op, "logits", logits, logits.rows, logits.columns);
    check_vector(op, "lse", lse, logits.rows);
    check_vector(op, "targets", targets, logits.rows, DType::Int32);
    require(temperature > 0.0f && std::isfinite(temperature), op, "temperature", "a number above 0", temperature);
    require(valid_vocab >= 0 && valid_vocab <= logits.columns, op, "valid_vocab", logits.columns, valid_vocab);
    const std::int64_t valid = valid_vocab == 0 ? logits.columns : valid_vocab;
    check_indices(op, "targets", targets, valid);
    return valid;
}

}  // namespace

void CpuBackend::logprob_forward(const Tensor& logp, const Tensor& entropy, const Tensor& lse, const Tensor& logits, const Tensor& targets,
                                 float temperature, std::int64_t valid_vocab) {
    const char* op = "logprob_forward";
    const std::int64_t valid = check_logprob(op, logits, lse, targets, temperature, valid_vocab);
    check_vector(op, "logp", logp, logits.rows);
    const bool with_entropy = entropy.data != nullptr;
    if (with_entropy) check_vector(op, "entropy", entropy, logits.rows);
    const float scale = 1.0f / temperature;
    pool_.parallel_ranges(logits.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const float* x = row(logits, i);
            const float largest = kernels_.max(x, valid) * scale;
            double weighted = 0.0;
            const double sum = kernels_.exp_sum(with_entropy ? &weighted : nullptr, x, scale, largest, valid);
            const double log_sum = std::log(sum);
            lse.f32()[i] = static_cast<float>(static_cast<double>(largest) + log_sum);
            const double shifted = static_cast<double>(x[targets.i32()[i]] * scale - largest);
            logp.f32()[i] = static_cast<float>(shifted - log_sum);
            // H = -sum p log p, log p = (z - largest) - log_sum
            if (with_entropy) entropy.f32()[i] = static_cast<float>(log_sum - weighted / sum);
        }
    });
}

void CpuBackend::logprob_backward(const Tensor& dlogits, const Tensor& logits, const Tensor& lse, const Tensor& entropy,
                                  const Tensor& targets, const Tensor& dlogp, const Tensor& dentropy, float temperature,
                                  std::int64_t valid_vocab) {
    const char* op = "logprob_backward";
    const std::int64_t valid = check_logprob(op, logits, lse, targets, temperature, valid_vocab);
    check(op, "dlogits", dlogits, logits.rows, logits.columns);
    const bool in_place = dlogits.data == logits.data;
    if (in_place) require(dlogits.stride == logits.stride, op, "dlogits", "the logits' stride where the two are one", dlogits.stride);
    check_vector(op, "dlogp", dlogp, logits.rows);
    const bool with_entropy = dentropy.data != nullptr;
    if (with_entropy) {
        check_vector(op, "dentropy", dentropy, logits.rows);
        check_vector(op, "entropy", entropy, logits.rows);
    }
    const float scale = 1.0f / temperature;
    pool_.parallel_ranges(logits.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            float* x = row(dlogits, i);
            const float seed = dlogp.f32()[i], entropy_seed = with_entropy ? dentropy.f32()[i] : 0.0f;
            if (seed == 0.0f && entropy_seed == 0.0f) {
                std::fill_n(x, logits.columns, 0.0f);
                continue;
            }
            if (!in_place) std::copy_n(row(logits, i), valid, x);
            const float own_entropy = with_entropy ? entropy.f32()[i] : 0.0f;
            kernels_.logprob_backward(x, scale, lse.f32()[i], own_entropy, seed, entropy_seed, scale, valid);
            x[targets.i32()[i]] += scale * seed;
            std::fill(x + valid, x + logits.columns, 0.0f);
        }
    });
}

}  // namespace surogate
