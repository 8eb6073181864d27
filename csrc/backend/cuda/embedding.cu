#include <cub/device/device_radix_sort.cuh>

#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"

namespace surogate {

using namespace cuda;

namespace {

constexpr int kThreads = 128;

template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    take_rows_kernel(Rows<T> out, Rows<T> in, const std::int32_t* index, std::int64_t limit, std::int64_t columns, int code, int* fault) {
    const std::int64_t row = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
    if (column >= columns) return;
    const std::int32_t from = index[row];
    if (from < 0 || from >= limit) {
        *fault = code;
        return;
    }
    const Vec<T, V> vec = in.template get<V>(from, column);
    float out_values[V];
#pragma unroll
    for (int i = 0; i < V; ++i) out_values[i] = vec[i];
    out.template put<V>(row, column, out_values);
}

__global__ void number_kernel(std::int32_t* order, std::int64_t count) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count) order[i] = static_cast<std::int32_t>(i);
}

constexpr int kRunThreads = 32;  // of a block that adds up a run: a frequent id's rows are read by many multiprocessors, a few columns each
constexpr int kRunAhead = 16;    // rows in flight

/// Where a run of equal ids begins, a block adds up its rows, in the order of T (the sort is stable). Rows are fetched ahead of the sum,
/// which alone has to keep the order.
template <typename T, int V>
__global__ void __launch_bounds__(kRunThreads)
    add_runs_kernel(Rows<Any> out, Rows<T> in, const std::int32_t* ids, const std::int32_t* order, std::int64_t count, std::int64_t limit,
                    std::int64_t columns, int code, int* fault) {
    const std::int64_t first = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kRunThreads + threadIdx.x) * V;
    const std::int32_t id = ids[first];
    if (first > 0 && ids[first - 1] == id) return;
    if (id < 0 || id >= limit) {
        *fault = code;
        return;
    }
    const bool live = column < columns;
    float sum[V];
    if (live) {
        const Vec<Any, V> before = out.get<V>(id, column);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] = before[i];
    }
    // The lanes look at 32 places at a time: how many of them belong to the run, and which rows they are.
    for (std::int64_t at = first;; at += 32) {
        const std::int64_t own = at + threadIdx.x;
        const bool same = own < count && ids[own] == id;
        const std::int32_t row = same ? order[own] : 0;
        const int here = __popc(__ballot_sync(kFullWarp, same));
        for (int begin = 0; begin < here; begin += kRunAhead) {
            Vec<T, V> vecs[kRunAhead];
#pragma unroll
            for (int n = 0; n < kRunAhead; ++n) {
                const std::int32_t from = __shfl_sync(kFullWarp, row, (begin + n) % 32);
                if (live && begin + n < here) {
                    vecs[n] = in.template get<V>(from, column);
                } else {
                    vecs[n].zero();
                }
            }
#pragma unroll
            for (int n = 0; n < kRunAhead; ++n) {
                if (begin + n >= here) continue;
#pragma unroll
                for (int i = 0; i < V; ++i) sum[i] += vecs[n][i];
            }
        }
        if (here < 32) break;
    }
    if (live) out.put<V>(id, column, sum);
}

/// Sets `repeats` unless the index rises from row to row, as it does where rows were picked out of a matrix in their order.
__global__ void find_repeats_kernel(int* repeats, const std::int32_t* index, std::int64_t count) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i + 1 < count && index[i + 1] <= index[i]) *repeats = 1;
}

/// out[index[i]] += in[i]. If an index may repeat, the first row of each adds up all of them, in order; that reads the whole index.
template <int V>
__global__ void __launch_bounds__(kThreads) scatter_add_kernel(Rows<Any> out, Rows<Any> in, const std::int32_t* index, const int* repeats,
                                                               std::int64_t count, std::int64_t limit, std::int64_t columns, int* fault) {
    const std::int64_t row = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
    if (column >= columns) return;
    const std::int32_t to = index[row];
    if (to < 0 || to >= limit) {
        *fault = static_cast<int>(DeviceFault::ScatterIndex);
        return;
    }
    const bool search = *repeats != 0;
    if (search) {
        for (std::int64_t i = 0; i < row; ++i) {
            if (index[i] == to) return;
        }
    }
    Vec<Any, V> vec = in.get<V>(row, column);
    const Vec<Any, V> before = out.get<V>(to, column);
    float sum[V];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = before[i] + vec[i];
    if (search) {
        for (std::int64_t i = row + 1; i < count; ++i) {
            if (index[i] != to) continue;
            vec = in.get<V>(i, column);
#pragma unroll
            for (int k = 0; k < V; ++k) sum[k] += vec[k];
        }
    }
    out.put<V>(to, column, sum);
}

void take_rows(cudaStream_t stream, int* fault, const char* op, const Tensor& out, const Tensor& in, const Tensor& index,
               const char* in_name, const char* index_name, DeviceFault code) {
    check(op, in_name, in, in.rows, in.columns);
    check(op, "out", out, index.size(), in.columns);
    check_vector(op, index_name, index, index.size(), DType::Int32);
    if (out.size() == 0) return;
    by_type({&out, &in}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(in.columns, {&out, &in}), [&](auto width) {
            constexpr int V = width();
            const dim3 grid(static_cast<unsigned>(out.rows), blocks_for(in.columns, kThreads * V));
            take_rows_kernel<T, V><<<grid, kThreads, 0, stream>>>(rows_of<T>(out), rows_of<T>(in), index.i32(), in.rows, in.columns,
                                                                  static_cast<int>(code), fault);
        });
    });
    CUDA_LAUNCHED(op);
}

}  // namespace

void CudaBackend::embedding_forward(const Tensor& out, const Tensor& table, const Tensor& ids) {
    const CudaOp scope(*this, "embedding_forward");
    take_rows(stream_, fault_, "embedding_forward", out, table, ids, "table", "ids", DeviceFault::EmbeddingId);
}

void CudaBackend::gather_rows(const Tensor& out, const Tensor& in, const Tensor& index) {
    const CudaOp scope(*this, "gather_rows");
    take_rows(stream_, fault_, "gather_rows", out, in, index, "in", "index", DeviceFault::GatherIndex);
}

void CudaBackend::embedding_backward(const Tensor& dtable, const Tensor& dout, const Tensor& ids) {
    const char* op = "embedding_backward";
    const CudaOp scope(*this, op);
    check(op, "dtable", dtable, dtable.rows, dout.columns);
    check(op, "dout", dout, ids.size(), dout.columns);
    check_vector(op, "ids", ids, ids.size(), DType::Int32);
    if (dout.size() == 0) return;
    // (id, row) sorted by id: rows of one id then follow each other, in their order, and are added up without atomics.
    const std::int64_t count = dout.rows;
    // Only the bits that ids of the table have are sorted by; one outside of it is found when it is added.
    int bits = 1;
    while (bits < 31 && (std::int64_t{1} << bits) < dtable.rows) ++bits;
    std::size_t sort_bytes = 0;
    CUDA_CHECK(op, cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, ids.i32(), static_cast<std::int32_t*>(nullptr),
                                                   static_cast<const std::int32_t*>(nullptr), static_cast<std::int32_t*>(nullptr),
                                                   static_cast<int>(count), 0, bits, stream_));
    const std::int64_t padded = (count + 63) / 64 * 64;
    auto* memory = static_cast<std::int32_t*>(scratch_->reserve(op, static_cast<std::size_t>(3 * padded) * 4 + sort_bytes));
    std::int32_t *numbers = memory, *sorted = memory + padded, *order = memory + 2 * padded;
    void* sort_memory = memory + 3 * padded;
    number_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream_>>>(numbers, count);
    CUDA_LAUNCHED(op);
    CUDA_CHECK(
        op, cub::DeviceRadixSort::SortPairs(sort_memory, sort_bytes, static_cast<const std::int32_t*>(ids.i32()), sorted,
                                            static_cast<const std::int32_t*>(numbers), order, static_cast<int>(count), 0, bits, stream_));
    by_type({&dout}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(dout.columns, {&dtable, &dout}), [&](auto width) {
            constexpr int V = width();
            const dim3 grid(static_cast<unsigned>(count), blocks_for(dout.columns, kRunThreads * V));
            add_runs_kernel<T, V><<<grid, kRunThreads, 0, stream_>>>(rows_of<Any>(dtable), rows_of<T>(dout), sorted, order, count,
                                                                     dtable.rows, dout.columns, static_cast<int>(DeviceFault::EmbeddingId),
                                                                     fault_);
        });
    });
    CUDA_LAUNCHED(op);
}

void CudaBackend::scatter_add_rows(const Tensor& out, const Tensor& in, const Tensor& index) {
    const char* op = "scatter_add_rows";
    const CudaOp scope(*this, op);
    check(op, "out", out, out.rows, in.columns);
    check(op, "in", in, index.size(), in.columns);
    check_vector(op, "index", index, index.size(), DType::Int32);
    if (in.size() == 0) return;
    int* repeats = scratch_->of<int>(op, 1);
    CUDA_CHECK(op, cudaMemsetAsync(repeats, 0, sizeof(int), stream_));
    find_repeats_kernel<<<blocks_for(in.rows, kThreads), kThreads, 0, stream_>>>(repeats, index.i32(), in.rows);
    CUDA_LAUNCHED(op);
    by_width(vectors_of_8(in.columns, {&out, &in}), [&](auto width) {
        constexpr int V = width();
        const dim3 grid(static_cast<unsigned>(in.rows), blocks_for(in.columns, kThreads * V));
        scatter_add_kernel<V><<<grid, kThreads, 0, stream_>>>(rows_of<Any>(out), rows_of<Any>(in), index.i32(), repeats, in.rows, out.rows,
                                                              in.columns, fault_);
    });
    CUDA_LAUNCHED(op);
}

}  // namespace surogate
