// The source of the matrix product's inner loops for all kernel sets; see kernels_impl.h, whose rules hold here too.

#include <cstdint>

#include "backend/cpu/packed_gemm.h"
#include "backend/cpu/vector_math.h"

namespace surogate::SUROGATE_ISA {

namespace {

// A tile of sums, a line of b and a value of a fill the registers: 32 of 512 bits, elsewhere at least 16.
constexpr int kHeight = SUROGATE_LANES == 16 ? 14 : 6;
constexpr int kWidth = 2 * kLanes;
constexpr int kAhead = 16;                        // how many values of k b is fetched ahead
constexpr int kCopyLines = 32, kCopyAhead = 128;  // lines copied together, and how many floats ahead they are fetched

#if SUROGATE_LANES == 16
[[gnu::always_inline]] inline __mmask16 first_lanes(std::int64_t count) {
    return count >= 16 ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << count) - 1u);
}

/// Turns 16 vectors into the 16 columns that they form.
[[gnu::always_inline]] inline void turn(__m512 (&r)[16]) {
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
#endif

void transpose(float* out, std::int64_t out_stride, const float* in, std::int64_t in_stride, std::int64_t lines, std::int64_t length) {
#if SUROGATE_LANES == 16
    for (std::int64_t first = 0; first < lines; first += 16, out += 16, in += 16 * in_stride) {
        const std::int64_t here = lines - first < 16 ? lines - first : 16;
        const __mmask16 written = first_lanes(here);
        for (std::int64_t p = 0; p < length; p += 16) {
            const std::int64_t count = length - p < 16 ? length - p : 16;
            const __mmask16 read = first_lanes(count);
            __m512 r[16];
            for (int i = 0; i < 16; ++i) {
                r[i] = i < here ? _mm512_maskz_loadu_ps(read, in + i * in_stride + p) : _mm512_setzero_ps();
                __builtin_prefetch(in + i * in_stride + p + 64);
            }
            turn(r);
            if (count == 16) {
                for (int i = 0; i < 16; ++i) _mm512_mask_storeu_ps(out + (p + i) * out_stride, written, r[i]);
            } else {
                for (std::int64_t i = 0; i < count; ++i) _mm512_mask_storeu_ps(out + (p + i) * out_stride, written, r[i]);
            }
        }
    }
#else
    for (std::int64_t p = 0; p < length; ++p) {
        for (std::int64_t i = 0; i < lines; ++i) out[p * out_stride + i] = in[i * in_stride + p];
    }
#endif
}

void pack_rows(float* panels, std::int64_t panel_stride, const Operand& a, std::int64_t rows, std::int64_t height, std::int64_t k) {
    if (!a.transposed) {
        for (std::int64_t r = 0; r < rows; r += height, panels += panel_stride) {
            transpose(panels, height, a.data + r * a.stride, a.stride, rows - r < height ? rows - r : height, k);
        }
        return;
    }
    // Panel by panel, since lines of different panels may well share a set of the cache.
    for (std::int64_t first = 0; first < k; first += kCopyLines) {
        const std::int64_t end = k - first < kCopyLines ? k : first + kCopyLines;
        for (std::int64_t r = 0; r < rows; r += height) {
            const std::int64_t high = rows - r < height ? rows - r : height;
            float* out = panels + r / height * panel_stride + first * height;
            const float* line = a.data + first * a.stride + r;
            for (std::int64_t p = first; p < end; ++p, out += height, line += a.stride) {
                __builtin_prefetch(line + kCopyAhead);
#if SUROGATE_LANES == 16
                _mm512_mask_storeu_ps(out, first_lanes(high), _mm512_maskz_loadu_ps(first_lanes(high), line));
#else
                for (std::int64_t i = 0; i < high; ++i) out[i] = line[i];
#endif
            }
        }
    }
}

void pack_columns(float* panels, std::int64_t panel_stride, const Operand& b, std::int64_t columns, std::int64_t k) {
    if (b.transposed) {
        for (std::int64_t n = 0; n < columns; n += kWidth, panels += panel_stride) {
            transpose(panels, kWidth, b.data + n * b.stride, b.stride, columns - n < kWidth ? columns - n : kWidth, k);
        }
        return;
    }
    for (std::int64_t first = 0; first < k; first += kCopyLines) {
        const std::int64_t end = k - first < kCopyLines ? k : first + kCopyLines;
        for (std::int64_t n = 0; n < columns; n += kWidth) {
            float* out = panels + n / kWidth * panel_stride + first * kWidth;
            const float* line = b.data + first * b.stride + n;
            const std::int64_t wide = columns - n < kWidth ? columns - n : kWidth;
            for (std::int64_t p = first; p < end; ++p, out += kWidth, line += b.stride) {
                __builtin_prefetch(line + kCopyAhead);
                __builtin_prefetch(line + kCopyAhead + kLanes);
                each(wide, [&](std::int64_t i, auto part) { part.store(out + i, part.load(line + i)); });
            }
        }
    }
}

/// How the values of a lie: k by k, `a_step` floats apart; row by row, likewise; or row by row as in a panel, where the step is known.
enum class Layout : std::uint8_t { ByK, Lines, PanelLines, ShortLines };

/// ROWS x (VECTORS * kLanes) elements of c.
template <int ROWS, int VECTORS, Layout LAYOUT>
void tile(float* c, std::int64_t c_stride, const float* a, std::int64_t a_step, const float* b, std::int64_t b_step, std::int64_t columns,
          std::int64_t k, float alpha, float beta) {
    const std::int64_t ahead = kAhead * b_step;
    // The compiler knows the step where it is a constant: no row needs a pointer of its own then.
    const std::int64_t row_step = LAYOUT == Layout::PanelLines   ? GemmKernels::line_step
                                  : LAYOUT == Layout::ShortLines ? GemmKernels::short_step
                                                                 : a_step;
    Vec sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i) {
        for (int v = 0; v < VECTORS; ++v) {
            sums[i][v] = Vec{};
            __builtin_prefetch(c + i * c_stride + kLanes * v, 1);
        }
    }
    for (std::int64_t p = 0; p < k; ++p) {
        Vec line[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            __builtin_prefetch(b + kLanes * v + ahead);
            line[v] = Full{}.load(b + kLanes * v);
        }
#pragma GCC unroll 14
        for (int i = 0; i < ROWS; ++i) {
            const Vec x = broadcast(a[LAYOUT == Layout::ByK ? i : i * row_step + p]);
            for (int v = 0; v < VECTORS; ++v) sums[i][v] += x * line[v];
        }
        if constexpr (LAYOUT == Layout::ByK) a += a_step;
        b += b_step;
    }
    const auto finish = [&](int v, auto part) {
        float* at = c + kLanes * v;
        for (int i = 0; i < ROWS; ++i, at += c_stride) {
            part.store(at, beta == 0.0f ? sums[i][v] * alpha : part.load(at) * beta + sums[i][v] * alpha);
        }
    };
    for (int v = 0; v < VECTORS; ++v) {
        const std::int64_t left = columns - kLanes * v;
        if (left >= kLanes) {
            finish(v, Full{});
        } else {
            finish(v, Tail{left});
        }
    }
}

using Tile = void (*)(float*, std::int64_t, const float*, std::int64_t, const float*, std::int64_t, std::int64_t, std::int64_t, float,
                      float);

template <int V, Layout L>
constexpr Tile kTiles[kHeight] = {tile<1, V, L>,  tile<2, V, L>, tile<3, V, L>, tile<4, V, L>,  tile<5, V, L>,  tile<6, V, L>,
#if SUROGATE_LANES == 16
                                  tile<7, V, L>,  tile<8, V, L>, tile<9, V, L>, tile<10, V, L>, tile<11, V, L>, tile<12, V, L>,
                                  tile<13, V, L>, tile<14, V, L>
#endif
};

constexpr int kLines = SUROGATE_LANES == 16 ? 8 : 6;  // each row needs a pointer, and there are 16

template <int V>
constexpr Tile kLineTiles[kLines] = {tile<1, V, Layout::Lines>, tile<2, V, Layout::Lines>, tile<3, V, Layout::Lines>,
                                     tile<4, V, Layout::Lines>, tile<5, V, Layout::Lines>, tile<6, V, Layout::Lines>,
#if SUROGATE_LANES == 16
                                     tile<7, V, Layout::Lines>, tile<8, V, Layout::Lines>
#endif
};

template <Layout L>
void multiply_panel(float* c, std::int64_t c_stride, const float* a, std::int64_t a_step, const float* b, std::int64_t b_step,
                    std::int64_t rows, std::int64_t columns, std::int64_t k, float alpha, float beta) {
    (columns > kLanes ? kTiles<2, L> : kTiles<1, L>)[rows - 1](c, c_stride, a, a_step, b, b_step, columns, k, alpha, beta);
}

void multiply_lines(float* c, std::int64_t c_stride, const float* a, std::int64_t a_stride, const float* b, std::int64_t b_step,
                    std::int64_t rows, std::int64_t columns, std::int64_t k, float alpha, float beta) {
    for (std::int64_t r = 0; r < rows; r += kLines) {
        const std::int64_t here = rows - r < kLines ? rows - r : kLines;
        (columns > kLanes ? kLineTiles<2> : kLineTiles<1>)[here - 1](c + r* c_stride, c_stride, a + r* a_stride, a_stride, b, b_step,
                                                                     columns, k, alpha, beta);
    }
}

}  // namespace

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {kHeight,
                                  kWidth,
                                  SUROGATE_LANES == 16,
                                  pack_rows,
                                  pack_columns,
                                  multiply_panel<Layout::ByK>,
                                  multiply_panel<Layout::PanelLines>,
                                  multiply_panel<Layout::ShortLines>,
                                  multiply_lines,
                                  transpose};

}  // namespace surogate::SUROGATE_ISA
