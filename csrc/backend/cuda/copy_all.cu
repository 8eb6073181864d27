#include <algorithm>
#include <cstring>

#include "backend/cuda/checks.h"
#include "backend/cuda/copy_all.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/staging.h"

namespace surogate {

using namespace cuda;

namespace cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 4;

template <int V>
__device__ __forceinline__ void copy_vector(const CopyTable::Entry& entry, std::int64_t row, std::int64_t column) {
    const Rows<Any> in{const_cast<void*>(entry.in), entry.in_stride, entry.in_wide != 0},
        out{entry.out, entry.out_stride, entry.out_wide != 0};
    const Vec<Any, V> vec = in.get<V>(row, column);
    out.put<V>(row, column, vec.value);
}

/// The entry that holds vector `at`: the last one whose first is not above it.
__device__ __forceinline__ int entry_of(const CopyTable::Entry* entries, int count, std::int64_t at) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (entries[middle].first_vector <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

__global__ void __launch_bounds__(kThreads) copy_all_kernel(const CopyTable::Entry* entries, int count, std::int64_t vectors) {
    std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads * kVectorsPerThread + threadIdx.x;
#pragma unroll
    for (int n = 0; n < kVectorsPerThread; ++n, at += kThreads) {
        if (at >= vectors) return;
        const CopyTable::Entry entry = entries[entry_of(entries, count, at)];
        const std::int64_t within = at - entry.first_vector, row = within / entry.vectors_of_row;
        const std::int64_t column = (within - row * entry.vectors_of_row) * entry.width;
        if (entry.width == 8) {
            copy_vector<8>(entry, row, column);
        } else {
            copy_vector<1>(entry, row, column);
        }
    }
}

}  // namespace

CopyTable::~CopyTable() { cudaFree(device_); }

void CopyTable::upload(const char* op) {
    const std::size_t bytes = entries_.size() * sizeof(Entry);
    if (bytes > capacity_) {
        CUDA_CHECK(op, cudaStreamSynchronize(stream_));
        cudaFree(device_);
        device_ = nullptr;
        capacity_ = 0;
        CUDA_CHECK(op, cudaMalloc(&device_, bytes));
        capacity_ = bytes;
    }
    for (std::size_t done = 0; done < bytes;) {
        const std::size_t part = std::min(bytes - done, Staging::kLarge);
        Staging::Slot& slot = staging_.take(op, part);
        std::memcpy(slot.data, reinterpret_cast<const char*>(entries_.data()) + done, part);
        CUDA_CHECK(op, cudaMemcpyAsync(static_cast<char*>(device_) + done, slot.data, part, cudaMemcpyHostToDevice, stream_));
        staging_.used(op, slot);
        done += part;
    }
}

void CopyTable::run(const char* op, const std::vector<Backend::CopyItem>& items) {
    std::vector<Entry> entries;
    entries.reserve(items.size());
    std::int64_t vectors = 0;
    for (const auto& [out, in] : items) {
        if (in.size() == 0) continue;
        const int width = vectors_of_8(in.columns, {&out, &in}) ? 8 : 1;
        const std::int64_t of_row = in.columns / width;
        require(of_row < (std::int64_t{1} << 31), op, "columns", "fewer than 2^31", in.columns);
        entries.push_back({out.data, in.data, out.stride, in.stride, vectors, static_cast<std::int32_t>(of_row), width,
                           out.dtype == DType::Float32 ? 1 : 0, in.dtype == DType::Float32 ? 1 : 0});
        vectors += in.rows * of_row;
    }
    if (vectors == 0) return;
    if (entries != entries_) {
        entries_.clear();  // if the upload fails, the next call must not take the table for this one
        std::swap(entries_, entries);
        try {
            upload(op);
        } catch (...) {
            entries_.clear();
            throw;
        }
        vectors_ = vectors;
    }
    copy_all_kernel<<<blocks_for(vectors_, std::int64_t{kThreads} * kVectorsPerThread), kThreads, 0, stream_>>>(
        static_cast<const Entry*>(device_), static_cast<int>(entries_.size()), vectors_);
    CUDA_LAUNCHED(op);
}

}  // namespace cuda

void CudaBackend::copy_all(const std::vector<CopyItem>& items) {
    const char* op = "copy_all";
    const CudaOp scope(*this, op);
    bool real = true;
    for (const auto& [out, in] : items) {
        check_place(op, "in", in);
        check_place(op, "out", out);
        require(out.rows == in.rows && out.columns == in.columns, op, "out", in, out);
        real = real && is_real(in.dtype) && is_real(out.dtype);
    }
    if (!real) return Backend::copy_all(items);  // integers: one by one
    copies_->run(op, items);
}

}  // namespace surogate
