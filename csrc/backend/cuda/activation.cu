#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"

namespace surogate {

using namespace cuda;

namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, int V>
__global__ void __launch_bounds__(kThreads) swiglu_forward_kernel(Rows<T> y, Rows<T> gate_up, std::int64_t width) {
    const std::int64_t row = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
    if (column >= width) return;
    const Vec<T, V> gate = gate_up.template get<V>(row, column), up = gate_up.template get<V>(row, width + column);
    float out[V];
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
    y.template put<V>(row, column, out);
}

/// `Again`: y, too. Each thread reads its elements before it writes them, so that dgate_up may be gate_up, and y may be dy.
template <typename T, int V, bool Again>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(Rows<T> dgate_up, Rows<T> y, Rows<T> dy, Rows<T> gate_up, std::int64_t width) {
    const std::int64_t row = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
    if (column >= width) return;
    const Vec<T, V> seed = dy.template get<V>(row, column), gate = gate_up.template get<V>(row, column),
                    up = gate_up.template get<V>(row, width + column);
    float dgate[V], dup[V], out[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        const float s = sigmoid(gate[i]), silu = gate[i] * s;
        dup[i] = seed[i] * silu;
        dgate[i] = seed[i] * up[i] * (s + silu * (1.0f - s));
        if constexpr (Again) out[i] = silu * up[i];
    }
    dgate_up.template put<V>(row, column, dgate);
    dgate_up.template put<V>(row, width + column, dup);
    if constexpr (Again) y.template put<V>(row, column, out);
}

}  // namespace

void CudaBackend::swiglu_forward(const Tensor& y, const Tensor& gate_up) {
    const char* op = "swiglu_forward";
    const CudaOp scope(*this, op);
    check(op, "y", y, y.rows, y.columns);
    check(op, "gate_up", gate_up, y.rows, 2 * y.columns);
    if (y.size() == 0) return;
    by_type({&y, &gate_up}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(y.columns, {&y, &gate_up}), [&](auto width) {
            constexpr int V = width();
            const dim3 grid(static_cast<unsigned>(y.rows), blocks_for(y.columns, kThreads * V));
            swiglu_forward_kernel<T, V><<<grid, kThreads, 0, stream_>>>(rows_of<T>(y), rows_of<T>(gate_up), y.columns);
        });
    });
    CUDA_LAUNCHED(op);
}

void CudaBackend::swiglu_backward(const Tensor& dgate_up, const Tensor& dy, const Tensor& gate_up) {
    swiglu_recompute_backward(dgate_up, {}, dy, gate_up);
}

void CudaBackend::swiglu_recompute_backward(const Tensor& dgate_up, const Tensor& y, const Tensor& dy, const Tensor& gate_up) {
    const char* op = y.data != nullptr ? "swiglu_recompute_backward" : "swiglu_backward";
    const CudaOp scope(*this, op);
    check(op, "dy", dy, dy.rows, dy.columns);
    check(op, "gate_up", gate_up, dy.rows, 2 * dy.columns);
    check(op, "dgate_up", dgate_up, dy.rows, 2 * dy.columns);
    if (y.data != nullptr) check(op, "y", y, dy.rows, dy.columns);
    if (dy.size() == 0) return;
    by_type({&dgate_up, &y, &dy, &gate_up}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(dy.columns, {&dgate_up, &y, &dy, &gate_up}), [&](auto width) {
            constexpr int V = width();
            const dim3 grid(static_cast<unsigned>(dy.rows), blocks_for(dy.columns, kThreads * V));
            const auto launch = [&](auto kernel) {
                kernel<<<grid, kThreads, 0, stream_>>>(rows_of<T>(dgate_up), rows_of<T>(y), rows_of<T>(dy), rows_of<T>(gate_up),
                                                       dy.columns);
            };
            if (y.data != nullptr) {
                launch(swiglu_backward_kernel<T, V, true>);
            } else {
                launch(swiglu_backward_kernel<T, V, false>);
            }
        });
    });
    CUDA_LAUNCHED(op);
}

}  // namespace surogate
