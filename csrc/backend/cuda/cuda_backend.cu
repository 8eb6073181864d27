#include <cstdio>
#include <cstring>
#include <deque>

#include "backend/cuda/attention_graphs.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/copy_all.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/linear.h"
#include "backend/cuda/profiler.h"
#include "backend/cuda/segment_cache.h"
#include "backend/cuda/staging.h"

namespace surogate {

using namespace cuda;

namespace {

constexpr int kThreads = 256;

std::string gibibytes(std::size_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1024.0 * 1024.0 * 1024.0));
    return text;
}

void* take_memory(const char* op, std::size_t bytes) {
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        std::size_t free = 0, total = 0;
        cudaMemGetInfo(&free, &total);
        throw OutOfMemory(std::string(op) + ": " + gibibytes(bytes) + " of device memory asked for, " + gibibytes(free) + " of " +
                          gibibytes(total) + " free");
    }
    cuda_check(status, op, "cudaMalloc");
    return data;
}

// One thread per vector, whole rows in x so that no division is needed.
template <int V>
__global__ void convert_kernel(Rows<Any> out, Rows<Any> in, std::int64_t columns) {
    const std::int64_t row = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
    if (column >= columns) return;
    const Vec<Any, V> vec = in.get<V>(row, column);
    out.put<V>(row, column, vec.value);
}

template <int V>
__global__ void fill_kernel(Rows<Any> out, std::int64_t columns, float value) {
    const std::int64_t row = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
    if (column >= columns) return;
    float values[V];
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = value;
    out.put<V>(row, column, values);
}

template <int V>
__global__ void scale_kernel(Rows<Any> x, std::int64_t columns, float factor) {
    const std::int64_t row = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
    if (column >= columns) return;
    Vec<Any, V> vec = x.get<V>(row, column);
#pragma unroll
    for (int i = 0; i < V; ++i) vec.value[i] *= factor;
    x.put<V>(row, column, vec.value);
}

/// Rows that are long go into y; dense matrices are folded so that neither axis passes the grid's limit of 65535 in y.
struct Flat {
    std::int64_t rows, columns;
    Tensor view(const Tensor& t) const {
        Tensor flat = t;
        flat.rows = rows;
        flat.columns = columns;
        flat.stride = rows == t.rows ? t.stride : columns;
        return flat;
    }
    dim3 grid(int width) const { return {static_cast<unsigned>(rows), blocks_for(columns, std::int64_t{kThreads} * width), 1}; }
};

/// A dense matrix as rows of 8192 elements where that divides it; otherwise as it is, in row pieces that the grid can take.
Flat flatten(std::int64_t rows, std::int64_t columns, bool dense) {
    constexpr std::int64_t kRow = 8192;
    if (dense && (rows * columns) % kRow == 0) return {rows * columns / kRow, kRow};
    return {rows, columns};
}

constexpr std::int64_t kMostColumns = std::int64_t{65535} * kThreads;  // of one launch, one element at a time

/// Calls body(views...) on pieces of the rows that one launch can take.
template <typename Body>
void over_columns(const Flat& flat, const Body& body) {
    for (std::int64_t first = 0; first < flat.columns; first += kMostColumns) {
        body(first, std::min(kMostColumns, flat.columns - first));
    }
}

void check_any(const char* op, const char* name, const Tensor& t) { check_place(op, name, t); }

__global__ void column_sums_kernel(Rows<Any> out, const float* partial, std::int64_t count, std::int64_t stride, std::int64_t columns) {
    __shared__ float sums[16][33];
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (std::int64_t p = threadIdx.y; p < count; p += 16) sum += partial[p * stride + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= columns) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) total += sums[i][threadIdx.x];
    const float values[1] = {out.get<1>(0, column)[0] + total};
    out.put<1>(0, column, values);
}

}  // namespace

// --- Life --------------------------------------------------------------------------------------------------------------------------------

CudaBackend::CudaBackend(const CudaOptions& options) : options_(options) {
    const char* op = "make_cuda_backend";
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        cudaGetLastError();
        throw CudaError(op, "cudaGetDeviceCount", std::string(cudaGetErrorString(status)) + " (is there an NVIDIA GPU and a driver?)");
    }
    require(options.device >= 0 && options.device < count, op, "device", "0 to " + std::to_string(count - 1), options.device);
    CUDA_CHECK(op, cudaSetDevice(options.device));
    cudaDeviceProp properties{};
    CUDA_CHECK(op, cudaGetDeviceProperties(&properties, options.device));
    if (properties.major < 8) {
        fail(op, ": device: expected compute capability 8.0 or higher (bfloat16), got ", properties.name, " with ", properties.major, ".",
             properties.minor);
    }
    cudaFuncAttributes attributes{};
    const cudaError_t image = cudaFuncGetAttributes(&attributes, fill_kernel<1>);
    if (image != cudaSuccess) {
        cudaGetLastError();
        throw CudaError(op, "loading our kernels",
                        std::string(cudaGetErrorString(image)) + ": this build has none for " + properties.name + " (compute capability " +
                            std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                            "); build again with SUROGATE_CUDA_ARCHS=native");
    }
    // Members own what they take; these three are ours, and a constructor that throws has no destructor.
    try {
        CUDA_CHECK(op, cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        CUDA_CHECK(op, cudaMalloc(&fault_, sizeof(int)));
        CUDA_CHECK(op, cudaMemsetAsync(fault_, 0, sizeof(int), stream_));
        CUDA_CHECK(op, cudaMallocHost(&host_slot_, 64));
        scratch_ = std::make_unique<Workspace>(stream_);
        attention_scratch_ = std::make_unique<Workspace>(stream_);
        staging_ = std::make_unique<Staging>(stream_);
        if (options.profile) profiler_ = std::make_unique<Profiler>(stream_);
        linear_ = std::make_unique<Linear>(stream_, options.autotune && !options.deterministic);
        attention_ = std::make_unique<AttentionGraphs>(stream_, options.deterministic, options.tune_attention);
        segments_ = std::make_unique<SegmentCache>(stream_, *staging_);
        copies_ = std::make_unique<CopyTable>(stream_, *staging_);
        CUDA_CHECK(op, cudaStreamSynchronize(stream_));
    } catch (...) {
        cudaFree(fault_);
        cudaFreeHost(host_slot_);
        throw;
    }
}

CudaBackend::~CudaBackend() {
    cudaSetDevice(options_.device);
    if (profiler_) {
        try {
            std::fputs((profile_table() + product_table()).c_str(), stderr);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "profile: %s\n", error.what());
        }
    }
    cudaStreamSynchronize(stream_);
    copies_.reset();
    segments_.reset();
    attention_.reset();
    linear_.reset();
    profiler_.reset();
    staging_.reset();
    attention_scratch_.reset();
    scratch_.reset();
    cudaFree(fault_);
    cudaFreeHost(host_slot_);
    cudaStreamDestroy(stream_);
}

std::string CudaBackend::profile_table() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return profiler_ ? profiler_->table() : std::string();
}

std::string CudaBackend::product_table() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return linear_->choices();
}

const std::string& CudaBackend::attention_refusal() const { return attention_->refusal(); }

std::size_t CudaBackend::own_bytes() const {
    return scratch_->capacity() + attention_scratch_->capacity() + linear_->device_bytes() + staging_->device_bytes();
}

CudaOp::CudaOp(CudaBackend& backend, const char* name, std::initializer_list<std::int64_t> shape)
    : backend_(backend), lock_(backend.mutex_) {
    CUDA_CHECK(name, cudaSetDevice(backend.options_.device));
    if (!backend.profiler_) return;
    std::string full = name;
    const char* mark = " ";
    for (const std::int64_t size : shape) {
        full += mark;
        full += std::to_string(size);
        mark = "x";
    }
    timed_ = backend.profiler_->begin(full);
}

CudaOp::~CudaOp() {
    if (timed_) backend_.profiler_->end();
}

Workspace::~Workspace() { cudaFree(data_); }

void* Workspace::reserve(const char* op, std::size_t bytes) {
    if (bytes <= capacity_) return data_;
    CUDA_CHECK(op, cudaStreamSynchronize(stream_));
    cudaFree(data_);
    data_ = nullptr;
    capacity_ = 0;
    const std::size_t padded = (bytes + (std::size_t{1} << 20) - 1) >> 20 << 20;
    data_ = take_memory(op, padded);
    capacity_ = padded;
    return data_;
}

// --- Memory ------------------------------------------------------------------------------------------------------------------------------

void* CudaBackend::allocate(std::size_t bytes) {
    const CudaOp scope(*this, "allocate");
    if (bytes == 0) return nullptr;
    void* data = take_memory("allocate", bytes);
    const cudaError_t status = cudaMemsetAsync(data, 0, bytes, stream_);
    if (status != cudaSuccess) cudaFree(data);
    cuda_check(status, "allocate", "cudaMemsetAsync");
    return data;
}

void CudaBackend::release(void* data) noexcept {
    if (data == nullptr) return;
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    cudaSetDevice(options_.device);
    cudaStreamSynchronize(stream_);
    cudaFree(data);
    cudaGetLastError();
}

void CudaBackend::copy(const Tensor& out, const Tensor& in) {
    const char* op = "copy";
    const CudaOp scope(*this, op);
    check_any(op, "in", in);
    check_any(op, "out", out);
    require(out.rows == in.rows && out.columns == in.columns && (out.dtype == in.dtype || (is_real(out.dtype) && is_real(in.dtype))), op,
            "out", in, out);
    if (in.size() == 0) return;
    const bool dense = in.contiguous() && out.contiguous();
    if (out.dtype == in.dtype) {
        const std::size_t item = size_of(in.dtype), width = static_cast<std::size_t>(in.columns) * item;
        if (dense) {
            CUDA_CHECK(op,
                       cudaMemcpyAsync(out.data, in.data, width * static_cast<std::size_t>(in.rows), cudaMemcpyDeviceToDevice, stream_));
        } else {
            CUDA_CHECK(op, cudaMemcpy2DAsync(out.data, static_cast<std::size_t>(out.stride) * item, in.data,
                                             static_cast<std::size_t>(in.stride) * item, width, static_cast<std::size_t>(in.rows),
                                             cudaMemcpyDeviceToDevice, stream_));
        }
        return;
    }
    const Flat flat = flatten(in.rows, in.columns, dense);
    over_columns(flat, [&](std::int64_t first, std::int64_t count) {
        const Tensor to = flat.view(out).column_range(first, count), from = flat.view(in).column_range(first, count);
        by_width(vectors_of_8(count, {&to, &from}), [&](auto width) {
            constexpr int V = width();
            convert_kernel<V><<<Flat{flat.rows, count}.grid(V), kThreads, 0, stream_>>>(rows_of<Any>(to), rows_of<Any>(from), count);
        });
    });
    CUDA_LAUNCHED(op);
}

void CudaBackend::fill(const Tensor& out, float value) {
    const char* op = "fill";
    const CudaOp scope(*this, op);
    check_any(op, "out", out);
    require(is_real(out.dtype) || value == 0.0f, op, "out", "float32 or bfloat16", out);
    if (out.size() == 0) return;
    const std::size_t item = size_of(out.dtype), width = static_cast<std::size_t>(out.columns) * item;
    if (value == 0.0f && !std::signbit(value)) {
        if (out.contiguous()) {
            CUDA_CHECK(op, cudaMemsetAsync(out.data, 0, width * static_cast<std::size_t>(out.rows), stream_));
        } else {
            CUDA_CHECK(op, cudaMemset2DAsync(out.data, static_cast<std::size_t>(out.stride) * item, 0, width,
                                             static_cast<std::size_t>(out.rows), stream_));
        }
        return;
    }
    const Flat flat = flatten(out.rows, out.columns, out.contiguous());
    over_columns(flat, [&](std::int64_t first, std::int64_t count) {
        const Tensor to = flat.view(out).column_range(first, count);
        by_width(vectors_of_8(count, {&to}), [&](auto width_of_vector) {
            constexpr int V = width_of_vector();
            fill_kernel<V><<<Flat{flat.rows, count}.grid(V), kThreads, 0, stream_>>>(rows_of<Any>(to), count, value);
        });
    });
    CUDA_LAUNCHED(op);
}

void CudaBackend::scale(const Tensor& x, float factor) {
    const char* op = "scale";
    const CudaOp scope(*this, op);
    check(op, "x", x, x.rows, x.columns);
    if (x.size() == 0) return;
    const Flat flat = flatten(x.rows, x.columns, x.contiguous());
    over_columns(flat, [&](std::int64_t first, std::int64_t count) {
        const Tensor view = flat.view(x).column_range(first, count);
        by_width(vectors_of_8(count, {&view}), [&](auto width) {
            constexpr int V = width();
            scale_kernel<V><<<Flat{flat.rows, count}.grid(V), kThreads, 0, stream_>>>(rows_of<Any>(view), count, factor);
        });
    });
    CUDA_LAUNCHED(op);
}

// --- Transfers ---------------------------------------------------------------------------------------------------------------------------

namespace {

/// Calls body(view, first element in the dense host rows) on pieces of at most `most` elements; a piece is whole rows or part of one.
template <typename Body>
void over_pieces(const Tensor& t, std::int64_t most, const Body& body) {
    Tensor whole = t;
    if (t.contiguous()) whole = matrix(t.data, 1, t.size(), t.dtype, t.device);
    if (whole.columns <= most) {
        const std::int64_t step = most / whole.columns;
        for (std::int64_t row = 0; row < whole.rows; row += step) {
            body(whole.row_range(row, std::min(step, whole.rows - row)), row * whole.columns);
        }
        return;
    }
    for (std::int64_t row = 0; row < whole.rows; ++row) {
        for (std::int64_t column = 0; column < whole.columns; column += most) {
            body(whole.row_range(row, 1).column_range(column, std::min(most, whole.columns - column)), row * whole.columns + column);
        }
    }
}

}  // namespace

void CudaBackend::upload(const Tensor& out, const void* host) {
    const char* op = "upload";
    const CudaOp scope(*this, op);
    check_any(op, "out", out);
    require(host != nullptr || out.size() == 0, op, "host", "data", "a null pointer");
    if (out.size() == 0) return;
    over_pieces(out, static_cast<std::int64_t>(Staging::kLarge / 4), [&](const Tensor& view, std::int64_t first) {
        const std::size_t bytes = static_cast<std::size_t>(view.size()) * 4;
        Staging::Slot& slot = staging_->take(op, bytes);
        std::memcpy(slot.data, static_cast<const char*>(host) + first * 4, bytes);
        if (out.dtype == DType::BFloat16) {
            const Tensor wide = matrix(staging_->device_buffer(op), view.rows, view.columns, DType::Float32, device());
            CUDA_CHECK(op, cudaMemcpyAsync(wide.data, slot.data, bytes, cudaMemcpyHostToDevice, stream_));
            copy(view, wide);
        } else if (view.contiguous()) {
            CUDA_CHECK(op, cudaMemcpyAsync(view.data, slot.data, bytes, cudaMemcpyHostToDevice, stream_));
        } else {
            const std::size_t width = static_cast<std::size_t>(view.columns) * 4;
            CUDA_CHECK(op, cudaMemcpy2DAsync(view.data, static_cast<std::size_t>(view.stride) * 4, slot.data, width, width,
                                             static_cast<std::size_t>(view.rows), cudaMemcpyHostToDevice, stream_));
        }
        staging_->used(op, slot);
    });
}

void CudaBackend::download(void* host, const Tensor& in) {
    const char* op = "download";
    const CudaOp scope(*this, op);
    check_any(op, "in", in);
    require(host != nullptr || in.size() == 0, op, "host", "data", "a null pointer");
    if (in.size() == 0) return;
    struct Piece {
        Staging::Slot* slot;
        std::size_t first, bytes;
    };
    std::deque<Piece> flying;
    const auto land = [&] {
        const Piece piece = flying.front();
        flying.pop_front();
        staging_->wait(op, *piece.slot);
        std::memcpy(static_cast<char*>(host) + piece.first, piece.slot->data, piece.bytes);
    };
    CUDA_CHECK(op, cudaMemcpyAsync(host_slot_, fault_, sizeof(int), cudaMemcpyDeviceToHost, stream_));
    over_pieces(in, static_cast<std::int64_t>(Staging::kLarge / 4), [&](const Tensor& view, std::int64_t first) {
        if (flying.size() + 1 >= Staging::kLargeSlots) land();
        const std::size_t bytes = static_cast<std::size_t>(view.size()) * 4;
        Staging::Slot& slot = staging_->take(op, bytes);
        if (in.dtype == DType::BFloat16) {
            const Tensor wide = matrix(staging_->device_buffer(op), view.rows, view.columns, DType::Float32, device());
            copy(wide, view);
            CUDA_CHECK(op, cudaMemcpyAsync(slot.data, wide.data, bytes, cudaMemcpyDeviceToHost, stream_));
        } else if (view.contiguous()) {
            CUDA_CHECK(op, cudaMemcpyAsync(slot.data, view.data, bytes, cudaMemcpyDeviceToHost, stream_));
        } else {
            const std::size_t width = static_cast<std::size_t>(view.columns) * 4;
            CUDA_CHECK(op, cudaMemcpy2DAsync(slot.data, width, view.data, static_cast<std::size_t>(view.stride) * 4, width,
                                             static_cast<std::size_t>(view.rows), cudaMemcpyDeviceToHost, stream_));
        }
        staging_->used(op, slot);
        flying.push_back({&slot, static_cast<std::size_t>(first) * 4, bytes});
    });
    while (!flying.empty()) land();
    check_faults(op);
}

void CudaBackend::synchronize() {
    const char* op = "synchronize";
    const CudaOp scope(*this, op);
    CUDA_CHECK(op, cudaMemcpyAsync(host_slot_, fault_, sizeof(int), cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(op, cudaStreamSynchronize(stream_));
    check_faults(op);
}

void CudaBackend::check_faults(const char* op) {
    const auto fault = static_cast<DeviceFault>(*static_cast<const int*>(host_slot_));
    if (fault == DeviceFault::None) return;
    CUDA_CHECK(op, cudaMemsetAsync(fault_, 0, sizeof(int), stream_));
    switch (fault) {
        case DeviceFault::EmbeddingId:
            fail("embedding: ids: one is outside of the table");
        case DeviceFault::GatherIndex:
            fail("gather_rows: index: one is outside of the matrix");
        case DeviceFault::ScatterIndex:
            fail("scatter_add_rows: index: one is outside of the matrix");
        case DeviceFault::Position:
            fail("qk_norm_rope: positions: one is outside of the table of rotations");
        default:
            fail("logprob: targets: one is outside of the valid vocabulary");
    }
}

void CudaBackend::add_column_sums(const char* op, const Tensor& out, const float* partial, std::int64_t count, std::int64_t stride) {
    const std::int64_t columns = out.size();
    column_sums_kernel<<<blocks_for(columns, 32), dim3(32, 16), 0, stream_>>>(rows_of<Any>(out), partial, count, stride, columns);
    CUDA_LAUNCHED(op);
}

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) { return std::make_unique<CudaBackend>(options); }

}  // namespace surogate
