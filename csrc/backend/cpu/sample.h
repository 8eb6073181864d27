#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"

namespace surogate::cpu {

struct Sampled {
    std::int32_t token;  // -1: a logit is not finite
    float logp;
};

/// Floats of scratch that `sample_row` needs, aligned to 64 bytes.
std::size_t sample_scratch_floats(std::int64_t vocab);

/// One token out of the softmax of logits [vocab] at the row's temperature, after its filters, by inverting the cumulative distribution at
/// `row.uniform`. Sums are taken in a fixed order: blocks of ids, the blocks' sums in double precision.
Sampled sample_row(const float* logits, std::int64_t vocab, const SampleRow& row, float* scratch);

}  // namespace surogate::cpu
