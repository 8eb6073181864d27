#include "generate/kv_cache.h"

#include <stdexcept>

namespace surogate {

KvCache::KvCache(Arena& arena, const ModelSpec& spec, std::int64_t blocks, std::int64_t block_size) : block_size_(block_size) {
    for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
        keys_.push_back(arena.take(blocks * block_size, spec.kv_columns()));
        values_.push_back(arena.take(blocks * block_size, spec.kv_columns()));
    }
    references_.assign(static_cast<std::size_t>(blocks), 0);
    for (std::int64_t block = blocks - 1; block >= 0; --block) free_.push_back(static_cast<std::int32_t>(block));
}

std::int32_t KvCache::take() {
    if (free_.empty()) return -1;
    const std::int32_t block = free_.back();
    free_.pop_back();
    references_[static_cast<std::size_t>(block)] = 1;
    return block;
}

void KvCache::drop(std::int32_t block) {
    std::int32_t& references = references_[static_cast<std::size_t>(block)];
    if (references <= 0) throw std::logic_error("KvCache: a free block was dropped");
    if (--references == 0) free_.push_back(block);
}

void KvCache::copy_block(Backend& backend, std::int32_t out, std::int32_t in) const {
    for (const std::vector<Tensor>* buffers : {&keys_, &values_}) {
        for (const Tensor& buffer : *buffers) {
            backend.copy(buffer.row_range(out * block_size_, block_size_), buffer.row_range(in * block_size_, block_size_));
        }
    }
}

PagedCache KvCache::layer(std::int64_t layer) const {
    PagedCache cache;
    cache.keys = keys_[static_cast<std::size_t>(layer)];
    cache.values = values_[static_cast<std::size_t>(layer)];
    cache.block_size = block_size_;
    return cache;
}

}  // namespace surogate
