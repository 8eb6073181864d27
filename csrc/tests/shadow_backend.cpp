#include "tests/shadow_backend.h"

#include <sys/mman.h>

#include <bit>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/random.h"
#include "tests/bfloat16.h"

namespace surogate::testing {

/// One operation: opens the device's memory, hands out float32 (or int32) copies of its tensors, and on `finish` writes the outputs back.
class ShadowCall {
   public:
    /// How an output becomes bfloat16.
    using Round = std::function<std::uint16_t(float value, std::int64_t index)>;

    ShadowCall(ShadowBackend& backend, const char* name) : backend_(backend), name_(name) {
        ++backend.calls[name];
        backend.open(true);
    }
    ~ShadowCall() { backend_.open(false); }
    ShadowCall(const ShadowCall&) = delete;
    ShadowCall& operator=(const ShadowCall&) = delete;

    Tensor in(const char* argument, const Tensor& t) {
        if (t.data == nullptr) return t;
        require(t.device == backend_.device(), name_, argument, "memory of the device", "the host's");
        check_bounds(argument, t);
        auto& bytes = copies_.emplace_back(static_cast<std::size_t>(t.size()) * 4);
        const Tensor copy = matrix(bytes.data(), t.rows, t.columns, t.dtype == DType::Int32 ? DType::Int32 : DType::Float32);
        for (std::int64_t i = 0; i < t.size(); ++i) {
            const std::int64_t at = i / t.columns * t.stride + i % t.columns;
            if (t.dtype == DType::BFloat16) {
                copy.f32()[i] = from_bfloat16(t.as<std::uint16_t>()[at]);
            } else {
                copy.i32()[i] = t.i32()[at];
            }
        }
        return copy;
    }
    Tensor in(const char* argument, const Tensor& t, DType dtype) {
        if (t.data != nullptr) require(t.dtype == dtype, name_, argument, name_of(dtype), name_of(t.dtype));
        return in(argument, t);
    }
    /// What it held before is in the copy, too.
    Tensor out(const char* argument, const Tensor& t, Round round = {}) {
        const Tensor copy = in(argument, t);
        if (copy.data != nullptr) outputs_.push_back({t, copy, std::move(round)});
        return copy;
    }
    Tensor out(const char* argument, const Tensor& t, DType dtype) {
        if (t.data != nullptr) require(t.dtype == dtype, name_, argument, name_of(dtype), name_of(t.dtype));
        return out(argument, t);
    }

    void finish() {
        for (const Output& output : outputs_) {
            const Tensor& t = output.place;
            for (std::int64_t i = 0; i < t.size(); ++i) {
                const std::int64_t at = i / t.columns * t.stride + i % t.columns;
                if (t.dtype == DType::BFloat16) {
                    const float value = output.copy.f32()[i];
                    t.as<std::uint16_t>()[at] = output.round ? output.round(value, i) : to_bfloat16(value);
                } else {
                    t.i32()[at] = output.copy.i32()[i];
                }
            }
        }
    }

   private:
    struct Output {
        Tensor place, copy;
        Round round;
    };

    void check_bounds(const char* argument, const Tensor& t) const {
        const auto* begin = static_cast<const char*>(t.data);
        const auto* end = begin + static_cast<std::size_t>(t.rows > 0 ? (t.rows - 1) * t.stride + t.columns : 0) * size_of(t.dtype);
        auto block = backend_.blocks_.upper_bound(t.data);
        require(block != backend_.blocks_.begin(), name_, argument, "memory that was allocated", "another address");
        --block;
        require(end <= static_cast<const char*>(block->first) + block->second, name_, argument, "memory that was allocated", t);
        require(t.rows <= 1 || t.stride >= t.columns, name_, argument, "rows that do not overlap", t.stride);
    }

    ShadowBackend& backend_;
    const char* name_;
    std::list<std::vector<char>> copies_;
    std::vector<Output> outputs_;
};

ShadowBackend::~ShadowBackend() {
    for (const auto& [data, bytes] : blocks_) ::munmap(data, bytes);
}

void ShadowBackend::open(bool accessible) {
    for (const auto& [data, bytes] : blocks_) ::mprotect(data, bytes, accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void* ShadowBackend::allocate(std::size_t bytes) {
    void* data = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw OutOfMemory("ShadowBackend: cannot map memory");
    blocks_[data] = bytes;
    return data;
}

void ShadowBackend::release(void* data) noexcept {
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) return;
    ::munmap(data, found->second);
    blocks_.erase(found);
}

void ShadowBackend::upload(const Tensor& out, const void* host) {
    ShadowCall call(*this, "upload");
    std::memcpy(call.out("out", out).data, host, static_cast<std::size_t>(out.size()) * 4);
    call.finish();
}

void ShadowBackend::download(void* host, const Tensor& in) {
    ShadowCall call(*this, "download");
    std::memcpy(host, call.in("in", in).data, static_cast<std::size_t>(in.size()) * 4);
}

void ShadowBackend::copy(const Tensor& out, const Tensor& in) {
    ShadowCall call(*this, "copy");
    cpu_.copy(call.out("out", out), call.in("in", in));
    call.finish();
}

void ShadowBackend::fill(const Tensor& out, float value) {
    ShadowCall call(*this, "fill");
    cpu_.fill(call.out("out", out), value);
    call.finish();
}

void ShadowBackend::linear_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) {
    ShadowCall call(*this, "linear_forward");
    require(y.dtype == x.dtype || y.dtype == DType::Float32, "linear_forward", "y", x, y);
    cpu_.linear_forward(call.out("y", y), call.in("x", x), call.in("w", w, x.dtype), call.in("bias", bias, x.dtype), alpha, beta);
    call.finish();
}

void ShadowBackend::linear_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, float alpha, float beta) {
    ShadowCall call(*this, "linear_backward_input");
    cpu_.linear_backward_input(call.out("dx", dx, dy.dtype), call.in("dy", dy), call.in("w", w, dy.dtype), alpha, beta);
    call.finish();
}

void ShadowBackend::linear_adapted_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias,
                                           const std::vector<AdapterOutput>& adapters, float scale) {
    ShadowCall call(*this, "linear_adapted_forward");
    calls["linear_forward"] += 1 + static_cast<int>(adapters.size());  // the products that it stands for
    std::vector<AdapterOutput> copies;
    for (const auto& [low, b, first] : adapters) copies.push_back({call.in("low", low, x.dtype), call.in("b", b, x.dtype), first});
    cpu_.linear_adapted_forward(call.out("y", y, x.dtype), call.in("residual", residual, x.dtype), call.in("x", x),
                                call.in("w", w, x.dtype), call.in("bias", bias, x.dtype), copies, scale);
    call.finish();
}

void ShadowBackend::linear_adapted_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, const Tensor& d_low,
                                                  const Tensor& a) {
    ShadowCall call(*this, "linear_adapted_backward_input");
    calls["linear_backward_input"] += 2;
    cpu_.linear_adapted_backward_input(call.out("dx", dx, dy.dtype), call.in("dy", dy), call.in("w", w, dy.dtype),
                                       call.in("d_low", d_low, dy.dtype), call.in("a", a, dy.dtype));
    call.finish();
}

void ShadowBackend::linear_backward_weight(const Tensor& dw, const Tensor& dy, const Tensor& x, float alpha, float beta) {
    ShadowCall call(*this, "linear_backward_weight");
    cpu_.linear_backward_weight(call.out("dw", dw), call.in("dy", dy), call.in("x", x, dy.dtype), alpha, beta);
    call.finish();
}

void ShadowBackend::bias_backward(const Tensor& db, const Tensor& dy) {
    ShadowCall call(*this, "bias_backward");
    cpu_.bias_backward(call.out("db", db), call.in("dy", dy));
    call.finish();
}

void ShadowBackend::embedding_forward(const Tensor& out, const Tensor& table, const Tensor& ids) {
    ShadowCall call(*this, "embedding_forward");
    cpu_.embedding_forward(call.out("out", out, table.dtype), call.in("table", table), call.in("ids", ids, DType::Int32));
    call.finish();
}

void ShadowBackend::embedding_backward(const Tensor& dtable, const Tensor& dout, const Tensor& ids) {
    ShadowCall call(*this, "embedding_backward");
    cpu_.embedding_backward(call.out("dtable", dtable), call.in("dout", dout), call.in("ids", ids, DType::Int32));
    call.finish();
}

void ShadowBackend::rmsnorm_forward(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& weight, float eps) {
    ShadowCall call(*this, "rmsnorm_forward");
    cpu_.rmsnorm_forward(call.out("y", y, x.dtype), call.out("rstd", rstd, DType::Float32), call.in("x", x),
                         call.in("weight", weight, x.dtype), eps);
    call.finish();
}

void ShadowBackend::add_rmsnorm_forward(const Tensor& sum, const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, float eps) {
    ShadowCall call(*this, "add_rmsnorm_forward");
    cpu_.add_rmsnorm_forward(call.out("sum", sum, x.dtype), call.out("y", y, x.dtype), call.out("rstd", rstd, DType::Float32),
                             call.in("x", x), call.in("residual", residual, x.dtype), call.in("weight", weight, x.dtype), eps);
    call.finish();
}

void ShadowBackend::rmsnorm_backward(const Tensor& dx, const Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& weight,
                                     const Tensor& rstd) {
    ShadowCall call(*this, "rmsnorm_backward");
    cpu_.rmsnorm_backward(call.out("dx", dx, dy.dtype), call.out("dweight", dweight), call.in("dy", dy), call.in("x", x, dy.dtype),
                          call.in("weight", weight, dy.dtype), call.in("rstd", rstd, DType::Float32));
    call.finish();
}

void ShadowBackend::qk_norm_rope_forward(const Tensor& qkv, const Tensor& raw_qk, const Tensor& rstd, const Tensor& q_weight,
                                         const Tensor& k_weight, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                                         const AttentionShape& shape, float eps) {
    ShadowCall call(*this, "qk_norm_rope_forward");
    cpu_.qk_norm_rope_forward(call.out("qkv", qkv), call.out("raw_qk", raw_qk, qkv.dtype), call.out("rstd", rstd, DType::Float32),
                              call.in("q_weight", q_weight, qkv.dtype), call.in("k_weight", k_weight, qkv.dtype),
                              call.in("cos", cos, DType::Float32), call.in("sin", sin, DType::Float32),
                              call.in("positions", positions, DType::Int32), shape, eps);
    call.finish();
}

void ShadowBackend::qk_norm_rope_backward(const Tensor& dqkv, const Tensor& dq_weight, const Tensor& dk_weight, const Tensor& raw_qk,
                                          const Tensor& rstd, const Tensor& q_weight, const Tensor& k_weight, const Tensor& cos,
                                          const Tensor& sin, const Tensor& positions, const AttentionShape& shape) {
    ShadowCall call(*this, "qk_norm_rope_backward");
    cpu_.qk_norm_rope_backward(
        call.out("dqkv", dqkv), call.out("dq_weight", dq_weight), call.out("dk_weight", dk_weight), call.in("raw_qk", raw_qk, dqkv.dtype),
        call.in("rstd", rstd, DType::Float32), call.in("q_weight", q_weight, dqkv.dtype), call.in("k_weight", k_weight, dqkv.dtype),
        call.in("cos", cos, DType::Float32), call.in("sin", sin, DType::Float32), call.in("positions", positions, DType::Int32), shape);
    call.finish();
}

void ShadowBackend::attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv, const Segments& segments,
                                      const AttentionShape& shape) {
    ShadowCall call(*this, "attention_forward");
    cpu_.attention_forward(call.out("out", out, qkv.dtype), call.out("lse", lse, DType::Float32), call.in("qkv", qkv), segments, shape);
    call.finish();
}

void ShadowBackend::attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                       const Segments& segments, const AttentionShape& shape, const Tensor& spare) {
    ShadowCall call(*this, "attention_backward");
    if (!spare.empty())
        cpu_.fill(call.out("spare", spare), std::numeric_limits<float>::quiet_NaN());  // it is free, and nobody's afterwards
    cpu_.attention_backward(call.out("dqkv", dqkv, qkv.dtype), call.in("dout", dout, qkv.dtype), call.in("out", out, qkv.dtype),
                            call.in("lse", lse, DType::Float32), call.in("qkv", qkv), segments, shape);
    call.finish();
}

void ShadowBackend::swiglu_forward(const Tensor& y, const Tensor& gate_up) {
    ShadowCall call(*this, "swiglu_forward");
    cpu_.swiglu_forward(call.out("y", y, gate_up.dtype), call.in("gate_up", gate_up));
    call.finish();
}

void ShadowBackend::swiglu_backward(const Tensor& dgate_up, const Tensor& dy, const Tensor& gate_up) {
    ShadowCall call(*this, "swiglu_backward");
    cpu_.swiglu_backward(call.out("dgate_up", dgate_up, dy.dtype), call.in("dy", dy), call.in("gate_up", gate_up, dy.dtype));
    call.finish();
}

void ShadowBackend::swiglu_recompute_backward(const Tensor& dgate_up, const Tensor& y, const Tensor& dy, const Tensor& gate_up) {
    ShadowCall call(*this, "swiglu_recompute_backward");
    const Tensor seed = call.in("dy", dy), before = call.in("gate_up", gate_up, dy.dtype);
    cpu_.swiglu_recompute_backward(call.out("dgate_up", dgate_up, dy.dtype), call.out("y", y, dy.dtype), seed, before);
    call.finish();
}

void ShadowBackend::gather_rows(const Tensor& out, const Tensor& in, const Tensor& index) {
    ShadowCall call(*this, "gather_rows");
    cpu_.gather_rows(call.out("out", out, in.dtype), call.in("in", in), call.in("index", index, DType::Int32));
    call.finish();
}

void ShadowBackend::scatter_add_rows(const Tensor& out, const Tensor& in, const Tensor& index) {
    ShadowCall call(*this, "scatter_add_rows");
    cpu_.scatter_add_rows(call.out("out", out, in.dtype), call.in("in", in), call.in("index", index, DType::Int32));
    call.finish();
}

void ShadowBackend::scatter_add_scaled_rows(const Tensor& out, const Tensor& in, const Tensor& index, const Tensor& scale) {
    ShadowCall call(*this, "scatter_add_scaled_rows");
    cpu_.scatter_add_scaled_rows(call.out("out", out, in.dtype), call.in("in", in), call.in("index", index, DType::Int32),
                                 call.in("scale", scale, DType::Float32));
    call.finish();
}

void ShadowBackend::logprob_forward(const Tensor& logp, const Tensor& entropy, const Tensor& lse, const Tensor& logits,
                                    const Tensor& targets, float temperature, std::int64_t valid_vocab) {
    ShadowCall call(*this, "logprob_forward");
    cpu_.logprob_forward(call.out("logp", logp, DType::Float32), call.out("entropy", entropy, DType::Float32),
                         call.out("lse", lse, DType::Float32), call.in("logits", logits), call.in("targets", targets, DType::Int32),
                         temperature, valid_vocab);
    call.finish();
}

void ShadowBackend::logprob_backward(const Tensor& dlogits, const Tensor& logits, const Tensor& lse, const Tensor& entropy,
                                     const Tensor& targets, const Tensor& dlogp, const Tensor& dentropy, float temperature,
                                     std::int64_t valid_vocab) {
    ShadowCall call(*this, "logprob_backward");
    const std::int64_t wider = logits.dtype == DType::Float32 && dlogits.dtype == DType::BFloat16 ? 2 : 1;
    if (dlogits.data == logits.data) require(dlogits.stride == wider * logits.stride, "logprob_backward", "dlogits", logits, dlogits);
    cpu_.logprob_backward(call.out("dlogits", dlogits), call.in("logits", logits), call.in("lse", lse, DType::Float32),
                          call.in("entropy", entropy, DType::Float32), call.in("targets", targets, DType::Int32),
                          call.in("dlogp", dlogp, DType::Float32), call.in("dentropy", dentropy, DType::Float32), temperature, valid_vocab);
    call.finish();
}

double ShadowBackend::sum_of_squares(const Tensor& x) {
    ShadowCall call(*this, "sum_of_squares");
    return cpu_.sum_of_squares(call.in("x", x));
}

void ShadowBackend::adamw(const Tensor& weight, const Tensor& master, const Tensor& m, const Tensor& v, const Tensor& gradient,
                          const AdamWOptions& options) {
    ShadowCall call(*this, "adamw");
    // Adds random bits below those that stay, so that the mean is the value itself.
    const auto stochastic = [&](std::uint64_t stream) {
        return [random = Philox(options.seed + static_cast<std::uint64_t>(options.step), stream)](float value, std::int64_t index) {
            const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
            return static_cast<std::uint16_t>((bits + (random(static_cast<std::uint64_t>(index))[0] & 0xffffu)) >> 16);
        };
    };
    const bool has_master = !master.empty();
    if (has_master) require(weight.dtype == DType::BFloat16, "adamw", "master", "none beside float32 weights", weight);
    const Tensor exact = has_master ? call.out("master", master, DType::Float32) : call.out("weight", weight, stochastic(0));
    cpu_.adamw(exact, {}, call.out("m", m, stochastic(1)), call.out("v", v, stochastic(2)), call.in("gradient", gradient), options);
    if (has_master) cpu_.copy(call.out("weight", weight), exact);
    call.finish();
}

}  // namespace surogate::testing
