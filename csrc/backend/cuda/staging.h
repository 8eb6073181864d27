#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace surogate::cuda {

/// Pinned host memory through which all transfers go, in slots used in turn. A slot is free again once the stream has passed the event that
/// was recorded after its last use: many small slots keep the host from waiting for work queued before an upload.
class Staging {
   public:
    static constexpr std::size_t kSmall = std::size_t{256} << 10, kLarge = std::size_t{16} << 20;
    static constexpr std::size_t kSmallSlots = 64, kLargeSlots = 4;

    struct Slot {
        char* data = nullptr;
        cudaEvent_t used = nullptr;
        bool pending = false;
    };

    explicit Staging(cudaStream_t stream) : stream_(stream) {}
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    /// The next slot of at least `bytes` (at most kLarge), free to be written.
    Slot& take(const char* op, std::size_t bytes);
    /// After the transfers from or to the slot were queued.
    void used(const char* op, Slot& slot);
    /// Waits until they are done.
    void wait(const char* op, Slot& slot);
    /// Device memory of kLarge bytes for what is converted on its way; one use after the other, in the stream's order.
    void* device_buffer(const char* op);
    std::size_t device_bytes() const { return device_ != nullptr ? kLarge : 0; }

   private:
    struct Ring {
        std::vector<Slot> slots;
        char* memory = nullptr;
        std::size_t next = 0;
    };
    void make(const char* op, Ring& ring, std::size_t slots, std::size_t bytes);
    static void destroy(Ring& ring);

    cudaStream_t stream_;
    Ring small_, large_;
    void* device_ = nullptr;
};

}  // namespace surogate::cuda
