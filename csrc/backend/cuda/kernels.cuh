#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "core/tensor.h"

// What the kernels share: vectors of elements held in registers as they lie in memory, views of matrices, sums over a row's threads.

namespace surogate::cuda {

using bf16 = __nv_bfloat16;

/// A matrix whose element type is known at run time only. Kernels are compiled for all-bfloat16, for all-float32, and for Any: mixtures.
struct Any {};

constexpr unsigned kFullWarp = 0xffffffffu;

// --- Vectors -----------------------------------------------------------------------------------------------------------------------------

/// V elements as they lie in memory, unpacked when read.
template <typename T, int V>
struct Vec {
    float value[V];
    __device__ float operator[](int i) const { return value[i]; }
    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < V; ++i) value[i] = 0.0f;
    }
};

template <>
struct Vec<bf16, 8> {
    uint4 packed;
    __device__ float operator[](int i) const {
        const unsigned word = i < 2 ? packed.x : i < 4 ? packed.y : i < 6 ? packed.z : packed.w;
        return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
    __device__ void zero() { packed = make_uint4(0, 0, 0, 0); }
};

template <int V>
__device__ __forceinline__ void load(float (&out)[V], const float* in) {
    if constexpr (V == 8) {
        const float4 a = reinterpret_cast<const float4*>(in)[0], b = reinterpret_cast<const float4*>(in)[1];
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = in[i];
    }
}

template <int V>
__device__ __forceinline__ void load(float (&out)[V], const bf16* in) {
    if constexpr (V == 8) {
        Vec<bf16, 8> vec;
        vec.packed = *reinterpret_cast<const uint4*>(in);
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = vec[i];
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = __bfloat162float(in[i]);
    }
}

template <int V>
__device__ __forceinline__ void store(float* out, const float (&in)[V]) {
    if constexpr (V == 8) {
        reinterpret_cast<float4*>(out)[0] = make_float4(in[0], in[1], in[2], in[3]);
        reinterpret_cast<float4*>(out)[1] = make_float4(in[4], in[5], in[6], in[7]);
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = in[i];
    }
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    return static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
           static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

template <int V>
__device__ __forceinline__ void store(bf16* out, const float (&in)[V]) {
    if constexpr (V == 8) {
        *reinterpret_cast<uint4*>(out) = make_uint4(pack(in[0], in[1]), pack(in[2], in[3]), pack(in[4], in[5]), pack(in[6], in[7]));
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = __float2bfloat16_rn(in[i]);
    }
}

// --- Views -------------------------------------------------------------------------------------------------------------------------------

/// Rows of a matrix of type T (float, bf16 or Any). Vectors of 8 need 16-byte alignment of the data and strides that are multiples of 8.
template <typename T>
struct Rows {
    T* data;
    std::int64_t stride;

    template <int V>
    __device__ __forceinline__ Vec<T, V> get(std::int64_t row, std::int64_t column) const {
        Vec<T, V> vec;
        const T* at = data + row * stride + column;
        if constexpr (std::is_same_v<T, bf16> && V == 8) {
            vec.packed = *reinterpret_cast<const uint4*>(at);
        } else {
            load<V>(vec.value, at);
        }
        return vec;
    }
    template <int V>
    __device__ __forceinline__ void put(std::int64_t row, std::int64_t column, const float (&in)[V]) const {
        store<V>(data + row * stride + column, in);
    }
    /// What a stored value reads back as.
    __device__ __forceinline__ float rounded(float value) const {
        if constexpr (std::is_same_v<T, bf16>) return __bfloat162float(__float2bfloat16_rn(value));
        return value;
    }
};

template <>
struct Rows<Any> {
    void* data;
    std::int64_t stride;
    bool wide;  // float32

    template <int V>
    __device__ __forceinline__ Vec<Any, V> get(std::int64_t row, std::int64_t column) const {
        Vec<Any, V> vec;
        const std::int64_t at = row * stride + column;
        if (wide) {
            load<V>(vec.value, static_cast<const float*>(data) + at);
        } else {
            load<V>(vec.value, static_cast<const bf16*>(data) + at);
        }
        return vec;
    }
    template <int V>
    __device__ __forceinline__ void put(std::int64_t row, std::int64_t column, const float (&in)[V]) const {
        const std::int64_t at = row * stride + column;
        if (wide) {
            store<V>(static_cast<float*>(data) + at, in);
        } else {
            store<V>(static_cast<bf16*>(data) + at, in);
        }
    }
    __device__ __forceinline__ float rounded(float value) const { return wide ? value : __bfloat162float(__float2bfloat16_rn(value)); }
};

template <typename T>
Rows<T> rows_of(const Tensor& t) {
    if constexpr (std::is_same_v<T, Any>) {
        return {t.data, t.stride, t.dtype == DType::Float32};
    } else {
        return {t.as<T>(), t.stride};
    }
}

// --- Dispatch ----------------------------------------------------------------------------------------------------------------------------

template <typename T>
struct Type {
    using type = T;
};

/// Calls body(Type<T>) with the type that all these tensors have, or Type<Any>. Tensors without data do not count.
template <typename Body>
void by_type(std::initializer_list<const Tensor*> tensors, const Body& body) {
    bool narrow = true, wide = true;
    for (const Tensor* t : tensors) {
        if (t->data == nullptr) continue;
        narrow = narrow && t->dtype == DType::BFloat16;
        wide = wide && t->dtype == DType::Float32;
    }
    if (narrow) {
        body(Type<bf16>{});
    } else if (wide) {
        body(Type<float>{});
    } else {
        body(Type<Any>{});
    }
}

/// Whether rows of all these tensors, and of `columns` elements, can be read as vectors of 8.
inline bool vectors_of_8(std::int64_t columns, std::initializer_list<const Tensor*> tensors) {
    bool aligned = columns % 8 == 0;
    for (const Tensor* t : tensors) {
        if (t->data == nullptr) continue;
        aligned = aligned && reinterpret_cast<std::uintptr_t>(t->data) % 16 == 0 && (t->rows <= 1 || t->stride % 8 == 0);
    }
    return aligned;
}

/// Calls body(width) with an integral constant: 8 or 1 elements at a time.
template <typename Body>
void by_width(bool vectors, const Body& body) {
    if (vectors) {
        body(std::integral_constant<int, 8>{});
    } else {
        body(std::integral_constant<int, 1>{});
    }
}

inline unsigned blocks_for(std::int64_t count, std::int64_t per_block) {
    return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// --- A row held in the registers of its threads ---------------------------------------------------------------------------------------

constexpr int kRowThreads = 128;     // of a block, if a row needs no more
constexpr int kMaxRowThreads = 512;  // of one row
constexpr int kMaxRowsPerBlock = kRowThreads / 32;

/// Vectors that one thread holds of a row.
template <int V>
constexpr int kHeld = V == 8 ? 4 : 16;

/// Block (threads of a row, rows): each thread holds the vectors threadIdx.x + n * blockDim.x, n < kHeld<V>.
template <int V>
dim3 row_block(std::int64_t columns) {
    const std::int64_t span = std::int64_t{V} * kHeld<V> * 32;
    const auto threads = static_cast<unsigned>(std::max<std::int64_t>(1, (columns + span - 1) / span) * 32);
    return {threads, std::max(1u, kRowThreads / threads), 1};
}
template <int V>
constexpr std::int64_t kMaxRowColumns = std::int64_t{kMaxRowThreads} * V * kHeld<V>;

// --- Sums --------------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
}

/// The sum over the threads of a row (threadIdx.x), whose warps all take part; every thread of the block must call it.
/// `shared` holds a block's rows x (blockDim.x / 32) floats.
__device__ __forceinline__ float row_sum(float value, float* shared) {
    value = warp_sum(value);
    const unsigned warps = blockDim.x / 32;
    if (warps == 1) return value;
    float* own = shared + threadIdx.y * warps;
    if (threadIdx.x % 32 == 0) own[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (unsigned w = 0; w < warps; ++w) total += own[w];
    __syncthreads();  // the next sum may write at once
    return total;
}

}  // namespace surogate::cuda
