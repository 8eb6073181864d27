#include <algorithm>
#include <array>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm.h"

namespace surogate {

void CpuBackend::linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) {
    const char* op = "linear_forward";
    check(op, "y", y, x.rows, w.rows);
    check(op, "x", x, x.rows, w.columns);
    check(op, "w", w, w.rows, w.columns);
    const bool biased = bias.data != nullptr;
    if (biased) check_vector(op, "bias", bias, w.rows);
    const Pieces pieces(x.rows, w.rows);
    pool_.parallel_for(pieces.count(), [&](std::int64_t index) {
        const Piece p = pieces[index];
        float* out = row(y, p.row) + p.column;
        gemm(out, y.stride, {row(x, p.row), x.stride}, {row(w, p.column), w.stride, true}, p.rows, p.columns, x.columns, alpha, beta);
        if (!biased) return;
        for (std::int64_t i = 0; i < p.rows; ++i) kernels_.add(out + i * y.stride, bias.f32() + p.column, p.columns);
    });
}

void CpuBackend::linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) {
    const char* op = "linear_backward_input";
    check(op, "dx", dx, dy.rows, w.columns);
    check(op, "dy", dy, dy.rows, w.rows);
    check(op, "w", w, w.rows, w.columns);
    const Pieces pieces(dx.rows, dx.columns);
    pool_.parallel_for(pieces.count(), [&](std::int64_t index) {
        const Piece p = pieces[index];
        gemm(row(dx, p.row) + p.column, dx.stride, {row(dy, p.row), dy.stride}, {w.f32() + p.column, w.stride}, p.rows, p.columns, w.rows,
             alpha, beta);
    });
}

void CpuBackend::linear_backward_weight(const Tensor& dw, const Tensor& dy, const Tensor& x, float alpha) {
    const char* op = "linear_backward_weight";
    check(op, "dw", dw, dy.columns, x.columns);
    check(op, "dy", dy, dy.rows, dy.columns);
    check(op, "x", x, dy.rows, x.columns);
    const Pieces pieces(dw.rows, dw.columns);
    pool_.parallel_for(pieces.count(), [&](std::int64_t index) {
        const Piece p = pieces[index];
        gemm(row(dw, p.row) + p.column, dw.stride, {dy.f32() + p.row, dy.stride, true}, {x.f32() + p.column, x.stride}, p.rows, p.columns,
             dy.rows, alpha, 1.0f);
    });
}

void CpuBackend::bias_backward(const Tensor& db, const Tensor& dy) {
    check_vector("bias_backward", "db", db, dy.columns);
    check("bias_backward", "dy", dy, dy.rows, dy.columns);
    // Sums of blocks of rows are added up, not row after row: rounding errors then grow with the block's size and not with T.
    constexpr std::int64_t kRows = 32, kColumns = 256;
    pool_.parallel_ranges(dy.columns, kColumns, [&](std::int64_t begin, std::int64_t end) {
        std::array<float, kColumns> sums;
        for (std::int64_t first = 0; first < dy.rows; first += kRows) {
            sums.fill(0.0f);
            for (std::int64_t t = first; t < std::min(first + kRows, dy.rows); ++t)
                kernels_.add(sums.data(), row(dy, t) + begin, end - begin);
            kernels_.add(db.f32() + begin, sums.data(), end - begin);
        }
    });
}

}  // namespace surogate
