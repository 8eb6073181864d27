#pragma once

#include <vector>

#include "model/arena.h"
#include "model/learner.h"
#include "optim/adamw.h"

namespace surogate {

/// Flat buffers of a learner's parameters.
struct ParameterBuffers {
    Tensor base, adapter, initial_adapter;  // [n]; with borders the adapter holds the exact values of those
    Tensor master;                          // float32 [n] of what is trained, beside bfloat16
    Tensor gradient, m, v;                  // [n] of what is trained: the base weights, or the adapter alone
    Tensor rope_cos, rope_sin;
};

ParameterBuffers lay_out_parameters(Arena& arena, const ModelSpec& spec, const LearnerOptions& options);

/// The views into them.
struct ParameterSet {
    ModelWeights live, initial, off;  // the same base weights, three choices of adapter
    ModelWeights trained;             // gradients; empty where frozen
    std::vector<NamedTensor> tensors, gradients, optimizer;
    std::vector<ParameterSpan> spans;
    std::vector<Backend::CopyItem> borders;  // adapters, from their exact values, after each update
    /// What pads the gradients of matrices to lines, with all weights trained. It is a part of the spans, so it has to be zero.
    std::vector<Tensor> gradient_gaps;

    ParameterSet() = default;
    ParameterSet(const ModelSpec& spec, const LearnerOptions& options, const ParameterBuffers& buffers);
};

/// Sets the exact values of a weight or adapter, and what is rounded from them.
void load_parameter(Backend& backend, const NamedTensor& named, const float* values);

void fill_rope(Backend& backend, const ModelSpec& spec, const Tensor& cos, const Tensor& sin);

/// A uniform in +-1/sqrt(in), which is Kaiming's with a = sqrt(5) as PEFT draws it; B zero. A tensor's values depend on seed and name
/// alone.
void initialise_adapters(Backend& backend, const std::vector<NamedTensor>& names, std::uint64_t seed);

}  // namespace surogate
