#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "model/arena.h"
#include "model/spec.h"

namespace surogate {

/// Keys and values of all layers in blocks of `block_size` positions. A block is one index into every layer's buffers; blocks are counted
/// references, so that sequences share what they have in common, and one that several hold must be copied before it is written.
class KvCache {
   public:
    /// Takes (or, in a measuring arena, plans) the buffers of `blocks` blocks.
    KvCache(Arena& arena, const ModelSpec& spec, std::int64_t blocks, std::int64_t block_size);

    std::int64_t block_size() const { return block_size_; }
    std::int64_t blocks() const { return static_cast<std::int64_t>(references_.size()); }
    std::int64_t free_blocks() const { return static_cast<std::int64_t>(free_.size()); }

    /// A block with one reference, or -1 when none is free.
    std::int32_t take();
    void share(std::int32_t block) { ++references_[static_cast<std::size_t>(block)]; }
    void drop(std::int32_t block);
    bool shared(std::int32_t block) const { return references_[static_cast<std::size_t>(block)] > 1; }
    std::int32_t references(std::int32_t block) const { return references_[static_cast<std::size_t>(block)]; }

    /// Copies a block's keys and values in all layers.
    void copy_block(Backend& backend, std::int32_t out, std::int32_t in) const;

    /// Block tables and lengths are the caller's to fill in.
    PagedCache layer(std::int64_t layer) const;

   private:
    std::int64_t block_size_;
    std::vector<Tensor> keys_, values_;  // per layer, [blocks * block_size, K * D]
    std::vector<std::int32_t> references_;
    std::vector<std::int32_t> free_;  // a stack: what was used last is taken first, so that little memory is ever touched
};

}  // namespace surogate
