#pragma once

#include <cstdint>

namespace surogate::cpu {

/// The keys of 16 consecutive cache rows lie as [K, D, 16], so that 16 scores are one chain of vector multiply-adds without a horizontal
/// sum; values lie row by row, [row, K * D].
constexpr std::int64_t kCacheRows = 16;

/// One query row against one kv-head: `groups` query heads share it.
struct AttentionTask {
    float* out;      // [groups, D]
    const float* q;  // [groups, D]
    const float* keys;
    const float* values;
    const std::int32_t* blocks;  // the sequence's table
    std::int64_t block_size;
    std::int64_t kv_columns;  // K * D
    std::int64_t head;        // of the K
    std::int64_t head_dim, groups;
    std::int64_t first, length;  // attends to positions [first, length)
    float scale;
    float* scratch;  // attention_scratch(length) floats
};

constexpr std::int64_t kAttentionHeads = 4;  // query heads computed together

constexpr std::int64_t attention_scratch(std::int64_t length) { return kAttentionHeads * (length + 2 * kCacheRows); }

/// Sums of exp((x - max) * inverse_temperature) over blocks of a row of logits.
struct SoftmaxTask {
    const float* logits;
    std::int64_t size;
    float inverse_temperature;
    double* block_sums;  // [ceil(size / kSoftmaxBlock)]
    float max;           // out
    double total;        // out; NaN if a logit is not finite
};

constexpr std::int64_t kSoftmaxBlock = 512;

struct RowKernels {
    void (*attention)(const AttentionTask& task);
    void (*softmax)(SoftmaxTask& task);
    /// out[i] = exp((x[i] - max) * inverse_temperature), the very numbers that `softmax` sums
    void (*exponentials)(float* out, const float* x, std::int64_t size, float max, float inverse_temperature);
};

/// The same arithmetic in the widest registers that this processor has.
const RowKernels& row_kernels();

const RowKernels& row_kernels_portable();
#if defined(__x86_64__)
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();
#endif

}  // namespace surogate::cpu
