// The source of all kernel sets. Included once by each kernels_<isa>.cpp, which is compiled for that instruction set and defines
// SUROGATE_ISA, a namespace, and SUROGATE_LANES, the floats in a vector. All helpers have internal linkage and no standard template is
// used: otherwise the linker could pick a copy compiled for one instruction set to serve all of them.

#include <cmath>
#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/vector_math.h"

namespace surogate::SUROGATE_ISA {

namespace {

float rmsnorm(float* y, float* sum, const float* x, const float* residual, const float* weight, std::int64_t n, float eps) {
    float squares;
    if (residual == nullptr) {
        if (sum != nullptr) each(n, [&](std::int64_t i, auto part) { part.store(sum + i, part.load(x + i)); });
        squares = sum_over(n, [&](std::int64_t i, auto part) {
            const Vec v = part.load(x + i);
            return v * v;
        });
    } else {
        squares = sum_over(n, [&](std::int64_t i, auto part) {
            const Vec v = part.load(x + i) + part.load(residual + i);
            part.store(sum + i, v);
            return v * v;
        });
        x = sum;
    }
    const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
    each(n, [&](std::int64_t i, auto part) { part.store(y + i, part.load(x + i) * rstd * part.load(weight + i)); });
    return rstd;
}

void rmsnorm_backward(float* dx, float* dweight, const float* dy, const float* x, const float* weight, float rstd, std::int64_t n) {
    const float projection =
        sum_over(n, [&](std::int64_t i, auto part) { return part.load(dy + i) * part.load(weight + i) * part.load(x + i); });
    const float along = projection * rstd * rstd * rstd / static_cast<float>(n);
    if (dweight != nullptr) {
        each(n, [&](std::int64_t i, auto part) {
            part.store(dweight + i, part.load(dweight + i) + part.load(dy + i) * (part.load(x + i) * rstd));
        });
    }
    each(n, [&](std::int64_t i, auto part) {
        part.store(dx + i, part.load(dx + i) + part.load(dy + i) * part.load(weight + i) * rstd - part.load(x + i) * along);
    });
}

void rotate(float* x, const float* cos, const float* sin, std::int64_t half, float direction) {
    each(half, [&](std::int64_t i, auto part) {
        const Vec a = part.load(x + i), b = part.load(x + half + i);
        const Vec c = part.load(cos + i), s = part.load(sin + i) * direction;
        part.store(x + i, a * c - b * s);
        part.store(x + half + i, b * c + a * s);
    });
}

void swiglu(float* y, const float* gate, const float* up, std::int64_t n) {
    each(n, [&](std::int64_t i, auto part) {
        const Vec g = part.load(gate + i);
        part.store(y + i, g * sigmoid(g) * part.load(up + i));
    });
}

void swiglu_backward(float* dgate, float* dup, float* y, const float* dy, const float* gate, const float* up, std::int64_t n) {
    each(n, [&](std::int64_t i, auto part) {
        const Vec g = part.load(gate + i), u = part.load(up + i), d = part.load(dy + i);
        const Vec s = sigmoid(g);
        const Vec silu = g * s;
        if (y != nullptr) part.store(y + i, silu * u);
        part.store(dup + i, d * silu);
        part.store(dgate + i, d * u * (s + silu * (1.0f - s)));
    });
}

void add(float* y, const float* x, std::int64_t n) {
    each(n, [&](std::int64_t i, auto part) { part.store(y + i, part.load(y + i) + part.load(x + i)); });
}

void scale(float* y, const float* x, float factor, std::int64_t n) {
    each(n, [&](std::int64_t i, auto part) { part.store(y + i, part.load(x + i) * factor); });
}

float max(const float* x, std::int64_t n) {
    Vec best[4] = {broadcast(x[0]), broadcast(x[0]), broadcast(x[0]), broadcast(x[0])};
    // A comparison with NaN is false, so NaN on the left is kept and NaN on the right is taken.
    const auto larger = [](Vec a, Vec b) { return select((a >= b) | (a != a), a, b); };
    std::int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k) {
            // A row of logits comes from far away, and the hardware fetches ahead within a page only.
            __builtin_prefetch(x + i + k * kLanes + 1024);
            best[k] = larger(best[k], Full{}.load(x + i + k * kLanes));
        }
    }
    for (; i + kLanes <= n; i += kLanes) best[0] = larger(best[0], Full{}.load(x + i));
    const Vec all = larger(larger(best[0], best[1]), larger(best[2], best[3]));
    float result = all[0];
    for (int k = 1; k < kLanes; ++k) result = result >= all[k] || result != result ? result : all[k];
    for (; i < n; ++i) result = result >= x[i] || result != result ? result : x[i];
    return result;
}

double exp_sum(double* weighted, const float* x, float scale, float shift, std::int64_t n) {
    // Blocks keep the rounding of the float sums small however large the vocabulary is.
    constexpr std::int64_t kBlock = 4096;
    double total = 0.0, total_weighted = 0.0;
    for (std::int64_t begin = 0; begin < n; begin += kBlock) {
        const std::int64_t count = n - begin < kBlock ? n - begin : kBlock;
        const float* block = x + begin;
        if (weighted == nullptr) {
            total += static_cast<double>(
                sum_over(count, [&](std::int64_t i, auto part) { return part.only(exp(part.load(block + i) * scale - shift)); }));
        } else {
            Vec products = {};
            total += static_cast<double>(sum_over(count, [&](std::int64_t i, auto part) {
                const Vec z = part.load(block + i) * scale - shift;
                const Vec e = part.only(exp(z));
                products += e * z;
                return e;
            }));
            total_weighted += static_cast<double>(sum(products));
        }
    }
    if (weighted != nullptr) *weighted = total_weighted;
    return total;
}

void logprob_backward(float* x, float scale, float lse, float entropy, float dlogp, float dentropy, float factor, std::int64_t n) {
    if (dentropy == 0.0f) {
        const float seed = -factor * dlogp;
        each(n, [&](std::int64_t i, auto part) { part.store(x + i, exp(part.load(x + i) * scale - lse) * seed); });
        return;
    }
    each(n, [&](std::int64_t i, auto part) {
        const Vec logp = part.load(x + i) * scale - lse;
        part.store(x + i, exp(logp) * (dlogp + dentropy * (logp + entropy)) * -factor);
    });
}

void fill_uncached(float* y, float value, std::int64_t n) {
    std::int64_t i = 0;
#if SUROGATE_LANES == 16
    for (; i < n && reinterpret_cast<std::uintptr_t>(y + i) % 64 != 0; ++i) y[i] = value;
    for (; i + 16 <= n; i += 16) _mm512_stream_ps(y + i, broadcast(value));
    _mm_sfence();
#endif
    for (; i < n; ++i) y[i] = value;
}

double sum_of_squares(const float* x, std::int64_t n) {
    // In double precision: a gradient's norm spans many magnitudes, and the loop waits for memory anyway.
    double lanes[16] = {};
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __builtin_prefetch(x + i + 1024);  // beyond the page that the hardware fetches ahead in
        for (int k = 0; k < 16; ++k) lanes[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
    }
    for (int k = 0; i < n; ++i, ++k) lanes[k] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    double total = 0.0;
    for (int k = 0; k < 16; ++k) total += lanes[k];
    return total;
}

void adamw(float* w, float* m, float* v, const float* g, float gradient_scale, float beta1, float beta2, float epsilon, float decay,
           float step_size, float v_factor, std::int64_t n) {
    each(n, [&](std::int64_t i, auto part) {
        const Vec gradient = part.load(g + i) * gradient_scale;
        const Vec first = part.load(m + i) * beta1 + gradient * (1.0f - beta1);
        const Vec second = part.load(v + i) * beta2 + gradient * gradient * (1.0f - beta2);
        part.store(m + i, first);
        part.store(v + i, second);
        part.store(w + i, part.load(w + i) * decay - first * step_size / (sqrt(second * v_factor) + epsilon));
    });
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {SUROGATE_NAME, rmsnorm, rmsnorm_backward, rotate,         swiglu, swiglu_backward, add, scale, fill_uncached,
                         max,           exp_sum, logprob_backward, sum_of_squares, adamw};

}  // namespace surogate::SUROGATE_ISA
