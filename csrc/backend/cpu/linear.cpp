#include <algorithm>
#include <array>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm.h"

namespace surogate {

void CpuBackend::product(const Tensor& c, const Operand& a, const Operand& b, std::int64_t k, float alpha, float beta) {
    // Copying an operand pays if it is used often enough. An output that is thin uses the other operand too few times, and so do sums over
    // few values, which are best left to the BLAS.
    constexpr std::int64_t kThin = 96;
    if (gemm_kernels_.beats_blas && k >= kThin) {
        const bool thick = std::min(c.rows, c.columns) >= kThin;
        if (thick || c.columns <= c.rows || !b.transposed) {
            const std::lock_guard<std::mutex> lock(shared_mutex_);
            (thick ? packed_gemm : thin_gemm)(pool_, gemm_kernels_, shared_, c.f32(), c.stride, a, b, c.rows, c.columns, k, alpha, beta);
            return;
        }
    }
    const Pieces pieces(c.rows, c.columns);
    pool_.parallel_for(pieces.count(), [&](std::int64_t index) {
        const Piece p = pieces[index];
        gemm(row(c, p.row) + p.column, c.stride, operand_at(a, p.row, 0), operand_at(b, 0, p.column), p.rows, p.columns, k, alpha, beta);
    });
}

void CpuBackend::linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) {
    const char* op = "linear_forward";
    check(op, "y", y, x.rows, w.rows);
    check(op, "x", x, x.rows, w.columns);
    check(op, "w", w, w.rows, w.columns);
    const bool biased = bias.data != nullptr;
    if (biased) check_vector(op, "bias", bias, w.rows);
    product(y, {x.f32(), x.stride}, {w.f32(), w.stride, true}, x.columns, alpha, beta);
    if (!biased) return;
    pool_.parallel_ranges(y.rows, 16, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) kernels_.add(row(y, t), bias.f32(), y.columns);
    });
}

void CpuBackend::linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) {
    const char* op = "linear_backward_input";
    check(op, "dx", dx, dy.rows, w.columns);
    check(op, "dy", dy, dy.rows, w.rows);
    check(op, "w", w, w.rows, w.columns);
    product(dx, {dy.f32(), dy.stride}, {w.f32(), w.stride}, w.rows, alpha, beta);
}

void CpuBackend::linear_backward_weight(const Tensor& dw, const Tensor& dy, const Tensor& x, float alpha) {
    const char* op = "linear_backward_weight";
    check(op, "dw", dw, dy.columns, x.columns);
    check(op, "dy", dy, dy.rows, dy.columns);
    check(op, "x", x, dy.rows, x.columns);
    product(dw, {dy.f32(), dy.stride, true}, {x.f32(), x.stride}, dy.rows, alpha, 1.0f);
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
