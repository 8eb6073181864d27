#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"

namespace surogate {

using namespace cuda;

namespace {

constexpr int kThreads = 128;

/// out[index[i]] += scale[i] * in[i], where the index rises from row to row; no two blocks write one row.
template <int V>
__global__ void __launch_bounds__(kThreads)
    scatter_add_scaled_kernel(Rows<Any> out, Rows<Any> in, const std::int32_t* index, const float* scale, std::int64_t limit,
                              std::int64_t columns, int* fault) {
    const std::int64_t row = blockIdx.x, column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * V;
    const float factor = scale[row];
    if (column >= columns || factor == 0.0f) return;
    const std::int32_t to = index[row];
    if (to < 0 || to >= limit || (row > 0 && index[row - 1] >= to)) {
        *fault = static_cast<int>(DeviceFault::ScatterIndex);
        return;
    }
    const Vec<Any, V> vec = in.get<V>(row, column), before = out.get<V>(to, column);
    float sum[V];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = fmaf(factor, vec[i], before[i]);
    out.put<V>(to, column, sum);
}

}  // namespace

void CudaBackend::scatter_add_scaled_rows(const Tensor& out, const Tensor& in, const Tensor& index, const Tensor& scale) {
    const char* op = "scatter_add_scaled_rows";
    const CudaOp scope(*this, op);
    check(op, "out", out, out.rows, in.columns);
    check(op, "in", in, index.size(), in.columns);
    check_vector(op, "index", index, index.size(), DType::Int32);
    check_vector(op, "scale", scale, index.size(), DType::Float32);
    if (in.size() == 0) return;
    by_width(vectors_of_8(in.columns, {&out, &in}), [&](auto width) {
        constexpr int V = width();
        const dim3 grid(static_cast<unsigned>(in.rows), blocks_for(in.columns, kThreads * V));
        scatter_add_scaled_kernel<V>
            <<<grid, kThreads, 0, stream_>>>(rows_of<Any>(out), rows_of<Any>(in), index.i32(), scale.f32(), out.rows, in.columns, fault_);
    });
    CUDA_LAUNCHED(op);
}

}  // namespace surogate
