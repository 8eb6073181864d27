#include "backend/cpu/packed_gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace surogate {

namespace {

constexpr std::int64_t kBlockDepth = 640;                                      // a panel of a stays in the first-level cache
constexpr std::int64_t kBlockColumns = 768;                                    // a block of b stays in the second-level cache
constexpr std::int64_t kParts = 10;                                            // of the rows, for each thread
constexpr std::int64_t kChunkDepth = 4 * kBlockDepth, kChunkFloats = 4 << 20;  // of an a that is packed as a whole, at a time
constexpr std::int64_t kSlots = 3;       // blocks of b: one in use, one being packed, one that a late thread still reads
constexpr std::int64_t kPackLines = 32;  // of an operand for one thread at a time, if packing goes along its rows
constexpr std::int64_t kPackPanels = 2;  // and if it goes across them

static_assert(kBlockDepth <= GemmKernels::line_step);

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Where part `part` of [0, size) begins, in `parts` parts of about the same number of units.
std::int64_t cut(std::int64_t size, std::int64_t unit, std::int64_t parts, std::int64_t part) {
    return std::min(size, ceil_div(size, unit) * part / parts * unit);
}

/// Waits for the thread that is at work on what comes before.
template <typename Ready>
void wait_until(const Ready& ready) {
    for (int spins = 0; !ready(); ++spins) {
        if (spins < 1000) {
            ThreadPool::pause();
        } else {
            std::this_thread::yield();
        }
    }
}

/// Fetches the lines of a panel into the caches, a few at a time while something else is computed.
class Ahead {
   public:
    Ahead(const float* lines, std::int64_t stride, std::int64_t count, std::int64_t depth)
        : line_(lines), stride_(stride), left_(count), depth_(depth) {}
    void fetch(std::int64_t cache_lines) {
        for (; cache_lines > 0 && left_ > 0; --cache_lines) {
            __builtin_prefetch(line_ + at_, 0, 2);
            at_ += 16;
            if (at_ < depth_) continue;
            at_ = 0;
            line_ += stride_;
            --left_;
        }
    }

   private:
    const float* line_;
    std::int64_t stride_, left_, depth_, at_ = 0;
};

/// One product. b is packed block by block, a few blocks ahead of their use; an a that is not transposed, panel by panel by the thread that
/// needs it; any other a, as a whole beforehand, or in chunks if it is large.
class Product {
   public:
    Product(ThreadPool& pool, const GemmKernels& kernels, const GemmArguments& arguments)
        : pool_(pool),
          kernels_(kernels),
          x_(arguments),
          // Panels of equal height: 16 rows are better 8 and 8 than 14 and 2.
          height_(ceil_div(x_.m, ceil_div(x_.m, kernels.max_height))),
          by_line_(!x_.a.transposed) {
        // Blocks of k decide the order of the sums, so they depend on k alone.
        const std::int64_t depth_blocks = std::max<std::int64_t>(1, ceil_div(x_.k, kBlockDepth));
        depth_ = std::max<std::int64_t>(16, ceil_div(ceil_div(x_.k, depth_blocks), 16) * 16);
        chunk_depth_ = by_line_ ? depth_ * depth_blocks : std::min(kChunkDepth / depth_, depth_blocks) * depth_;
        const std::int64_t row_panels = ceil_div(x_.m, height_);
        chunk_rows_ = by_line_ ? row_panels : std::clamp(kChunkFloats / chunk_depth_ / height_, std::int64_t{1}, row_panels);
        chunk_rows_ *= height_;
        column_blocks_ = ceil_div(x_.n, kBlockColumns);
        block_panels_ = ceil_div(ceil_div(x_.n, kernels.width), column_blocks_);
        block_floats_ = block_panels_ * kernels.width * depth_;
        pack_shares_ = x_.b.transposed ? ceil_div(block_panels_, kPackPanels) : ceil_div(depth_, kPackLines);
        // Where a comes in chunks of rows, b is packed once for all of them if it is small enough.
        const std::int64_t most = column_blocks_ * (chunk_depth_ / depth_);
        slots_ = chunk_rows_ < x_.m && most * block_floats_ <= kChunkFloats ? most : std::min(most, kSlots);
        a_floats_ = by_line_ ? 0 : chunk_rows_ * chunk_depth_;
        std::int64_t end = a_floats_ + slots_ * block_floats_;
        for (const LowRankTerm& term : x_.terms) {
            low_at_.push_back(end);
            end += row_panels * height_ * term.rank;
            term_at_.push_back(end);
            end += (ceil_div(term.first + term.columns, kernels.width) - term.first / kernels.width) * kernels.width * term.rank;
        }
        floats_ = end;
    }

    std::size_t floats() const { return static_cast<std::size_t>(floats_); }

    void run(float* memory) {
        memory_ = memory;
        for (int worker = 0; by_line_ && worker < pool_.size(); ++worker) line_panel(worker);  // not to run out of memory later on
        pack_terms();
        for (first_k_ = 0; first_k_ == 0 || first_k_ < x_.k; first_k_ += chunk_depth_) {
            deep_ = std::min(chunk_depth_, x_.k - first_k_);
            depth_blocks_ = std::max<std::int64_t>(1, ceil_div(deep_, depth_));
            b_packed_ = false;
            for (row_ = 0; row_ < x_.m; row_ += chunk_rows_) {
                rows_ = std::min(chunk_rows_, x_.m - row_);
                if (!by_line_) pack_a();
                multiply_chunk();
                b_packed_ = slots_ == column_blocks_ * depth_blocks_;
            }
        }
    }

   private:
    std::int64_t depth_of(std::int64_t block) const { return std::min(depth_, deep_ - block * depth_); }
    std::int64_t left(std::int64_t column_block) const { return cut(x_.n, kernels_.width, column_blocks_, column_block); }
    float* line_panel(int worker) const { return pool_.scratch(worker, static_cast<std::size_t>(height_ * GemmKernels::line_step)); }
    float* slot(std::int64_t block) const { return memory_ + a_floats_ + block % slots_ * block_floats_; }
    float* packed_a(std::int64_t depth_block, std::int64_t row) const {
        return memory_ + depth_block * depth_ * ceil_div(rows_, height_) * height_ + row * depth_of(depth_block);
    }

    void pack_terms() {
        const std::int64_t count = static_cast<std::int64_t>(x_.terms.size());
        constexpr std::int64_t kPanels = 8;
        const std::int64_t row_shares = ceil_div(x_.m, kPanels * height_);
        pool_.parallel_for(count * (row_shares + 1), [&](std::int64_t share) {
            const std::int64_t index = share % count, part = share / count;
            const auto at = static_cast<std::size_t>(index);
            const LowRankTerm& term = x_.terms[at];
            if (part > 0) {
                const std::int64_t first = (part - 1) * kPanels * height_;
                kernels_.pack_rows(memory_ + low_at_[at] + first * term.rank, height_ * term.rank, operand_at(term.low, first, 0),
                                   std::min(kPanels * height_, x_.m - first), height_, term.rank);
                return;
            }
            float* panels = memory_ + term_at_[at];
            const std::int64_t width = kernels_.width, lane = term.first % width, stride = width * term.rank;
            if (lane == 0) {
                std::fill_n(panels + term.columns / width * stride, term.columns % width == 0 ? 0 : stride, 0.0f);
                kernels_.pack_columns(panels, stride, term.b, term.columns, term.rank);
                return;
            }
            std::fill_n(panels, ceil_div(lane + term.columns, width) * stride, 0.0f);
            for (std::int64_t column = 0; column < term.columns; ++column) {
                float* out = panels + (lane + column) / width * stride + (lane + column) % width;
                for (std::int64_t p = 0; p < term.rank; ++p) out[p * width] = *operand_at(term.b, p, column).data;
            }
        });
    }

    void pack_a() {
        // An operand is read along its rows, as they lie in memory.
        const std::int64_t shares = ceil_div(depth_, kPackLines);
        pool_.parallel_for(depth_blocks_ * shares, [&](std::int64_t share) {
            const std::int64_t block = share / shares, from = share % shares * kPackLines, deep = depth_of(block);
            const std::int64_t count = std::min(kPackLines, deep - from);
            if (count <= 0) return;
            kernels_.pack_rows(packed_a(block, 0) + from * height_, height_ * deep,
                               operand_at(x_.a, row_, first_k_ + block * depth_ + from), rows_, height_, count);
        });
    }

    void pack_b(std::int64_t block, std::int64_t share) const {
        const std::int64_t column_block = block / depth_blocks_, depth_block = block % depth_blocks_;
        const std::int64_t column = left(column_block), columns = left(column_block + 1) - column, deep = depth_of(depth_block);
        const std::int64_t k = first_k_ + depth_block * depth_, panel_stride = kernels_.width * deep;
        if (x_.b.transposed) {
            const std::int64_t unit = kPackPanels * kernels_.width, first = share * unit;
            if (first >= columns) return;
            kernels_.pack_columns(slot(block) + share * kPackPanels * panel_stride, panel_stride, operand_at(x_.b, k, column + first),
                                  std::min(unit, columns - first), deep);
        } else {
            const std::int64_t from = share * kPackLines, count = std::min(kPackLines, deep - from);
            if (count <= 0) return;
            kernels_.pack_columns(slot(block) + from * kernels_.width, panel_stride, operand_at(x_.b, k + from, column), columns, count);
        }
    }

    /// Rows [from, to) of the chunk times one block of b.
    void multiply_block(std::int64_t block, std::int64_t from, std::int64_t to, int worker) const {
        const std::int64_t column_block = block / depth_blocks_, depth_block = block % depth_blocks_, deep = depth_of(depth_block);
        const std::int64_t begin = left(column_block), end = left(column_block + 1), k = first_k_ + depth_block * depth_;
        const std::int64_t width = kernels_.width, fetched = ceil_div(height_ * ceil_div(deep, 16), ceil_div(end - begin, width));
        const bool first = k == 0, last = k + deep >= x_.k;
        const auto multiply = by_line_ ? kernels_.multiply_panel_lines : kernels_.multiply;
        for (std::int64_t r = from; r < to; r += height_) {
            const std::int64_t row = row_ + r, high = std::min(height_, to - r);
            const float* panel = by_line_ ? line_panel(worker) : packed_a(depth_block, r);
            Ahead ahead(nullptr, 0, 0, 0);
            if (by_line_) {
                const float* lines = x_.a.data + row * x_.a.stride + k;
                for (std::int64_t i = 0; i < high; ++i) {
                    std::memcpy(line_panel(worker) + i * GemmKernels::line_step, lines + i * x_.a.stride,
                                static_cast<std::size_t>(deep) * sizeof(float));
                }
                ahead = {lines + high * x_.a.stride, x_.a.stride, std::min(height_, to - r - high), deep};
            }
            for (std::int64_t q = begin; q < end; q += width) {
                const std::int64_t columns = std::min(width, end - q);
                float* c = x_.c + row * x_.c_stride + q;
                ahead.fetch(fetched);
                if (first && x_.start != nullptr) copy_start(c, row, q, high, columns);
                multiply(c, x_.c_stride, panel, height_, slot(block) + (q - begin) * deep, width, high, columns, deep, x_.alpha,
                         !first || x_.start != nullptr ? 1.0f : x_.beta);
                for (std::size_t i = 0; last && i < x_.terms.size(); ++i) add_term(i, c, row, q, high, columns);
            }
        }
    }

    void copy_start(float* c, std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns) const {
        const float* from = x_.start + row * x_.start_stride + column;
        for (std::int64_t i = 0; i < rows; ++i) {
            std::memcpy(c + i * x_.c_stride, from + i * x_.start_stride, static_cast<std::size_t>(columns) * sizeof(float));
        }
    }

    void add_term(std::size_t index, float* c, std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns) const {
        const LowRankTerm& term = x_.terms[index];
        const std::int64_t width = kernels_.width;
        if (column + columns <= term.first || column >= term.first + term.columns) return;
        kernels_.multiply(c, x_.c_stride, memory_ + low_at_[index] + row * term.rank, height_,
                          memory_ + term_at_[index] + (column / width - term.first / width) * width * term.rank, width, rows, columns,
                          term.rank, term.scale, 1.0f);
    }

    void multiply_chunk() {
        // Parts of the rows for one thread each: enough of them that all threads end together. Work is taken in this order, so whatever a
        // piece of it waits for is done or being done: packing block 0; packing block 1 and using block 0; and so on.
        const std::int64_t blocks = column_blocks_ * depth_blocks_, row_panels = ceil_div(rows_, height_);
        const std::int64_t parts = pool_.size() == 1 ? 1 : std::min<std::int64_t>(kParts * pool_.size(), row_panels);
        const std::int64_t shares = b_packed_ ? 0 : pack_shares_;
        std::vector<std::atomic<std::int64_t>> packed(static_cast<std::size_t>(blocks)), used(static_cast<std::size_t>(parts));
        pool_.parallel_for((blocks + 1) * (shares + parts), [&](std::int64_t index, int worker) {
            const std::int64_t turn = index / (shares + parts), item = index % (shares + parts);
            if (item < shares) {
                if (turn == blocks) return;
                for (auto& blocks_used : used) wait_until([&] { return blocks_used.load(std::memory_order_acquire) > turn - slots_; });
                pack_b(turn, item);
                packed[static_cast<std::size_t>(turn)].fetch_add(1, std::memory_order_release);
                return;
            }
            if (turn == 0) return;
            const std::int64_t part = item - shares, block = turn - 1;
            auto& blocks_used = used[static_cast<std::size_t>(part)];
            auto& shares_packed = packed[static_cast<std::size_t>(block)];
            wait_until([&] { return shares_packed.load(std::memory_order_acquire) == shares; });
            wait_until([&] { return blocks_used.load(std::memory_order_acquire) == block; });
            multiply_block(block, cut(rows_, height_, parts, part), cut(rows_, height_, parts, part + 1), worker);
            blocks_used.store(turn, std::memory_order_release);
        });
    }

    ThreadPool& pool_;
    const GemmKernels& kernels_;
    const GemmArguments& x_;
    std::int64_t height_, depth_ = 0, chunk_depth_ = 0, chunk_rows_ = 0;
    bool by_line_;
    std::int64_t column_blocks_ = 0, block_panels_ = 0, block_floats_ = 0, pack_shares_ = 0, slots_ = 0, a_floats_ = 0, floats_ = 0;
    std::vector<std::int64_t> low_at_, term_at_;  // where the terms' factors lie
    float* memory_ = nullptr;
    // The chunk at work.
    std::int64_t first_k_ = 0, deep_ = 0, depth_blocks_ = 0, row_ = 0, rows_ = 0;
    bool b_packed_ = false;
};

}  // namespace

void packed_gemm(ThreadPool& pool, const GemmKernels& kernels, AlignedBuffer& shared, const GemmArguments& arguments) {
    if (arguments.m == 0 || arguments.n == 0) return;
    Product product(pool, kernels, arguments);
    product.run(shared.floats(product.floats()));
}

}  // namespace surogate
