#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "model/learner.h"
#include "model/parameters.h"
#include "model/recipe.h"
#include "model/spec.h"

namespace surogate {

/// Hands out consecutive views of one flat buffer, from its element `start` on. Without a buffer (an empty tensor) it only measures.
class Cursor {
   public:
    explicit Cursor(std::int64_t padding, const Tensor& buffer = {}, std::int64_t start = 0)
        : buffer_(buffer), padding_(padding), used_(start) {}

    Tensor take(std::int64_t rows, std::int64_t columns);
    /// The element behind the last view, which is padded to a multiple of `padding` elements.
    std::int64_t used() const { return used_; }

   private:
    Tensor buffer_;
    std::int64_t padding_;
    std::int64_t used_;
};

/// Elements that every parameter is padded to. All flat buffers of a learner share it, whatever their dtypes, so that element i of one
/// (gradient, moment, float32 master) belongs to element i of the others.
std::int64_t parameter_padding(const Recipe& recipe);

/// Sizes in elements of a set of parameters: weight decay applies to the matrices, which lie first, and not to the vectors behind them.
struct ParameterSize {
    std::int64_t matrices = 0;
    std::int64_t vectors = 0;
    std::int64_t total() const { return matrices + vectors; }
};

/// Which adapters lie in borders of the weights: those of `lora`, or none at all.
struct BorderOptions {
    LoraOptions lora;

    BorderOptions() = default;
    explicit BorderOptions(const LearnerOptions& options);
    /// R for linears that are one product.
    std::int64_t width(std::initializer_list<Linear> linears) const;
};

ParameterSize base_size(const ModelSpec& spec, std::int64_t padding, const BorderOptions& border);
ParameterSize adapter_size(const ModelSpec& spec, const LoraOptions& lora, std::int64_t padding);

/// Where each block's matrices begin in a buffer of base weights (without borders), in elements, and where the last block's end: all
/// between two of these numbers belongs to one block. What lies before the first is the embedding.
std::vector<std::int64_t> block_offsets(const ModelSpec& spec, std::int64_t padding);

/// Points the base weights of `weights` (or their gradients, or optimiser state) into a buffer of base_size(...).total() elements and
/// appends name and view of each part, in the model's order.
void lay_out_base(const ModelSpec& spec, const Tensor& buffer, std::int64_t padding, const BorderOptions& border, ModelWeights& weights,
                  std::vector<NamedTensor>& names);

/// The same for the adapters, adapter_size(spec, lora, padding).total() elements; where `weights` has borders they lie in those instead.
void lay_out_adapters(const ModelSpec& spec, const LoraOptions& lora, const Tensor& buffer, std::int64_t padding, ModelWeights& weights,
                      std::vector<NamedTensor>& names);

/// "q_proj", ..., "lm_head", and back; an unknown name is an error that lists the known ones.
const char* name_of(Linear linear);
Linear linear_from_name(const std::string& name);

}  // namespace surogate
