#include <algorithm>
#include <string>
#include <vector>

#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/linear.h"

// cuBLASLt counts in columns: a row-major [m, n] of stride s is its column-major [n, m] of leading dimension s. So out = a b becomes
// out' = b' a', with b first, and a matrix that we hold turned is one that it must not transpose.

namespace surogate {

using namespace cuda;

namespace cuda {

namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20;
constexpr int kCandidates = 8;
constexpr int kTimedRuns = 5;
constexpr std::size_t kMostExactShapes = 4096;

void blas_check(cublasStatus_t status, const char* op, const char* call) {
    if (status != CUBLAS_STATUS_SUCCESS) throw CudaError(op, call, cublasLtGetStatusString(status));
}
#define BLAS_CHECK(op, call) blas_check((call), op, #call)

cudaDataType_t type_of(const Tensor& t) { return t.dtype == DType::BFloat16 ? CUDA_R_16BF : CUDA_R_32F; }

std::uint32_t alignment_of(const void* data, std::int64_t stride, DType dtype) {
    const std::uintptr_t bits =
        reinterpret_cast<std::uintptr_t>(data) | (static_cast<std::uintptr_t>(stride) * size_of(dtype)) | std::uintptr_t{256};
    return static_cast<std::uint32_t>(bits & (~bits + 1));  // the lowest set bit
}

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
__global__ void plain_product_kernel(Element out, Element a, Element b, const float* bias_wide, const bf16* bias_narrow, std::int64_t m,
                                     std::int64_t n, std::int64_t k, float alpha, float beta) {
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
    if (beta != 0.0f) value += beta * out.get(row, column);
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

/// The library's descriptions of one product, on the stack.
struct Linear::Call {
    cublasLtMatmulDescOpaque_t description;
    cublasLtMatrixLayoutOpaque_t a, b, out;
    const void* a_data;
    const void* b_data;

    Call(const char* op, const Product& p) : a_data(p.b.data), b_data(p.a.data) {
        BLAS_CHECK(op, cublasLtMatmulDescInit(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        // The library's first operand is our b' [n,k]: as it counts, b [k,n] is [n,k] already, and b given as [n,k] is [k,n], to be turned.
        set(op, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<std::int32_t>(p.b_turned ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(op, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<std::int32_t>(p.a_turned ? CUBLAS_OP_T : CUBLAS_OP_N));
        if (p.bias.data != nullptr) {
            set(op, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::int32_t>(CUBLASLT_EPILOGUE_BIAS));
            set(op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias.data);
            set(op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(type_of(p.bias)));
        }
        layout(op, a, p.b, p.b_turned ? p.k : p.n, p.b_turned ? p.n : p.k);
        layout(op, b, p.a, p.a_turned ? p.m : p.k, p.a_turned ? p.k : p.m);
        layout(op, out, p.out, p.n, p.m);
    }

   private:
    template <typename Value>
    void set(const char* op, cublasLtMatmulDescAttributes_t attribute, Value value) {
        BLAS_CHECK(op, cublasLtMatmulDescSetAttribute(&description, attribute, &value, sizeof value));
    }
    static void layout(const char* op, cublasLtMatrixLayoutOpaque_t& result, const Tensor& t, std::int64_t rows, std::int64_t columns) {
        // A single row of ours may carry any stride; the library wants one that covers the row.
        const std::int64_t stride = std::max(t.stride, rows);
        BLAS_CHECK(op, cublasLtMatrixLayoutInit(&result, type_of(t), static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns),
                                                stride));
    }
};

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
            p.rows_vary ? 1 : 0,
            p.depth_varies ? 1 : 0,
            0};
}

cublasLtMatmulAlgo_t Linear::choose(const char* op, const Call& call, const Product& p, bool& found) {
    cublasLtMatmulPreferenceOpaque_t preference;
    BLAS_CHECK(op, cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        BLAS_CHECK(op, cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    // Partial sums of a product that is split along k are kept in float32 and added in a fixed order.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b.data, p.b.stride, p.b.dtype));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a.data, p.a.stride, p.a.dtype));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.out.data, p.out.stride, p.out.dtype));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.out.data, p.out.stride, p.out.dtype));

    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> results{};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&call.description), const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.a),
        const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.b), const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.out),
        const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.out), &preference, autotune_ ? kCandidates : 1, results.data(), &count);
    found = status == CUBLAS_STATUS_SUCCESS && count > 0 && results[0].state == CUBLAS_STATUS_SUCCESS;
    if (!found) {
        if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) {
            blas_check(status, op, "cublasLtMatmulAlgoGetHeuristic");
        }
        return {};
    }
    if (!autotune_ || count == 1) return results[0].algo;

    // Timed into memory of their own: the result must not be added up more than once. Without room for that, the library's first.
    const std::size_t bytes = static_cast<std::size_t>((p.m - 1) * p.out.stride + p.n) * size_of(p.out.dtype);
    void* target = nullptr;
    if (cudaMalloc(&target, bytes) != cudaSuccess) {
        cudaGetLastError();
        return results[0].algo;
    }
    // Only the relative alignment of what the algorithms are timed on could differ from the real one, to the better.
    cudaEvent_t begin = nullptr, end = nullptr;
    int best = 0;
    float best_time = 0.0f;
    try {
        CUDA_CHECK(op, cudaEventCreate(&begin));
        CUDA_CHECK(op, cudaEventCreate(&end));
        for (int i = 0; i < count; ++i) {
            if (results[static_cast<std::size_t>(i)].state != CUBLAS_STATUS_SUCCESS) continue;
            const auto run = [&] {
                return cublasLtMatmul(handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&call.description), &p.alpha, call.a_data,
                                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.a), call.b_data,
                                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.b), &p.beta, p.beta != 0.0f ? p.out.data : target,
                                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.out), target,
                                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.out), &results[static_cast<std::size_t>(i)].algo,
                                      workspace_, kWorkspaceBytes, stream_);
            };
            if (run() != CUBLAS_STATUS_SUCCESS) continue;
            float time = 0.0f;
            for (int round = 0; round < 2; ++round) {
                CUDA_CHECK(op, cudaEventRecord(begin, stream_));
                for (int r = 0; r < kTimedRuns; ++r) BLAS_CHECK(op, run());
                CUDA_CHECK(op, cudaEventRecord(end, stream_));
                CUDA_CHECK(op, cudaEventSynchronize(end));
                float once = 0.0f;
                CUDA_CHECK(op, cudaEventElapsedTime(&once, begin, end));
                time = round == 0 ? once : std::min(time, once);
            }
            if (best_time == 0.0f || time < best_time) {
                best_time = time;
                best = i;
            }
        }
    } catch (...) {
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
        cudaFree(target);
        throw;
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaFree(target);
    return results[static_cast<std::size_t>(best)].algo;
}

void Linear::run_plain(const char* op, const Product& p) {
    const bool wide = p.bias.dtype == DType::Float32;
    const dim3 grid(blocks_for(p.m, kTile), blocks_for(p.n, kTile));
    plain_product_kernel<<<grid, dim3(kTile, kTile), 0, stream_>>>(
        element(p.out, false), element(p.a, p.a_turned), element(p.b, p.b_turned), wide ? p.bias.as<const float>() : nullptr,
        wide ? nullptr : p.bias.as<const bf16>(), p.m, p.n, p.k, p.alpha, p.beta);
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
            usable =
                cublasLtMatmulAlgoCheck(
                    handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&call.description), const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.a),
                    const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.b), const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.out),
                    const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.out), &shared->second.algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
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
        BLAS_CHECK(op, cublasLtMatmul(handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&call.description), &p.alpha, call.a_data,
                                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.a), call.b_data,
                                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.b), &p.beta, p.out.data,
                                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.out), p.out.data,
                                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&call.out), &choice->second.algorithm, workspace_,
                                      kWorkspaceBytes, stream_));
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
    const CudaOp scope(*this, op);
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

void CudaBackend::linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) {
    const char* op = "linear_backward_input";
    const CudaOp scope(*this, op);
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

void CudaBackend::linear_backward_weight(const Tensor& dw, const Tensor& dy, const Tensor& x, float alpha) {
    const char* op = "linear_backward_weight";
    const CudaOp scope(*this, op);
    check(op, "dw", dw, dy.columns, x.columns);
    check(op, "dy", dy, dy.rows, dy.columns);
    check(op, "x", x, dy.rows, x.columns);
    if (dy.rows == 0) return;
    Linear::Product p;
    p.out = dw, p.a = dy, p.b = x;
    p.a_turned = true;
    p.m = dy.columns, p.n = x.columns, p.k = dy.rows;
    p.alpha = alpha, p.beta = 1.0f;
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
