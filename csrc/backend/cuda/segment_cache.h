#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/staging.h"

namespace surogate::cuda {

/// The segments of a batch on the device; made once per batch and used by every layer of it. Empty segments are left out.
struct SegmentsOnDevice {
    std::vector<std::int32_t> bounds;  // [count + 1], host
    std::int64_t count = 0;
    std::int64_t bucket = 0;   // count rounded up to a power of two, so that few graphs serve many batches
    std::int64_t longest = 0;  // segment

    const std::int32_t* boundaries = nullptr;  // [bucket + 1], the last one repeated
    const std::int32_t* lengths = nullptr;     // [bucket], 0 from count on

    struct Offsets {
        std::int64_t stride;
        bool wide;
        void* data;
    };
    std::vector<Offsets> offsets;  // boundaries * stride, [bucket + 1] int32 or (wide) int64
    std::vector<void*> memory;
};

/// The last few lists of segments that were asked for (a learner and its reference take turns).
class SegmentCache {
   public:
    SegmentCache(cudaStream_t stream, Staging& staging) : stream_(stream), staging_(staging) {}
    ~SegmentCache();
    SegmentCache(const SegmentCache&) = delete;
    SegmentCache& operator=(const SegmentCache&) = delete;

    /// Valid until the next call.
    SegmentsOnDevice& get(const char* op, const Segments& segments);
    /// Where each segment begins, in elements of a matrix of this row stride.
    void* offsets(const char* op, SegmentsOnDevice& segments, std::int64_t stride, bool wide);

   private:
    static constexpr std::size_t kKept = 8;

    void* to_device(const char* op, SegmentsOnDevice& owner, const void* values, std::size_t bytes);
    static void release(const SegmentsOnDevice& segments);

    cudaStream_t stream_;
    Staging& staging_;
    std::deque<SegmentsOnDevice> entries_;  // the last used in front
};

}  // namespace surogate::cuda
