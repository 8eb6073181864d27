#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace surogate::cuda {

class Staging;

/// Many small copies as one launch. What is copied where is a table on the device, uploaded when it differs from the last one's: a learner
/// refreshes the same adapters after every step.
class CopyTable {
   public:
    CopyTable(cudaStream_t stream, Staging& staging) : stream_(stream), staging_(staging) {}
    ~CopyTable();
    CopyTable(const CopyTable&) = delete;
    CopyTable& operator=(const CopyTable&) = delete;

    /// Of float32 or bfloat16 each way.
    void run(const char* op, const std::vector<Backend::CopyItem>& items);

    /// One of the copies, as vectors of `width` elements.
    struct Entry {
        void* out;
        const void* in;
        std::int64_t out_stride, in_stride;
        std::int64_t first_vector;  // the vectors of all entries before it
        std::int32_t vectors_of_row;
        std::int32_t width;              // 8 or 1
        std::int32_t out_wide, in_wide;  // float32

        friend bool operator==(const Entry&, const Entry&) = default;
    };

   private:
    void upload(const char* op);

    cudaStream_t stream_;
    Staging& staging_;
    std::vector<Entry> entries_;
    std::int64_t vectors_ = 0;
    void* device_ = nullptr;
    std::size_t capacity_ = 0;
};

}  // namespace surogate::cuda
