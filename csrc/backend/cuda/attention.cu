#include <algorithm>
#include <cstdlib>
#include <vector>

#include "backend/cuda/attention_graphs.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/segment_cache.h"

// Attention of our own, for what cuDNN refuses (float32, odd head sizes) and as a second opinion in tests. One warp per query and head, or
// per key and kv-head; its lanes share out the columns of the head. Right for every shape, without atomics; not fast.

namespace surogate {

using namespace cuda;

namespace {

constexpr int kWarps = 4;  // of a block
constexpr float kMinusInfinity = -INFINITY;

struct Shape {
    std::int64_t tokens;
    int heads, kv_heads, size, group;
    float scale;
    std::int64_t window;
    const std::int32_t* boundaries;  // [count + 1], rising
    std::int64_t count;

    __device__ std::int64_t key_column(int kv_head) const { return static_cast<std::int64_t>(heads + kv_head) * size; }
    __device__ std::int64_t value_column(int kv_head) const { return static_cast<std::int64_t>(heads + kv_heads + kv_head) * size; }
    /// The segment that holds row t.
    __device__ std::int64_t segment_of(std::int64_t t) const {
        std::int64_t low = 0, high = count;
        while (high - low > 1) {
            const std::int64_t middle = (low + high) / 2;
            if (boundaries[middle] <= t) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

/// The columns lane, lane + 32, ... of a head.
template <int J, typename T>
__device__ __forceinline__ void load_head(float (&out)[J], const Rows<T>& in, std::int64_t row, std::int64_t column, int size) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < J; ++j) out[j] = lane + 32 * j < size ? in.template get<1>(row, column + lane + 32 * j)[0] : 0.0f;
}

template <int J>
__device__ __forceinline__ void store_head(const Rows<Any>& out, std::int64_t row, std::int64_t column, int size, const float (&in)[J]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < J; ++j) {
        const float value[1] = {in[j]};
        if (lane + 32 * j < size) out.put<1>(row, column + lane + 32 * j, value);
    }
}

template <int J>
__device__ __forceinline__ float dot(const float (&a)[J], const float (&b)[J]) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < J; ++j) sum += a[j] * b[j];
    return warp_sum(sum);
}

template <typename T, int J>
__global__ void __launch_bounds__(kWarps * 32) attention_forward_kernel(Rows<Any> out, Rows<float> lse, Rows<T> qkv, Shape s) {
    constexpr int U = 4;  // keys at a time
    const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (item >= s.tokens * s.heads) return;
    const std::int64_t t = item / s.heads;
    const int head = static_cast<int>(item % s.heads), kv_head = head / s.group;
    const std::int64_t start = s.boundaries[s.segment_of(t)];
    const std::int64_t first = s.window > 0 && t - s.window + 1 > start ? t - s.window + 1 : start;
    float q[J], result[J];
    load_head<J>(q, qkv, t, static_cast<std::int64_t>(head) * s.size, s.size);
#pragma unroll
    for (int j = 0; j < J; ++j) {
        q[j] *= s.scale;
        result[j] = 0.0f;
    }
    float largest = kMinusInfinity, sum = 0.0f;
    for (std::int64_t key = first; key <= t; key += U) {
        float score[U], top = largest;
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float k[J];
            load_head<J>(k, qkv, key + u <= t ? key + u : t, s.key_column(kv_head), s.size);
            score[u] = dot<J>(q, k);
            if (key + u > t) score[u] = kMinusInfinity;
            top = fmaxf(top, score[u]);
        }
        const float factor = expf(largest - top);  // NaN, and seen as such, if nothing here is a number
        sum *= factor;
#pragma unroll
        for (int j = 0; j < J; ++j) result[j] *= factor;
#pragma unroll
        for (int u = 0; u < U; ++u) {
            if (key + u > t) continue;
            const float p = expf(score[u] - top);
            sum += p;
            float v[J];
            load_head<J>(v, qkv, key + u, s.value_column(kv_head), s.size);
#pragma unroll
            for (int j = 0; j < J; ++j) result[j] += p * v[j];
        }
        largest = top;
    }
#pragma unroll
    for (int j = 0; j < J; ++j) result[j] /= sum;
    store_head<J>(out, t, static_cast<std::int64_t>(head) * s.size, s.size, result);
    if (threadIdx.x % 32 == 0) lse.data[t * lse.stride + head] = largest + logf(sum);
}

/// dq, and delta [tokens, heads] = the sum of dout * out over a head, which the kernel of the keys reads.
template <typename T, int J>
__global__ void __launch_bounds__(kWarps * 32)
    attention_dq_kernel(Rows<Any> dqkv, float* delta, Rows<Any> dout, Rows<Any> out, Rows<float> lse, Rows<T> qkv, Shape s) {
    const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (item >= s.tokens * s.heads) return;
    const std::int64_t t = item / s.heads;
    const int head = static_cast<int>(item % s.heads), kv_head = head / s.group;
    const std::int64_t column = static_cast<std::int64_t>(head) * s.size;
    const std::int64_t start = s.boundaries[s.segment_of(t)];
    const std::int64_t first = s.window > 0 && t - s.window + 1 > start ? t - s.window + 1 : start;
    float q[J], seed[J], own[J], dq[J];
    load_head<J>(q, qkv, t, column, s.size);
    load_head<J>(seed, dout, t, column, s.size);
    load_head<J>(own, out, t, column, s.size);
    const float sum = dot<J>(seed, own), own_lse = lse.data[t * lse.stride + head];
    if (threadIdx.x % 32 == 0) delta[item] = sum;
#pragma unroll
    for (int j = 0; j < J; ++j) dq[j] = 0.0f;
#pragma unroll 2
    for (std::int64_t key = first; key <= t; ++key) {
        float k[J], v[J];
        load_head<J>(k, qkv, key, s.key_column(kv_head), s.size);
        load_head<J>(v, qkv, key, s.value_column(kv_head), s.size);
        const float p = expf(dot<J>(q, k) * s.scale - own_lse);
        const float ds = p * (dot<J>(seed, v) - sum) * s.scale;
#pragma unroll
        for (int j = 0; j < J; ++j) dq[j] += ds * k[j];
    }
    store_head<J>(dqkv, t, column, s.size, dq);
}

template <typename T, int J>
__global__ void __launch_bounds__(kWarps * 32)
    attention_dkv_kernel(Rows<Any> dqkv, const float* delta, Rows<Any> dout, Rows<float> lse, Rows<T> qkv, Shape s) {
    const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (item >= s.tokens * s.kv_heads) return;
    const std::int64_t key = item / s.kv_heads;
    const int kv_head = static_cast<int>(item % s.kv_heads);
    const std::int64_t end = s.boundaries[s.segment_of(key) + 1];
    const std::int64_t last = s.window > 0 && key + s.window < end ? key + s.window : end;  // queries before it see this key
    float k[J], v[J], dk[J], dv[J];
    load_head<J>(k, qkv, key, s.key_column(kv_head), s.size);
    load_head<J>(v, qkv, key, s.value_column(kv_head), s.size);
#pragma unroll
    for (int j = 0; j < J; ++j) dk[j] = dv[j] = 0.0f;
    for (std::int64_t t = key; t < last; ++t) {
        for (int g = 0; g < s.group; ++g) {
            const int head = kv_head * s.group + g;
            float q[J], seed[J];
            load_head<J>(q, qkv, t, static_cast<std::int64_t>(head) * s.size, s.size);
            load_head<J>(seed, dout, t, static_cast<std::int64_t>(head) * s.size, s.size);
            const float p = expf(dot<J>(q, k) * s.scale - lse.data[t * lse.stride + head]);
            const float ds = p * (dot<J>(seed, v) - delta[t * s.heads + head]) * s.scale;
#pragma unroll
            for (int j = 0; j < J; ++j) {
                dv[j] += p * seed[j];
                dk[j] += ds * q[j];
            }
        }
    }
    store_head<J>(dqkv, key, s.key_column(kv_head), s.size, dk);
    store_head<J>(dqkv, key, s.value_column(kv_head), s.size, dv);
}

/// Calls body(columns per lane) for a head size of at most 256.
template <typename Body>
void by_head_size(std::int64_t size, const Body& body) {
    if (size <= 32) {
        body(std::integral_constant<int, 1>{});
    } else if (size <= 64) {
        body(std::integral_constant<int, 2>{});
    } else if (size <= 128) {
        body(std::integral_constant<int, 4>{});
    } else {
        body(std::integral_constant<int, 8>{});
    }
}

Shape shape_of(std::int64_t tokens, const SegmentsOnDevice& segments, const AttentionShape& shape) {
    Shape s{};
    s.tokens = tokens;
    s.heads = static_cast<int>(shape.heads);
    s.kv_heads = static_cast<int>(shape.kv_heads);
    s.size = static_cast<int>(shape.head_dim);
    s.group = s.heads / s.kv_heads;
    s.scale = shape.scale;
    s.window = shape.window;
    s.boundaries = segments.boundaries;
    s.count = segments.count;
    return s;
}

void check_attention(const char* op, const Tensor& qkv, const Tensor& out, const Tensor& lse, const Segments& segments,
                     const AttentionShape& s) {
    require(s.head_dim > 0 && s.head_dim <= 256, op, "head_dim", "a number from 1 to 256", s.head_dim);
    require(s.kv_heads > 0 && s.heads > 0 && s.heads % s.kv_heads == 0, op, "heads", "a multiple of kv_heads", s.heads);
    require(s.window >= 0, op, "window", "0 or more", s.window);
    check(op, "qkv", qkv, qkv.rows, (s.heads + 2 * s.kv_heads) * s.head_dim);
    check(op, "out", out, qkv.rows, s.heads * s.head_dim);
    check(op, "lse", lse, qkv.rows, s.heads, DType::Float32);
    require(segments.count >= 0 && (segments.cu_seqlens != nullptr || segments.count == 0), op, "segments", "boundaries", "none");
    const std::int32_t* bounds = segments.cu_seqlens;
    const std::int64_t first = segments.count > 0 ? bounds[0] : 0, last = segments.count > 0 ? bounds[segments.count] : 0;
    require(first == 0 && last == qkv.rows, op, "cu_seqlens", qkv.rows, last);
    for (std::int64_t i = 0; i < segments.count; ++i) {
        if (bounds[i] > bounds[i + 1]) fail(op, ": cu_seqlens[", i + 1, "]: expected ", bounds[i], " or more, got ", bounds[i + 1]);
    }
}

}  // namespace

void CudaBackend::plain_attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv, const SegmentsOnDevice& segments,
                                          const AttentionShape& shape) {
    const Shape s = shape_of(qkv.rows, segments, shape);
    const unsigned blocks = blocks_for(s.tokens * s.heads, kWarps);
    by_type({&qkv}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_head_size(shape.head_dim, [&](auto per_lane) {
            constexpr int J = per_lane();
            attention_forward_kernel<T, J><<<blocks, kWarps * 32, 0, stream_>>>(rows_of<Any>(out), rows_of<float>(lse), rows_of<T>(qkv), s);
        });
    });
    CUDA_LAUNCHED("attention_forward");
}

void CudaBackend::plain_attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                           const SegmentsOnDevice& segments, const AttentionShape& shape) {
    const char* op = "attention_backward";
    const Shape s = shape_of(qkv.rows, segments, shape);
    float* delta = scratch_->of<float>(op, s.tokens * s.heads);
    by_type({&qkv}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_head_size(shape.head_dim, [&](auto per_lane) {
            constexpr int J = per_lane();
            attention_dq_kernel<T, J><<<blocks_for(s.tokens * s.heads, kWarps), kWarps * 32, 0, stream_>>>(
                rows_of<Any>(dqkv), delta, rows_of<Any>(dout), rows_of<Any>(out), rows_of<float>(lse), rows_of<T>(qkv), s);
            CUDA_LAUNCHED(op);
            attention_dkv_kernel<T, J><<<blocks_for(s.tokens * s.kv_heads, kWarps), kWarps * 32, 0, stream_>>>(
                rows_of<Any>(dqkv), delta, rows_of<Any>(dout), rows_of<float>(lse), rows_of<T>(qkv), s);
            CUDA_LAUNCHED(op);
        });
    });
}

void CudaBackend::attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv, const Segments& segments,
                                    const AttentionShape& shape) {
    const char* op = "attention_forward";
    const CudaOp scope(*this, op);
    check_attention(op, qkv, out, lse, segments, shape);
    if (qkv.rows == 0) return;
    SegmentsOnDevice& on_device = segments_->get(op, segments);
    if (options_.attention != CudaOptions::Attention::Plain) {
        if (attention_->forward({op, on_device, *segments_, *attention_scratch_, shape, {}}, out, lse, qkv)) return;
        if (options_.attention == CudaOptions::Attention::Cudnn) throw CudaError(op, "cuDNN's attention", attention_->refusal());
    }
    plain_attention_forward(out, lse, qkv, on_device, shape);
}

void CudaBackend::attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                     const Segments& segments, const AttentionShape& shape, const Tensor& spare) {
    const char* op = "attention_backward";
    const CudaOp scope(*this, op);
    check_attention(op, qkv, out, lse, segments, shape);
    check(op, "dqkv", dqkv, qkv.rows, qkv.columns);
    check(op, "dout", dout, out.rows, out.columns);
    if (qkv.rows == 0) return;
    if (options_.attention != CudaOptions::Attention::Plain) {
        if (cudnn_attention_backward(dqkv, dout, out, lse, qkv, segments, shape, spare)) return;
        if (options_.attention == CudaOptions::Attention::Cudnn) throw CudaError(op, "cuDNN's attention", attention_->refusal());
    }
    plain_attention_backward(dqkv, dout, out, lse, qkv, segments_->get(op, segments), shape);
}

/// In parts, each of whole segments, where all at once would need more memory on the way than is spare.
bool CudaBackend::cudnn_attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                           const Segments& segments, const AttentionShape& shape, const Tensor& spare) {
    const char* op = "attention_backward";
    const AttentionGraphs::Call call{op, segments_->get(op, segments), *segments_, *attention_scratch_, shape, spare};
    const std::size_t room = SpareMemory(spare).bytes, needed = attention_->backward_bytes(call, dqkv, dout, out, lse, qkv);
    if (needed == 0) return false;
    const std::int64_t rows = qkv.rows, longest = call.segments.longest;
    const bool parts_fit = needed / static_cast<std::size_t>(rows) * static_cast<std::size_t>(longest) < room;
    // The boundary nearest to the middle at which the rows of lse, the narrowest matrix, begin as cuDNN wants its pointers aligned.
    const std::vector<std::int32_t> bounds = call.segments.bounds;
    auto middle = bounds.end();
    const auto off = [&](auto bound) { return std::abs(2 * static_cast<std::int64_t>(*bound) - rows); };
    for (auto bound = bounds.begin() + 1; bound < bounds.end() - 1; ++bound) {
        if (*bound * lse.stride % 4 == 0 && (middle == bounds.end() || off(bound) < off(middle))) middle = bound;
    }
    if (needed <= std::max(room, attention_scratch_->capacity()) || middle == bounds.end() || !parts_fit) {
        return attention_->backward(call, dqkv, dout, out, lse, qkv);
    }
    const auto part = [&](auto first, auto last) {
        std::vector<std::int32_t> own(first, last + 1);
        for (std::int32_t& bound : own) bound -= *first;
        const auto of = [&](const Tensor& tensor) { return tensor.row_range(*first, *last - *first); };
        return cudnn_attention_backward(of(dqkv), of(dout), of(out), of(lse), of(qkv),
                                        {own.data(), static_cast<std::int64_t>(own.size()) - 1}, shape, spare);
    };
    return part(bounds.begin(), middle) && part(middle, bounds.end() - 1);
}

}  // namespace surogate
