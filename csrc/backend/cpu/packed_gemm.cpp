#include "backend/cpu/packed_gemm.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/kernels.h"

namespace surogate {

#ifdef SUROGATE_X86_KERNELS
namespace avx512 {
extern const GemmKernels gemm_kernels;
}
#endif

const GemmKernels* find_gemm_kernels([[maybe_unused]] const char* name) {
#ifdef SUROGATE_X86_KERNELS
    if (std::strcmp(name, "avx512") == 0 && find_kernels(name) != nullptr) return &avx512::gemm_kernels;
#endif
    return nullptr;
}

namespace {

constexpr std::int64_t kBlockDepth = 576;        // a panel of a stays in the first-level cache
constexpr std::int64_t kBlockColumns = 768;      // a block of b stays in the second-level cache
constexpr std::int64_t kBlockPanels = 4;         // of a, packed at a time: lines of memory serve several
constexpr std::int64_t kPackRows = 32;           // of b for one thread at a time
constexpr std::int64_t kSharedFloats = 2 << 20;  // of b, packed at a time

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The operand from row `row` and column `column` on.
Operand at(const Operand& x, std::int64_t row, std::int64_t column) {
    return {x.data + (x.transposed ? column * x.stride + row : row * x.stride + column), x.stride, x.transposed};
}

/// [0, size) in `parts` parts of about the same number of units.
std::int64_t cut(std::int64_t size, std::int64_t unit, std::int64_t parts, std::int64_t part) {
    return std::min(size, ceil_div(size, unit) * part / parts * unit);
}

}  // namespace

void packed_gemm(ThreadPool& pool, const GemmKernels& kernels, AlignedBuffer& shared, float* c, std::int64_t c_stride, const Operand& a,
                 const Operand& b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float beta) {
    if (m == 0 || n == 0) return;
    const std::int64_t width = kernels.width;
    // Blocks of k are the same wherever in c they are used, since they decide the order of the sums.
    const std::int64_t depth_blocks = std::max<std::int64_t>(1, ceil_div(k, kBlockDepth));
    const std::int64_t depth = std::max<std::int64_t>(16, ceil_div(ceil_div(k, depth_blocks), 16) * 16);
    // Panels of equal height: 16 rows are better 8 and 8 than 14 and 2.
    const std::int64_t height = ceil_div(m, ceil_div(m, kernels.max_height));
    const std::int64_t panels = ceil_div(m, height);

    const std::int64_t padded = ceil_div(n, width) * width;
    const std::int64_t chunk_depth =
        std::clamp(kSharedFloats / std::min(padded, kBlockColumns) / depth, std::int64_t{1}, depth_blocks) * depth;
    const std::int64_t chunk_columns = std::clamp(kSharedFloats / chunk_depth / width, std::int64_t{1}, padded / width) * width;
    float* packed = shared.floats(static_cast<std::size_t>(chunk_depth * chunk_columns));

    for (std::int64_t first_column = 0; first_column < n; first_column += chunk_columns) {
        const std::int64_t columns = std::min(chunk_columns, n - first_column);
        std::int64_t first_k = 0;
        do {
            const std::int64_t chunk = std::min(chunk_depth, k - first_k), blocks = std::max<std::int64_t>(1, ceil_div(chunk, depth));
            const std::int64_t column_panels = ceil_div(columns, width);
            // Panel p of block i lies at (i * depth) * columns-with-padding + p * width * (depth of that block).
            const auto panel_of = [&](std::int64_t block, std::int64_t panel) {
                const std::int64_t deep = std::min(depth, chunk - block * depth);
                return packed + block * depth * column_panels * width + panel * width * deep;
            };
            // b is read along its rows, as they lie in memory: a share is some columns if it is transposed, else some rows.
            if (b.transposed) {
                pool.parallel_for(blocks * column_panels, [&](std::int64_t index) {
                    const std::int64_t block = index / column_panels, panel = index % column_panels;
                    const std::int64_t deep = std::min(depth, chunk - block * depth);
                    kernels.pack_columns(panel_of(block, panel), 0, at(b, first_k + block * depth, first_column + panel * width),
                                         std::min(width, columns - panel * width), deep);
                });
            } else {
                const std::int64_t shares = ceil_div(depth, kPackRows);
                pool.parallel_for(blocks * shares, [&](std::int64_t index) {
                    const std::int64_t block = index / shares, from = index % shares * kPackRows;
                    const std::int64_t deep = std::min(depth, chunk - block * depth), to = std::min(from + kPackRows, deep);
                    if (from >= to) return;
                    kernels.pack_columns(panel_of(block, 0) + from * width, width * deep,
                                         at(b, first_k + block * depth + from, first_column), columns, to - from);
                });
            }

            // Parts of the output for one thread each: enough of them that all threads end together.
            const std::int64_t wanted = 4 * pool.size();
            std::int64_t column_parts = ceil_div(columns, kBlockColumns);
            std::int64_t row_parts = std::clamp(ceil_div(wanted, column_parts), std::min(panels, ceil_div(panels, 24)), panels);
            column_parts = std::clamp(ceil_div(wanted, row_parts), column_parts, std::max(column_parts, ceil_div(column_panels, 4)));
            pool.parallel_for(row_parts * column_parts, [&](std::int64_t index, int worker) {
                const std::int64_t i = index / column_parts, j = index % column_parts;
                const std::int64_t row = cut(m, height, row_parts, i), end_row = cut(m, height, row_parts, i + 1);
                const std::int64_t column = cut(columns, width, column_parts, j), end_column = cut(columns, width, column_parts, j + 1);
                const std::int64_t high = kBlockPanels * height;
                float* rows = pool.scratch(worker, static_cast<std::size_t>(std::min(high, end_row - row) * depth));
                for (std::int64_t r = row; r < end_row; r += high) {
                    const std::int64_t end = std::min(r + high, end_row);
                    for (std::int64_t block = 0; block < blocks; ++block) {
                        const std::int64_t at_k = first_k + block * depth, deep = std::min(depth, k - at_k);
                        const float factor = at_k == 0 ? beta : 1.0f;
                        kernels.pack_rows(rows, at(a, r, at_k), end - r, height, deep);
                        for (std::int64_t s = r; s < end; s += height) {
                            for (std::int64_t q = column; q < end_column; q += width) {
                                kernels.multiply(c + s * c_stride + first_column + q, c_stride, rows + (s - r) * deep,
                                                 panel_of(block, q / width), std::min(height, end - s), std::min(width, end_column - q),
                                                 deep, alpha, factor);
                            }
                        }
                    }
                }
            });
            first_k += chunk_depth;
        } while (first_k < k);
    }
}

}  // namespace surogate
