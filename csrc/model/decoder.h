#pragma once

#include <cstdint>

#include "model/activations.h"
#include "model/parameters.h"
#include "model/spec.h"

namespace surogate {

/// What every block of one pass shares.
struct PassContext {
    Backend& backend;
    const ModelSpec& spec;
    float lora_scale = 0.0f;
    Tensor rope_cos, rope_sin;
    Tensor positions;  // [T]
    Segments segments;
    bool add_gradients = true;  // to those of matrices; false: what these held does not count

    AttentionShape attention(std::int64_t layer) const;
};

/// out = x + attention(norm(x)) + mlp(...), all [T, C]. `kept` receives what backward needs; views of exactly T rows. `out` may be `x`; it
/// may be empty, then only `kept` is filled (for backward after a pass that kept nothing but x), and scratch.activated only if an adapter
/// reads it.
void block_forward(const PassContext& pass, std::int64_t layer, const BlockWeights& weights, const Tensor& out,
                   const BlockActivations& kept, const Scratch& scratch, const Tensor& x);

/// How far down a gradient has to go inside a block: with adapters alone, nothing below the lowest one of the first layer matters.
enum class Depth : std::uint8_t { Mlp, AttentionOutput, Qkv, Input };

/// Turns scratch.d_stream from the gradient of the block's output into that of its input (below `depth` it is left unfinished), and adds to
/// `gradients`; a weight whose gradient is empty is frozen. `kept` is used up: gradients take the place of what they were computed from.
void block_backward(const PassContext& pass, std::int64_t layer, const BlockWeights& weights, const BlockWeights& gradients,
                    const BlockActivations& kept, const Scratch& scratch, const Tensor& x, Depth depth);

}  // namespace surogate
