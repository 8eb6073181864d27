#pragma once

#include <cstddef>
#include <utility>

namespace surogate {

inline constexpr std::size_t kAlignment = 64;  // a cache line, and the widest vector register

/// Zeroed memory aligned to `kAlignment`; large blocks are advised to lie in huge pages. Throws OutOfMemory with the size.
void* allocate_aligned(std::size_t bytes);
void release_aligned(void* data) noexcept;

/// Bytes that can be taken without swapping: the system's MemAvailable, or less where the process's control group allows less.
std::size_t available_host_memory();

/// Owns aligned memory that grows on demand and never shrinks; what was in it is lost when it grows.
class AlignedBuffer {
   public:
    AlignedBuffer() = default;
    AlignedBuffer(AlignedBuffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, std::size_t{0})) {}
    AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(capacity_, other.capacity_);
        return *this;
    }
    ~AlignedBuffer() { release_aligned(data_); }

    void* reserve(std::size_t bytes);

    /// Room for `count` floats, contents unspecified.
    float* floats(std::size_t count) { return static_cast<float*>(reserve(count * sizeof(float))); }

   private:
    void* data_ = nullptr;
    std::size_t capacity_ = 0;
};

}  // namespace surogate
