#include <algorithm>
#include <array>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm.h"

namespace surogate {

namespace {

void check_forward(const char* op, const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias) {
    check(op, "y", y, x.rows, w.rows);
    check(op, "x", x, x.rows, w.columns);
    check(op, "w", w, w.rows, w.columns);
    if (bias.data != nullptr) check_vector(op, "bias", bias, w.rows);
}

void check_backward_input(const char* op, const Tensor& dx, const Tensor& dy, const Tensor& w) {
    check(op, "dx", dx, dy.rows, w.columns);
    check(op, "dy", dy, dy.rows, w.rows);
    check(op, "w", w, w.rows, w.columns);
}

}  // namespace

void CpuBackend::product(const GemmArguments& x) {
    // Copying an operand pays if it is used often enough. An output that is thin uses the other operand too few times, and so do sums over
    // few values, which are best left to the BLAS.
    constexpr std::int64_t kThin = 96;
    const bool thick = std::min(x.m, x.n) >= kThin;
    if (gemm_kernels_.beats_blas && x.k >= kThin && thick) {
        const std::lock_guard<std::mutex> lock(shared_mutex_);
        packed_gemm(pool_, gemm_kernels_, shared_, x);
        return;
    }
    float beta = x.beta;
    if (x.start != nullptr) {
        const auto view = [&](const float* data, std::int64_t stride) {
            Tensor t = matrix(const_cast<float*>(data), x.m, x.n, DType::Float32);  // the start is only read
            t.stride = stride;
            return t;
        };
        copy(view(x.c, x.c_stride), view(x.start, x.start_stride));
        beta = 1.0f;
    }
    if (gemm_kernels_.beats_blas && x.k >= kThin && (x.n <= x.m || !x.b.transposed)) {
        const std::lock_guard<std::mutex> lock(shared_mutex_);
        thin_gemm(pool_, gemm_kernels_, shared_, {x.c, x.c_stride, x.a, x.b, x.m, x.n, x.k, x.alpha, beta});
    } else {
        const Pieces pieces(x.m, x.n);
        pool_.parallel_for(pieces.count(), [&](std::int64_t index) {
            const Piece p = pieces[index];
            gemm(x.c + p.row * x.c_stride + p.column, x.c_stride, operand_at(x.a, p.row, 0), operand_at(x.b, 0, p.column), p.rows,
                 p.columns, x.k, x.alpha, beta);
        });
    }
    for (const LowRankTerm& term : x.terms) {
        product({x.c + term.first, x.c_stride, term.low, term.b, x.m, term.columns, term.rank, term.scale, 1.0f});
    }
}

void CpuBackend::add_bias(const Tensor& y, const Tensor& bias) {
    if (bias.data == nullptr) return;
    pool_.parallel_ranges(y.rows, 16, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) kernels_.add(row(y, t), bias.f32(), y.columns);
    });
}

void CpuBackend::linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) {
    check_forward("linear_forward", y, x, w, bias);
    product({y.f32(), y.stride, {x.f32(), x.stride}, {w.f32(), w.stride, true}, y.rows, y.columns, x.columns, alpha, beta});
    add_bias(y, bias);
}

void CpuBackend::linear_add_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias) {
    const char* op = "linear_add_forward";
    check_forward(op, y, x, w, bias);
    check(op, "residual", residual, y.rows, y.columns);
    product({y.f32(),
             y.stride,
             {x.f32(), x.stride},
             {w.f32(), w.stride, true},
             y.rows,
             y.columns,
             x.columns,
             1.0f,
             1.0f,
             residual.f32(),
             residual.stride});
    add_bias(y, bias);
}

void CpuBackend::linear_adapted_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias,
                                        const std::vector<AdapterOutput>& adapters, float scale) {
    const char* op = "linear_adapted_forward";
    check_forward(op, y, x, w, bias);
    GemmArguments arguments{y.f32(), y.stride, {x.f32(), x.stride}, {w.f32(), w.stride, true}, y.rows, y.columns, x.columns, 1.0f, 0.0f};
    if (!residual.empty()) {
        check(op, "residual", residual, y.rows, y.columns);
        arguments.start = residual.f32();
        arguments.start_stride = residual.stride;
    }
    for (const auto& [low, b, first] : adapters) {
        check(op, "low", low, y.rows, b.columns);
        check(op, "b", b, b.rows, b.columns);
        require(first >= 0 && first + b.rows <= y.columns, op, "first", "columns of y", first);
        arguments.terms.push_back({{low.f32(), low.stride}, {b.f32(), b.stride, true}, first, b.rows, b.columns, scale});
    }
    product(arguments);
    add_bias(y, bias);
}

void CpuBackend::linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) {
    check_backward_input("linear_backward_input", dx, dy, w);
    product({dx.f32(), dx.stride, {dy.f32(), dy.stride}, {w.f32(), w.stride}, dx.rows, dx.columns, w.rows, alpha, beta});
}

void CpuBackend::linear_adapted_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, const Tensor& d_low, const Tensor& a) {
    const char* op = "linear_adapted_backward_input";
    check_backward_input(op, dx, dy, w);
    check(op, "d_low", d_low, dx.rows, a.rows);
    check(op, "a", a, a.rows, dx.columns);
    GemmArguments arguments{dx.f32(), dx.stride, {dy.f32(), dy.stride}, {w.f32(), w.stride}, dx.rows, dx.columns, w.rows, 1.0f, 0.0f};
    arguments.terms.push_back({{d_low.f32(), d_low.stride}, {a.f32(), a.stride}, 0, a.columns, a.rows, 1.0f});
    product(arguments);
}

void CpuBackend::linear_backward_weight(const Tensor& dw, const Tensor& dy, const Tensor& x, float alpha, float beta) {
    const char* op = "linear_backward_weight";
    check(op, "dw", dw, dy.columns, x.columns);
    check(op, "dy", dy, dy.rows, dy.columns);
    check(op, "x", x, dy.rows, x.columns);
    product({dw.f32(), dw.stride, {dy.f32(), dy.stride, true}, {x.f32(), x.stride}, dw.rows, dw.columns, dy.rows, alpha, beta});
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
