#pragma once

#include <cstdint>
#include <string>

#include "core/thread_pool.h"

namespace surogate {

/// A row-major matrix operand, read as its transpose if `transposed`.
struct Operand {
    const float* data;
    std::int64_t stride;
    bool transposed = false;
};

/// The operand from row `row` and column `column` on.
inline Operand operand_at(const Operand& x, std::int64_t row, std::int64_t column) {
    return {x.data + (x.transposed ? column * x.stride + row : row * x.stride + column), x.stride, x.transposed};
}

/// c [m,n] = alpha * a [m,k] b [k,n] + beta * c on the calling thread; with beta 0 what was in c is not read.
void gemm(float* c, std::int64_t c_stride, const Operand& a, const Operand& b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
          float beta);

/// A piece of a large product's output that one thread computes: rows [row, row + rows), columns [column, column + columns).
struct Piece {
    std::int64_t row, rows, column, columns;
};

/// How a product's output is cut: depends on its shape alone, never on the number of threads.
struct Pieces {
    Pieces(std::int64_t m, std::int64_t n);
    std::int64_t count() const { return row_pieces * column_pieces; }
    Piece operator[](std::int64_t index) const;

    std::int64_t m, n, row_pieces, column_pieces;
};

/// The BLAS in use, in its own words.
std::string blas_name();
/// Puts the BLAS to one thread: its own would spin against ours.
void use_one_blas_thread();

}  // namespace surogate
