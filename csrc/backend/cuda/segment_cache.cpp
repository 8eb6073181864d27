#include "backend/cuda/segment_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/cuda/cuda_error.h"

namespace surogate::cuda {

SegmentCache::~SegmentCache() {
    for (const SegmentsOnDevice& entry : entries_) release(entry);
}

// At the end only: cudaFree waits for the device, so that nothing in flight still reads what goes.
void SegmentCache::release(const SegmentsOnDevice& segments) {
    for (void* data : segments.memory) cudaFree(data);
}

void* SegmentCache::to_device(const char* op, SegmentsOnDevice& owner, const void* values, std::size_t bytes) {
    void* data = nullptr;
    CUDA_CHECK(op, cudaMallocAsync(&data, bytes, stream_));
    owner.memory.push_back(data);
    for (std::size_t done = 0; done < bytes;) {
        const std::size_t part = std::min(bytes - done, Staging::kLarge);
        Staging::Slot& slot = staging_.take(op, part);
        std::memcpy(slot.data, static_cast<const char*>(values) + done, part);
        CUDA_CHECK(op, cudaMemcpyAsync(static_cast<char*>(data) + done, slot.data, part, cudaMemcpyHostToDevice, stream_));
        staging_.used(op, slot);
        done += part;
    }
    return data;
}

SegmentsOnDevice& SegmentCache::get(const char* op, const Segments& segments) {
    std::vector<std::int32_t> bounds = {0};
    std::int64_t longest = 0;
    for (std::int64_t s = 0; s < segments.count; ++s) {
        const std::int32_t begin = segments.cu_seqlens[s], end = segments.cu_seqlens[s + 1];
        if (end == begin) continue;
        bounds.push_back(end);
        longest = std::max<std::int64_t>(longest, end - begin);
    }
    const auto known =
        std::find_if(entries_.begin(), entries_.end(), [&](const SegmentsOnDevice& entry) { return entry.bounds == bounds; });
    if (known != entries_.end()) {
        std::rotate(entries_.begin(), known, known + 1);
        return entries_.front();
    }

    SegmentsOnDevice fresh;
    fresh.bounds = std::move(bounds);
    fresh.count = static_cast<std::int64_t>(fresh.bounds.size()) - 1;
    fresh.longest = longest;
    fresh.bucket = 1;
    while (fresh.bucket < fresh.count) fresh.bucket *= 2;
    const std::int64_t first_length = (fresh.bucket + 1 + 63) / 64 * 64;  // cuDNN takes aligned pointers only
    std::vector<std::int32_t> values(static_cast<std::size_t>(first_length + fresh.bucket), 0);
    for (std::int64_t s = 0; s <= fresh.bucket; ++s) {
        values[static_cast<std::size_t>(s)] = fresh.bounds[static_cast<std::size_t>(std::min(s, fresh.count))];
    }
    for (std::int64_t s = 0; s < fresh.bucket; ++s) {
        values[static_cast<std::size_t>(first_length + s)] = values[static_cast<std::size_t>(s + 1)] - values[static_cast<std::size_t>(s)];
    }
    entries_.push_front(std::move(fresh));
    SegmentsOnDevice& entry = entries_.front();
    try {
        const auto* data = static_cast<const std::int32_t*>(to_device(op, entry, values.data(), values.size() * sizeof(std::int32_t)));
        entry.boundaries = data;
        entry.lengths = data + first_length;
    } catch (...) {
        release(entry);
        entries_.pop_front();
        throw;
    }
    if (entries_.size() > kKept) {
        for (void* data : entries_.back().memory) CUDA_CHECK(op, cudaFreeAsync(data, stream_));
        entries_.pop_back();
    }
    return entry;
}

void* SegmentCache::offsets(const char* op, SegmentsOnDevice& segments, std::int64_t stride, bool wide) {
    for (const SegmentsOnDevice::Offsets& known : segments.offsets) {
        if (known.stride == stride && known.wide == wide) return known.data;
    }
    std::vector<std::int64_t> values(static_cast<std::size_t>(segments.bucket + 1));
    for (std::int64_t s = 0; s <= segments.bucket; ++s) {
        values[static_cast<std::size_t>(s)] = segments.bounds[static_cast<std::size_t>(std::min(s, segments.count))] * stride;
    }
    void* data = nullptr;
    if (wide) {
        data = to_device(op, segments, values.data(), values.size() * sizeof(std::int64_t));
    } else {
        const std::vector<std::int32_t> narrow(values.begin(), values.end());
        data = to_device(op, segments, narrow.data(), narrow.size() * sizeof(std::int32_t));
    }
    segments.offsets.push_back({stride, wide, data});
    return data;
}

}  // namespace surogate::cuda
