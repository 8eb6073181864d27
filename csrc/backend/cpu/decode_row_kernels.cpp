#include "backend/cpu/decode_row_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One body, three instruction sets. Functions carry their target themselves, so that the file needs no compiler flags and the rest of the
// program runs on any processor. Whatever takes or returns vectors is always inlined: GCC 12 may clear the upper halves of a vector that a
// function returns (seen under AddressSanitizer).
namespace surogate::cpu {

namespace portable {
namespace {

#define SUROGATE_TARGET
#define SUROGATE_INLINE inline

struct Lanes {
    float v[16];
};

template <typename Function>
inline Lanes map(Function function) {
    Lanes result;
    for (int i = 0; i < 16; ++i) result.v[i] = function(i);
    return result;
}

inline Lanes set1(float x) {
    return map([&](int) { return x; });
}
inline Lanes load(const float* p) {
    Lanes result;
    std::memcpy(result.v, p, sizeof(result.v));
    return result;
}
inline Lanes load_partial(const float* p, std::int64_t count) {
    Lanes result = {};
    std::memcpy(result.v, p, static_cast<std::size_t>(count) * sizeof(float));
    return result;
}
inline void store(float* p, Lanes x) { std::memcpy(p, x.v, sizeof(x.v)); }
inline void store_partial(float* p, Lanes x, std::int64_t count) { std::memcpy(p, x.v, static_cast<std::size_t>(count) * sizeof(float)); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Lanes mul(Lanes a, Lanes b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes add(Lanes a, Lanes b) {
    return map([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes sub(Lanes a, Lanes b) {
    return map([&](int i) { return a.v[i] - b.v[i]; });
}
inline Lanes max(Lanes a, Lanes b) {
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes round(Lanes x) {
    return map([&](int i) { return std::nearbyintf(x.v[i]); });
}
/// x * 2^n, n whole and in [-126, 127]; anything where n is not
inline Lanes scale_by_power_of_two(Lanes x, Lanes n) {
    return map([&](int i) {
        const auto bits = static_cast<std::uint32_t>((n.v[i] > -127.0f ? static_cast<std::int32_t>(n.v[i]) : -127) + 127) << 23;
        float power;
        std::memcpy(&power, &bits, sizeof(power));
        return x.v[i] * power;
    });
}
inline Lanes zero_where_less(Lanes value, Lanes x, float bound) {
    return map([&](int i) { return x.v[i] < bound ? 0.0f : value.v[i]; });
}
inline float reduce_add(Lanes x) {
    float v[16];
    std::memcpy(v, x.v, sizeof(v));
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
}
inline float reduce_max(Lanes x) { return *std::max_element(x.v, x.v + 16); }

#include "backend/cpu/decode_row_kernels.inc"

#undef SUROGATE_TARGET
#undef SUROGATE_INLINE

}  // namespace
}  // namespace portable

#if defined(__x86_64__)

namespace avx2 {
namespace {

#define SUROGATE_TARGET __attribute__((target("avx2,fma")))
#define SUROGATE_INLINE __attribute__((target("avx2,fma"), always_inline)) inline

struct Lanes {
    __m256 low, high;
};

SUROGATE_INLINE Lanes set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SUROGATE_INLINE Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SUROGATE_INLINE void store(float* p, Lanes x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
SUROGATE_INLINE Lanes load_partial(const float* p, std::int64_t count) {
    alignas(32) float v[16] = {};
    std::memcpy(v, p, static_cast<std::size_t>(count) * sizeof(float));
    return load(v);
}
SUROGATE_INLINE void store_partial(float* p, Lanes x, std::int64_t count) {
    alignas(32) float v[16];
    store(v, x);
    std::memcpy(p, v, static_cast<std::size_t>(count) * sizeof(float));
}
SUROGATE_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
SUROGATE_INLINE Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
SUROGATE_INLINE Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
SUROGATE_INLINE Lanes sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
SUROGATE_INLINE Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
SUROGATE_INLINE Lanes round(Lanes x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, nearest), _mm256_round_ps(x.high, nearest)};
}
SUROGATE_INLINE __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
SUROGATE_INLINE Lanes scale_by_power_of_two(Lanes x, Lanes n) {
    return {_mm256_mul_ps(x.low, power_of_two(n.low)), _mm256_mul_ps(x.high, power_of_two(n.high))};
}
SUROGATE_INLINE Lanes zero_where_less(Lanes value, Lanes x, float bound) {
    const __m256 limit = _mm256_set1_ps(bound);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.low, limit, _CMP_LT_OQ), value.low),
            _mm256_andnot_ps(_mm256_cmp_ps(x.high, limit, _CMP_LT_OQ), value.high)};
}
SUROGATE_INLINE float reduce_add(Lanes x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
SUROGATE_INLINE float reduce_max(Lanes x) {
    alignas(32) float v[16];
    store(v, x);
    return *std::max_element(v, v + 16);
}

#include "backend/cpu/decode_row_kernels.inc"

#undef SUROGATE_TARGET
#undef SUROGATE_INLINE

}  // namespace
}  // namespace avx2

namespace avx512 {
namespace {

#define SUROGATE_TARGET __attribute__((target("avx512f")))
#define SUROGATE_INLINE __attribute__((target("avx512f"), always_inline)) inline

// The zero-masked forms with a full mask compile to the plain instructions, and spare GCC 12's false warnings about them.
constexpr __mmask16 kAll = 0xffff;

struct Lanes {
    __m512 v;
};

SUROGATE_INLINE __mmask16 first_lanes(std::int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }
SUROGATE_INLINE Lanes set1(float x) { return {_mm512_set1_ps(x)}; }
SUROGATE_INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
SUROGATE_INLINE void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
SUROGATE_INLINE Lanes load_partial(const float* p, std::int64_t count) { return {_mm512_maskz_loadu_ps(first_lanes(count), p)}; }
SUROGATE_INLINE void store_partial(float* p, Lanes x, std::int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), x.v); }
SUROGATE_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SUROGATE_INLINE Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
SUROGATE_INLINE Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
SUROGATE_INLINE Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
SUROGATE_INLINE Lanes max(Lanes a, Lanes b) { return {_mm512_maskz_max_ps(kAll, a.v, b.v)}; }
SUROGATE_INLINE Lanes round(Lanes x) { return {_mm512_maskz_roundscale_ps(kAll, x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
SUROGATE_INLINE Lanes scale_by_power_of_two(Lanes x, Lanes n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_maskz_cvtps_epi32(kAll, n.v), _mm512_set1_epi32(127));
    return {_mm512_mul_ps(x.v, _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, exponent, 23)))};
}
SUROGATE_INLINE Lanes zero_where_less(Lanes value, Lanes x, float bound) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_NLT_UQ);
    return {_mm512_maskz_mov_ps(keep, value.v)};
}
SUROGATE_INLINE float reduce_add(Lanes x) {
    alignas(64) float v[16];
    store(v, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
}
SUROGATE_INLINE float reduce_max(Lanes x) {
    alignas(64) float v[16];
    store(v, x);
    return *std::max_element(v, v + 16);
}

#include "backend/cpu/decode_row_kernels.inc"

#undef SUROGATE_TARGET
#undef SUROGATE_INLINE

}  // namespace
}  // namespace avx512

const RowKernels& row_kernels_avx2() { return avx2::kKernels; }

const RowKernels& row_kernels_avx512() { return avx512::kKernels; }

#endif

const RowKernels& row_kernels_portable() { return portable::kKernels; }

const RowKernels& row_kernels() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return row_kernels_avx512();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return row_kernels_avx2();
#endif
    return row_kernels_portable();
}

}  // namespace surogate::cpu
