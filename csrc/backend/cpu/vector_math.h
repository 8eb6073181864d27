// Vectors of SUROGATE_LANES floats for the kernels of one instruction set (see kernels_impl.h), through the compiler's vector extension, so
// that the same lines serve every processor. Each set is a translation unit of its own with its own namespace.
#pragma once

#include <cstdint>

#if SUROGATE_LANES == 16
#include <immintrin.h>
#endif

namespace surogate::SUROGATE_ISA {

namespace {

constexpr int kLanes = SUROGATE_LANES;
typedef float Vec __attribute__((vector_size(SUROGATE_LANES * 4)));
typedef std::int32_t IntVec __attribute__((vector_size(SUROGATE_LANES * 4)));

[[gnu::always_inline]] inline Vec broadcast(float x) { return x - Vec{}; }

[[gnu::always_inline]] inline Vec select(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }

/// How a whole vector is read and written.
struct Full {
    [[gnu::always_inline]] Vec load(const float* p) const {
        Vec v;
        __builtin_memcpy(&v, p, sizeof(v));
        return v;
    }
    [[gnu::always_inline]] void store(float* p, Vec v) const { __builtin_memcpy(p, &v, sizeof(v)); }
    [[gnu::always_inline]] Vec only(Vec v) const { return v; }
};

/// The same for the first `count` lanes at the end of a row; the others read as zero.
struct Tail {
    std::int64_t count;
#if SUROGATE_LANES == 16
    [[gnu::always_inline]] __mmask16 mask() const { return static_cast<__mmask16>((1u << count) - 1u); }
    [[gnu::always_inline]] Vec load(const float* p) const { return _mm512_maskz_loadu_ps(mask(), p); }
    [[gnu::always_inline]] void store(float* p, Vec v) const { _mm512_mask_storeu_ps(p, mask(), v); }
    /// Zeros beyond the end, for what does not map zero to zero.
    [[gnu::always_inline]] Vec only(Vec v) const { return _mm512_maskz_mov_ps(mask(), v); }
#else
    [[gnu::always_inline]] Vec load(const float* p) const {
        float lanes[kLanes] = {};
        for (std::int64_t i = 0; i < count; ++i) lanes[i] = p[i];
        return Full{}.load(lanes);
    }
    [[gnu::always_inline]] void store(float* p, Vec v) const {
        float lanes[kLanes];
        Full{}.store(lanes, v);
        for (std::int64_t i = 0; i < count; ++i) p[i] = lanes[i];
    }
    /// Zeros beyond the end, for what does not map zero to zero.
    [[gnu::always_inline]] Vec only(Vec v) const {
        float lanes[kLanes];
        Full{}.store(lanes, v);
        return load(lanes);
    }
#endif
};

/// Calls body(index, Full or Tail) for each vector of n floats.
template <typename Body>
[[gnu::always_inline]] inline void each(std::int64_t n, const Body& body) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, Full{});
    if (i < n) body(i, Tail{n - i});
}

/// Lanes in pairs, so that the order is the same at every call and the error small.
[[gnu::always_inline]] inline float sum(Vec v) {
    float lanes[kLanes];
    Full{}.store(lanes, v);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

/// Sum over n floats of the vectors that body(index, Full or Tail) returns; four running sums hide the adder's latency.
template <typename Body>
[[gnu::always_inline]] inline float sum_over(std::int64_t n, const Body& body) {
    Vec a = {}, b = {}, c = {}, d = {};
    std::int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        a += body(i, Full{});
        b += body(i + kLanes, Full{});
        c += body(i + 2 * kLanes, Full{});
        d += body(i + 3 * kLanes, Full{});
    }
    for (; i + kLanes <= n; i += kLanes) a += body(i, Full{});
    if (i < n) b += body(i, Tail{n - i});
    return sum((a + b) + (c + d));
}

/// exp to about one unit in the last place: 2^k * e^r with |r| <= ln 2 / 2, e^r by a polynomial (coefficients of Cephes, S. Moshier).
/// Below the smallest normal number the result is 0; NaN stays NaN.
[[gnu::always_inline]] inline Vec exp(Vec x) {
    const Vec low = broadcast(-87.33654f), high = broadcast(88.72284f);
    const IntVec underflow = x < low;
    Vec y = select(underflow, low, x);
    y = select(y > high, high, y);
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Vec shifted = y * 1.44269504f + round;
    const Vec k = shifted - round;
    const Vec r = (y - k * 0.693359375f) + k * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if SUROGATE_LANES == 16
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, k);
#else
    // 2^k in two factors, since k = 128 itself is no exponent of a float.
    IntVec bits;
    __builtin_memcpy(&bits, &shifted, sizeof(bits));
    const IntVec power = bits - 0x4B400000;
    const IntVec half = power >> 1;
    const IntVec first_bits = (half + 127) << 23, second_bits = (power - half + 127) << 23;
    Vec first, second;
    __builtin_memcpy(&first, &first_bits, sizeof(first));
    __builtin_memcpy(&second, &second_bits, sizeof(second));
    const Vec result = p * first * second;
    return select(underflow, Vec{}, result);
#endif
}

/// 1 / (1 + exp(-x))
[[gnu::always_inline]] inline Vec sigmoid(Vec x) {
#if SUROGATE_LANES == 16
    // A division takes as long as all the rest: an estimate of 14 bits and one step of Newton's method instead. The bound keeps the
    // denominator finite; NaN passes, as a comparison with it is false.
    const Vec bound = broadcast(-87.0f);
    const Vec denominator = 1.0f + exp(-select(x < bound, bound, x));
    const Vec estimate = _mm512_maskz_rcp14_ps(0xFFFF, denominator);
    return estimate * (2.0f - denominator * estimate);
#else
    return 1.0f / (1.0f + exp(-x));
#endif
}

[[gnu::always_inline]] inline Vec sqrt(Vec x) {
    Vec y;
    for (int i = 0; i < kLanes; ++i) y[i] = __builtin_sqrtf(x[i]);
    return y;
}

}  // namespace

}  // namespace surogate::SUROGATE_ISA
