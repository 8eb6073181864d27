// The source of attention's inner loops for all kernel sets; see kernels_impl.h, whose rules hold here too.

#include <cstdint>

#include "backend/cpu/attention_kernels.h"
#include "backend/cpu/vector_math.h"

namespace surogate::SUROGATE_ISA {

namespace {

constexpr float kMinusInfinity = -__builtin_inff();

/// Which lanes attend to key `key` of the block.
struct Mask {
    IntVec from, to;
    [[gnu::always_inline]] Mask(const KeyRanges* ranges, std::int64_t lane) : from{}, to{} {
        if (ranges == nullptr) return;
        __builtin_memcpy(&from, ranges->from + lane, sizeof(from));
        __builtin_memcpy(&to, ranges->to + lane, sizeof(to));
    }
    [[gnu::always_inline]] Vec keep(Vec x, std::int64_t key, float otherwise) const {
        const IntVec at = IntVec{} + static_cast<std::int32_t>(key);
        return select((from <= at) & (at < to), x, broadcast(otherwise));
    }
};

template <bool MASKED>
[[gnu::always_inline]] inline void softmax(float* s, std::int64_t stride, std::int64_t keys, const Mask& mask, float* largest, float* sums,
                                           float* factors) {
    const Full full;
    const Vec old = full.load(largest);
    Vec best = old;
    for (std::int64_t key = 0; key < keys; ++key) {
        Vec x = full.load(s + key * stride);
        if constexpr (MASKED) {
            x = mask.keep(x, key, kMinusInfinity);
            full.store(s + key * stride, x);
        }
        best = select((best >= x) | (best != best), best, x);  // NaN stays and wins
    }
    // Without any key yet all weights are exp(-inf) = 0.
    const Vec shift = select(best == broadcast(kMinusInfinity), Vec{}, best);
    const Vec factor = exp(old - shift);
    Vec sum = {};
    for (std::int64_t key = 0; key < keys; ++key) {
        const Vec e = exp(full.load(s + key * stride) - shift);
        full.store(s + key * stride, e);
        sum += e;
    }
    full.store(largest, best);
    full.store(factors, factor);
    full.store(sums, full.load(sums) * factor + sum);
}

void softmax_block(float* s, std::int64_t stride, std::int64_t keys, std::int64_t columns, const KeyRanges* ranges, float* largest,
                   float* sums, float* factors) {
    for (std::int64_t lane = 0; lane < columns; lane += kLanes) {
        const Mask mask(ranges, lane);
        if (ranges != nullptr) {
            softmax<true>(s + lane, stride, keys, mask, largest + lane, sums + lane, factors + lane);
        } else {
            softmax<false>(s + lane, stride, keys, mask, largest + lane, sums + lane, factors + lane);
        }
    }
}

/// Sums of sums of 64: rounding errors grow with the root of the number of keys at most.
constexpr std::int64_t kSumKeys = 64;

template <bool MASKED>
[[gnu::always_inline]] inline void gradients(float* s, float* dp, std::int64_t stride, std::int64_t keys, const Mask& mask, Vec lse) {
    const Full full;
    Vec total = {}, total_products = {};
    for (std::int64_t first = 0; first < keys; first += kSumKeys) {
        const std::int64_t end = first + kSumKeys < keys ? first + kSumKeys : keys;
        Vec sum = {}, products = {};
        for (std::int64_t key = first; key < end; ++key) {
            Vec p = exp(full.load(s + key * stride) - lse);
            if constexpr (MASKED) {
                p = mask.keep(p, key, 0.0f);
                full.store(dp + key * stride, mask.keep(full.load(dp + key * stride), key, 0.0f));
            }
            full.store(s + key * stride, p);
            sum += p;
            products += p * full.load(dp + key * stride);
        }
        total += sum;
        total_products += products;
    }
    const Vec factor = 1.0f / total;  // 1 but for the rounding of lse
    const Vec delta = total_products * factor;
    for (std::int64_t key = 0; key < keys; ++key) {
        const Vec p = full.load(s + key * stride) * factor;
        full.store(s + key * stride, p);
        full.store(dp + key * stride, p * (full.load(dp + key * stride) - delta));
    }
}

void softmax_gradient(float* s, float* dp, std::int64_t stride, std::int64_t keys, std::int64_t columns, const KeyRanges* ranges,
                      const float* lse) {
    for (std::int64_t lane = 0; lane < columns; lane += kLanes) {
        const Mask mask(ranges, lane);
        if (ranges != nullptr) {
            gradients<true>(s + lane, dp + lane, stride, keys, mask, Full{}.load(lse + lane));
        } else {
            gradients<false>(s + lane, dp + lane, stride, keys, mask, Full{}.load(lse + lane));
        }
    }
}

void scale_columns(float* x, std::int64_t stride, std::int64_t rows, std::int64_t columns, const float* factors) {
    for (std::int64_t lane = 0; lane < columns; lane += kLanes) {
        const Vec factor = Full{}.load(factors + lane);
        for (std::int64_t r = 0; r < rows; ++r) Full{}.store(x + r * stride + lane, Full{}.load(x + r * stride + lane) * factor);
    }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {softmax_block, softmax_gradient, scale_columns};

}  // namespace surogate::SUROGATE_ISA
