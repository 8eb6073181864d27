#pragma once

#include <cstdint>

namespace surogate::cpu {

/// y [n, N] = alpha * x w^T + beta * y + bias, over the rows [first, last) of w. The rows of x come in panels of 16, transposed:
/// `panels` is [ceil(n / 16)][K][16], rows past n are zero.
///
/// Element (i, j) is one chain of multiply-adds over k, cut every 256 of them to keep the rounding error small. It is the same chain in
/// every tile shape, so that a row's bits depend on neither n nor N nor its place, and AVX2 and AVX-512 agree bit for bit.
struct LinearBlock {
    float* y;
    std::int64_t y_stride;
    const float* panels;
    const float* w;
    std::int64_t w_stride;
    const float* bias;  // [N] or null
    std::int64_t n, k;
    std::int64_t first, last;
    std::int64_t rows;  // N: those behind `last` are likely to be next, and fetched ahead
    float alpha, beta;
};

constexpr std::int64_t kPanelRows = 16;

/// x [n, K] into panels. `panel` counts panels: rows [16 * panel, 16 * panel + 16).
void pack_panel(float* panels, const float* x, std::int64_t x_stride, std::int64_t n, std::int64_t k, std::int64_t panel);

using LinearKernel = void (*)(const LinearBlock&);

void linear_block_portable(const LinearBlock& block);
#if defined(__x86_64__)
void linear_block_avx2(const LinearBlock& block);
void linear_block_avx512(const LinearBlock& block);
#endif

/// The fastest one that this processor runs.
LinearKernel linear_kernel();

}  // namespace surogate::cpu
