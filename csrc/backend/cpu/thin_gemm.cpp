#include <algorithm>

#include "backend/cpu/packed_gemm.h"

namespace surogate {

namespace {

constexpr std::int64_t kDepth = 256;  // values of k between two visits to c
constexpr std::int64_t kItemRows = 64, kItemColumnPanels = 2;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Calls body(first, count) for blocks of k, in order; once with nothing if there is no k, so that c is scaled by beta.
template <typename Body>
void over_depth(std::int64_t k, const Body& body) {
    std::int64_t first = 0;
    do {
        body(first, std::min(kDepth, k - first));
        first += kDepth;
    } while (first < k);
}

}  // namespace

void thin_gemm(ThreadPool& pool, const GemmKernels& kernels, AlignedBuffer& shared, const GemmArguments& arguments) {
    const auto& [c, c_stride, a, b, m, n, k, alpha, beta, start, start_stride, terms] = arguments;
    if (m == 0 || n == 0) return;
    const std::int64_t width = kernels.width;
    if (n <= m && !a.transposed) {
        const std::int64_t panel_stride = k * width;
        float* panels = shared.floats(static_cast<std::size_t>(ceil_div(n, width) * panel_stride));
        pool.parallel_ranges(k, kDepth, [&](std::int64_t from, std::int64_t to) {
            kernels.pack_columns(panels + from * width, panel_stride, operand_at(b, from, 0), n, to - from);
        });
        pool.parallel_ranges(m, kItemRows, [&](std::int64_t begin, std::int64_t end) {
            over_depth(k, [&](std::int64_t first, std::int64_t count) {
                for (std::int64_t q = 0; q < n; q += width) {
                    kernels.multiply_lines(c + begin * c_stride + q, c_stride, a.data + begin * a.stride + first, a.stride,
                                           panels + q / width * panel_stride + first * width, width, end - begin, std::min(width, n - q),
                                           count, alpha, first == 0 ? beta : 1.0f);
                }
            });
        });
        return;
    }
    // The thin operand is the first one here; if it is b, the product is turned on its side.
    const bool turned = n <= m;
    const Operand thin = turned ? Operand{b.data, b.stride, !b.transposed} : a,
                  wide = turned ? Operand{a.data, a.stride, !a.transposed} : b;
    const std::int64_t rows = turned ? n : m, columns = turned ? m : n;
    const std::int64_t height = ceil_div(rows, ceil_div(rows, kernels.max_height)), panel_stride = k * height;
    float* panels = shared.floats(static_cast<std::size_t>(ceil_div(rows, height) * panel_stride));
    pool.parallel_ranges(k, kDepth, [&](std::int64_t from, std::int64_t to) {
        kernels.pack_rows(panels + from * height, panel_stride, operand_at(thin, 0, from), rows, height, to - from);
    });
    const std::int64_t item_columns = kItemColumnPanels * width;
    pool.parallel_for(ceil_div(columns, item_columns), [&](std::int64_t item, int worker) {
        const std::int64_t begin = item * item_columns, end = std::min(columns, begin + item_columns);
        float* packed = pool.scratch(worker, static_cast<std::size_t>(width * kDepth + 2 * rows * item_columns));
        float* result = packed + width * kDepth;
        float* out = turned ? result : c + begin;
        const std::int64_t out_stride = turned ? item_columns : c_stride;
        over_depth(k, [&](std::int64_t first, std::int64_t count) {
            const float factor = first > 0 ? 1.0f : turned ? 0.0f : beta;
            for (std::int64_t q = begin; q < end; q += width) {
                const std::int64_t here = std::min(width, end - q);
                // Lines of the wide operand are read where they lie, but for columns that are no whole panel.
                const Operand part = operand_at(wide, first, q);
                const bool direct = !wide.transposed && here == width;
                if (!direct) kernels.pack_columns(packed, 0, part, here, count);
                for (std::int64_t r = 0; r < rows; r += height) {
                    kernels.multiply(out + r * out_stride + q - begin, out_stride, panels + r / height * panel_stride + first * height,
                                     height, direct ? part.data : packed, direct ? part.stride : width, std::min(height, rows - r), here,
                                     count, alpha, factor);
                }
            }
        });
        if (!turned) return;
        float* upright = result + rows * item_columns;
        kernels.transpose(upright, rows, result, item_columns, rows, end - begin);
        for (std::int64_t i = begin; i < end; ++i) {
            for (std::int64_t j = 0; j < rows; ++j) {
                float& at = c[i * c_stride + j];
                at = beta == 0.0f ? upright[(i - begin) * rows + j] : at * beta + upright[(i - begin) * rows + j];
            }
        }
    });
}

}  // namespace surogate
