#include <immintrin.h>

#include <cstdint>

#include "backend/cpu/packed_gemm.h"

namespace surogate::avx512 {

namespace {

constexpr int kHeight = 14;  // 14 x 2 sums, 2 vectors of b and one of a: all but one of the 32 registers
constexpr int kWidth = 32;
constexpr int kAhead = 512;  // how many floats of b are fetched ahead

[[gnu::always_inline]] inline __mmask16 first_lanes(std::int64_t count) {
    return count >= 16 ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << count) - 1u);
}

/// Turns 16 vectors into the 16 columns that they form.
[[gnu::always_inline]] inline void transpose(__m512 (&r)[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    const auto low = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
    const auto high = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
    for (int i = 0; i < 16; i += 4) {
        r[i] = low(t[i], t[i + 2]);
        r[i + 1] = high(t[i], t[i + 2]);
        r[i + 2] = low(t[i + 1], t[i + 3]);
        r[i + 3] = high(t[i + 1], t[i + 3]);
    }
    // Now lane group g of r[4 i + j] holds rows 4 i to 4 i + 3 of column 4 g + j.
    for (int j = 0; j < 4; ++j) {
        const __m512 even_top = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), odd_top = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xDD);
        const __m512 even_end = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88), odd_end = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xDD);
        t[j] = _mm512_shuffle_f32x4(even_top, even_end, 0x88);
        t[4 + j] = _mm512_shuffle_f32x4(odd_top, odd_end, 0x88);
        t[8 + j] = _mm512_shuffle_f32x4(even_top, even_end, 0xDD);
        t[12 + j] = _mm512_shuffle_f32x4(odd_top, odd_end, 0xDD);
    }
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

/// out[p * out_stride + i] = in[i * in_stride + p] for `lines` <= 16 lines i of `length` values; lanes past the lines read as zero and are
/// written where `store_mask` says.
[[gnu::always_inline]] inline void turn(float* out, std::int64_t out_stride, const float* in, std::int64_t in_stride, std::int64_t lines,
                                        std::int64_t length, __mmask16 store_mask) {
    for (std::int64_t p = 0; p < length; p += 16) {
        const std::int64_t count = length - p < 16 ? length - p : 16;
        const __mmask16 mask = first_lanes(count);
        __m512 r[16];
        for (int i = 0; i < 16; ++i) {
            r[i] = i < lines ? _mm512_maskz_loadu_ps(mask, in + i * in_stride + p) : _mm512_setzero_ps();
            __builtin_prefetch(in + i * in_stride + p + 64);
        }
        transpose(r);
        if (count == 16) {
            for (int i = 0; i < 16; ++i) _mm512_mask_storeu_ps(out + (p + i) * out_stride, store_mask, r[i]);
        } else {
            for (std::int64_t i = 0; i < count; ++i) _mm512_mask_storeu_ps(out + (p + i) * out_stride, store_mask, r[i]);
        }
    }
}

void pack_rows(float* panels, std::int64_t panel_stride, const Operand& a, std::int64_t rows, std::int64_t height, std::int64_t k) {
    if (!a.transposed) {
        for (std::int64_t r = 0; r < rows; r += height) {
            const std::int64_t high = rows - r < height ? rows - r : height;
            turn(panels + r / height * panel_stride, height, a.data + r * a.stride, a.stride, high, k, first_lanes(high));
        }
        return;
    }
    for (std::int64_t p = 0; p < k; ++p) {
        const float* line = a.data + p * a.stride;
        float* out = panels + p * height;
        for (std::int64_t r = 0; r < rows; r += height, out += panel_stride) {
            const __mmask16 mask = first_lanes(rows - r < height ? rows - r : height);
            _mm512_mask_storeu_ps(out, mask, _mm512_maskz_loadu_ps(mask, line + r));
        }
    }
}

void pack_columns(float* panels, std::int64_t panel_stride, const Operand& b, std::int64_t columns, std::int64_t k) {
    if (b.transposed) {
        for (std::int64_t first = 0; first < columns; first += 16) {
            const std::int64_t count = columns - first < 16 ? columns - first : 16;
            float* out = panels + first / kWidth * panel_stride + first % kWidth;
            turn(out, kWidth, b.data + first * b.stride, b.stride, count, k, 0xFFFF);
        }
        return;
    }
    for (std::int64_t p = 0; p < k; ++p) {
        const float* line = b.data + p * b.stride;
        for (std::int64_t first = 0; first < columns; first += 16) {
            float* out = panels + first / kWidth * panel_stride + first % kWidth;
            _mm512_storeu_ps(out + p * kWidth, _mm512_maskz_loadu_ps(first_lanes(columns - first), line + first));
        }
    }
}

/// ROWS x (16 VECTORS) elements of c.
template <int ROWS, int VECTORS>
void tile(float* c, std::int64_t c_stride, const float* a, std::int64_t a_step, const float* b, std::int64_t columns, std::int64_t k,
          float alpha, float beta) {
    __m512 sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i) {
        for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_setzero_ps();
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(c + i * c_stride + 16 * v, 1);
    }
    for (std::int64_t p = 0; p < k; ++p) {
        __m512 line[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            __builtin_prefetch(b + 16 * v + kAhead);
            line[v] = _mm512_loadu_ps(b + 16 * v);
        }
#pragma GCC unroll 14
        for (int i = 0; i < ROWS; ++i) {
            const __m512 x = _mm512_set1_ps(a[i]);
            for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_fmadd_ps(x, line[v], sums[i][v]);
        }
        a += a_step;
        b += kWidth;
    }
    const __m512 factor = _mm512_set1_ps(alpha), old = _mm512_set1_ps(beta);
    for (int v = 0; v < VECTORS; ++v) {
        const __mmask16 mask = first_lanes(columns - 16 * v);
        if (beta == 0.0f) {
            for (int i = 0; i < ROWS; ++i) _mm512_mask_storeu_ps(c + i * c_stride + 16 * v, mask, _mm512_mul_ps(sums[i][v], factor));
        } else {
            for (int i = 0; i < ROWS; ++i) {
                float* at = c + i * c_stride + 16 * v;
                const __m512 before = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, at), old);
                _mm512_mask_storeu_ps(at, mask, _mm512_fmadd_ps(sums[i][v], factor, before));
            }
        }
    }
}

using Tile = void (*)(float*, std::int64_t, const float*, std::int64_t, const float*, std::int64_t, std::int64_t, float, float);

template <int VECTORS>
constexpr Tile kTiles[kHeight] = {tile<1, VECTORS>,  tile<2, VECTORS>,  tile<3, VECTORS>,  tile<4, VECTORS>, tile<5, VECTORS>,
                                  tile<6, VECTORS>,  tile<7, VECTORS>,  tile<8, VECTORS>,  tile<9, VECTORS>, tile<10, VECTORS>,
                                  tile<11, VECTORS>, tile<12, VECTORS>, tile<13, VECTORS>, tile<14, VECTORS>};

void multiply(float* c, std::int64_t c_stride, const float* a, std::int64_t height, const float* b, std::int64_t rows, std::int64_t columns,
              std::int64_t k, float alpha, float beta) {
    (columns > 16 ? kTiles<2> : kTiles<1>)[rows - 1](c, c_stride, a, height, b, columns, k, alpha, beta);
}

}  // namespace

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {kHeight, kWidth, pack_rows, pack_columns, multiply};

}  // namespace surogate::avx512
