#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "backend/backend.h"
#include "backend/cpu/attention_kernels.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/packed_gemm.h"
#include "core/memory.h"
#include "core/thread_pool.h"

namespace surogate {

/// The back-end for host memory, float32. Large matrix products go to our own kernels where there is AVX-512, else to the BLAS, one thread
/// each, on pieces of the output that our own pool shares out; everything else is one fused pass. No order of a sum depends on the number
/// of threads, so results have the same bits for any.
class CpuBackend final : public Backend {
   public:
    explicit CpuBackend(const CpuOptions& options);
    /// With this set of kernels, which must be one that the processor can run.
    CpuBackend(const CpuOptions& options, const Kernels& kernels);

    ThreadPool& pool() { return pool_; }
    const Kernels& kernels() const { return kernels_; }

    Device device() const override { return {}; }
    std::size_t available_memory() const override { return available_host_memory(); }
    void* allocate(std::size_t bytes) override;
    void release(void* data) noexcept override;
    void upload(const Tensor& out, const void* host) override;
    void download(void* host, const Tensor& in) override;
    void copy(const Tensor& out, const Tensor& in) override;
    void fill(const Tensor& out, float value) override;

    void linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) override;
    void linear_add_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias) override;
    void linear_adapted_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias,
                                const std::vector<AdapterOutput>& adapters, float scale) override;
    void linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) override;
    void linear_adapted_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, const Tensor& d_low, const Tensor& a) override;
    void linear_backward_weight(const Tensor& dw, const Tensor& dy, const Tensor& x, float alpha, float beta = 1.0f) override;
    void bias_backward(const Tensor& db, const Tensor& dy) override;

    void embedding_forward(const Tensor& out, const Tensor& table, const Tensor& ids) override;
    void embedding_backward(const Tensor& dtable, const Tensor& dout, const Tensor& ids) override;

    void rmsnorm_forward(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& weight, float eps) override;
    void add_rmsnorm_forward(const Tensor& sum, const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& residual,
                             const Tensor& weight, float eps) override;
    void rmsnorm_backward(const Tensor& dx, const Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& weight,
                          const Tensor& rstd) override;

    void qk_norm_rope_forward(const Tensor& qkv, const Tensor& raw_qk, const Tensor& rstd, const Tensor& q_weight, const Tensor& k_weight,
                              const Tensor& cos, const Tensor& sin, const Tensor& positions, const AttentionShape& shape,
                              float eps) override;
    void qk_norm_rope_backward(const Tensor& dqkv, const Tensor& dq_weight, const Tensor& dk_weight, const Tensor& raw_qk,
                               const Tensor& rstd, const Tensor& q_weight, const Tensor& k_weight, const Tensor& cos, const Tensor& sin,
                               const Tensor& positions, const AttentionShape& shape) override;

    void attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv, const Segments& segments,
                           const AttentionShape& shape) override;
    void attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                            const Segments& segments, const AttentionShape& shape, const Tensor& spare = {}) override;

    void swiglu_forward(const Tensor& y, const Tensor& gate_up) override;
    void swiglu_backward(const Tensor& dgate_up, const Tensor& dy, const Tensor& gate_up) override;
    void swiglu_recompute_backward(const Tensor& dgate_up, const Tensor& y, const Tensor& dy, const Tensor& gate_up) override;

    void gather_rows(const Tensor& out, const Tensor& in, const Tensor& index) override;
    void scatter_add_rows(const Tensor& out, const Tensor& in, const Tensor& index) override;
    void scatter_add_scaled_rows(const Tensor& out, const Tensor& in, const Tensor& index, const Tensor& scale) override;

    void logprob_forward(const Tensor& logp, const Tensor& entropy, const Tensor& lse, const Tensor& logits, const Tensor& targets,
                         float temperature, std::int64_t valid_vocab) override;
    void logprob_backward(const Tensor& dlogits, const Tensor& logits, const Tensor& lse, const Tensor& entropy, const Tensor& targets,
                          const Tensor& dlogp, const Tensor& dentropy, float temperature, std::int64_t valid_vocab) override;

    double sum_of_squares(const Tensor& x) override;
    void adamw(const Tensor& weight, const Tensor& master, const Tensor& m, const Tensor& v, const Tensor& gradient,
               const AdamWOptions& options) override;

    // In decode.cpp.
    void decode_linear(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) override;
    void cache_write(const PagedCache& cache, const Tensor& qkv, const Tensor& slots, const AttentionShape& shape) override;
    void paged_attention(const Tensor& out, const Tensor& qkv, const PagedCache& cache, const AttentionShape& shape) override;
    void sample(std::int32_t* tokens, float* logp, const Tensor& logits, const SampleRow* rows, std::int64_t valid_vocab) override;

    void synchronize() override {}

   private:
    void product(const GemmArguments& x);
    void add_bias(const Tensor& y, const Tensor& bias);

    ThreadPool pool_;
    const Kernels& kernels_;
    const GemmKernels& gemm_kernels_;
    const AttentionKernels& attention_kernels_;
    // Memory that all threads of one operation share; kept, because taking it afresh each time costs page faults.
    std::mutex shared_mutex_;
    AlignedBuffer shared_;
    std::mutex decode_mutex_;
    AlignedBuffer decode_panels_;  // of decode_linear's x
};

}  // namespace surogate
