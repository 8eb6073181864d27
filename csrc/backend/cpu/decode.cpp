#include <algorithm>
#include <cmath>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/decode_linear_kernels.h"
#include "backend/cpu/decode_row_kernels.h"
#include "backend/cpu/sample.h"

namespace surogate {

namespace {

/// What one thread takes at a time: enough rows of w to be worth the hand-over, few enough to share the work out evenly.
std::int64_t rows_per_task(std::int64_t n, std::int64_t k) {
    constexpr std::int64_t kTile = 12;                     // rows that the kernels take at once
    constexpr std::int64_t kWork = std::int64_t{1} << 20;  // multiply-adds, some 15 microseconds
    const std::int64_t padded = (n + cpu::kPanelRows - 1) / cpu::kPanelRows * cpu::kPanelRows;
    const std::int64_t tiles = kWork / std::max<std::int64_t>(1, padded * k * kTile);
    return kTile * std::clamp<std::int64_t>(tiles, 2, 64);
}

void check_cache(const char* op, const PagedCache& cache, const AttentionShape& shape) {
    require(cache.block_size > 0 && cache.block_size % cpu::kCacheRows == 0, op, "block_size", "a positive multiple of 16",
            cache.block_size);
    require(shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, op, "heads", "a multiple of kv_heads", shape.heads);
    check(op, "keys", cache.keys, cache.keys.rows, shape.kv_heads * shape.head_dim);
    check(op, "values", cache.values, cache.keys.rows, shape.kv_heads * shape.head_dim);
    require(cache.keys.contiguous() && cache.values.contiguous(), op, "keys, values", "dense rows", "rows with gaps");
    require(cache.keys.rows % cache.block_size == 0, op, "keys", "whole blocks", cache.keys.rows);
}

}  // namespace

void CpuBackend::decode_linear(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, float alpha, float beta) {
    const char* op = "decode_linear";
    check(op, "y", y, x.rows, w.rows);
    check(op, "x", x, x.rows, w.columns);
    check(op, "w", w, w.rows, w.columns);
    const bool biased = bias.data != nullptr;
    if (biased) check_vector(op, "bias", bias, w.rows);
    if (y.size() == 0) return;

    static const cpu::LinearKernel kernel = cpu::linear_kernel();
    const std::int64_t panels = (x.rows + cpu::kPanelRows - 1) / cpu::kPanelRows;
    std::lock_guard<std::mutex> lock(decode_mutex_);
    float* packed = decode_panels_.floats(static_cast<std::size_t>(panels * cpu::kPanelRows * x.columns));
    const auto pack = [&](std::int64_t panel) { cpu::pack_panel(packed, x.f32(), x.stride, x.rows, x.columns, panel); };
    if (panels <= 2) {
        for (std::int64_t panel = 0; panel < panels; ++panel) pack(panel);  // sooner done than shared out
    } else {
        pool_.parallel_for(panels, pack);
    }
    // Threads take indices in turn, so each mostly stays in its own stretch of w, whose next rows are fetched while these are multiplied.
    const std::int64_t grain = rows_per_task(x.rows, x.columns), blocks = (w.rows + grain - 1) / grain;
    const std::int64_t stretches = pool_.size(), length = (blocks + stretches - 1) / stretches;
    pool_.parallel_for(stretches * length, [&](std::int64_t index) {
        const std::int64_t first = (index % stretches * length + index / stretches) * grain;
        if (first >= w.rows) return;
        kernel({y.f32(), y.stride, packed, w.f32(), w.stride, biased ? bias.f32() : nullptr, x.rows, x.columns, first,
                std::min(w.rows, first + grain), w.rows, alpha, beta});
    });
}

void CpuBackend::cache_write(const PagedCache& cache, const Tensor& qkv, const Tensor& slots, const AttentionShape& shape) {
    const char* op = "cache_write";
    check_cache(op, cache, shape);
    const std::int64_t kv = shape.kv_heads * shape.head_dim, q = shape.heads * shape.head_dim;
    check(op, "qkv", qkv, qkv.rows, q + 2 * kv);
    check_vector(op, "slots", slots, qkv.rows, DType::Int32);
    check_indices(op, "slots", slots, cache.keys.rows);
    // Key columns are strided, so rows that share a cache line go to one thread: those of one call are mostly neighbours or far apart.
    pool_.parallel_ranges(qkv.rows, 64, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t slot = slots.i32()[i];
            const float* k = row(qkv, i) + q;
            float* keys = cache.keys.f32() + slot / cpu::kCacheRows * cpu::kCacheRows * kv + slot % cpu::kCacheRows;
            for (std::int64_t column = 0; column < kv; ++column) keys[column * cpu::kCacheRows] = k[column];
            std::copy_n(k + kv, kv, cache.values.f32() + slot * kv);
        }
    });
}

void CpuBackend::paged_attention(const Tensor& out, const Tensor& qkv, const PagedCache& cache, const AttentionShape& shape) {
    const char* op = "paged_attention";
    check_cache(op, cache, shape);
    const std::int64_t kv = shape.kv_heads * shape.head_dim, n = qkv.rows;
    check(op, "qkv", qkv, n, shape.heads * shape.head_dim + 2 * kv);
    check(op, "out", out, n, shape.heads * shape.head_dim);
    const std::int64_t blocks = cache.keys.rows / cache.block_size;
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t length = cache.lengths[i];
        if (length < 1 || length > cache.max_blocks * cache.block_size) {
            fail(op, ": lengths[", i, "]: expected 1 to ", cache.max_blocks * cache.block_size, ", got ", length);
        }
        for (std::int64_t b = 0; b * cache.block_size < length; ++b) {
            const std::int32_t block = cache.block_tables[i * cache.max_blocks + b];
            if (block < 0 || block >= blocks) fail(op, ": block_tables[", i, ", ", b, "]: expected 0 to ", blocks - 1, ", got ", block);
        }
        longest = std::max(longest, length);
    }
    const cpu::RowKernels& kernels = cpu::row_kernels();
    const std::int64_t groups = shape.heads / shape.kv_heads;
    // Neighbouring rows often share blocks (a group's prompt), so one head's rows are taken one after the other.
    constexpr std::int64_t kRows = 4;
    const std::int64_t row_tasks = (n + kRows - 1) / kRows;
    pool_.parallel_for(shape.kv_heads * row_tasks, [&](std::int64_t task, int worker) {
        const std::int64_t head = task / row_tasks, begin = task % row_tasks * kRows;
        float* scratch = pool_.scratch(worker, static_cast<std::size_t>(cpu::attention_scratch(longest)));
        for (std::int64_t i = begin; i < std::min(n, begin + kRows); ++i) {
            const std::int64_t length = cache.lengths[i];
            const std::int64_t first = shape.window > 0 ? std::max<std::int64_t>(0, length - shape.window) : 0;
            const std::int64_t column = head * groups * shape.head_dim;
            kernels.attention({row(out, i) + column, row(qkv, i) + column, cache.keys.f32(), cache.values.f32(),
                               cache.block_tables + i * cache.max_blocks, cache.block_size, kv, head, shape.head_dim, groups, first, length,
                               shape.scale, scratch});
        }
    });
}

void CpuBackend::sample(std::int32_t* tokens, float* logp, const Tensor& logits, const SampleRow* rows, std::int64_t valid_vocab) {
    const char* op = "sample";
    check(op, "logits", logits, logits.rows, logits.columns);
    require(valid_vocab >= 1 && valid_vocab <= logits.columns, op, "valid_vocab", "1 to the columns of logits", valid_vocab);
    const std::size_t scratch = cpu::sample_scratch_floats(valid_vocab);
    pool_.parallel_for(logits.rows, [&](std::int64_t i, int worker) {
        const cpu::Sampled sampled = cpu::sample_row(row(logits, i), valid_vocab, rows[i], pool_.scratch(worker, scratch));
        tokens[i] = sampled.token;
        logp[i] = sampled.logp;
    });
}

}  // namespace surogate
