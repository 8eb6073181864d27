#pragma once

#include <cstdint>

#include "backend/cpu/gemm.h"
#include "core/memory.h"
#include "core/thread_pool.h"

namespace surogate {

/// The inner loops of a matrix product over operands that were first copied into panels, in the order in which they are read. (Goto and van
/// de Geijn, "Anatomy of high-performance matrix multiplication", 2008.) Each element of the output is summed over k in order, in blocks of
/// a size that depends on k alone: its bits depend neither on the number of threads nor on the other rows and columns of the product.
struct GemmKernels {
    std::int64_t max_height;  // rows of a panel of a, at most
    std::int64_t width;       // columns of a panel of b

    /// Panels of `height` <= max_height rows of a (the last may have fewer), `panel_stride` floats apart; within a panel k by k.
    void (*pack_rows)(float* panels, std::int64_t panel_stride, const Operand& a, std::int64_t rows, std::int64_t height, std::int64_t k);
    /// Panels of `width` columns of b, likewise. What is past the last column is read by `multiply` and not used.
    void (*pack_columns)(float* panels, std::int64_t panel_stride, const Operand& b, std::int64_t columns, std::int64_t k);
    /// c [rows, columns] = alpha * a b + beta * c for one panel of each.
    void (*multiply)(float* c, std::int64_t c_stride, const float* a, std::int64_t height, const float* b, std::int64_t rows,
                     std::int64_t columns, std::int64_t k, float alpha, float beta);
};

/// Those of the set of this name (see kernels.h), or null: only "avx512" has some, elsewhere the BLAS does as well.
const GemmKernels* find_gemm_kernels(const char* name);

/// c [m,n] = alpha * a [m,k] b [k,n] + beta * c over the pool's threads; with beta 0 what was in c is not read. `shared` is working memory.
void packed_gemm(ThreadPool& pool, const GemmKernels& kernels, AlignedBuffer& shared, float* c, std::int64_t c_stride, const Operand& a,
                 const Operand& b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float beta);

}  // namespace surogate
