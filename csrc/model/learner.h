#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/parameters.h"
#include "model/recipe.h"
#include "model/spec.h"

namespace surogate {

struct LearnerOptions {
    std::int64_t max_tokens = 0;  // of one micro-batch; all activations are planned for it
    std::int64_t head_rows = 0;   // rows of logits computed at a time; 0: a number that depends on vocabulary and recipe alone
    bool trainable = true;        // false: forward only, no gradients and no optimiser (a reference model)
    bool recompute = false;       // keep a block's input only, compute its activations again in backward
    /// With recompute and all weights trained: until backward writes a gradient, its memory holds activations. A step is then made of a
    /// single backward, between which and the step there is no other pass. Same bits.
    bool lend_gradients = false;
    /// Keep the logits of all rows between forward and backward, not of the last chunk alone: same bits, more memory, one product less.
    bool keep_logits = false;
    /// With a head that is not trained: forward goes on to the gradient of every row for a seed of 1, which backward only scales. One
    /// product less than computing the logits again; backward with dentropy still does that. Other rounding, so not the default.
    bool head_gradient_in_forward = false;
    /// Keep the adapters as a border of the frozen weights, so that each linear with its adapters is a single product (see Border). Other
    /// rounding than with products of their own.
    bool border_adapters = false;
    Recipe recipe;
    LoraOptions lora;
    std::uint64_t seed = 0;        // of the fresh adapter's A, and of stochastic rounding
    std::size_t memory_limit = 0;  // bytes; 0: what the device has free
};

/// A packed micro-batch, host memory. targets[t] is the token that position t predicts, negative where there is none.
struct Batch {
    const std::int32_t* tokens = nullptr;     // [T]
    const std::int32_t* positions = nullptr;  // [T], within the segment
    const std::int32_t* targets = nullptr;    // [T]
    std::int64_t size = 0;                    // T
    Segments segments;
};

enum class AdapterUse : std::uint8_t { Live, Initial, Off };

struct PassOptions {
    float temperature = 1.0f;
    std::int64_t valid_vocab = 0;  // ids from here on count as -inf; 0: the whole vocabulary
    bool entropy = false;
    AdapterUse adapter = AdapterUse::Live;
};

struct TokenStats {
    std::vector<float> logp;     // [T], 0 where there is no target
    std::vector<float> entropy;  // [T] or empty; nats
};

struct StepOptions {
    float learning_rate = 0.0f;
    float max_grad_norm = 0.0f;                                                // 0: no clipping
    float beta1 = 0.9f, beta2 = 0.999f, epsilon = 1e-8f, weight_decay = 0.0f;  // decay only on matrices, not on norms and biases
};

struct StepStats {
    double grad_norm = 0.0;  // before clipping
    bool applied = false;    // false: the norm was not finite, nothing but the gradients (now zero) changed
    std::int64_t step = 0;   // updates applied so far
};

struct MemoryItem {
    std::string name;
    std::size_t bytes;
};

class Learner {
   public:
    Learner(std::shared_ptr<Backend> backend, ModelSpec spec, LearnerOptions options);
    ~Learner();
    Learner(const Learner&) = delete;
    Learner& operator=(const Learner&) = delete;

    /// What a learner with these options takes, part by part, without taking it.
    static std::vector<MemoryItem> plan(const ModelSpec& spec, const LearnerOptions& options);

    TokenStats score(const Batch& batch, const PassOptions& options);
    TokenStats forward(const Batch& batch, const PassOptions& options);
    /// dlogp, dentropy [T] (dentropy may be null): gradients of the loss; adds to the gradients and closes the pending pass
    void backward(const float* dlogp, const float* dentropy);
    TokenStats forward_backward(const Batch& batch, const PassOptions& options, const float* dlogp, const float* dentropy);
    std::int64_t pending_tokens() const;  // T of the pending pass, -1 without one
    void discard_pending();               // closes the pending pass without a gradient

    StepStats step(const StepOptions& options);
    void zero_gradients();

    /// Host values, dense, into the weight or adapter of that name. The name must exist, and no pass be pending.
    void load(const std::string& name, const float* values);
    /// Exact values, dense, of a tensor out of `tensors()`, `gradients()` or `optimizer_state()`; and, of the latter two, back again.
    void read(float* values, const NamedTensor& named) const;
    void write(const NamedTensor& named, const float* values);
    /// Exact values of tensors out of those lists into memory of the learner's device that somebody else owns, rounded once if that is
    /// bfloat16. When it returns they are there. What was queued on that memory before must have ended.
    struct Export {
        const NamedTensor* named;
        Tensor out;
    };
    void export_to(const std::vector<Export>& exports) const;
    /// The tensor of that name out of `tensors()`, `gradients()` or `optimizer_state()`, or an error that names `op` and what there is.
    static const NamedTensor& find(const std::vector<NamedTensor>& tensors, const char* op, const std::string& name);

    /// Weights and adapters, "embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.lora_A", ...
    const std::vector<NamedTensor>& tensors() const;
    /// The same names, gradients (trainable ones only).
    const std::vector<NamedTensor>& gradients() const;
    /// "<name>.exp_avg", "<name>.exp_avg_sq"
    const std::vector<NamedTensor>& optimizer_state() const;
    std::int64_t update_count() const;
    void set_update_count(std::int64_t count);
    /// Takes the present adapter as the initial one (AdapterUse::Initial). Until then the initial one is the fresh one, which is as good as
    /// off; but after an adapter was loaded, AdapterUse::Initial is an error until this was called.
    void snapshot_adapter();

    const ModelSpec& spec() const;
    const LearnerOptions& options() const;
    const ModelWeights& weights() const;  // the sampler shares them
    Backend& backend() const;
    const std::vector<MemoryItem>& memory() const;

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace surogate
