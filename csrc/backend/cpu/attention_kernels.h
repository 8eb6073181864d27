#pragma once

#include <cstdint>

namespace surogate {

/// Lane l attends to the keys [from[l], to[l]) of a block, counted from the block's first.
struct KeyRanges {
    static constexpr int kMost = 64;  // lanes of the widest panel, with room to spare
    std::int32_t from[kMost], to[kMost];
};

/// The inner loops of attention that are no matrix products. A block of scores is [keys, stride] with one query per column, so that all
/// goes down the columns in whole vectors; memory must be there up to the next full vector of columns. `ranges` null: all attend to all.
struct AttentionKernels {
    /// One step of a running softmax: s becomes exp(s - largest); `factors` is by what sums so far shrink, which `sums` itself already did.
    void (*softmax_block)(float* s, std::int64_t stride, std::int64_t keys, std::int64_t columns, const KeyRanges* ranges, float* largest,
                          float* sums, float* factors);
    /// Over all keys of the queries at once: s becomes p = exp(s - lse), dp becomes p * (dp - sum of p * dp). Taken from the very numbers
    /// that it is subtracted from, that sum lets their rounding errors cancel, which out * dout (the same sum in exact numbers) would not.
    void (*softmax_gradient)(float* s, float* dp, std::int64_t stride, std::int64_t keys, std::int64_t columns, const KeyRanges* ranges,
                             const float* lse);
    /// x [rows, stride] *= factors, one for each column
    void (*scale_columns)(float* x, std::int64_t stride, std::int64_t rows, std::int64_t columns, const float* factors);
};

/// Those of the set of this name (see kernels.h), or null where the processor or the build lacks it.
const AttentionKernels* find_attention_kernels(const char* name);

}  // namespace surogate
