#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/cuda_error.h"
#include "backend/cuda/linear.h"

// cuBLASLt counts in columns: a row-major [m, n] of stride s is its column-major [n, m] of leading dimension s. So out = a b becomes
// out' = b' a', with b first, and a matrix that we hold turned is one that it must not transpose.

namespace surogate::cuda {

inline constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20;

inline void blas_check(cublasStatus_t status, const char* op, const char* call) {
    if (status != CUBLAS_STATUS_SUCCESS) throw CudaError(op, call, cublasLtGetStatusString(status));
}
#define BLAS_CHECK(op, call) blas_check((call), op, #call)

inline cudaDataType_t type_of(const Tensor& t) { return t.dtype == DType::BFloat16 ? CUDA_R_16BF : CUDA_R_32F; }

inline std::uint32_t alignment_of(const void* data, std::int64_t stride, DType dtype) {
    const std::uintptr_t bits =
        reinterpret_cast<std::uintptr_t>(data) | (static_cast<std::uintptr_t>(stride) * size_of(dtype)) | std::uintptr_t{256};
    return static_cast<std::uint32_t>(bits & (~bits + 1));  // the lowest set bit
}

/// The library's descriptions of one product, on the stack.
struct Linear::Call {
    cublasLtMatmulDescOpaque_t description;
    cublasLtMatrixLayoutOpaque_t a, b, start, out;
    const void* a_data;
    const void* b_data;
    const void* start_data;  // null: what is written

    Call(const char* op, const Product& p) : a_data(p.b.data), b_data(p.a.data), start_data(p.start.data) {
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
        layout(op, start, start_data != nullptr ? p.start : p.out, p.n, p.m);
    }

    /// Into `target`, which has the layout of the output.
    cublasStatus_t run(cublasLtHandle_t handle, const Product& p, void* target, const cublasLtMatmulAlgo_t& algorithm, void* workspace,
                       cudaStream_t stream) const {
        const void* from = start_data != nullptr ? start_data : p.beta != 0.0f ? p.out.data : target;
        return cublasLtMatmul(handle, const_cast<cublasLtMatmulDescOpaque_t*>(&description), &p.alpha, a_data, mutable_layout(a), b_data,
                              mutable_layout(b), &p.beta, from, mutable_layout(start), target, mutable_layout(out), &algorithm, workspace,
                              kWorkspaceBytes, stream);
    }
    // The library takes what it only reads as mutable.
    static cublasLtMatrixLayoutOpaque_t* mutable_layout(const cublasLtMatrixLayoutOpaque_t& layout) {
        return const_cast<cublasLtMatrixLayoutOpaque_t*>(&layout);
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

}  // namespace surogate::cuda
