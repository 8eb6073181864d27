#pragma once

#include <string>

#include "core/tensor.h"

namespace surogate {

/// The number formats of a learner. What a caller loads, exports or is told is float32 whatever these are.
struct Recipe {
    DType compute = DType::Float32;   // weights, activations and their gradients
    DType logits = DType::Float32;    // what the head computes log-probabilities from
    DType gradient = DType::Float32;  // of weights, added up over micro-batches
    DType state = DType::Float32;     // AdamW's moments
    /// Beside bfloat16 weights that are trained: keep them in float32 too, and update those. Without, updates are rounded stochastically.
    bool master = true;

    bool has_master() const { return compute != DType::Float32 && master; }

    /// Throws std::invalid_argument that names the format that does not go with the others.
    void validate() const;
};

/// "float32" or "bfloat16"; `name` is the option that an error names.
DType dtype_from_name(const char* name, const std::string& value);

}  // namespace surogate
