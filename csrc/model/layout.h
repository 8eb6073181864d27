#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/parameters.h"
#include "model/spec.h"

namespace surogate {

/// Hands out consecutive float32 views of one buffer. Without a buffer (nullptr) it only measures.
class Cursor {
   public:
    explicit Cursor(float* base = nullptr, Device device = {}) : base_(base), device_(device) {}

    Tensor take(std::int64_t rows, std::int64_t columns);
    /// Floats handed out so far, each view padded to 64 bytes.
    std::int64_t used() const { return used_; }

   private:
    float* base_;
    Device device_;
    std::int64_t used_ = 0;
};

/// Sizes in floats of a set of parameters: weight decay applies to the matrices, which lie first, and not to the vectors behind them.
struct ParameterSize {
    std::int64_t matrices = 0;
    std::int64_t vectors = 0;
    std::int64_t total() const { return matrices + vectors; }
};

ParameterSize base_size(const ModelSpec& spec);
ParameterSize adapter_size(const ModelSpec& spec, const LoraOptions& lora);

/// Points the base weights of `weights` (or their gradients, or optimiser state) into a buffer of base_size(spec).total() floats and
/// appends name and view of each part, in the model's order.
void lay_out_base(const ModelSpec& spec, float* buffer, Device device, ModelWeights& weights, std::vector<NamedTensor>& names);

/// The same for the adapters, adapter_size(spec, lora).total() floats.
void lay_out_adapters(const ModelSpec& spec, const LoraOptions& lora, float* buffer, Device device, ModelWeights& weights,
                      std::vector<NamedTensor>& names);

/// "q_proj", ..., "lm_head", and back; an unknown name is an error that lists the known ones.
const char* name_of(Linear linear);
Linear linear_from_name(const std::string& name);

}  // namespace surogate
