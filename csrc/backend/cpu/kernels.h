#pragma once

#include <cstdint>

namespace surogate {

/// The vectorised inner loops, each over one row or one span in the memory of one thread. They are compiled once per instruction set from
/// the same source (kernels_impl.h); a back-end takes the widest set that the processor has. `n` counts floats; outputs come first.
struct Kernels {
    const char* name;

    /// y = weight * s / rms(s), s = x + residual (residual null: x), which is kept in `sum` unless that is null; returns 1 / rms.
    float (*rmsnorm)(float* y, float* sum, const float* x, const float* residual, const float* weight, std::int64_t n, float eps);
    /// dx += the gradient with respect to x; dweight += (unless null)
    void (*rmsnorm_backward)(float* dx, float* dweight, const float* dy, const float* x, const float* weight, float rstd, std::int64_t n);

    /// Rotates the pairs (x[i], x[i + half]) by the angle whose cosine and sine are given; `direction` -1 turns back.
    void (*rotate)(float* x, const float* cos, const float* sin, std::int64_t half, float direction);

    void (*swiglu)(float* y, const float* gate, const float* up, std::int64_t n);
    /// y, unless null, as by swiglu
    void (*swiglu_backward)(float* dgate, float* dup, float* y, const float* dy, const float* gate, const float* up, std::int64_t n);

    void (*add)(float* y, const float* x, std::int64_t n);                  // y += x
    void (*scale)(float* y, const float* x, float factor, std::int64_t n);  // y = factor * x; may be in place
    /// Past the caches, which it neither reads nor fills: for memory that will not be used soon.
    void (*fill_uncached)(float* y, float value, std::int64_t n);
    float (*max)(const float* x, std::int64_t n);  // n > 0; NaN if any is
    /// Sum of e = exp(scale * x - shift), and of e * (scale * x - shift) in `weighted` unless that is null.
    double (*exp_sum)(double* weighted, const float* x, float scale, float shift, std::int64_t n);
    /// x = -factor * p * (dlogp + dentropy * (log p + entropy)), log p = scale * x - lse
    void (*logprob_backward)(float* x, float scale, float lse, float entropy, float dlogp, float dentropy, float factor, std::int64_t n);

    double (*sum_of_squares)(const float* x, std::int64_t n);
    /// AdamW; decay = 1 - lr * weight decay, step_size = lr / (1 - beta1^t), v_factor = 1 / (1 - beta2^t)
    void (*adamw)(float* w, float* m, float* v, const float* g, float gradient_scale, float beta1, float beta2, float epsilon, float decay,
                  float step_size, float v_factor, std::int64_t n);
};

/// The widest that this processor has and that was compiled in.
const Kernels& best_kernels();

/// One set by name ("generic", "avx2", "avx512"), or null where the processor or the build lacks it. The tests compare them.
const Kernels* find_kernels(const char* name);

}  // namespace surogate
