#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"

// A row lies in the registers of its threads from its one read to its one write.

namespace surogate {

using namespace cuda;

namespace {

constexpr int kSharedSums = 32;

template <typename T, int V, bool Add>
__global__ void __launch_bounds__(kMaxRowThreads) rmsnorm_forward_kernel(Rows<T> y, Rows<T> sum, float* rstd, Rows<T> x, Rows<T> residual,
                                                                         Rows<Any> weight, std::int64_t rows, int columns, float eps) {
    constexpr int N = kHeld<V>;
    __shared__ float shared[kSharedSums];
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool live = row < rows;
    float value[N][V];
    {
        Vec<T, V> in[N], other[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = static_cast<int>(threadIdx.x + n * blockDim.x) * V;
            if (live && column < columns) {
                in[n] = x.template get<V>(row, column);
                if constexpr (Add) other[n] = residual.template get<V>(row, column);
            } else {
                in[n].zero();
                if constexpr (Add) other[n].zero();
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                // The norm is that of the sum as it is stored: backward reads it back.
                value[n][i] = Add ? sum.rounded(in[n][i] + other[n][i]) : in[n][i];
            }
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int column = static_cast<int>(threadIdx.x + n * blockDim.x) * V;
        if constexpr (Add) {
            if (live && column < columns) sum.template put<V>(row, column, value[n]);
        }
#pragma unroll
        for (int i = 0; i < V; ++i) squares += value[n][i] * value[n][i];
    }
    const float factor = rsqrtf(row_sum(squares, shared) / static_cast<float>(columns) + eps);
    if (!live) return;
    if (threadIdx.x == 0) rstd[row] = factor;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int column = static_cast<int>(threadIdx.x + n * blockDim.x) * V;
        if (column >= columns) continue;
        const Vec<Any, V> w = weight.get<V>(0, column);
#pragma unroll
        for (int i = 0; i < V; ++i) value[n][i] *= factor * w[i];
        y.template put<V>(row, column, value[n]);
    }
}

/// Block b takes the rows from b * blockDim.y * turns on, blockDim.y at a time. With `Trained`, what its threads add up for the weight goes
/// to row (block, threadIdx.y) of `partial` [gridDim.x * blockDim.y, columns].
template <typename T, int V, bool Trained>
__global__ void __launch_bounds__(kMaxRowThreads)
    rmsnorm_backward_kernel(Rows<T> dx, float* partial, Rows<T> dy, Rows<T> x, Rows<Any> weight, const float* rstd, std::int64_t rows,
                            int columns, int turns) {
    constexpr int N = kHeld<V>;
    __shared__ float shared[kSharedSums];
    float sums[Trained ? N : 1][V];
    if constexpr (Trained) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < V; ++i) sums[n][i] = 0.0f;
        }
    }
    for (int turn = 0; turn < turns; ++turn) {
        const std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * turns + turn) * blockDim.y + threadIdx.y;
        const bool live = row < rows;
        Vec<T, V> seed[N], in[N], before[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = static_cast<int>(threadIdx.x + n * blockDim.x) * V;
            if (live && column < columns) {
                seed[n] = dy.template get<V>(row, column);
                in[n] = x.template get<V>(row, column);
                before[n] = dx.template get<V>(row, column);
            } else {
                seed[n].zero();
                in[n].zero();
                before[n].zero();
            }
        }
        const float factor = live ? rstd[row] : 0.0f;
        float projection = 0.0f;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = static_cast<int>(threadIdx.x + n * blockDim.x) * V;
            if (column >= columns) continue;
            const Vec<Any, V> w = weight.get<V>(0, column);
#pragma unroll
            for (int i = 0; i < V; ++i) projection += seed[n][i] * w[i] * in[n][i];
        }
        const float along = row_sum(projection, shared) * factor * factor * factor / static_cast<float>(columns);
        if (!live) continue;  // its warps only wait for the next sum
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = static_cast<int>(threadIdx.x + n * blockDim.x) * V;
            if (column >= columns) continue;
            const Vec<Any, V> w = weight.get<V>(0, column);  // again from the cache: registers are scarcer
            float out[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                out[i] = before[n][i] + seed[n][i] * w[i] * factor - in[n][i] * along;
                if constexpr (Trained) sums[n][i] += seed[n][i] * (in[n][i] * factor);
            }
            dx.template put<V>(row, column, out);
        }
    }
    if constexpr (Trained) {
        const std::int64_t line = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = static_cast<int>(threadIdx.x + n * blockDim.x) * V;
            if (column < columns) store<V>(partial + line * columns + column, sums[n]);
        }
    }
}

template <int V>
void check_width(const char* op, std::int64_t columns) {
    require(columns <= kMaxRowColumns<V>, op, "columns", V == 8 ? "at most 16384" : "at most 8192 where rows are not aligned to 16 bytes",
            columns);
}
static_assert(kMaxRowColumns<8> == 16384 && kMaxRowColumns<1> == 8192);

}  // namespace

void CudaBackend::rmsnorm_forward(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& weight, float eps) {
    const char* op = "rmsnorm_forward";
    const CudaOp scope(*this, op);
    check(op, "x", x, x.rows, x.columns);
    check(op, "y", y, x.rows, x.columns);
    check_vector(op, "rstd", rstd, x.rows, DType::Float32);
    check_vector(op, "weight", weight, x.columns);
    if (x.size() == 0) return;
    by_type({&y, &x}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(x.columns, {&y, &x, &weight}), [&](auto width) {
            constexpr int V = width();
            check_width<V>(op, x.columns);
            const dim3 block = row_block<V>(x.columns);
            rmsnorm_forward_kernel<T, V, false>
                <<<blocks_for(x.rows, block.y), block, 0, stream_>>>(rows_of<T>(y), Rows<T>{}, rstd.f32(), rows_of<T>(x), Rows<T>{},
                                                                     rows_of<Any>(weight), x.rows, static_cast<int>(x.columns), eps);
        });
    });
    CUDA_LAUNCHED(op);
}

void CudaBackend::add_rmsnorm_forward(const Tensor& sum, const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& residual,
                                      const Tensor& weight, float eps) {
    const char* op = "add_rmsnorm_forward";
    const CudaOp scope(*this, op);
    check(op, "x", x, x.rows, x.columns);
    check(op, "residual", residual, x.rows, x.columns);
    check(op, "sum", sum, x.rows, x.columns);
    check(op, "y", y, x.rows, x.columns);
    check_vector(op, "rstd", rstd, x.rows, DType::Float32);
    check_vector(op, "weight", weight, x.columns);
    if (x.size() == 0) return;
    by_type({&sum, &y, &x, &residual}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(x.columns, {&sum, &y, &x, &residual, &weight}), [&](auto width) {
            constexpr int V = width();
            check_width<V>(op, x.columns);
            const dim3 block = row_block<V>(x.columns);
            rmsnorm_forward_kernel<T, V, true><<<blocks_for(x.rows, block.y), block, 0, stream_>>>(
                rows_of<T>(y), rows_of<T>(sum), rstd.f32(), rows_of<T>(x), rows_of<T>(residual), rows_of<Any>(weight), x.rows,
                static_cast<int>(x.columns), eps);
        });
    });
    CUDA_LAUNCHED(op);
}

void CudaBackend::rmsnorm_backward(const Tensor& dx, const Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& weight,
                                   const Tensor& rstd) {
    const char* op = "rmsnorm_backward";
    const CudaOp scope(*this, op);
    check(op, "x", x, x.rows, x.columns);
    check(op, "dx", dx, x.rows, x.columns);
    check(op, "dy", dy, x.rows, x.columns);
    check_vector(op, "rstd", rstd, x.rows, DType::Float32);
    check_vector(op, "weight", weight, x.columns);
    const bool trained = dweight.data != nullptr;
    if (trained) check_vector(op, "dweight", dweight, x.columns);
    if (x.size() == 0) return;
    // The number of partial sums depends on the shape alone, never on the device, so that the order of summation does not either.
    constexpr std::int64_t kMostBlocks = 528;
    by_type({&dx, &dy, &x}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors_of_8(x.columns, {&dx, &dy, &x, &weight}), [&](auto width) {
            constexpr int V = width();
            check_width<V>(op, x.columns);
            const dim3 block = row_block<V>(x.columns);
            const std::int64_t steps = (x.rows + block.y - 1) / block.y;
            if (!trained) {
                rmsnorm_backward_kernel<T, V, false><<<static_cast<unsigned>(steps), block, 0, stream_>>>(
                    rows_of<T>(dx), nullptr, rows_of<T>(dy), rows_of<T>(x), rows_of<Any>(weight), rstd.f32(), x.rows,
                    static_cast<int>(x.columns), 1);
                CUDA_LAUNCHED(op);
                return;
            }
            const std::int64_t turns = (steps + kMostBlocks - 1) / kMostBlocks, blocks = (steps + turns - 1) / turns;
            float* partial = scratch_->of<float>(op, blocks * block.y * x.columns);
            rmsnorm_backward_kernel<T, V, true><<<static_cast<unsigned>(blocks), block, 0, stream_>>>(
                rows_of<T>(dx), partial, rows_of<T>(dy), rows_of<T>(x), rows_of<Any>(weight), rstd.f32(), x.rows,
                static_cast<int>(x.columns), static_cast<int>(turns));
            CUDA_LAUNCHED(op);
            add_column_sums(op, dweight, partial, blocks * block.y, x.columns);
        });
    });
}

}  // namespace surogate
