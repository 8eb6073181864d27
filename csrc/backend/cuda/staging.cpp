#include "backend/cuda/staging.h"

#include "backend/cuda/cuda_error.h"

namespace surogate::cuda {

Staging::~Staging() {
    destroy(small_);
    destroy(large_);
    cudaFree(device_);
}

void Staging::destroy(Ring& ring) {
    for (const Slot& slot : ring.slots) {
        if (slot.used != nullptr) cudaEventDestroy(slot.used);
    }
    if (ring.memory != nullptr) cudaFreeHost(ring.memory);
}

void Staging::make(const char* op, Ring& ring, std::size_t slots, std::size_t bytes) {
    void* memory = nullptr;
    CUDA_CHECK(op, cudaMallocHost(&memory, slots * bytes));
    ring.memory = static_cast<char*>(memory);
    ring.slots.resize(slots);
    for (std::size_t i = 0; i < slots; ++i) {
        ring.slots[i].data = ring.memory + i * bytes;
        CUDA_CHECK(op, cudaEventCreateWithFlags(&ring.slots[i].used, cudaEventDisableTiming));
    }
}

Staging::Slot& Staging::take(const char* op, std::size_t bytes) {
    Ring& ring = bytes <= kSmall ? small_ : large_;
    if (ring.memory == nullptr) {
        if (bytes <= kSmall) {
            make(op, ring, kSmallSlots, kSmall);
        } else {
            make(op, ring, kLargeSlots, kLarge);
        }
    }
    Slot& slot = ring.slots[ring.next];
    ring.next = (ring.next + 1) % ring.slots.size();
    wait(op, slot);
    return slot;
}

void Staging::used(const char* op, Slot& slot) {
    CUDA_CHECK(op, cudaEventRecord(slot.used, stream_));
    slot.pending = true;
}

void Staging::wait(const char* op, Slot& slot) {
    if (!slot.pending) return;
    CUDA_CHECK(op, cudaEventSynchronize(slot.used));
    slot.pending = false;
}

void* Staging::device_buffer(const char* op) {
    if (device_ == nullptr) CUDA_CHECK(op, cudaMalloc(&device_, kLarge));
    return device_;
}

}  // namespace surogate::cuda
