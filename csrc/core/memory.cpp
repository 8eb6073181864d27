#include "core/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>

#include "core/error.h"

namespace surogate {

namespace {
constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
}

void* allocate_aligned(std::size_t bytes) {
    const std::size_t extra = kAlignment + sizeof(void*);
    void* raw = nullptr;
    // calloc takes fresh pages from the system for large blocks, so nothing is touched before its first use.
    if (bytes <= std::numeric_limits<std::size_t>::max() - extra) raw = std::calloc(1, bytes + extra);
    if (raw == nullptr) throw OutOfMemory("cannot allocate " + std::to_string(bytes) + " bytes of host memory");
    const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(raw) + sizeof(void*);
    const std::uintptr_t aligned = (start + kAlignment - 1) / kAlignment * kAlignment;
    reinterpret_cast<void**>(aligned)[-1] = raw;
#ifdef MADV_HUGEPAGE
    const std::uintptr_t first = (aligned + kHugePage - 1) / kHugePage * kHugePage;
    const std::uintptr_t last = (aligned + bytes) / kHugePage * kHugePage;
    if (last > first) {
        // Only advice: without it the memory is the same, merely slower to walk.
        (void)::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
    }
#endif
    return reinterpret_cast<void*>(aligned);
}

void release_aligned(void* data) noexcept {
    if (data != nullptr) std::free(static_cast<void**>(data)[-1]);
}

void* AlignedBuffer::reserve(std::size_t bytes) {
    if (bytes > capacity_) {
        release_aligned(std::exchange(data_, nullptr));
        capacity_ = 0;
        data_ = allocate_aligned(bytes);
        capacity_ = bytes;
    }
    return data_;
}

}  // namespace surogate
