#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/packed_gemm.h"

// Blocked attention with a running softmax (Dao et al., "FlashAttention", 2022), turned on its side: scores are [keys, queries], so that
// the softmax goes down columns in whole vectors, and a block of weights is, as it is written, the packed operand of the next product. Keys
// and values are packed once for all queries. Only blocks at or below the diagonal and inside the window are computed.

namespace surogate {

namespace {

constexpr std::int64_t kBlockPanels = 8;                      // panels of keys in a block: its scores stay in the first-level cache
constexpr std::int64_t kPackPanels = 32;                      // of keys for one thread at a time
constexpr std::int64_t kScoreFloats = std::int64_t{1} << 18;  // of the scores that backward holds at once, per thread and of each kind
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

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

/// Panels of an operand of a product: `stride` floats apart, `height` rows each.
struct Panels {
    const float* data;
    std::int64_t stride, height;
};

/// A matrix [keys of a segment, D] of one kv-head, packed in either or both of the ways in which products read it: keys as rows (with the
/// sum over D), and D as rows (with the sum over keys).
class PackedKeys {
   public:
    PackedKeys(const GemmKernels& kernels, const Segments& segments, const AttentionShape& shape, bool by_key, bool by_column)
        : kernels_(kernels), kv_heads_(shape.kv_heads), size_(shape.head_dim), by_key_(by_key), by_column_(by_column) {
        column_panels_ = (size_ + kernels_.max_height - 1) / kernels_.max_height;
        column_height_ = (size_ + column_panels_ - 1) / column_panels_;
        for (std::int64_t s = 0; s < segments.count; ++s) {
            begins_.push_back(floats_);
            lengths_.push_back(segments.cu_seqlens[s + 1] - segments.cu_seqlens[s]);
            floats_ += kv_heads_ * head_floats(s);
        }
    }

    std::int64_t floats() const { return floats_; }
    void set_memory(float* memory) { memory_ = memory; }

    /// Keys as rows, from `key` on, a multiple of the kernels' height.
    Panels keys(std::int64_t segment, std::int64_t kv_head, std::int64_t key) const {
        return {head(segment, kv_head) + key * size_, kernels_.max_height * size_, kernels_.max_height};
    }
    /// D as rows, for the keys from `key` on.
    Panels columns(std::int64_t segment, std::int64_t kv_head, std::int64_t key) const {
        return {head(segment, kv_head) + key_floats(segment) + key * column_height_, length(segment) * column_height_, column_height_};
    }

    /// Packs keys [key, key + count); `first` is the segment's first row of the matrix.
    void pack(const Operand& first, std::int64_t segment, std::int64_t kv_head, std::int64_t key, std::int64_t count) const {
        const float* data = first.data + key * first.stride;
        if (by_key_) {
            const Panels panels = keys(segment, kv_head, key);
            kernels_.pack_rows(const_cast<float*>(panels.data), panels.stride, {data, first.stride}, count, panels.height, size_);
        }
        if (by_column_) {
            const Panels panels = columns(segment, kv_head, key);
            kernels_.pack_rows(const_cast<float*>(panels.data), panels.stride, {data, first.stride, true}, size_, panels.height, count);
        }
    }

   private:
    std::int64_t length(std::int64_t segment) const { return lengths_[static_cast<std::size_t>(segment)]; }
    std::int64_t key_floats(std::int64_t segment) const {
        const std::int64_t height = kernels_.max_height;
        return by_key_ ? (length(segment) + height - 1) / height * height * size_ : 0;
    }
    std::int64_t head_floats(std::int64_t segment) const {
        return key_floats(segment) + (by_column_ ? column_panels_ * column_height_ * length(segment) : 0);
    }
    float* head(std::int64_t segment, std::int64_t kv_head) const {
        return memory_ + begins_[static_cast<std::size_t>(segment)] + kv_head * head_floats(segment);
    }

    const GemmKernels& kernels_;
    std::int64_t kv_heads_, size_, column_panels_ = 0, column_height_ = 0;
    bool by_key_, by_column_;
    std::vector<std::int64_t> begins_, lengths_;
    std::int64_t floats_ = 0;
    float* memory_ = nullptr;
};

/// The queries [begin, end) of a segment that starts at row `start`, for the heads of one kv-head.
struct Item {
    std::int64_t segment, start, kv_head, begin, end;
    double cost;
    std::int64_t sums;  // backward: where its dk and dv lie in the scratch memory; negative: directly in dqkv
};

/// Longest first, so that the threads end together. Equal costs keep their order.
void sort_by_cost(std::vector<Item>& items) {
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

/// The heads that share a kv-head, and the columns of qkv at which its keys and values begin.
struct Group {
    Group(const AttentionShape& s, std::int64_t kv_head)
        : heads(s.heads / s.kv_heads),
          first_head(kv_head * heads),
          keys((s.heads + kv_head) * s.head_dim),
          values((s.heads + s.kv_heads + kv_head) * s.head_dim) {}
    std::int64_t heads, first_head, keys, values;
};

/// Which of the keys [key, key + keys) each of the queries [query, query + count) attends to: fills `ranges` and returns it, or null if all
/// attend to all.
const KeyRanges* ranges_of(KeyRanges& ranges, std::int64_t key, std::int64_t keys, std::int64_t query, std::int64_t count,
                           std::int64_t window) {
    if (key + keys <= query + 1 && key >= keys_of(query + count - 1, window).begin) return nullptr;
    for (std::int64_t i = 0; i < KeyRanges::kMost; ++i) {
        const KeyRange range = keys_of(query + std::min(i, count - 1), window);
        ranges.from[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(range.begin - key, 0, keys));
        ranges.to[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(range.end - key, 0, keys));
    }
    return &ranges;
}

/// Packs keys and values of all segments, a share of the keys for each thread at a time.
void pack_all(ThreadPool& pool, std::int64_t share, const Tensor& qkv, const Segments& segments, const AttentionShape& shape,
              const PackedKeys& keys, const PackedKeys& values) {
    struct Share {
        std::int64_t segment, kv_head, key;
    };
    std::vector<Share> shares;
    for (std::int64_t s = 0; s < segments.count; ++s) {
        for (std::int64_t key = 0; key < segments.cu_seqlens[s + 1] - segments.cu_seqlens[s]; key += share) {
            for (std::int64_t k = 0; k < shape.kv_heads; ++k) shares.push_back({s, k, key});
        }
    }
    pool.parallel_for(static_cast<std::int64_t>(shares.size()), [&](std::int64_t index) {
        const auto& [segment, kv_head, key] = shares[static_cast<std::size_t>(index)];
        const Group group(shape, kv_head);
        const std::int64_t start = segments.cu_seqlens[segment], count = std::min(share, segments.cu_seqlens[segment + 1] - start - key);
        keys.pack({row(qkv, start) + group.keys, qkv.stride}, segment, kv_head, key, count);
        values.pack({row(qkv, start) + group.values, qkv.stride}, segment, kv_head, key, count);
    });
}

/// c [rows, columns] (stride c_stride) = alpha * a b + beta * c; b is one panel of columns, packed unless there is a `b_step`
void multiply_panels(const GemmKernels& kernels, float* c, std::int64_t c_stride, Panels a, const float* b, std::int64_t rows,
                     std::int64_t columns, std::int64_t k, float alpha, float beta, std::int64_t b_step = 0) {
    for (std::int64_t r = 0; r < rows; r += a.height, a.data += a.stride) {
        kernels.multiply(c + r * c_stride, c_stride, a.data, a.height, b, b_step > 0 ? b_step : kernels.width, std::min(a.height, rows - r),
                         columns, k, alpha, beta);
    }
}

/// The vectors of size D that begin in `count` rows from `first` on as one panel [D, width], `factor` times.
void pack_panel(const Kernels& kernels, const GemmKernels& gemm, float* panel, const float* first, std::int64_t stride, std::int64_t count,
                std::int64_t size, float factor) {
    if (count < gemm.width) std::fill_n(panel, size * gemm.width, 0.0f);
    gemm.pack_columns(panel, 0, {first, stride, true}, count, size);
    if (factor != 1.0f) kernels.scale(panel, panel, factor, size * gemm.width);
}

}  // namespace

void CpuBackend::attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv, const Segments& segments,
                                   const AttentionShape& shape) {
    check_attention("attention_forward", qkv, out, lse, segments, shape);
    const std::int64_t width = gemm_kernels_.width, height = gemm_kernels_.max_height, size = shape.head_dim;
    const std::int64_t block_keys = kBlockPanels * height;
    std::vector<Item> items;
    for (std::int64_t s = 0; s < segments.count; ++s) {
        const std::int64_t start = segments.cu_seqlens[s], length = segments.cu_seqlens[s + 1] - start;
        for (std::int64_t begin = 0; begin < length; begin += width) {
            const std::int64_t end = std::min(begin + width, length);
            const double cost = static_cast<double>((end - keys_of(begin, shape.window).begin) * (end - begin));
            for (std::int64_t k = 0; k < shape.kv_heads; ++k) items.push_back({s, start, k, begin, end, cost, -1});
        }
    }
    sort_by_cost(items);

    PackedKeys keys(gemm_kernels_, segments, shape, true, false), values(gemm_kernels_, segments, shape, false, true);
    const std::lock_guard<std::mutex> lock(shared_mutex_);
    float* memory = shared_.floats(static_cast<std::size_t>(keys.floats() + values.floats()));
    keys.set_memory(memory);
    values.set_memory(memory + keys.floats());
    pack_all(pool_, kPackPanels * height, qkv, segments, shape, keys, values);

    pool_.parallel_for(static_cast<std::int64_t>(items.size()), [&](std::int64_t index, int worker) {
        const Item& item = items[static_cast<std::size_t>(index)];
        const Group group(shape, item.kv_head);
        const std::int64_t count = item.end - item.begin, first_row = item.start + item.begin;
        const std::int64_t first_key = keys_of(item.begin, shape.window).begin / height * height;
        float* queries = pool_.scratch(worker, static_cast<std::size_t>(width * (2 * size + block_keys + 3)));
        float* result = queries + size * width;
        float* scores = result + size * width;
        float* largest = scores + block_keys * width;
        float* sums = largest + width;
        float* factors = sums + width;
        KeyRanges ranges;
        for (std::int64_t head = group.first_head; head < group.first_head + group.heads; ++head) {
            pack_panel(kernels_, gemm_kernels_, queries, row(qkv, first_row) + head * size, qkv.stride, count, size, shape.scale);
            std::fill_n(largest, width, kMinusInfinity);
            std::fill_n(sums, width, 0.0f);
            for (std::int64_t key = first_key; key < item.end; key += block_keys) {
                const std::int64_t block = std::min(block_keys, item.end - key);
                const bool begun = key > first_key;
                multiply_panels(gemm_kernels_, scores, width, keys.keys(item.segment, item.kv_head, key), queries, block, count, size, 1.0f,
                                0.0f);
                attention_kernels_.softmax_block(scores, width, block, count,
                                                 ranges_of(ranges, key, block, item.begin, count, shape.window), largest, sums, factors);
                if (begun && std::any_of(factors, factors + count, [](float f) { return f != 1.0f; })) {
                    attention_kernels_.scale_columns(result, width, size, count, factors);
                }
                multiply_panels(gemm_kernels_, result, width, values.columns(item.segment, item.kv_head, key), scores, size, count, block,
                                1.0f, begun ? 1.0f : 0.0f);
            }
            for (std::int64_t i = 0; i < width; ++i) factors[i] = i < count ? 1.0f / sums[i] : 0.0f;
            attention_kernels_.scale_columns(result, width, size, count, factors);
            gemm_kernels_.transpose(row(out, first_row) + head * size, out.stride, result, width, size, count);
            for (std::int64_t i = 0; i < count; ++i) row(lse, first_row + i)[head] = largest[i] + std::log(sums[i]);
        }
    });
}

void CpuBackend::attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                    const Segments& segments, const AttentionShape& shape, const Tensor&) {
    const char* op = "attention_backward";
    check_attention(op, qkv, out, lse, segments, shape);
    check(op, "dqkv", dqkv, qkv.rows, qkv.columns);
    check(op, "dout", dout, out.rows, out.columns);
    const std::int64_t width = gemm_kernels_.width, height = gemm_kernels_.max_height, size = shape.head_dim;
    const std::int64_t size_panels = (size + width - 1) / width, block_keys = kBlockPanels * height;
    const auto first_key_of = [&](std::int64_t query) { return keys_of(query, shape.window).begin / height * height; };

    // An item walks a range of queries and adds up dk and dv for all keys that they see. A long segment is cut into parts of about equal
    // work that each add into memory of their own, but the last, which adds where the result belongs.
    std::vector<Item> items;
    std::int64_t part_floats = 0;
    for (std::int64_t s = 0; s < segments.count; ++s) {
        const std::int64_t start = segments.cu_seqlens[s], length = segments.cu_seqlens[s + 1] - start;
        if (length == 0) continue;
        const std::int64_t blocks = (length + width - 1) / width, parts = std::min<std::int64_t>(4, (length + 255) / 256);
        std::int64_t begin = 0;
        for (std::int64_t part = 0; part < parts; ++part) {
            // Causal work grows with the square of the position, windowed work in proportion to it.
            const double share = static_cast<double>(part + 1) / static_cast<double>(parts);
            const bool windowed = shape.window > 0 && shape.window < length / 2;
            const double cut = static_cast<double>(blocks) * (windowed ? share : std::sqrt(share));
            const std::int64_t end = part + 1 == parts ? length : std::min<std::int64_t>(length, std::llround(cut) * width);
            if (end <= begin) continue;
            const std::int64_t first_key = first_key_of(begin);
            const double cost = static_cast<double>(end - begin) * static_cast<double>(end - first_key);
            for (std::int64_t k = 0; k < shape.kv_heads; ++k) {
                items.push_back({s, start, k, begin, end, cost, end == length ? -1 : part_floats});
                if (end < length) part_floats += (end - first_key) * 2 * size;
            }
            begin = end;
        }
    }
    const std::vector<Item> in_order = items;
    sort_by_cost(items);

    PackedKeys keys(gemm_kernels_, segments, shape, true, true), values(gemm_kernels_, segments, shape, true, false);
    const std::lock_guard<std::mutex> lock(shared_mutex_);
    float* part_sums = shared_.floats(static_cast<std::size_t>(part_floats + keys.floats() + values.floats()));
    keys.set_memory(part_sums + part_floats);
    values.set_memory(part_sums + part_floats + keys.floats());
    pack_all(pool_, kPackPanels * height, qkv, segments, shape, keys, values);

    pool_.parallel_for(static_cast<std::int64_t>(items.size()), [&](std::int64_t index, int worker) {
        const Item& item = items[static_cast<std::size_t>(index)];
        const Group group(shape, item.kv_head);
        // dk and dv of the segment's keys from `origin` on.
        const bool direct = item.sums < 0;
        const std::int64_t origin = direct ? 0 : first_key_of(item.begin), sum_stride = direct ? dqkv.stride : 2 * size;
        float* dkeys = direct ? row(dqkv, item.start) + group.keys : part_sums + item.sums;
        float* dvalues = direct ? row(dqkv, item.start) + group.values : dkeys + size;
        for (std::int64_t key = origin; key < item.end; ++key) {
            std::fill_n(dkeys + (key - origin) * sum_stride, size, 0.0f);
            std::fill_n(dvalues + (key - origin) * sum_stride, size, 0.0f);
        }

        // As many heads at once as their scores over all keys find room: dk and dv are then read and written less often.
        // Their scores lie side by side, so that they are the first operand of dk and dv as they are.
        constexpr std::int64_t step = GemmKernels::short_step;
        const std::int64_t span = item.end - first_key_of(item.begin);
        const std::int64_t together = std::clamp<std::int64_t>(kScoreFloats / (span * width), 1, std::min(group.heads, step / width));
        const std::int64_t lines = size_panels * together * width * width;
        float* scores = pool_.scratch(worker, static_cast<std::size_t>(2 * span * step + 3 * size * width + 2 * lines + width));
        float* dscores = scores + span * step;
        float* queries = dscores + span * step;     // of one head, as the second operand of the scores
        float* gradients = queries + size * width;  // likewise, of dscores
        float* dqueries = gradients + size * width;
        float* query_lines = dqueries + size * width;  // of the heads one after the other, as the second operand of dk
        float* gradient_lines = query_lines + lines;   // likewise, of dv
        float* own_lse = gradient_lines + lines;
        KeyRanges ranges;
        for (std::int64_t begin = item.begin; begin < item.end; begin += width) {
            const std::int64_t end = std::min(begin + width, item.end), count = end - begin, first_row = item.start + begin;
            const std::int64_t first_key = first_key_of(begin), all_keys = end - first_key;
            const KeyRanges* masked = ranges_of(ranges, first_key, all_keys, begin, count, shape.window);
            for (std::int64_t first = 0; first < group.heads; first += together) {
                const std::int64_t heads = std::min(together, group.heads - first), depth = heads * count;
                for (std::int64_t g = 0; g < heads; ++g) {
                    const std::int64_t head = group.first_head + first + g;
                    const float* query = row(qkv, first_row) + head * size;
                    const float* gradient = row(dout, first_row) + head * size;
                    pack_panel(kernels_, gemm_kernels_, queries, query, qkv.stride, count, size, shape.scale);
                    pack_panel(kernels_, gemm_kernels_, gradients, gradient, dout.stride, count, size, 1.0f);
                    gemm_kernels_.pack_columns(query_lines + g * count * width, depth * width, {query, qkv.stride}, size, count);
                    gemm_kernels_.pack_columns(gradient_lines + g * count * width, depth * width, {gradient, dout.stride}, size, count);
                    for (std::int64_t i = 0; i < width; ++i) own_lse[i] = row(lse, first_row + std::min(i, count - 1))[head];

                    float* p = scores + g * width;
                    float* ds = dscores + g * width;
                    multiply_panels(gemm_kernels_, p, step, keys.keys(item.segment, item.kv_head, first_key), queries, all_keys, count,
                                    size, 1.0f, 0.0f);
                    multiply_panels(gemm_kernels_, ds, step, values.keys(item.segment, item.kv_head, first_key), gradients, all_keys, count,
                                    size, 1.0f, 0.0f);
                    attention_kernels_.softmax_gradient(p, ds, step, all_keys, count, masked, own_lse);
                    for (std::int64_t key = 0; key < all_keys; key += block_keys) {
                        multiply_panels(gemm_kernels_, dqueries, width, keys.columns(item.segment, item.kv_head, first_key + key),
                                        ds + key * step, size, count, std::min(block_keys, all_keys - key), shape.scale,
                                        key == 0 ? 0.0f : 1.0f, step);
                    }
                    gemm_kernels_.transpose(row(dqkv, first_row) + head * size, dqkv.stride, dqueries, width, size, count);
                }
                // The columns of the heads follow on one another if there are as many queries as columns.
                const std::int64_t at_once = count == width ? heads : 1;
                for (std::int64_t key = 0; key < all_keys; key += height) {
                    const std::int64_t high = std::min(height, all_keys - key), offset = (first_key + key - origin) * sum_stride;
                    for (std::int64_t g = 0; g < heads; g += at_once) {
                        const std::int64_t at = key * step + g * width;
                        for (std::int64_t j = 0; j < size_panels; ++j) {
                            const std::int64_t columns = std::min(width, size - j * width), panel = (j * depth + g * count) * width;
                            gemm_kernels_.multiply_short_lines(dvalues + offset + j * width, sum_stride, scores + at, 0,
                                                               gradient_lines + panel, width, high, columns, at_once * count, 1.0f, 1.0f);
                            gemm_kernels_.multiply_short_lines(dkeys + offset + j * width, sum_stride, dscores + at, 0, query_lines + panel,
                                                               width, high, columns, at_once * count, shape.scale, 1.0f);
                        }
                    }
                }
            }
        }
    });

    // The parts' sums, in the order of the parts; rows of different kv-heads and segments are different columns or rows.
    pool_.parallel_for(shape.kv_heads, [&](std::int64_t kv_head) {
        const Group group(shape, kv_head);
        for (const Item& item : in_order) {
            if (item.sums < 0 || item.kv_head != kv_head) continue;
            const float* sums = part_sums + item.sums;
            for (std::int64_t key = first_key_of(item.begin); key < item.end; ++key, sums += 2 * size) {
                kernels_.add(row(dqkv, item.start + key) + group.keys, sums, size);
                kernels_.add(row(dqkv, item.start + key) + group.values, sums + size, size);
            }
        }
    });
}

}  // namespace surogate
