#include <algorithm>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm.h"

namespace surogate {

void CpuBackend::product(const Tensor& c, const Operand& a, const Operand& b, std::int64_t k, float alpha, float beta) {
    // Copying an operand pays if it is used often enough; the adapters' thin products are better off with the BLAS.
    constexpr std::int64_t kThin = 96;
    if (gemm_kernels_ != nullptr && std::min({c.rows, c.columns, k}) >= kThin) {
        const std::lock_guard<std::mutex> lock(shared_mutex_);
        packed_gemm(pool_, *gemm_kernels_, shared_, c.f32(), c.stride, a, b, c.rows, c.columns, k, alpha, beta);
        return;
    }
    const auto at = [](const Operand& x, std::int64_t row, std::int64_t column) {
        return Operand{x.data + (x.transposed ? column * x.stride + row : row * x.stride + column), x.stride, x.transposed};
    };
    const Pieces pieces(c.rows, c.columns);
    pool_.parallel_for(pieces.count(), [&](std::int64_t index) {
        const Piece p = pieces[index];
        gemm(row(c, p.row) + p.column, c.stride, at(a, p.row, 0), at(b, 0, p.column), p.rows, p.columns, k, alpha, beta);
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
    pool_.parallel_ranges(dy.columns, 256, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = 0; t < dy.rows; ++t) kernels_.add(db.f32() + begin, row(dy, t) + begin, end - begin);
    });
}

}  // namespace surogate
