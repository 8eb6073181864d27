#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace surogate {

/// Packed segments: segment s owns rows [cu_seqlens[s], cu_seqlens[s + 1]). Host memory, so that a back-end can plan its work; it lives as
/// long as the call that it is passed to.
struct Segments {
    const std::int32_t* cu_seqlens = nullptr;  // [count + 1]
    std::int64_t count = 0;
};

/// Where the keys and values of the sequences of one decode call lie: blocks of `block_size` positions of one layer's cache. How they lie
/// within 16 rows is the back-end's own business; block_size is a multiple of 16, and blocks may be copied as a whole.
struct PagedCache {
    Tensor keys;    // [blocks * block_size, K * D]
    Tensor values;  // [blocks * block_size, K * D]
    std::int64_t block_size = 0;
    const std::int32_t* block_tables = nullptr;  // [sequences, max_blocks], host
    std::int64_t max_blocks = 0;
    const std::int32_t* lengths = nullptr;  // [sequences]: positions of each, the query's own last row included
};

struct AttentionShape {
    std::int64_t heads, kv_heads, head_dim;
    float scale;
    std::int64_t window;  // 0: the whole segment
};

/// The part of an adapter that widens again: low [T, r] times b [n, r]^T goes to the columns of the output from `first` on.
struct AdapterOutput {
    Tensor low, b;
    std::int64_t first = 0;
};

/// How one row of logits becomes a token. Filters apply in this order: temperature, top_k, top_p (of what top_k left), min_p.
struct SampleRow {
    float temperature;   // 0: the most probable token, the lowest id of equal ones
    float top_p;         // in (0, 1]
    float min_p;         // in [0, 1], relative to the most probable token
    std::int32_t top_k;  // 0: off
    double uniform;      // in (0, 1); the token is the inverse of the cumulative distribution there
};

struct AdamWOptions {
    float learning_rate, beta1, beta2, epsilon, weight_decay;
    std::int64_t step;       // from 1, for the bias correction
    float gradient_scale;    // clipping, multiplied in on the fly
    std::uint64_t seed = 0;  // with `step` and the element's index it decides how stochastic rounding falls; other spans have other seeds
};

/// The whole vocabulary of operations; the only thing that knows a device. T tokens, H heads, K kv-heads, D head size, C hidden, F ffn,
/// V vocabulary, r adapter rank. Outputs come first. A gradient is prefixed `d`; "+=" marks what accumulates.
/// Reductions have a fixed order: same inputs give same bits, whatever the number of threads.
///
/// Dtypes. Weights, activations and gradients of activations are float32 or bfloat16, the same in all of one call unless said otherwise;
/// sums are formed in float32 (or wider) and rounded once. Gradients of weights (dw, db, dtable, dweight, dq_weight, dk_weight) are
/// float32, or bfloat16 beside bfloat16 activations. Statistics (rstd, lse, logp, entropy), their gradients, cos and sin are float32,
/// indices int32. The CPU takes float32 alone, and only copies to bfloat16. Any matrix may be a view with a stride; vectors are dense.
///
/// Order. Operations happen in the order of their calls, but may still be running when a call returns. What waits: `download`,
/// `sum_of_squares`, `sample` and `synchronize` return when their results are there; `upload` when `host` may be changed again.
class Backend {
   public:
    virtual ~Backend() = default;

    virtual Device device() const = 0;
    virtual std::size_t available_memory() const = 0;    // bytes that allocate() can still give without doing harm
    virtual std::size_t own_bytes() const { return 0; }  // of the device that it took for itself, beside what allocate() gave out
    virtual void* allocate(std::size_t bytes) = 0;       // aligned to 64 bytes, zeroed
    virtual void release(void* data) noexcept = 0;
    virtual void upload(const Tensor& out, const void* host) = 0;  // dense host rows into a view: int32, or float32 whatever it is
    virtual void download(void* host, const Tensor& in) = 0;       // a view into dense host rows, likewise
    virtual void copy(const Tensor& out, const Tensor& in) = 0;    // of the same shape; converts
    virtual void fill(const Tensor& out, float value) = 0;
    /// Many small copies at once, to memory that does not overlap.
    struct CopyItem {
        Tensor out, in;
    };
    virtual void copy_all(const std::vector<CopyItem>& items);

    // Linear algebra. Weights lie as in Hugging Face files, [N, K]: y = x W^T.
    /// y [T,N] = alpha * x [T,K] w[N,K]^T + beta * y (+ bias [N], may be empty). y may be float32 beside bfloat16 x and w.
    virtual void linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) = 0;
    /// y [T,N] = residual [T,N] + x [T,K] w[N,K]^T (+ bias [N], may be empty). y and residual are different buffers.
    virtual void linear_add_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias);
    /// y [T,N] = x w^T (+ bias) (+ residual, unless empty; another buffer than y) + scale * low b^T of each adapter
    virtual void linear_adapted_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias,
                                        const std::vector<AdapterOutput>& adapters, float scale);
    /// dx [T,K] = alpha * dy [T,N] w[N,K] + beta * dx
    virtual void linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) = 0;
    /// dx [T,K] = dy [T,N] w[N,K] + d_low [T,r] a[r,K]
    virtual void linear_adapted_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, const Tensor& d_low, const Tensor& a);
    /// dw [N,K] = alpha * dy [T,N]^T x [T,K] + beta * dw. With beta = 0 it does not matter what dw held.
    virtual void linear_backward_weight(const Tensor& dw, const Tensor& dy, const Tensor& x, float alpha, float beta = 1.0f) = 0;
    /// db [N] += column sums of dy [T,N]
    virtual void bias_backward(const Tensor& db, const Tensor& dy) = 0;

    // Embedding. ids [T] int32.
    virtual void embedding_forward(const Tensor& out, const Tensor& table, const Tensor& ids) = 0;
    virtual void embedding_backward(const Tensor& dtable, const Tensor& dout, const Tensor& ids) = 0;  // +=, in order of T

    // RMSNorm over the C columns; rstd [T] is kept for backward.
    virtual void rmsnorm_forward(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& weight, float eps) = 0;
    /// sum [T,C] = x + residual, then y = rmsnorm(sum). `sum` may be `residual`.
    virtual void add_rmsnorm_forward(const Tensor& sum, const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& residual,
                                     const Tensor& weight, float eps) = 0;
    /// dx += ..., dweight += ... (dweight may be empty: frozen)
    virtual void rmsnorm_backward(const Tensor& dx, const Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& weight,
                                  const Tensor& rstd) = 0;

    // Rotation of q and k in place in qkv [T, (H+2K)*D], after an optional RMSNorm of each head (weights [D], empty: none).
    // `raw_qk` [T, (H+K)*D] and `rstd` [T, H+K] keep what backward needs of the norm (empty without one). cos, sin [positions, D/2].
    virtual void qk_norm_rope_forward(const Tensor& qkv, const Tensor& raw_qk, const Tensor& rstd, const Tensor& q_weight,
                                      const Tensor& k_weight, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                                      const AttentionShape& shape, float eps) = 0;
    /// dqkv is turned in place from the gradient after to the one before; dq_weight, dk_weight [D] += (may be empty)
    virtual void qk_norm_rope_backward(const Tensor& dqkv, const Tensor& dq_weight, const Tensor& dk_weight, const Tensor& raw_qk,
                                       const Tensor& rstd, const Tensor& q_weight, const Tensor& k_weight, const Tensor& cos,
                                       const Tensor& sin, const Tensor& positions, const AttentionShape& shape) = 0;

    // Causal attention within segments. out [T, H*D], lse [T, H], qkv [T, (H+2K)*D].
    virtual void attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv, const Segments& segments,
                                   const AttentionShape& shape) = 0;
    /// `spare`: memory that holds nothing, of any shape, for what a back-end needs on the way; may be empty.
    virtual void attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                    const Segments& segments, const AttentionShape& shape, const Tensor& spare = {}) = 0;

    // y [T,F] = silu(gate) * up, gate_up [T, 2F]. dgate_up may be gate_up itself.
    virtual void swiglu_forward(const Tensor& y, const Tensor& gate_up) = 0;
    virtual void swiglu_backward(const Tensor& dgate_up, const Tensor& dy, const Tensor& gate_up) = 0;
    /// Both at once, where y was not kept. y may be dy itself.
    virtual void swiglu_recompute_backward(const Tensor& dgate_up, const Tensor& y, const Tensor& dy, const Tensor& gate_up) = 0;

    // Rows picked by index [n] int32: what has a target enters the head.
    virtual void gather_rows(const Tensor& out, const Tensor& in, const Tensor& index) = 0;
    virtual void scatter_add_rows(const Tensor& out, const Tensor& in, const Tensor& index) = 0;
    /// out[index[i]] += scale[i] * in[i], the index rising from row to row. scale [n] float32; a row whose scale is 0 adds nothing, not
    /// even a NaN of its own.
    virtual void scatter_add_scaled_rows(const Tensor& out, const Tensor& in, const Tensor& index, const Tensor& scale) = 0;

    // Head. logits [n, V]; ids >= valid_vocab count as -inf. logp, entropy, lse [n]; entropy may be empty.
    virtual void logprob_forward(const Tensor& logp, const Tensor& entropy, const Tensor& lse, const Tensor& logits, const Tensor& targets,
                                 float temperature, std::int64_t valid_vocab) = 0;
    /// dlogits [n, V] from dlogp and dentropy (may be empty) [n]. A row whose seeds are 0 gives zeros. dlogits may be the logits
    /// themselves. Beside float32 logits it may be bfloat16, and then still share their memory row by row: the same data, twice the stride
    /// in elements.
    virtual void logprob_backward(const Tensor& dlogits, const Tensor& logits, const Tensor& lse, const Tensor& entropy,
                                  const Tensor& targets, const Tensor& dlogp, const Tensor& dentropy, float temperature,
                                  std::int64_t valid_vocab) = 0;

    // Optimiser, over flat spans [n].
    virtual double sum_of_squares(const Tensor& x) = 0;
    /// One update of AdamW with decoupled decay. `master` float32 holds the exact weights beside bfloat16 ones, which become its values
    /// rounded to nearest; empty: `weight` is all there is, and if it is bfloat16 it is rounded stochastically. m and v are float32, or
    /// bfloat16 and rounded stochastically; the gradient as above.
    virtual void adamw(const Tensor& weight, const Tensor& master, const Tensor& m, const Tensor& v, const Tensor& gradient,
                       const AdamWOptions& options) = 0;

    // Generation. A row's result never depends on the other rows of the call. A back-end without a sampler leaves these as they are: they
    // throw std::invalid_argument and say so.
    /// y [n,N] = alpha * x [n,K] w[N,K]^T + beta * y (+ bias), n small; each row has the same bits alone and among others
    virtual void decode_linear(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta);
    /// writes the k and v columns of qkv [n, (H+2K)*D] to rows `slots` [n] (int32) of the cache
    virtual void cache_write(const PagedCache& cache, const Tensor& qkv, const Tensor& slots, const AttentionShape& shape);
    /// out [n, H*D]; query row i belongs to sequence i
    virtual void paged_attention(const Tensor& out, const Tensor& qkv, const PagedCache& cache, const AttentionShape& shape);

    /// tokens, logp [n], host; logits [n, V], of which the first `valid_vocab` count. logp is at the row's temperature (1 where that is 0)
    /// and before the filters. A row with a logit that is not finite gives the token -1.
    virtual void sample(std::int32_t* tokens, float* logp, const Tensor& logits, const SampleRow* rows, std::int64_t valid_vocab);

    virtual void synchronize() = 0;
};

struct CpuOptions {
    int threads = 0;  // 0: one per core that this process may use
};

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options);

struct CudaOptions {
    int device = 0;
    bool deterministic = false;   // same inputs, same bits, also in another process: no timing of algorithms, no atomic sums
    bool autotune = true;         // time the best matrix-product algorithms on first use of a shape (never when deterministic)
    bool tune_attention = false;  // build all of cuDNN's plans for a shape and time them (never when deterministic); costs seconds a shape
    bool profile = false;         // NVTX ranges, and a table of the time of each operation on stderr when the back-end goes
    enum class Attention : std::uint8_t { Auto, Cudnn, Plain } attention = Attention::Auto;  // Auto: cuDNN where it takes the shape
};

/// bf16 or float32 per tensor; statistics, rotations and losses in float32. Throws where this build or this machine has no CUDA.
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);

/// Why make_cuda_backend cannot work here (not built with it, no driver, no device), and what to do; empty if it can.
std::string cuda_unavailable_reason();

}  // namespace surogate
