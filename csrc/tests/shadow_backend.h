#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/cpu_backend.h"

namespace surogate::testing {

/// A GPU's stand-in: a device of its own whose memory the host cannot touch between operations (its pages are closed to all access), with
/// float32 and bfloat16 tensors. Every operation is the CPU's in float32, between two conversions, each output rounded once. So it shows
/// that what is built above the back-end keeps to a device's rules and dtypes, and counts how often the host waits or copies.
class ShadowBackend final : public Backend {
   public:
    ShadowBackend() : cpu_(CpuOptions{1}) {}
    ~ShadowBackend() override;

    std::map<std::string, int> calls;  // of each operation
    std::size_t memory = std::size_t{1} << 32;

    Device device() const override { return {Device::Kind::Cuda, 0}; }
    std::size_t available_memory() const override { return memory; }
    void* allocate(std::size_t bytes) override;
    void release(void* data) noexcept override;
    void upload(const Tensor& out, const void* host) override;
    void download(void* host, const Tensor& in) override;
    void copy(const Tensor& out, const Tensor& in) override;
    void fill(const Tensor& out, float value) override;

    void linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) override;
    void linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) override;
    void linear_adapted_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias,
                                const std::vector<AdapterOutput>& adapters, float scale) override;
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

    void synchronize() override { ++calls["synchronize"]; }

    int count(const std::string& operation) const {
        const auto found = calls.find(operation);
        return found == calls.end() ? 0 : found->second;
    }

   private:
    friend class ShadowCall;
    void open(bool accessible);

    CpuBackend cpu_;
    std::map<void*, std::size_t> blocks_;  // and their sizes
};

}  // namespace surogate::testing
