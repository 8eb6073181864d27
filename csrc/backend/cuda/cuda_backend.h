#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace surogate {

namespace cuda {

class AttentionGraphs;
class CopyTable;
class Linear;
class Profiler;
class SegmentCache;
struct SegmentsOnDevice;
class Staging;

/// Device memory that grows on demand and never shrinks; what was in it is lost when it grows. Uses of it are ordered by the stream.
class Workspace {
   public:
    explicit Workspace(cudaStream_t stream) : stream_(stream) {}
    ~Workspace();
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    void* reserve(const char* op, std::size_t bytes);
    template <typename T>
    T* of(const char* op, std::int64_t count) {
        return static_cast<T*>(reserve(op, static_cast<std::size_t>(count) * sizeof(T)));
    }
    std::size_t capacity() const { return capacity_; }

   private:
    cudaStream_t stream_;
    void* data_ = nullptr;
    std::size_t capacity_ = 0;
};

/// What kernels found wrong with indices that only the device knows. Looked at whenever the host waits for the device anyway.
enum class DeviceFault : int { None, EmbeddingId, GatherIndex, ScatterIndex, Position, Target };

}  // namespace cuda

/// The back-end for one NVIDIA GPU. Products go to cuBLASLt, attention to cuDNN, all else is a fused kernel of our own. Everything runs on
/// one stream; only download, synchronize and sum_of_squares wait for it. Operations may be called from any thread, one at a time.
///
/// All sums have a fixed order, but for attention_backward, whose dq cuDNN adds up with atomics unless options.deterministic, and for the
/// choice of matrix-product algorithms, which autotune makes by timing.
class CudaBackend final : public Backend {
   public:
    explicit CudaBackend(const CudaOptions& options);
    ~CudaBackend() override;
    CudaBackend(const CudaBackend&) = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;

    const CudaOptions& options() const { return options_; }
    cudaStream_t stream() const { return stream_; }
    /// Time per operation so far, as a table; empty unless options.profile.
    std::string profile_table();
    /// The matrix products whose algorithms were chosen by timing, and their rates.
    std::string product_table();
    /// Why cuDNN did not take the last attention that it was asked for; empty if it did.
    const std::string& attention_refusal() const;
    Device device() const override { return {Device::Kind::Cuda, options_.device}; }
    /// What the device has free, less what the back-end itself will come to take for workspaces and staging.
    std::size_t available_memory() const override;
    /// Workspaces and staging.
    std::size_t own_bytes() const override;
    void* allocate(std::size_t bytes) override;
    void release(void* data) noexcept override;
    void upload(const Tensor& out, const void* host) override;
    void download(void* host, const Tensor& in) override;
    void copy(const Tensor& out, const Tensor& in) override;
    void fill(const Tensor& out, float value) override;
    /// One launch for all of them.
    void copy_all(const std::vector<CopyItem>& items) override;
    /// x *= factor
    void scale(const Tensor& x, float factor);

    void linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) override;
    void linear_add_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias) override;
    void linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) override;
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
    /// dlogits may be narrower than logits and still share their memory, row by row: the same data, and twice the stride in elements.
    void logprob_backward(const Tensor& dlogits, const Tensor& logits, const Tensor& lse, const Tensor& entropy, const Tensor& targets,
                          const Tensor& dlogp, const Tensor& dentropy, float temperature, std::int64_t valid_vocab) override;

    double sum_of_squares(const Tensor& x) override;
    void adamw(const Tensor& weight, const Tensor& master, const Tensor& m, const Tensor& v, const Tensor& gradient,
               const AdamWOptions& options) override;

    void synchronize() override;

   private:
    friend class CudaOp;

    void check_faults(const char* op);  // after a synchronisation
    void plain_attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv, const cuda::SegmentsOnDevice& segments,
                                 const AttentionShape& shape);
    bool cudnn_attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                  const Segments& segments, const AttentionShape& shape, const Tensor& spare);
    void plain_attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                  const cuda::SegmentsOnDevice& segments, const AttentionShape& shape);
    /// out [1, columns] += the sum over the rows of partial [count, stride], in their order.
    void add_column_sums(const char* op, const Tensor& out, const float* partial, std::int64_t count, std::int64_t stride);

    CudaOptions options_;
    std::recursive_mutex mutex_;
    cudaStream_t stream_ = nullptr;
    int* fault_ = nullptr;                                // on the device
    void* host_slot_ = nullptr;                           // pinned: a fault, a sum
    std::unique_ptr<cuda::Workspace> scratch_;            // partial sums of one operation
    std::unique_ptr<cuda::Workspace> attention_scratch_;  // cuDNN's
    std::unique_ptr<cuda::Profiler> profiler_;
    std::unique_ptr<cuda::Staging> staging_;
    std::unique_ptr<cuda::Linear> linear_;
    std::unique_ptr<cuda::AttentionGraphs> attention_;
    std::unique_ptr<cuda::SegmentCache> segments_;
    std::unique_ptr<cuda::CopyTable> copies_;
};

/// One operation in flight: holds the back-end's lock, makes its device current, and times it when profiling. The first thing in each.
class CudaOp {
   public:
    /// `shape` becomes a part of the name in profiles.
    CudaOp(CudaBackend& backend, const char* name, std::initializer_list<std::int64_t> shape = {});
    ~CudaOp();
    CudaOp(const CudaOp&) = delete;
    CudaOp& operator=(const CudaOp&) = delete;

   private:
    CudaBackend& backend_;
    std::lock_guard<std::recursive_mutex> lock_;
    bool timed_ = false;
};

}  // namespace surogate
