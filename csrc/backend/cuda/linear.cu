#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/linear.h"
#include "backend/cuda/linear_call.h"

namespace surogate {

using namespace cuda;

namespace cuda {

namespace {

constexpr std::size_t kMostExactShapes = 4096;

/// Numbers of tokens that share an algorithm: four steps per power of two.
std::int64_t round_up_tokens(std::int64_t tokens) {
    std::int64_t step = 64;
    while (step * 8 < tokens) step *= 2;
    return (tokens + step - 1) / step * step;
}

/// Element (row, column) of a matrix, or of its transpose, of either type.
struct Element {
    void* data;
    std::int64_t row_step, column_step;
    bool wide;
    __device__ float get(std::int64_t r, std::int64_t c) const {
        const std::int64_t at = r * row_step + c * column_step;
        return wide ? static_cast<const float*>(data)[at] : __bfloat162float(static_cast<const bf16*>(data)[at]);
    }
    __device__ void put(std::int64_t r, std::int64_t c, float value) const {
        const std::int64_t at = r * row_step + c * column_step;
        if (wide) {
            static_cast<float*>(data)[at] = value;
        } else {
            static_cast<bf16*>(data)[at] = __float2bfloat16_rn(value);
        }
    }
};

Element element(const Tensor& t, bool turned) { return {t.data, turned ? 1 : t.stride, turned ? t.stride : 1, t.dtype == DType::Float32}; }

constexpr int kTile = 16;

/// What cuBLASLt refuses (operands of different types, odd strides and the like): right for any shape, types and strides, and slow.
__global__ void plain_product_kernel(Element out, Element start, Element a, Element b, const float* bias_wide, const bf16* bias_narrow,
                                     std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float beta) {
    __shared__ float a_tile[kTile][kTile + 1], b_tile[kTile][kTile + 1];
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kTile + threadIdx.y;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kTile + threadIdx.x;
    float sum = 0.0f;
    for (std::int64_t first = 0; first < k; first += kTile) {
        const std::int64_t a_column = first + threadIdx.x, b_row = first + threadIdx.y;
        a_tile[threadIdx.y][threadIdx.x] = row < m && a_column < k ? a.get(row, a_column) : 0.0f;
        b_tile[threadIdx.y][threadIdx.x] = b_row < k && column < n ? b.get(b_row, column) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kTile; ++i) sum += a_tile[threadIdx.y][i] * b_tile[i][threadIdx.x];
        __syncthreads();
    }
    if (row >= m || column >= n) return;
    float value = alpha * sum;
    if (beta != 0.0f) value += beta * start.get(row, column);
    if (bias_wide != nullptr) value += bias_wide[column];
    if (bias_narrow != nullptr) value += __bfloat162float(bias_narrow[column]);
    out.put(row, column, value);
}

__global__ void add_bias_kernel(Rows<Any> y, Rows<Any> bias, std::int64_t columns) {
    const std::int64_t row = blockIdx.x, column = static_cast<std::int64_t>(blockIdx.y) * 256 + threadIdx.x;
    if (column >= columns) return;
    const float value[1] = {y.get<1>(row, column)[0] + bias.get<1>(0, column)[0]};
    y.put<1>(row, column, value);
}

}  // namespace

Linear::Linear(cudaStream_t stream, bool autotune) : stream_(stream), autotune_(autotune) {
    const char* op = "make_cuda_backend";
    BLAS_CHECK(op, cublasLtCreate(&handle_));
    const cudaError_t status = cudaMalloc(&workspace_, kWorkspaceBytes);
    if (status != cudaSuccess) cublasLtDestroy(handle_);
    cuda_check(status, op, "cudaMalloc of the workspace of cuBLASLt");
}

Linear::~Linear() {
    cudaFree(workspace_);
    cublasLtDestroy(handle_);
}

std::size_t Linear::device_bytes() const { return kWorkspaceBytes; }

Linear::Key Linear::key_of(const Product& p, bool rounded) {
    const std::int64_t types = (p.a.dtype == DType::BFloat16 ? 1 : 0) | (p.out.dtype == DType::BFloat16 ? 2 : 0) |
                               (p.bias.data != nullptr ? 4 : 0) | (p.beta != 0.0f ? 8 : 0) | (p.a_turned ? 16 : 0) | (p.b_turned ? 32 : 0);
    const std::int64_t bias_alignment = p.bias.data == nullptr ? 0 : alignment_of(p.bias.data, 0, p.bias.dtype);
    const bool apart = p.start.data != nullptr;
    return {types,
            rounded && p.rows_vary ? round_up_tokens(p.m) : p.m,
            p.n,
            rounded && p.depth_varies ? round_up_tokens(p.k) : p.k,
            p.out.stride,
            p.a.stride,
            p.b.stride,
            alignment_of(p.out.data, p.out.stride, p.out.dtype),
            alignment_of(p.a.data, p.a.stride, p.a.dtype),
            alignment_of(p.b.data, p.b.stride, p.b.dtype),
            bias_alignment,
            apart ? p.start.stride : 0,
            apart ? alignment_of(p.start.data, p.start.stride, p.start.dtype) : 0,
            p.rows_vary ? 1 : 0,
            p.depth_varies ? 1 : 0,
            0};
}

void Linear::run_plain(const char* op, const Product& p) {
    const bool wide = p.bias.dtype == DType::Float32;
    const dim3 grid(blocks_for(p.m, kTile), blocks_for(p.n, kTile));
    plain_product_kernel<<<grid, dim3(kTile, kTile), 0, stream_>>>(
        element(p.out, false), element(p.start.data != nullptr ? p.start : p.out, false), element(p.a, p.a_turned),
        element(p.b, p.b_turned), wide ? p.bias.as<const float>() : nullptr, wide ? nullptr : p.bias.as<const bf16>(), p.m, p.n, p.k,
        p.alpha, p.beta);
    CUDA_LAUNCHED(op);
}

void Linear::multiply(const char* op, const Product& given) {
    if (given.m == 0 || given.n == 0) return;
    Product p = given;
    if (p.k == 0 || p.a.dtype != p.b.dtype) return run_plain(op, p);
    // The epilogue's bias has the type of the output; another one is added in a pass of its own.
    const Tensor late_bias = p.bias.data != nullptr && p.bias.dtype != p.out.dtype ? p.bias : Tensor{};
    if (late_bias.data != nullptr) p.bias = Tensor{};

    const Call call(op, p);
    const Key exact = key_of(p, false);
    auto choice = exact_.find(exact);
    if (choice == exact_.end()) {
        const Key rounded = key_of(p, true);
        auto shared = rounded_.find(rounded);
        bool usable = false;
        if (shared != rounded_.end() && shared->second.found) {
            cublasLtMatmulHeuristicResult_t result{};
            usable = cublasLtMatmulAlgoCheck(handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&call.description),
                                             Call::mutable_layout(call.a), Call::mutable_layout(call.b), Call::mutable_layout(call.start),
                                             Call::mutable_layout(call.out), &shared->second.algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
                     result.workspaceSize <= kWorkspaceBytes;
        }
        Choice fresh{};
        if (usable) {
            fresh = shared->second;
        } else {
            fresh.algorithm = choose(op, call, p, fresh.found);
            rounded_.insert_or_assign(rounded, fresh);
        }
        if (exact_.size() >= kMostExactShapes) exact_.clear();
        choice = exact_.insert_or_assign(exact, fresh).first;
    }
    if (!choice->second.found) {
        run_plain(op, p);
    } else {
        blas_check(call.run(handle_, p, p.out.data, choice->second.algorithm, workspace_, stream_), op, "cublasLtMatmul");
    }
    if (late_bias.data != nullptr) {
        add_bias_kernel<<<dim3(static_cast<unsigned>(p.m), blocks_for(p.n, 256)), 256, 0, stream_>>>(rows_of<Any>(p.out),
                                                                                                     rows_of<Any>(late_bias), p.n);
        CUDA_LAUNCHED(op);
    }
}

}  // namespace cuda

void CudaBackend::linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) {
    const char* op = "linear_forward";
    const CudaOp scope(*this, op, {x.rows, w.rows, w.columns});
    check(op, "y", y, x.rows, w.rows);
    check(op, "x", x, x.rows, w.columns);
    check(op, "w", w, w.rows, w.columns);
    if (bias.data != nullptr) check_vector(op, "bias", bias, w.rows);
    Linear::Product p;
    p.out = y, p.a = x, p.b = w, p.bias = bias;
    p.b_turned = true;
    p.m = x.rows, p.n = w.rows, p.k = w.columns;
    p.alpha = alpha, p.beta = beta;
    p.rows_vary = true;
    linear_->multiply(op, p);
}

void CudaBackend::linear_add_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias) {
    const char* op = "linear_add_forward";
    const CudaOp scope(*this, op, {x.rows, w.rows, w.columns});
    check(op, "y", y, x.rows, w.rows);
    check(op, "residual", residual, x.rows, w.rows);
    check(op, "x", x, x.rows, w.columns);
    check(op, "w", w, w.rows, w.columns);
    if (bias.data != nullptr) check_vector(op, "bias", bias, w.rows);
    if (residual.dtype != y.dtype) {  // the library takes one type for both
        copy(y, residual);
        return linear_forward(y, x, w, bias, 1.0f, 1.0f);
    }
    Linear::Product p;
    p.out = y, p.start = residual, p.a = x, p.b = w, p.bias = bias;
    p.b_turned = true;
    p.m = x.rows, p.n = w.rows, p.k = w.columns;
    p.beta = 1.0f;
    p.rows_vary = true;
    linear_->multiply(op, p);
}

void CudaBackend::linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) {
    const char* op = "linear_backward_input";
    const CudaOp scope(*this, op, {dy.rows, w.columns, w.rows});
    check(op, "dx", dx, dy.rows, w.columns);
    check(op, "dy", dy, dy.rows, w.rows);
    check(op, "w", w, w.rows, w.columns);
    Linear::Product p;
    p.out = dx, p.a = dy, p.b = w;
    p.m = dy.rows, p.n = w.columns, p.k = w.rows;
    p.alpha = alpha, p.beta = beta;
    p.rows_vary = true;
    linear_->multiply(op, p);
}

void CudaBackend::linear_backward_weight(const Tensor& dw, const Tensor& dy, const Tensor& x, float alpha, float beta) {
    const char* op = "linear_backward_weight";
    const CudaOp scope(*this, op, {dy.columns, x.columns, dy.rows});
    check(op, "dw", dw, dy.columns, x.columns);
    check(op, "dy", dy, dy.rows, dy.columns);
    check(op, "x", x, dy.rows, x.columns);
    if (dy.rows == 0 && beta == 1.0f) return;
    Linear::Product p;
    p.out = dw, p.a = dy, p.b = x;
    p.a_turned = true;
    p.m = dy.columns, p.n = x.columns, p.k = dy.rows;
    p.alpha = alpha, p.beta = beta;
    p.depth_varies = true;
    linear_->multiply(op, p);
}

// --- Bias --------------------------------------------------------------------------------------------------------------------------------

namespace {

constexpr int kBiasRows = 256;  // of one partial sum

/// Partial sums [chunks, columns] of kBiasRows rows each.
template <typename T, int V>
__global__ void bias_backward_kernel(float* partial, Rows<T> dy, std::int64_t rows, std::int64_t columns) {
    __shared__ float sums[8][32 * V];
    const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * 32 + threadIdx.x) * V;
    const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kBiasRows;
    const std::int64_t last = min(first + kBiasRows, rows);
    float sum[V];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (std::int64_t row = first + threadIdx.y; row < last; row += 8) {
            const Vec<T, V> vec = dy.template get<V>(row, column);
#pragma unroll
            for (int i = 0; i < V; ++i) sum[i] += vec[i];
        }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) sums[threadIdx.y][threadIdx.x * V + i] = sum[i];
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.y * 32 + threadIdx.x); i < 32 * V; i += 256) {
        const std::int64_t at = static_cast<std::int64_t>(blockIdx.y) * 32 * V + i;
        if (at >= columns) continue;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; ++w) total += sums[w][i];
        partial[static_cast<std::int64_t>(blockIdx.x) * columns + at] = total;
    }
}

}  // namespace

void CudaBackend::bias_backward(const Tensor& db, const Tensor& dy) {
    const char* op = "bias_backward";
    const CudaOp scope(*this, op);
    check_vector(op, "db", db, dy.columns);
    check(op, "dy", dy, dy.rows, dy.columns);
    if (dy.size() == 0) return;
    const std::int64_t chunks = (dy.rows + kBiasRows - 1) / kBiasRows;
    float* partial = scratch_->of<float>(op, chunks * dy.columns);
    by_type({&dy}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(dy.columns, {&dy}), [&](auto width) {
            constexpr int V = width();
            const dim3 grid(static_cast<unsigned>(chunks), blocks_for(dy.columns, 32 * V));
            bias_backward_kernel<T, V><<<grid, dim3(32, 8), 0, stream_>>>(partial, rows_of<T>(dy), dy.rows, dy.columns);
        });
    });
    CUDA_LAUNCHED(op);
    add_column_sums(op, db, partial, chunks, dy.columns);
}

}  // namespace surogate
