#include <cmath>

#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"

namespace surogate {

using namespace cuda;

namespace {

constexpr int kThreads = 256;

// --- AdamW -------------------------------------------------------------------------------------------------------------------------------

struct AdamWNumbers {
    float gradient_scale, beta1, beta2, epsilon, decay, step_size, v_factor;
    std::uint64_t key;  // of this step's random bits
};

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): element `index` of the stream `key`.
__host__ __device__ inline std::uint64_t random_bits(std::uint64_t key, std::uint64_t index) {
    std::uint64_t x = key + (index + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/// Up or down to a neighbouring bfloat16, with the probabilities that make the mean exact; `bits` uniform in [0, 2^16).
__device__ __forceinline__ bf16 round_stochastically(float value, unsigned bits) {
    const unsigned as_bits = __float_as_uint(value);
    if ((as_bits & 0x7f800000u) == 0x7f800000u) return __float2bfloat16_rn(value);  // infinite or NaN
    return __ushort_as_bfloat16(static_cast<unsigned short>((as_bits + bits) >> 16));
}

/// Within 2^-22 of the root, in one instruction: with random bits to make as well, exact roots and quotients would take longer than memory
/// does.
__device__ __forceinline__ float near_root(float x) {
    float result;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

template <int V>
__device__ __forceinline__ void keep(float* out, const float (&value)[V], const std::uint64_t*, int) {
    store<V>(out, value);
}
/// 16 bits of each element's 64, from bit `first` on.
template <int V>
__device__ __forceinline__ void keep(bf16* out, const float (&value)[V], const std::uint64_t* random, int first) {
    float rounded[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        rounded[i] = __bfloat162float(round_stochastically(value[i], static_cast<unsigned>(random[i] >> first) & 0xffffu));
    }
    store<V>(out, rounded);  // exact
}

/// W weights, S states, G gradients; `Master`: the weight itself is float32 in `master`, and `weight` its copy.
template <typename W, typename S, typename G, bool Master, int V>
__device__ __forceinline__ void adamw_vector(W* weight, float* master, S* m, S* v, const G* gradient, const AdamWNumbers& numbers,
                                             std::int64_t at) {
    float w[V], first[V], second[V], g[V];
    if constexpr (Master) {
        load<V>(w, master + at);
    } else {
        load<V>(w, weight + at);
    }
    load<V>(first, m + at);
    load<V>(second, v + at);
    load<V>(g, gradient + at);
    std::uint64_t random[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        g[i] *= numbers.gradient_scale;
        first[i] = first[i] * numbers.beta1 + g[i] * (1.0f - numbers.beta1);
        second[i] = second[i] * numbers.beta2 + g[i] * g[i] * (1.0f - numbers.beta2);
        w[i] = w[i] * numbers.decay - __fdividef(first[i] * numbers.step_size, near_root(second[i] * numbers.v_factor) + numbers.epsilon);
        random[i] = random_bits(numbers.key, static_cast<std::uint64_t>(at + i));
    }
    keep<V>(m + at, first, random, 0);
    keep<V>(v + at, second, random, 16);
    if constexpr (Master) {
        store<V>(master + at, w);
        store<V>(weight + at, w);
    } else {
        keep<V>(weight + at, w, random, 32);
    }
}

template <typename W, typename S, typename G, bool Master, int V>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(W* weight, float* master, S* m, S* v, const G* gradient, AdamWNumbers numbers, std::int64_t count) {
    const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
    if (at + V <= count) {
        adamw_vector<W, S, G, Master, V>(weight, master, m, v, gradient, numbers, at);
    } else {
        for (std::int64_t i = at; i < count; ++i) adamw_vector<W, S, G, Master, 1>(weight, master, m, v, gradient, numbers, i);
    }
}

template <typename Body>
void by_two_types(DType dtype, const Body& body) {
    if (dtype == DType::BFloat16) {
        body(Type<bf16>{});
    } else {
        body(Type<float>{});
    }
}

// --- Sums of squares ---------------------------------------------------------------------------------------------------------------------

constexpr int kMostSums = 1024;

__device__ __forceinline__ double block_sum(double value) {
    __shared__ double shared[kThreads / 32];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    double total = 0.0;
    for (int w = 0; w < kThreads / 32; ++w) total += shared[w];
    return total;
}

/// Thread j of all takes the vectors j, j + number of threads, ...: an order that the size alone sets. The squares of one vector are added
/// in float32, vectors in float64: a norm spans many magnitudes.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads) squares_kernel(double* partial, Rows<T> x, std::int64_t rows, std::int64_t columns) {
    const std::int64_t vectors = (columns + V - 1) / V, threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
    double sum = 0.0;
    for (std::int64_t row = 0; row < rows; ++row) {
#pragma unroll 4
        for (std::int64_t j = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; j < vectors; j += threads) {
            const std::int64_t at = j * V;
            float squares = 0.0f;
            if (at + V <= columns) {
                const Vec<T, V> vec = x.template get<V>(row, at);
#pragma unroll
                for (int i = 0; i < V; ++i) squares += vec[i] * vec[i];
            } else {
                for (std::int64_t i = at; i < columns; ++i) {
                    const float value = x.template get<1>(row, i)[0];
                    squares += value * value;
                }
            }
            sum += static_cast<double>(squares);
        }
    }
    const double total = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads) total_kernel(double* total, const double* partial, int count) {
    double sum = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) sum += partial[i];
    const double all = block_sum(sum);
    if (threadIdx.x == 0) *total = all;
}

}  // namespace

double CudaBackend::sum_of_squares(const Tensor& x) {
    const char* op = "sum_of_squares";
    const CudaOp scope(*this, op);
    check(op, "x", x, x.rows, x.columns);
    if (x.size() == 0) return 0.0;
    Tensor flat = x;
    if (x.contiguous()) flat = matrix(x.data, 1, x.size(), x.dtype, x.device);
    const bool vectors = vectors_of_8(0, {&flat});
    const std::int64_t threads = (flat.columns + 7) / 8;
    const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>((threads + 4 * kThreads - 1) / (4 * kThreads), 1, kMostSums));
    auto* partial = scratch_->of<double>(op, kMostSums + 1);
    by_two_types(x.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(vectors, [&](auto width) {
            constexpr int V = width();
            squares_kernel<T, V><<<blocks, kThreads, 0, stream_>>>(partial, rows_of<T>(flat), flat.rows, flat.columns);
        });
    });
    CUDA_LAUNCHED(op);
    total_kernel<<<1, kThreads, 0, stream_>>>(partial + kMostSums, partial, static_cast<int>(blocks));
    CUDA_LAUNCHED(op);
    auto* result = reinterpret_cast<double*>(static_cast<char*>(host_slot_) + 16);
    CUDA_CHECK(op, cudaMemcpyAsync(result, partial + kMostSums, sizeof(double), cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(op, cudaMemcpyAsync(host_slot_, fault_, sizeof(int), cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(op, cudaStreamSynchronize(stream_));
    check_faults(op);
    return *result;
}

void CudaBackend::adamw(const Tensor& weight, const Tensor& master, const Tensor& m, const Tensor& v, const Tensor& gradient,
                        const AdamWOptions& options) {
    const char* op = "adamw";
    const CudaOp scope(*this, op);
    const std::int64_t size = weight.size();
    check_vector(op, "weight", weight, size);
    check_vector(op, "m", m, size);
    check_vector(op, "v", v, size, m.dtype);
    check_vector(op, "gradient", gradient, size);
    const bool mastered = master.data != nullptr;
    if (mastered) check_vector(op, "master", master, size, DType::Float32);
    require(options.step >= 1, op, "step", "a number from 1", options.step);
    if (size == 0) return;
    const double step = static_cast<double>(options.step), rate = static_cast<double>(options.learning_rate);
    AdamWNumbers numbers{};
    numbers.gradient_scale = options.gradient_scale;
    numbers.beta1 = options.beta1;
    numbers.beta2 = options.beta2;
    numbers.epsilon = options.epsilon;
    numbers.decay = static_cast<float>(1.0 - rate * static_cast<double>(options.weight_decay));
    numbers.step_size = static_cast<float>(rate / (1.0 - std::pow(static_cast<double>(options.beta1), step)));
    numbers.v_factor = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(options.beta2), step)));
    numbers.key = random_bits(options.seed, static_cast<std::uint64_t>(options.step));
    const bool vectors = vectors_of_8(0, {&weight, &master, &m, &v, &gradient});
    by_two_types(weight.dtype, [&](auto weight_type) {
        using W = typename decltype(weight_type)::type;
        by_two_types(m.dtype, [&](auto state_type) {
            using S = typename decltype(state_type)::type;
            by_two_types(gradient.dtype, [&](auto gradient_type) {
                using G = typename decltype(gradient_type)::type;
                by_width(vectors, [&](auto width) {
                    constexpr int V = width();
                    const unsigned blocks = blocks_for(size, std::int64_t{kThreads} * V);
                    const auto launch = [&](auto kernel) {
                        kernel<<<blocks, kThreads, 0, stream_>>>(weight.as<W>(), master.f32(), m.as<S>(), v.as<S>(), gradient.as<const G>(),
                                                                 numbers, size);
                    };
                    if (mastered) {
                        launch(adamw_kernel<W, S, G, true, V>);
                    } else {
                        launch(adamw_kernel<W, S, G, false, V>);
                    }
                });
            });
        });
    });
    CUDA_LAUNCHED(op);
}

}  // namespace surogate
