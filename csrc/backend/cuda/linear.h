#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

#include "core/tensor.h"

namespace surogate::cuda {

/// Matrix products through cuBLASLt. An algorithm is chosen once per shape (with the number of tokens rounded up, so that batches of
/// different sizes share it), element types, strides and epilogue; by timing the library's best few proposals if `autotune`.
class Linear {
   public:
    Linear(cudaStream_t stream, bool autotune);
    ~Linear();
    Linear(const Linear&) = delete;
    Linear& operator=(const Linear&) = delete;

    /// out [m,n] = alpha * a [m,k] b [k,n] + beta * out (+ bias [n] if it has data). `a_turned`: a is given as [k,m]; `b_turned`: b as
    /// [n,k]. Any of bfloat16 and float32 for each, but only a and b of one type are fast. `rows_vary`, `depth_varies`: m or k is the
    /// number of tokens.
    struct Product {
        Tensor out, a, b, bias;
        bool a_turned = false, b_turned = false;
        std::int64_t m = 0, n = 0, k = 0;
        float alpha = 1.0f, beta = 0.0f;
        bool rows_vary = false, depth_varies = false;
    };
    void multiply(const char* op, const Product& product);

    std::size_t device_bytes() const;

   private:
    using Key = std::array<std::int64_t, 14>;
    struct Call;
    static Key key_of(const Product& product, bool rounded);
    cublasLtMatmulAlgo_t choose(const char* op, const Call& call, const Product& product, bool& found);
    void run_plain(const char* op, const Product& product);

    cudaStream_t stream_;
    bool autotune_;
    cublasLtHandle_t handle_ = nullptr;
    void* workspace_ = nullptr;
    struct Choice {
        cublasLtMatmulAlgo_t algorithm;
        bool found;
    };
    std::map<Key, Choice> rounded_;  // by rounded number of tokens
    std::map<Key, Choice> exact_;    // the same, checked for the very shape
};

}  // namespace surogate::cuda
