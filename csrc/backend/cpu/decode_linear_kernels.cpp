#include "backend/cpu/decode_linear_kernels.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace surogate::cpu {

namespace {

/// Multiply-adds of one chain before its sum moves to the total.
constexpr std::int64_t kChain = 256;

template <int Rows>
void tile_portable(const LinearBlock& b, std::int64_t j, std::int64_t panel) {
    const float* x = b.panels + panel * b.k * kPanelRows;
    float total[Rows][kPanelRows] = {};
    for (std::int64_t k0 = 0; k0 < b.k; k0 += kChain) {
        float sum[Rows][kPanelRows] = {};
        const std::int64_t k1 = std::min(b.k, k0 + kChain);
        for (std::int64_t k = k0; k < k1; ++k) {
            for (int r = 0; r < Rows; ++r) {
                const float w = b.w[(j + r) * b.w_stride + k];
                for (int i = 0; i < kPanelRows; ++i) sum[r][i] += w * x[k * kPanelRows + i];
            }
        }
        for (int r = 0; r < Rows; ++r)
            for (int i = 0; i < kPanelRows; ++i) total[r][i] += sum[r][i];
    }
    const std::int64_t rows = std::min(kPanelRows, b.n - panel * kPanelRows);
    for (std::int64_t i = 0; i < rows; ++i) {
        float* y = b.y + (panel * kPanelRows + i) * b.y_stride + j;
        for (int r = 0; r < Rows; ++r) {
            float value = b.alpha * total[r][i];
            if (b.bias != nullptr) value += b.bias[j + r];
            if (b.beta != 0.0f) value += b.beta * y[r];
            y[r] = value;
        }
    }
}

}  // namespace

void linear_block_portable(const LinearBlock& b) {
    const std::int64_t panels = (b.n + kPanelRows - 1) / kPanelRows;
    std::int64_t j = b.first;
    for (; j + 4 <= b.last; j += 4)
        for (std::int64_t p = 0; p < panels; ++p) tile_portable<4>(b, j, p);
    for (; j < b.last; ++j)
        for (std::int64_t p = 0; p < panels; ++p) tile_portable<1>(b, j, p);
}

void pack_panel(float* panels, const float* x, std::int64_t x_stride, std::int64_t n, std::int64_t k, std::int64_t panel) {
    float* out = panels + panel * k * kPanelRows;
    const std::int64_t row = panel * kPanelRows;
    const std::int64_t rows = std::min(kPanelRows, n - row);
    x += row * x_stride;
    // Eight columns at a time: each cache line of x is read once, and the strided writes stay within a few lines.
    for (std::int64_t k0 = 0; k0 < k; k0 += 8) {
        const std::int64_t count = std::min<std::int64_t>(8, k - k0);
        for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t c = 0; c < count; ++c) out[(k0 + c) * kPanelRows + i] = x[i * x_stride + k0 + c];
        for (std::int64_t c = 0; c < count; ++c)
            for (std::int64_t i = rows; i < kPanelRows; ++i) out[(k0 + c) * kPanelRows + i] = 0.0f;
    }
}

#if defined(__x86_64__)

namespace {

#define SUROGATE_AVX2 __attribute__((target("avx2,fma")))
#define SUROGATE_AVX512 __attribute__((target("avx512f")))

// ---- AVX-512: a tile is `Rows` rows of w by `Panels` panels of x, each panel one register.

// The zero-masked forms with a full mask compile to the plain instructions, and spare GCC 12's false warnings about them.
constexpr __mmask16 kAll16 = 0xffff;
constexpr __mmask8 kAll8 = 0xff;

/// Writes a tile: `sums` [Rows <= 16][16] is turned so that the rows of x lie along memory again.
SUROGATE_AVX512 void write_tile_avx512(const LinearBlock& b, const __m512* sums, int rows, std::int64_t j, std::int64_t panel) {
    __m512 a[16], t[16];
    for (int r = 0; r < 16; ++r) a[r] = r < rows ? sums[r] : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int r = 0; r < 16; r += 2) {
        t[r] = _mm512_maskz_unpacklo_ps(kAll16, a[r], a[r + 1]);
        t[r + 1] = _mm512_maskz_unpackhi_ps(kAll16, a[r], a[r + 1]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 16; r += 4) {
        for (int s = 0; s < 2; ++s) {
            const __m512d low = _mm512_castps_pd(t[r + s]), high = _mm512_castps_pd(t[r + 2 + s]);
            a[r + 2 * s] = _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAll8, low, high));
            a[r + 2 * s + 1] = _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAll8, low, high));
        }
    }
    // Now a[4 * g + c], quarter q, holds w rows 4g .. 4g + 3 of x row 4q + c.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512 even = _mm512_maskz_shuffle_f32x4(kAll16, a[c], a[4 + c], 0x88),
                     odd = _mm512_maskz_shuffle_f32x4(kAll16, a[c], a[4 + c], 0xdd);
        const __m512 even2 = _mm512_maskz_shuffle_f32x4(kAll16, a[8 + c], a[12 + c], 0x88),
                     odd2 = _mm512_maskz_shuffle_f32x4(kAll16, a[8 + c], a[12 + c], 0xdd);
        t[c] = _mm512_maskz_shuffle_f32x4(kAll16, even, even2, 0x88);
        t[8 + c] = _mm512_maskz_shuffle_f32x4(kAll16, even, even2, 0xdd);
        t[4 + c] = _mm512_maskz_shuffle_f32x4(kAll16, odd, odd2, 0x88);
        t[12 + c] = _mm512_maskz_shuffle_f32x4(kAll16, odd, odd2, 0xdd);
    }
    const auto mask = static_cast<__mmask16>((1u << rows) - 1u);
    const __m512 alpha = _mm512_set1_ps(b.alpha), beta = _mm512_set1_ps(b.beta);
    const __m512 bias = b.bias != nullptr ? _mm512_maskz_loadu_ps(mask, b.bias + j) : _mm512_setzero_ps();
    const std::int64_t count = std::min(kPanelRows, b.n - panel * kPanelRows);
    float* y = b.y + panel * kPanelRows * b.y_stride + j;
    for (std::int64_t i = 0; i < count; ++i, y += b.y_stride) {
        __m512 value = _mm512_fmadd_ps(t[i], alpha, bias);
        if (b.beta != 0.0f) value = _mm512_fmadd_ps(beta, _mm512_maskz_loadu_ps(mask, y), value);
        _mm512_mask_storeu_ps(y, mask, value);
    }
}

template <int Rows, int Panels>
SUROGATE_AVX512 void tile_avx512(const LinearBlock& b, std::int64_t j, std::int64_t panel, const float* ahead) {
    __m512 total[Panels][Rows];
    const float* x = b.panels + panel * b.k * kPanelRows;
    const std::int64_t panel_size = b.k * kPanelRows;
    const float* w = b.w + j * b.w_stride;
    const std::int64_t stride = b.w_stride;
    for (std::int64_t k0 = 0; k0 < b.k; k0 += kChain) {
        const std::int64_t k1 = std::min(b.k, k0 + kChain);
        __m512 sum[Panels][Rows];
#pragma GCC unroll 32
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < Panels; ++p) sum[p][r] = _mm512_setzero_ps();
        for (std::int64_t kb = k0; kb < k1; kb += 16) {
            // The rows that come next are fetched into L2 while these are multiplied (L1 would not hold both), these a line ahead into L1.
            if (ahead != nullptr) {
                const float* line = ahead + kb;
#pragma GCC unroll 32
                for (int r = 0; r < Rows; ++r) {
                    _mm_prefetch(reinterpret_cast<const char*>(line + r * stride), _MM_HINT_T1);
                    _mm_prefetch(reinterpret_cast<const char*>(w + kb + 16 + r * stride), _MM_HINT_T0);
                }
            }
            const std::int64_t ke = std::min(k1, kb + 16);
            for (std::int64_t k = kb; k < ke; ++k) {
                __m512 xs[Panels];
#pragma GCC unroll 4
                for (int p = 0; p < Panels; ++p) xs[p] = _mm512_loadu_ps(x + p * panel_size + k * kPanelRows);
                const float* wk = w + k;
#pragma GCC unroll 32
                for (int r = 0; r < Rows; ++r) {
                    const __m512 wr = _mm512_set1_ps(wk[r * stride]);
#pragma GCC unroll 4
                    for (int p = 0; p < Panels; ++p) sum[p][r] = _mm512_fmadd_ps(wr, xs[p], sum[p][r]);
                }
            }
        }
#pragma GCC unroll 32
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < Panels; ++p) total[p][r] = k0 == 0 ? sum[p][r] : _mm512_add_ps(total[p][r], sum[p][r]);
    }
    for (int p = 0; p < Panels; ++p)
        for (int r = 0; r < Rows; r += 16) write_tile_avx512(b, total[p] + r, std::min(16, Rows - r), j + r, panel + p);
}

template <int Rows>
SUROGATE_AVX512 void rows_avx512(const LinearBlock& b, std::int64_t j, std::int64_t panels, const float* ahead) {
    std::int64_t p = 0;
    for (; p + 2 <= panels; p += 2) tile_avx512<Rows, 2>(b, j, p, p == 0 ? ahead : nullptr);
    if (p < panels) tile_avx512<Rows, 1>(b, j, p, p == 0 ? ahead : nullptr);
}

// ---- AVX2: a panel is two registers.

template <int Rows>
SUROGATE_AVX2 void tile_avx2(const LinearBlock& b, std::int64_t j, std::int64_t panel) {
    alignas(32) float total[Rows][kPanelRows] = {};
    const float* x = b.panels + panel * b.k * kPanelRows;
    const float* w = b.w + j * b.w_stride;
    const std::int64_t stride = b.w_stride;
    for (std::int64_t k0 = 0; k0 < b.k; k0 += kChain) {
        const std::int64_t k1 = std::min(b.k, k0 + kChain);
        __m256 low[Rows], high[Rows];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) low[r] = high[r] = _mm256_setzero_ps();
        for (std::int64_t k = k0; k < k1; ++k) {
            const __m256 x0 = _mm256_loadu_ps(x + k * kPanelRows), x1 = _mm256_loadu_ps(x + k * kPanelRows + 8);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const __m256 wr = _mm256_broadcast_ss(w + r * stride + k);
                low[r] = _mm256_fmadd_ps(wr, x0, low[r]);
                high[r] = _mm256_fmadd_ps(wr, x1, high[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            _mm256_store_ps(total[r], _mm256_add_ps(_mm256_load_ps(total[r]), low[r]));
            _mm256_store_ps(total[r] + 8, _mm256_add_ps(_mm256_load_ps(total[r] + 8), high[r]));
        }
    }
    const std::int64_t count = std::min(kPanelRows, b.n - panel * kPanelRows);
    for (std::int64_t i = 0; i < count; ++i) {
        float* y = b.y + (panel * kPanelRows + i) * b.y_stride + j;
        for (int r = 0; r < Rows; ++r) {
            float value = __builtin_fmaf(total[r][i], b.alpha, b.bias != nullptr ? b.bias[j + r] : 0.0f);
            if (b.beta != 0.0f) value = __builtin_fmaf(b.beta, y[r], value);
            y[r] = value;
        }
    }
}

template <int Rows>
SUROGATE_AVX2 void rows_avx2(const LinearBlock& b, std::int64_t j, std::int64_t panels) {
    for (std::int64_t p = 0; p < panels; ++p) tile_avx2<Rows>(b, j, p);
}

}  // namespace

SUROGATE_AVX512 void linear_block_avx512(const LinearBlock& b) {
    const std::int64_t panels = (b.n + kPanelRows - 1) / kPanelRows;
    std::int64_t j = b.first;
    const auto ahead = [&](std::int64_t rows, std::int64_t next) {
        return j + rows + next <= b.rows ? b.w + (j + rows) * b.w_stride : nullptr;
    };
    for (; j + 12 <= b.last; j += 12) rows_avx512<12>(b, j, panels, ahead(12, 12));
    for (; j + 4 <= b.last; j += 4) rows_avx512<4>(b, j, panels, nullptr);
    for (; j < b.last; ++j) rows_avx512<1>(b, j, panels, nullptr);
}

SUROGATE_AVX2 void linear_block_avx2(const LinearBlock& b) {
    const std::int64_t panels = (b.n + kPanelRows - 1) / kPanelRows;
    std::int64_t j = b.first;
    for (; j + 6 <= b.last; j += 6) rows_avx2<6>(b, j, panels);
    for (; j < b.last; ++j) rows_avx2<1>(b, j, panels);
}

#endif

LinearKernel linear_kernel() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return linear_block_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return linear_block_avx2;
#endif
    return linear_block_portable;
}

}  // namespace surogate::cpu
