#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace surogate::cuda {

/// Matrix products through cuBLASLt. An algorithm is chosen once per shape (with the number of tokens rounded up, so that batches of
/// different sizes share it), element types, strides and epilogue; by timing the library's proposals if `autotune`: all of them briefly,
/// then the best few in turns for longer.
class Linear {
   public:
    Linear(cudaStream_t stream, bool autotune);
    ~Linear();
    Linear(const Linear&) = delete;
    Linear& operator=(const Linear&) = delete;

    /// out [m,n] = alpha * a [m,k] b [k,n] + beta * start (+ bias [n] if it has data). `start` is another matrix of the type of out, or
    /// without data: out itself. `a_turned`: a is given as [k,m]; `b_turned`: b as [n,k]. Any of bfloat16 and float32 for each, but only a
    /// and b of one type are fast. `rows_vary`, `depth_varies`: m or k is the number of tokens.
    struct Product {
        Tensor out, a, b, bias, start;
        bool a_turned = false, b_turned = false;
        std::int64_t m = 0, n = 0, k = 0;
        float alpha = 1.0f, beta = 0.0f;
        bool rows_vary = false, depth_varies = false;
    };
    void multiply(const char* op, const Product& product);

    std::size_t device_bytes() const;

    /// What timing chose, a line for each shape: its time and rate, and those of the library's own first choice. Empty without timing.
    std::string choices() const;

   private:
    using Key = std::array<std::int64_t, 16>;
    struct Call;
    static Key key_of(const Product& product, bool rounded);
    cublasLtMatmulAlgo_t choose(const char* op, const Call& call, const Product& product, bool& found);
    std::size_t fastest(const char* op, const Call& call, const Product& product,
                        const std::vector<cublasLtMatmulHeuristicResult_t>& proposals);
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
    struct Timed {
        std::string product;
        double flops, first_ms, best_ms;
        std::size_t proposals, rank;
    };
    std::vector<Timed> timed_;
};

}  // namespace surogate::cuda
