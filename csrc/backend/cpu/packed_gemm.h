#pragma once

#include <cstdint>
#include <vector>

#include "backend/cpu/gemm.h"
#include "core/memory.h"
#include "core/thread_pool.h"

namespace surogate {

/// The inner loops of a matrix product over operands that were first copied into panels, in the order in which they are read. (Goto and van
/// de Geijn, "Anatomy of high-performance matrix multiplication", 2008.) Each element of the output is summed over k in order, in blocks of
/// a size that depends on k alone: its bits depend neither on the number of threads nor on the other rows and columns of the product.
struct GemmKernels {
    /// Floats between the rows of a panel that holds a row by row; lines of them all lie in different sets of the first-level cache.
    static constexpr std::int64_t line_step = 656;
    static constexpr std::int64_t short_step = 144;

    std::int64_t max_height;  // rows of a panel of a, at most
    std::int64_t width;       // columns of a panel of b
    bool beats_blas;          // for large products

    /// Panels of `height` <= max_height rows of a (the last may have fewer), `panel_stride` floats apart; within a panel k by k.
    void (*pack_rows)(float* panels, std::int64_t panel_stride, const Operand& a, std::int64_t rows, std::int64_t height, std::int64_t k);
    /// Panels of `width` columns of b, likewise. What is past the last column is read by `multiply` and not used.
    void (*pack_columns)(float* panels, std::int64_t panel_stride, const Operand& b, std::int64_t columns, std::int64_t k);
    /// c [rows, columns] = alpha * a b + beta * c, rows <= max_height, columns <= width: the values of a for one k lie side by side, those
    /// for the next k `a_step` floats further on (in a panel: its height); likewise of b, of which whole vectors are read.
    void (*multiply)(float* c, std::int64_t c_stride, const float* a, std::int64_t a_step, const float* b, std::int64_t b_step,
                     std::int64_t rows, std::int64_t columns, std::int64_t k, float alpha, float beta);
    /// The same for rows that lie `line_step` apart; a_step is not looked at.
    void (*multiply_panel_lines)(float* c, std::int64_t c_stride, const float* a, std::int64_t a_step, const float* b, std::int64_t b_step,
                                 std::int64_t rows, std::int64_t columns, std::int64_t k, float alpha, float beta);
    /// Likewise, with `short_step`.
    void (*multiply_short_lines)(float* c, std::int64_t c_stride, const float* a, std::int64_t a_step, const float* b, std::int64_t b_step,
                                 std::int64_t rows, std::int64_t columns, std::int64_t k, float alpha, float beta);
    /// The same for an a that lies row by row, any number of rows: slower, but nothing needs to be packed.
    void (*multiply_lines)(float* c, std::int64_t c_stride, const float* a, std::int64_t a_stride, const float* b, std::int64_t b_step,
                           std::int64_t rows, std::int64_t columns, std::int64_t k, float alpha, float beta);
    /// out[p * out_stride + i] = in[i * in_stride + p] for i in [0, lines), p in [0, length)
    void (*transpose)(float* out, std::int64_t out_stride, const float* in, std::int64_t in_stride, std::int64_t lines,
                      std::int64_t length);
};

/// Those of the set of this name (see kernels.h), or null where the processor or the build lacks it.
const GemmKernels* find_gemm_kernels(const char* name);

/// scale * low [m, rank] b [rank, columns], added to the columns [first, first + columns) of a product's output.
struct LowRankTerm {
    Operand low, b;
    std::int64_t first, columns, rank;
    float scale;
};

/// c [m,n] = alpha * a [m,k] b [k,n] + beta * c, and the terms; with beta 0 what was in c is not read.
struct GemmArguments {
    float* c;
    std::int64_t c_stride;
    Operand a, b;
    std::int64_t m, n, k;
    float alpha, beta;
    const float* start = nullptr;  // takes the place of beta * c, unless null
    std::int64_t start_stride = 0;
    std::vector<LowRankTerm> terms{};
};

/// Over the pool's threads; `shared` is working memory.
void packed_gemm(ThreadPool& pool, const GemmKernels& kernels, AlignedBuffer& shared, const GemmArguments& arguments);

/// The same without terms, for a narrow or short output (n or m a few dozen): the wide operand is read once, from where it lies.
void thin_gemm(ThreadPool& pool, const GemmKernels& kernels, AlignedBuffer& shared, const GemmArguments& arguments);

}  // namespace surogate
