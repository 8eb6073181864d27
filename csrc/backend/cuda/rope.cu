#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"

// A head belongs to a group of `lanes` threads of one warp (a power of two). Each holds N vectors of its first half and the N of its second
// half that they are rotated with.

namespace surogate {

using namespace cuda;

namespace {

constexpr int kThreads = 256;

/// Vectors per thread and half: half a head of at most 256 elements always fits into a warp.
template <int V>
constexpr int kVectors = V == 8 ? 1 : 8;

struct Heads {
    std::int64_t items;  // rows * turned
    int turned, heads, half, lanes;
    std::int64_t limit;  // positions
};

__device__ __forceinline__ float group_sum(float value, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
}

__device__ __forceinline__ std::int64_t position_of(const std::int32_t* positions, std::int64_t row, std::int64_t limit, int* fault) {
    const std::int32_t position = positions[row];
    if (position >= 0 && position < limit) return position;
    *fault = static_cast<int>(DeviceFault::Position);
    return 0;
}

template <typename T, int V, bool Norm>
__global__ void __launch_bounds__(kThreads)
    qk_forward_kernel(Rows<T> qkv, Rows<T> raw, Rows<float> rstd, Rows<Any> q_weight, Rows<Any> k_weight, Rows<float> cos, Rows<float> sin,
                      const std::int32_t* positions, Heads h, float eps, int* fault) {
    constexpr int N = kVectors<V>;
    const int lane = static_cast<int>(threadIdx.x) % h.lanes;
    const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * (kThreads / h.lanes) + static_cast<int>(threadIdx.x) / h.lanes;
    const bool live = item < h.items;
    const std::int64_t row = live ? item / h.turned : 0;
    const int head = live ? static_cast<int>(item % h.turned) : 0;
    const std::int64_t first = static_cast<std::int64_t>(head) * 2 * h.half;
    float a[N][V], b[N][V];
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int at = (lane + n * h.lanes) * V;
        if (live && at < h.half) {
            const Vec<T, V> low = qkv.template get<V>(row, first + at), high = qkv.template get<V>(row, first + h.half + at);
#pragma unroll
            for (int i = 0; i < V; ++i) a[n][i] = low[i], b[n][i] = high[i];
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) a[n][i] = 0.0f, b[n][i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < V; ++i) squares += a[n][i] * a[n][i] + b[n][i] * b[n][i];
    }
    if constexpr (Norm) {
        const float factor = rsqrtf(group_sum(squares, h.lanes) / static_cast<float>(2 * h.half) + eps);
        if (live && lane == 0) rstd.data[row * rstd.stride + head] = factor;
        const Rows<Any> weight = head < h.heads ? q_weight : k_weight;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int at = (lane + n * h.lanes) * V;
            if (!live || at >= h.half) continue;
            raw.template put<V>(row, first + at, a[n]);
            raw.template put<V>(row, first + h.half + at, b[n]);
            const Vec<Any, V> low = weight.get<V>(0, at), high = weight.get<V>(0, h.half + at);
#pragma unroll
            for (int i = 0; i < V; ++i) a[n][i] *= factor * low[i], b[n][i] *= factor * high[i];
        }
    }
    if (!live) return;
    const std::int64_t position = position_of(positions, row, h.limit, fault);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int at = (lane + n * h.lanes) * V;
        if (at >= h.half) continue;
        const Vec<float, V> c = cos.get<V>(position, at), s = sin.get<V>(position, at);
        float low[V], high[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
            low[i] = a[n][i] * c[i] - b[n][i] * s[i];
            high[i] = b[n][i] * c[i] + a[n][i] * s[i];
        }
        qkv.template put<V>(row, first + at, low);
        qkv.template put<V>(row, first + h.half + at, high);
    }
}

/// Block b takes `turns` times kThreads / lanes heads. With `Trained`, its sums for the two weights go to row b of `partial`
/// [gridDim.x, 2 * head_dim], those of q first; shared memory: [kThreads / 32, 2 * head_dim] floats.
template <typename T, int V, bool Norm, bool Trained>
__global__ void __launch_bounds__(kThreads)
    qk_backward_kernel(Rows<T> dqkv, float* partial, Rows<T> raw, Rows<float> rstd, Rows<Any> q_weight, Rows<Any> k_weight, Rows<float> cos,
                       Rows<float> sin, const std::int32_t* positions, Heads h, int turns, int* fault) {
    constexpr int N = kVectors<V>;
    constexpr int S = Trained ? N : 1;
    const int lane = static_cast<int>(threadIdx.x) % h.lanes, group = static_cast<int>(threadIdx.x) / h.lanes;
    const int groups = kThreads / h.lanes;
    float sums[2][2][S][V];  // [q or k][half]
    if constexpr (Trained) {
#pragma unroll
        for (int n = 0; n < S; ++n) {
#pragma unroll
            for (int i = 0; i < V; ++i) sums[0][0][n][i] = sums[0][1][n][i] = sums[1][0][n][i] = sums[1][1][n][i] = 0.0f;
        }
    }
    for (int turn = 0; turn < turns; ++turn) {
        const std::int64_t item = (static_cast<std::int64_t>(blockIdx.x) * turns + turn) * groups + group;
        const bool live = item < h.items;
        const std::int64_t row = live ? item / h.turned : 0;
        const int head = live ? static_cast<int>(item % h.turned) : 0;
        const bool query = head < h.heads;
        const std::int64_t first = static_cast<std::int64_t>(head) * 2 * h.half;
        const std::int64_t position = live ? position_of(positions, row, h.limit, fault) : 0;
        float a[N][V], b[N][V];
        Vec<T, V> raw_a[Norm ? N : 1], raw_b[Norm ? N : 1];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int at = (lane + n * h.lanes) * V;
            if (live && at < h.half) {
                const Vec<T, V> low = dqkv.template get<V>(row, first + at), high = dqkv.template get<V>(row, first + h.half + at);
                const Vec<float, V> c = cos.get<V>(position, at), s = sin.get<V>(position, at);
                if constexpr (Norm) {
                    raw_a[n] = raw.template get<V>(row, first + at);
                    raw_b[n] = raw.template get<V>(row, first + h.half + at);
                }
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    a[n][i] = low[i] * c[i] + high[i] * s[i];
                    b[n][i] = high[i] * c[i] - low[i] * s[i];
                }
            } else {
#pragma unroll
                for (int i = 0; i < V; ++i) a[n][i] = 0.0f, b[n][i] = 0.0f;
                if constexpr (Norm) raw_a[n].zero(), raw_b[n].zero();
            }
        }
        if constexpr (Norm) {
            const Rows<Any> weight = query ? q_weight : k_weight;
            const float factor = live ? rstd.data[row * rstd.stride + head] : 0.0f;
            float w_a[N][V], w_b[N][V];
            float projection = 0.0f;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int at = (lane + n * h.lanes) * V;
                Vec<Any, V> low, high;
                low.zero(), high.zero();
                if (at < h.half) low = weight.get<V>(0, at), high = weight.get<V>(0, h.half + at);
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    w_a[n][i] = low[i], w_b[n][i] = high[i];
                    projection += a[n][i] * low[i] * raw_a[n][i] + b[n][i] * high[i] * raw_b[n][i];
                }
            }
            const float along = group_sum(projection, h.lanes) * factor * factor * factor / static_cast<float>(2 * h.half);
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    if constexpr (Trained) {
                        const float of_a = a[n][i] * (raw_a[n][i] * factor), of_b = b[n][i] * (raw_b[n][i] * factor);
                        sums[0][0][n][i] += query ? of_a : 0.0f;
                        sums[0][1][n][i] += query ? of_b : 0.0f;
                        sums[1][0][n][i] += query ? 0.0f : of_a;
                        sums[1][1][n][i] += query ? 0.0f : of_b;
                    }
                    a[n][i] = a[n][i] * w_a[n][i] * factor - raw_a[n][i] * along;
                    b[n][i] = b[n][i] * w_b[n][i] * factor - raw_b[n][i] * along;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int at = (lane + n * h.lanes) * V;
            if (!live || at >= h.half) continue;
            dqkv.template put<V>(row, first + at, a[n]);
            dqkv.template put<V>(row, first + h.half + at, b[n]);
        }
    }
    if constexpr (Trained) {
        extern __shared__ float shared[];
        const int size = 2 * h.half, warp = static_cast<int>(threadIdx.x) / 32, in_warp = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
#pragma unroll
                for (int n = 0; n < N; ++n) {
#pragma unroll
                    for (int i = 0; i < V; ++i) {
                        float total = sums[which][part][n][i];
                        for (int offset = h.lanes; offset < 32; offset *= 2) total += __shfl_xor_sync(kFullWarp, total, offset);
                        const int at = (lane + n * h.lanes) * V + i;
                        if (in_warp < h.lanes && at < h.half) shared[(warp * 2 + which) * size + part * h.half + at] = total;
                    }
                }
            }
        }
        __syncthreads();
        for (int at = static_cast<int>(threadIdx.x); at < 2 * size; at += kThreads) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < kThreads / 32; ++w) total += shared[w * 2 * size + at];
            partial[static_cast<std::int64_t>(blockIdx.x) * 2 * size + at] = total;
        }
    }
}

void check_rope(const char* op, const char* name, const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                const AttentionShape& shape) {
    require(shape.head_dim > 0 && shape.head_dim % 2 == 0 && shape.head_dim <= 512, op, "head_dim", "an even number from 2 to 512",
            shape.head_dim);
    require(shape.heads > 0 && shape.kv_heads > 0, op, "heads and kv_heads", "numbers above 0", std::min(shape.heads, shape.kv_heads));
    check(op, name, qkv, qkv.rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
    check(op, "cos", cos, cos.rows, shape.head_dim / 2, DType::Float32);
    check(op, "sin", sin, cos.rows, shape.head_dim / 2, DType::Float32);
    check_vector(op, "positions", positions, qkv.rows, DType::Int32);
}

void check_norm(const char* op, const Tensor& raw_qk, const Tensor& rstd, const Tensor& q_weight, const Tensor& k_weight, std::int64_t rows,
                const AttentionShape& shape) {
    check(op, "raw_qk", raw_qk, rows, (shape.heads + shape.kv_heads) * shape.head_dim);
    check(op, "rstd", rstd, rows, shape.heads + shape.kv_heads, DType::Float32);
    check_vector(op, "q_weight", q_weight, shape.head_dim);
    check_vector(op, "k_weight", k_weight, shape.head_dim);
}

Heads heads_of(const Tensor& qkv, const Tensor& cos, const AttentionShape& shape, int width) {
    Heads h{};
    h.turned = static_cast<int>(shape.heads + shape.kv_heads);
    h.items = qkv.rows * h.turned;
    h.heads = static_cast<int>(shape.heads);
    h.half = static_cast<int>(shape.head_dim / 2);
    const int vectors = (h.half + width - 1) / width;
    h.lanes = 1;
    while (h.lanes < vectors && h.lanes < 32) h.lanes *= 2;
    h.limit = cos.rows;
    return h;
}

}  // namespace

void CudaBackend::qk_norm_rope_forward(const Tensor& qkv, const Tensor& raw_qk, const Tensor& rstd, const Tensor& q_weight,
                                       const Tensor& k_weight, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                                       const AttentionShape& shape, float eps) {
    const char* op = "qk_norm_rope_forward";
    const CudaOp scope(*this, op);
    check_rope(op, "qkv", qkv, cos, sin, positions, shape);
    const bool normed = q_weight.data != nullptr;
    if (normed) check_norm(op, raw_qk, rstd, q_weight, k_weight, qkv.rows, shape);
    if (qkv.rows == 0) return;
    const Tensor raw = normed ? raw_qk : Tensor{};
    by_type({&qkv, &raw}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(shape.head_dim / 2, {&qkv, &raw, &q_weight, &k_weight, &cos, &sin}), [&](auto width) {
            constexpr int V = width();
            const Heads h = heads_of(qkv, cos, shape, V);
            const unsigned blocks = blocks_for(h.items, kThreads / h.lanes);
            if (normed) {
                qk_forward_kernel<T, V, true><<<blocks, kThreads, 0, stream_>>>(
                    rows_of<T>(qkv), rows_of<T>(raw), rows_of<float>(rstd), rows_of<Any>(q_weight), rows_of<Any>(k_weight),
                    rows_of<float>(cos), rows_of<float>(sin), positions.i32(), h, eps, fault_);
            } else {
                qk_forward_kernel<T, V, false><<<blocks, kThreads, 0, stream_>>>(rows_of<T>(qkv), Rows<T>{}, Rows<float>{}, Rows<Any>{},
                                                                                 Rows<Any>{}, rows_of<float>(cos), rows_of<float>(sin),
                                                                                 positions.i32(), h, eps, fault_);
            }
        });
    });
    CUDA_LAUNCHED(op);
}

void CudaBackend::qk_norm_rope_backward(const Tensor& dqkv, const Tensor& dq_weight, const Tensor& dk_weight, const Tensor& raw_qk,
                                        const Tensor& rstd, const Tensor& q_weight, const Tensor& k_weight, const Tensor& cos,
                                        const Tensor& sin, const Tensor& positions, const AttentionShape& shape) {
    const char* op = "qk_norm_rope_backward";
    const CudaOp scope(*this, op);
    check_rope(op, "dqkv", dqkv, cos, sin, positions, shape);
    const bool normed = q_weight.data != nullptr;
    if (normed) check_norm(op, raw_qk, rstd, q_weight, k_weight, dqkv.rows, shape);
    const std::int64_t size = shape.head_dim;
    if (dq_weight.data != nullptr) check_vector(op, "dq_weight", dq_weight, size);
    if (dk_weight.data != nullptr) check_vector(op, "dk_weight", dk_weight, size);
    if (dqkv.rows == 0) return;
    const bool trained = normed && (dq_weight.data != nullptr || dk_weight.data != nullptr);
    const Tensor raw = normed ? raw_qk : Tensor{};
    constexpr std::int64_t kMostBlocks = 1056;  // of the shape alone, as in rmsnorm_backward
    by_type({&dqkv, &raw}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(size / 2, {&dqkv, &raw, &q_weight, &k_weight, &cos, &sin}), [&](auto width) {
            constexpr int V = width();
            const Heads h = heads_of(dqkv, cos, shape, V);
            const std::int64_t steps = (h.items + kThreads / h.lanes - 1) / (kThreads / h.lanes);
            const auto launch = [&](auto kernel, std::int64_t blocks, std::int64_t turns, std::size_t shared, float* partial) {
                kernel<<<static_cast<unsigned>(blocks), kThreads, shared, stream_>>>(
                    rows_of<T>(dqkv), partial, rows_of<T>(raw), normed ? rows_of<float>(rstd) : Rows<float>{}, rows_of<Any>(q_weight),
                    rows_of<Any>(k_weight), rows_of<float>(cos), rows_of<float>(sin), positions.i32(), h, static_cast<int>(turns), fault_);
                CUDA_LAUNCHED(op);
            };
            if (!normed) {
                launch(qk_backward_kernel<T, V, false, false>, steps, 1, 0, nullptr);
            } else if (!trained) {
                launch(qk_backward_kernel<T, V, true, false>, steps, 1, 0, nullptr);
            } else {
                const std::int64_t turns = (steps + kMostBlocks - 1) / kMostBlocks, blocks = (steps + turns - 1) / turns;
                float* partial = scratch_->of<float>(op, blocks * 2 * size);
                const std::size_t shared = static_cast<std::size_t>(kThreads / 32 * 2 * size) * sizeof(float);
                launch(qk_backward_kernel<T, V, true, true>, blocks, turns, shared, partial);
                if (dq_weight.data != nullptr) add_column_sums(op, dq_weight, partial, blocks, 2 * size);
                if (dk_weight.data != nullptr) add_column_sums(op, dk_weight, partial + size, blocks, 2 * size);
            }
        });
    });
}

}  // namespace surogate
