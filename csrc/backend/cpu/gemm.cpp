#include "backend/cpu/gemm.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

#define SUROGATE_JOIN_(prefix, name) prefix##name
#define SUROGATE_JOIN(prefix, name) SUROGATE_JOIN_(prefix, name)
#define SUROGATE_BLAS(name) SUROGATE_JOIN(SUROGATE_BLAS_PREFIX, name)

// The few functions used, declared here because BLAS packages disagree on where their headers lie.
extern "C" {
void SUROGATE_BLAS(cblas_sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a, int lda,
                                const float* b, int ldb, float beta, float* c, int ldc);
#if defined(SUROGATE_BLAS_OPENBLAS)
void SUROGATE_BLAS(openblas_set_num_threads)(int threads);
char* SUROGATE_BLAS(openblas_get_config)(void);
#elif defined(SUROGATE_BLAS_MKL)
void MKL_Set_Num_Threads(int threads);
#elif defined(SUROGATE_BLAS_BLIS)
void bli_thread_set_num_threads(long threads);
#endif
}

namespace surogate {

namespace {

constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;

int blas_int(std::int64_t value) {
    if (value > std::numeric_limits<int>::max()) fail("gemm: a dimension of ", value, " is beyond what the BLAS can count");
    return static_cast<int>(value);
}

}  // namespace

void gemm(float* c, std::int64_t c_stride, const Operand& a, const Operand& b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
          float beta) {
    if (m == 0 || n == 0) return;
    const auto stride = [](std::int64_t value) { return blas_int(std::max<std::int64_t>(value, 1)); };
    SUROGATE_BLAS(cblas_sgemm)
    (kRowMajor, a.transposed ? kTranspose : kNoTranspose, b.transposed ? kTranspose : kNoTranspose, blas_int(m), blas_int(n), blas_int(k),
     alpha, a.data, stride(a.stride), b.data, stride(b.stride), beta, c, stride(c_stride));
}

Pieces::Pieces(std::int64_t m_, std::int64_t n_) : m(m_), n(n_) {
    // Large enough for the BLAS to reach its full rate, small enough that several threads end at about the same time.
    std::int64_t rows = std::min<std::int64_t>(m, 512), columns = std::min<std::int64_t>(n, 384);
    for (;;) {
        row_pieces = m > 0 ? (m + rows - 1) / rows : 0;
        column_pieces = n > 0 ? (n + columns - 1) / columns : 0;
        std::int64_t& longer = rows >= columns ? rows : columns;
        if (count() >= 4 || longer <= 128) break;
        longer = (longer + 1) / 2;
    }
}

Piece Pieces::operator[](std::int64_t index) const {
    // Sixteens keep the pieces' edges on cache lines.
    const auto cut = [](std::int64_t size, std::int64_t pieces, std::int64_t piece) {
        const std::int64_t units = (size + 15) / 16;
        return std::min(size, units * piece / pieces * 16);
    };
    const std::int64_t i = index / column_pieces, j = index % column_pieces;
    const std::int64_t row = cut(m, row_pieces, i), column = cut(n, column_pieces, j);
    return {row, cut(m, row_pieces, i + 1) - row, column, cut(n, column_pieces, j + 1) - column};
}

std::string blas_name() {
#if defined(SUROGATE_BLAS_OPENBLAS)
    return SUROGATE_BLAS(openblas_get_config)();
#else
    return SUROGATE_BLAS_NAME;
#endif
}

void use_one_blas_thread() {
#if defined(SUROGATE_BLAS_OPENBLAS)
    SUROGATE_BLAS(openblas_set_num_threads)(1);
#elif defined(SUROGATE_BLAS_MKL)
    MKL_Set_Num_Threads(1);
#elif defined(SUROGATE_BLAS_BLIS)
    bli_thread_set_num_threads(1);
#endif
}

}  // namespace surogate
