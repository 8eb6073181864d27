#include "backend/cpu/packed_gemm.h"

#include <algorithm>

namespace surogate {

namespace {

constexpr std::int64_t kBlockDepth = 640;       // a panel of a stays in the first-level cache
constexpr std::int64_t kBlockColumns = 768;     // a block of b stays in the second-level cache
constexpr std::int64_t kChunkFloats = 2 << 20;  // of either operand, packed at a time
constexpr std::int64_t kPackLines = 32;         // of an operand for one thread at a time, if packing goes along its rows
constexpr std::int64_t kPackPanels = 2;         // and if it goes across them

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Where part `part` of [0, size) begins, in `parts` parts of about the same number of units.
std::int64_t cut(std::int64_t size, std::int64_t unit, std::int64_t parts, std::int64_t part) {
    return std::min(size, ceil_div(size, unit) * part / parts * unit);
}

/// One operand, chunk by chunk in panels. A chunk is `lines` rows of a or columns of b by some blocks of k; in memory block by block,
/// within it panel by panel, within that k by k.
class Packed {
   public:
    /// Panels of `unit` lines, blocks of `depth` values of k; a chunk has `chunk_depth` values of k at most.
    Packed(const Operand& operand, bool is_a, std::int64_t lines, std::int64_t unit, std::int64_t depth, std::int64_t chunk_depth)
        : operand_(operand),
          is_a_(is_a),
          unit_(unit),
          depth_(depth),
          chunk_lines_(std::clamp(kChunkFloats / chunk_depth / unit, std::int64_t{1}, ceil_div(lines, unit)) * unit),
          floats_(static_cast<std::size_t>(chunk_lines_ * chunk_depth)) {}

    std::int64_t chunk_lines() const { return chunk_lines_; }
    std::size_t floats() const { return floats_; }
    void set_memory(float* memory) { memory_ = memory; }
    const float* panel(std::int64_t block, std::int64_t index) const {
        return memory_ + block_offset(block) + index * unit_ * depth_of(block);
    }
    std::int64_t depth_of(std::int64_t block) const { return std::min(depth_, chunk_depth_ - block * depth_); }

    /// Sets out to pack this chunk; how many shares of work that is: none if the chunk is the one that is packed already.
    std::int64_t start(std::int64_t first_line, std::int64_t lines, std::int64_t first_k, std::int64_t chunk_depth) {
        if (first_line == first_line_ && first_k == first_k_) return 0;
        first_line_ = first_line;
        first_k_ = first_k;
        lines_ = lines;
        chunk_depth_ = chunk_depth;
        panels_ = ceil_div(lines, unit_);
        // An operand is read along its rows, as they lie in memory.
        along_k_ = operand_.transposed != is_a_;
        shares_per_block_ = along_k_ ? ceil_div(panels_, kPackPanels) : ceil_div(depth_, kPackLines);
        return std::max<std::int64_t>(1, ceil_div(chunk_depth, depth_)) * shares_per_block_;
    }

    void pack(const GemmKernels& kernels, std::int64_t share) const {
        const std::int64_t block = share / shares_per_block_, part = share % shares_per_block_, deep = depth_of(block);
        const std::int64_t panel = along_k_ ? part * kPackPanels : 0, from = along_k_ ? 0 : part * kPackLines;
        const std::int64_t line = panel * unit_, lines = along_k_ ? std::min(kPackPanels * unit_, lines_ - line) : lines_;
        const std::int64_t count = along_k_ ? deep : std::min(kPackLines, deep - from);
        if (count <= 0) return;
        float* out = memory_ + block_offset(block) + panel * unit_ * deep + from * unit_;
        const std::int64_t k = first_k_ + block * depth_ + from;
        if (is_a_) {
            kernels.pack_rows(out, unit_ * deep, operand_at(operand_, first_line_ + line, k), lines, unit_, count);
        } else {
            kernels.pack_columns(out, unit_ * deep, operand_at(operand_, k, first_line_ + line), lines, count);
        }
    }

   private:
    std::int64_t block_offset(std::int64_t block) const { return block * depth_ * panels_ * unit_; }

    Operand operand_;
    bool is_a_;
    std::int64_t unit_, depth_, chunk_lines_;
    std::size_t floats_;
    float* memory_ = nullptr;
    std::int64_t first_line_ = -1, first_k_ = -1, lines_ = 0, chunk_depth_ = 0, panels_ = 0, shares_per_block_ = 0;
    bool along_k_ = false;
};

}  // namespace

void packed_gemm(ThreadPool& pool, const GemmKernels& kernels, AlignedBuffer& shared, float* c, std::int64_t c_stride, const Operand& a,
                 const Operand& b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float beta) {
    if (m == 0 || n == 0) return;
    const std::int64_t width = kernels.width;
    // Panels of equal height: 16 rows are better 8 and 8 than 14 and 2.
    const std::int64_t height = ceil_div(m, ceil_div(m, kernels.max_height));
    // Blocks of k decide the order of the sums, so they depend on k alone.
    const std::int64_t depth_blocks = std::max<std::int64_t>(1, ceil_div(k, kBlockDepth));
    const std::int64_t depth = std::max<std::int64_t>(16, ceil_div(ceil_div(k, depth_blocks), 16) * 16);
    const std::int64_t chunk_depth = std::clamp(kChunkFloats / kBlockColumns / depth, std::int64_t{1}, depth_blocks) * depth;

    Packed rows(a, true, m, height, depth, chunk_depth), columns(b, false, n, width, depth, chunk_depth);
    float* memory = shared.floats(rows.floats() + columns.floats());
    rows.set_memory(memory);
    columns.set_memory(memory + rows.floats());

    for (std::int64_t column = 0; column < n; column += columns.chunk_lines()) {
        for (std::int64_t row = 0; row < m; row += rows.chunk_lines()) {
            std::int64_t first_k = 0;
            do {
                const std::int64_t deep = std::min(chunk_depth, k - first_k), blocks = std::max<std::int64_t>(1, ceil_div(deep, depth));
                const std::int64_t wide = std::min(columns.chunk_lines(), n - column), high = std::min(rows.chunk_lines(), m - row);
                const std::int64_t row_shares = rows.start(row, high, first_k, deep),
                                   column_shares = columns.start(column, wide, first_k, deep);
                pool.parallel_for(row_shares + column_shares, [&](std::int64_t share) {
                    if (share < row_shares) {
                        rows.pack(kernels, share);
                    } else {
                        columns.pack(kernels, share - row_shares);
                    }
                });

                // Parts of the output for one thread each: enough of them that all threads end together.
                const std::int64_t row_panels = ceil_div(high, height), column_panels = ceil_div(wide, width), wanted = 8 * pool.size();
                std::int64_t column_parts = ceil_div(wide, kBlockColumns);
                const std::int64_t row_parts = std::clamp(ceil_div(wanted, column_parts), ceil_div(row_panels, 12), row_panels);
                column_parts = std::clamp(ceil_div(wanted, row_parts), column_parts, std::max(column_parts, ceil_div(column_panels, 4)));
                pool.parallel_for(row_parts * column_parts, [&](std::int64_t part) {
                    const std::int64_t i = part / column_parts, j = part % column_parts;
                    const std::int64_t from = cut(high, height, row_parts, i), to = cut(high, height, row_parts, i + 1);
                    const std::int64_t left = cut(wide, width, column_parts, j), right = cut(wide, width, column_parts, j + 1);
                    for (std::int64_t block = 0; block < blocks; ++block) {
                        const float factor = first_k + block == 0 ? beta : 1.0f;
                        for (std::int64_t r = from; r < to; r += height) {
                            for (std::int64_t q = left; q < right; q += width) {
                                kernels.multiply(c + (row + r) * c_stride + column + q, c_stride, rows.panel(block, r / height), height,
                                                 columns.panel(block, q / width), width, std::min(height, to - r),
                                                 std::min(width, right - q), columns.depth_of(block), alpha, factor);
                            }
                        }
                    }
                });
                first_k += chunk_depth;
            } while (first_k < k);
        }
    }
}

}  // namespace surogate
