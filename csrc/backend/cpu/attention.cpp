#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm.h"

// Forward is blocked attention with a running softmax (Dao et al., "FlashAttention", 2022) over matrix products of the BLAS. A block holds
// the queries of all heads that share one kv-head, stacked, so that its products are large even for small heads. Only blocks at or below
// the diagonal and inside the window are computed.

namespace surogate {

namespace {

constexpr std::int64_t kKeyBlock = 256;
constexpr std::int64_t kScoreFloats = std::int64_t{1} << 20;  // of the scores that backward holds at once, per thread and of each kind
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// Queries of one block: about 192 stacked rows.
std::int64_t query_block(std::int64_t group) { return std::clamp<std::int64_t>(192 / group / 16 * 16, 16, 128); }

struct KeyRange {
    std::int64_t begin, end;
};

/// What a query at `position` of its segment attends to.
KeyRange keys_of(std::int64_t position, std::int64_t window) {
    return {window > 0 ? std::max<std::int64_t>(0, position - window + 1) : 0, position + 1};
}

void check_attention(const char* op, const Tensor& qkv, const Tensor& out, const Tensor& lse, const Segments& segments,
                     const AttentionShape& s) {
    require(s.head_dim > 0, op, "head_dim", "a number above 0", s.head_dim);
    require(s.kv_heads > 0 && s.heads > 0 && s.heads % s.kv_heads == 0, op, "heads", "a multiple of kv_heads", s.heads);
    require(s.window >= 0, op, "window", "0 or more", s.window);
    check(op, "qkv", qkv, qkv.rows, (s.heads + 2 * s.kv_heads) * s.head_dim);
    check(op, "out", out, qkv.rows, s.heads * s.head_dim);
    check(op, "lse", lse, qkv.rows, s.heads);
    require(segments.count >= 0 && (segments.cu_seqlens != nullptr || segments.count == 0), op, "segments", "boundaries", "none");
    const std::int32_t* bounds = segments.cu_seqlens;
    const std::int64_t first = segments.count > 0 ? bounds[0] : 0, last = segments.count > 0 ? bounds[segments.count] : 0;
    require(first == 0 && last == qkv.rows, op, "cu_seqlens", qkv.rows, last);
    for (std::int64_t i = 0; i < segments.count; ++i) {
        if (bounds[i] > bounds[i + 1]) fail(op, ": cu_seqlens[", i + 1, "]: expected ", bounds[i], " or more, got ", bounds[i + 1]);
    }
}

/// The queries [begin, end) of a segment that starts at row `start`, for the heads of one kv-head.
struct Item {
    std::int64_t start, kv_head, begin, end;
    double cost;
    std::int64_t sums;  // backward: where its dk and dv lie in the scratch memory; negative: directly in dqkv
};

/// Longest first, so that the threads end together. Equal costs keep their order.
void sort_by_cost(std::vector<Item>& items) {
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

/// One item's view of the tensors.
struct Heads {
    Heads(const Tensor& qkv, const Item& item, const AttentionShape& shape)
        : size(shape.head_dim),
          group(shape.heads / shape.kv_heads),
          first_head(item.kv_head * group),
          key_column((shape.heads + item.kv_head) * size),
          value_column((shape.heads + shape.kv_heads + item.kv_head) * size),
          keys(row(qkv, item.start) + key_column),
          values(row(qkv, item.start) + value_column) {}

    std::int64_t size, group, first_head, key_column, value_column;
    const float* keys;
    const float* values;
};

/// Copies `factor` times the columns of the group's heads, rows [row, row + count), into stacked rows: head by head.
void stack(const Kernels& kernels, float* out, const Tensor& in, std::int64_t first_row, std::int64_t count, const Heads& heads,
           float factor) {
    for (std::int64_t g = 0; g < heads.group; ++g) {
        for (std::int64_t i = 0; i < count; ++i) {
            kernels.scale(out + (g * count + i) * heads.size, row(in, first_row + i) + (heads.first_head + g) * heads.size, factor,
                          heads.size);
        }
    }
}

}  // namespace

void CpuBackend::attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv, const Segments& segments,
                                   const AttentionShape& shape) {
    check_attention("attention_forward", qkv, out, lse, segments, shape);
    const std::int64_t block = query_block(shape.heads / shape.kv_heads);
    std::vector<Item> items;
    for (std::int64_t s = 0; s < segments.count; ++s) {
        const std::int64_t start = segments.cu_seqlens[s], length = segments.cu_seqlens[s + 1] - start;
        for (std::int64_t begin = 0; begin < length; begin += block) {
            const std::int64_t end = std::min(begin + block, length);
            const double cost = static_cast<double>((end - keys_of(begin, shape.window).begin) * (end - begin));
            for (std::int64_t k = 0; k < shape.kv_heads; ++k) items.push_back({start, k, begin, end, cost, -1});
        }
    }
    sort_by_cost(items);

    pool_.parallel_for(static_cast<std::int64_t>(items.size()), [&](std::int64_t index, int worker) {
        const Item& item = items[static_cast<std::size_t>(index)];
        const Heads heads(qkv, item, shape);
        const std::int64_t size = heads.size, count = item.end - item.begin, rows = heads.group * count;
        float* queries = pool_.scratch(worker, static_cast<std::size_t>(rows * (2 * size + kKeyBlock + 2)));
        float* result = queries + rows * size;
        float* scores = result + rows * size;
        float* largest = scores + rows * kKeyBlock;
        float* sums = largest + rows;
        stack(kernels_, queries, qkv, item.start + item.begin, count, heads, shape.scale);
        std::fill_n(largest, rows, kMinusInfinity);
        std::fill_n(sums, rows, 0.0f);

        const std::int64_t first_key = keys_of(item.begin, shape.window).begin;
        for (std::int64_t key = first_key; key < item.end; key += kKeyBlock) {
            const std::int64_t width = std::min(kKeyBlock, item.end - key);
            gemm(scores, width, {queries, size}, {heads.keys + key * qkv.stride, qkv.stride, true}, rows, width, size, 1.0f, 0.0f);
            for (std::int64_t r = 0; r < rows; ++r) {
                float* line = scores + r * width;
                const KeyRange all = keys_of(item.begin + r % count, shape.window);
                const std::int64_t from = std::clamp<std::int64_t>(all.begin - key, 0, width);
                const std::int64_t to = std::clamp<std::int64_t>(all.end - key, 0, width);
                if (from >= to) {
                    std::fill_n(line, width, 0.0f);
                    continue;
                }
                std::fill(line, line + from, 0.0f);
                std::fill(line + to, line + width, 0.0f);
                const float here = kernels_.max(line + from, to - from);
                const float shift = largest[r] >= here ? largest[r] : here;  // NaN in `here` wins, and shows in the result
                const float sum = kernels_.exp_shifted(line + from, line + from, shift, to - from);
                if (key > first_key && shift != largest[r]) {
                    const float factor = std::exp(largest[r] - shift);
                    sums[r] *= factor;
                    kernels_.scale(result + r * size, result + r * size, factor, size);
                }
                sums[r] += sum;
                largest[r] = shift;
            }
            gemm(result, size, {scores, width}, {heads.values + key * qkv.stride, qkv.stride}, rows, size, width, 1.0f,
                 key == first_key ? 0.0f : 1.0f);
        }
        for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t t = item.start + item.begin + r % count, head = heads.first_head + r / count;
            kernels_.scale(row(out, t) + head * size, result + r * size, 1.0f / sums[r], size);
            row(lse, t)[head] = largest[r] + std::log(sums[r]);
        }
    });
}

void CpuBackend::attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                    const Segments& segments, const AttentionShape& shape) {
    const char* op = "attention_backward";
    check_attention(op, qkv, out, lse, segments, shape);
    check(op, "dqkv", dqkv, qkv.rows, qkv.columns);
    check(op, "dout", dout, out.rows, out.columns);
    const std::int64_t block = query_block(shape.heads / shape.kv_heads), size = shape.head_dim;

    // An item walks a range of query blocks and adds up dk and dv for all keys that they see. A long segment is cut into parts of about
    // equal work that each add into memory of their own, but the last, which sees all keys that the others see, adds where the result
    // belongs.
    std::vector<Item> items;
    std::int64_t scratch = 0;
    for (std::int64_t s = 0; s < segments.count; ++s) {
        const std::int64_t start = segments.cu_seqlens[s], length = segments.cu_seqlens[s + 1] - start;
        if (length == 0) continue;
        const std::int64_t blocks = (length + block - 1) / block, parts = std::min<std::int64_t>(4, (length + 255) / 256);
        std::int64_t begin = 0;
        for (std::int64_t part = 0; part < parts; ++part) {
            // Causal work grows with the square of the position, windowed work in proportion to it.
            const double share = static_cast<double>(part + 1) / static_cast<double>(parts);
            const bool windowed = shape.window > 0 && shape.window < length / 2;
            const std::int64_t cut =
                static_cast<std::int64_t>(std::llround(static_cast<double>(blocks) * (windowed ? share : std::sqrt(share))));
            const std::int64_t end = part + 1 == parts ? length : std::min(length, cut * block);
            if (end <= begin) continue;
            const std::int64_t first_key = keys_of(begin, shape.window).begin;
            const double cost = static_cast<double>(end - begin) * static_cast<double>(end - first_key);
            for (std::int64_t k = 0; k < shape.kv_heads; ++k) {
                items.push_back({start, k, begin, end, cost, end == length ? -1 : scratch});
                if (end < length) scratch += (end - first_key) * 2 * size;
            }
            begin = end;
        }
    }
    const std::vector<Item> in_order = items;
    sort_by_cost(items);

    const std::lock_guard<std::mutex> lock(shared_mutex_);
    float* shared = shared_.floats(static_cast<std::size_t>(scratch));
    pool_.parallel_for(static_cast<std::int64_t>(items.size()), [&](std::int64_t index, int worker) {
        const Item& item = items[static_cast<std::size_t>(index)];
        const Heads heads(qkv, item, shape);
        const std::int64_t first_key = keys_of(item.begin, shape.window).begin;
        // dk and dv of the segment's keys from `origin` on.
        const bool direct = item.sums < 0;
        const std::int64_t origin = direct ? 0 : first_key, sum_stride = direct ? dqkv.stride : 2 * size;
        float* dkeys = direct ? row(dqkv, item.start) + heads.key_column : shared + item.sums;
        float* dvalues = direct ? row(dqkv, item.start) + heads.value_column : dkeys + size;
        for (std::int64_t key = origin; key < item.end; ++key) {
            std::fill_n(dkeys + (key - origin) * sum_stride, size, 0.0f);
            std::fill_n(dvalues + (key - origin) * sum_stride, size, 0.0f);
        }

        // All keys of a query are at hand at once: the sum over them of p * dp, taken from the very numbers that it is subtracted from,
        // lets their rounding errors cancel, which out * dout (the same sum in exact numbers) would not.
        const std::int64_t span = item.end - first_key;
        const std::int64_t step = std::min(block, std::max<std::int64_t>(16, kScoreFloats / (heads.group * span)));
        const std::int64_t most = heads.group * std::min(step, item.end - item.begin);
        float* queries = pool_.scratch(worker, static_cast<std::size_t>(most * (3 * size + 2 * span)));
        float* gradients = queries + most * size;
        float* dqueries = gradients + most * size;
        float* weights = dqueries + most * size;
        float* dscores = weights + most * span;
        for (std::int64_t begin = item.begin; begin < item.end; begin += step) {
            const std::int64_t end = std::min(begin + step, item.end), count = end - begin, rows = heads.group * count;
            const std::int64_t first = keys_of(begin, shape.window).begin, width = end - first;
            stack(kernels_, queries, qkv, item.start + begin, count, heads, shape.scale);
            stack(kernels_, gradients, dout, item.start + begin, count, heads, 1.0f);
            const float* keys = heads.keys + first * qkv.stride;
            gemm(weights, width, {queries, size}, {keys, qkv.stride, true}, rows, width, size, 1.0f, 0.0f);
            gemm(dscores, width, {gradients, size}, {heads.values + first * qkv.stride, qkv.stride, true}, rows, width, size, 1.0f, 0.0f);
            for (std::int64_t r = 0; r < rows; ++r) {
                float* p = weights + r * width;
                float* ds = dscores + r * width;
                const KeyRange all = keys_of(begin + r % count, shape.window);
                const std::int64_t from = all.begin - first, to = all.end - first;
                for (float* line : {p, ds}) {
                    std::fill(line, line + from, 0.0f);
                    std::fill(line + to, line + width, 0.0f);
                }
                const float own_lse = row(lse, item.start + begin + r % count)[heads.first_head + r / count];
                const float sum = kernels_.exp_shifted(p + from, p + from, own_lse, to - from);
                kernels_.scale(p + from, p + from, 1.0f / sum, to - from);  // 1 but for the rounding of lse
                kernels_.softmax_backward(ds + from, p + from, kernels_.dot(p + from, ds + from, to - from), to - from);
            }
            const std::int64_t at = (first - origin) * sum_stride;
            gemm(dvalues + at, sum_stride, {weights, width, true}, {gradients, size}, width, size, rows, 1.0f, 1.0f);
            gemm(dkeys + at, sum_stride, {dscores, width, true}, {queries, size}, width, size, rows, 1.0f, 1.0f);
            gemm(dqueries, size, {dscores, width}, {keys, qkv.stride}, rows, size, width, shape.scale, 0.0f);
            for (std::int64_t r = 0; r < rows; ++r) {
                std::memcpy(row(dqkv, item.start + begin + r % count) + (heads.first_head + r / count) * size, dqueries + r * size,
                            static_cast<std::size_t>(size) * sizeof(float));
            }
        }
    });

    // The parts' sums, in the order of the parts; rows of different kv-heads and segments are different columns or rows.
    pool_.parallel_for(shape.kv_heads, [&](std::int64_t kv_head) {
        for (const Item& item : in_order) {
            if (item.sums < 0 || item.kv_head != kv_head) continue;
            const Heads heads(qkv, item, shape);
            const std::int64_t first_key = keys_of(item.begin, shape.window).begin;
            const float* sums = shared + item.sums;
            for (std::int64_t key = first_key; key < item.end; ++key, sums += 2 * size) {
                kernels_.add(row(dqkv, item.start + key) + heads.key_column, sums, size);
                kernels_.add(row(dqkv, item.start + key) + heads.value_column, sums + size, size);
            }
        }
    });
}

}  // namespace surogate
