#include <cmath>

#include "backend/cuda/checks.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"
#include "backend/cuda/kernels.cuh"

// One block per row of logits, which is read once. Exponentials are taken to base 2, as the hardware does.

namespace surogate {

using namespace cuda;

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowest = -1e20f;  // below any logit; finite, so that differences are

__device__ __forceinline__ float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// Over the logits x seen so far, with z = factor (x - largest): the sum of 2^z, and that of 2^z z. The difference comes first: the largest
/// logits, which count most, then lose nothing to rounding.
struct Running {
    float largest, sum, weighted;

    __device__ __forceinline__ void clear() { largest = kLowest, sum = 0.0f, weighted = 0.0f; }
    __device__ __forceinline__ void move(float to, float factor) {
        const float by = (largest - to) * factor, shrink = exp2_fast(by);
        weighted = shrink * (weighted + by * sum);
        sum *= shrink;
        largest = to;
    }
    template <bool Entropy, typename Values, int V>
    __device__ __forceinline__ void add(const Values& x, float factor) {
        float top = x[0];
#pragma unroll
        for (int i = 1; i < V; ++i) top = fmaxf(top, x[i]);
        if (top > largest) move(top, factor);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const float z = (x[i] - largest) * factor, e = exp2_fast(z);
            sum += e;
            if constexpr (Entropy) weighted += e == 0.0f ? 0.0f : e * z;  // a logit of -inf adds nothing
        }
    }
    __device__ __forceinline__ void merge(Running other, float factor) {
        const float top = fmaxf(largest, other.largest);
        move(top, factor);
        other.move(top, factor);
        sum += other.sum;
        weighted += other.weighted;
    }
};

template <typename T, int V, bool Entropy>
__global__ void __launch_bounds__(kThreads)
    logprob_forward_kernel(float* logp, float* entropy, float* lse, Rows<T> logits, const std::int32_t* targets, float scale,
                           std::int64_t valid, int* fault) {
    __shared__ Running of_warps[kWarps];
    const std::int64_t row = blockIdx.x;
    const float factor = scale * kLog2e;
    Running running;
    running.clear();
    // Whole vectors, four at a time in flight, then what is left.
    constexpr std::int64_t kStep = std::int64_t{kThreads} * V;
    const std::int64_t whole = valid / V * V;
    std::int64_t at = static_cast<std::int64_t>(threadIdx.x) * V;
    for (; at + 3 * kStep < whole; at += 4 * kStep) {
        Vec<T, V> vecs[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) vecs[n] = logits.template get<V>(row, at + n * kStep);
#pragma unroll
        for (int n = 0; n < 4; ++n) running.template add<Entropy, Vec<T, V>, V>(vecs[n], factor);
    }
    for (; at < whole; at += kStep) {
        running.template add<Entropy, Vec<T, V>, V>(logits.template get<V>(row, at), factor);
    }
    for (at = whole + threadIdx.x; at < valid; at += kThreads) {
        running.template add<Entropy, Vec<T, 1>, 1>(logits.template get<1>(row, at), factor);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        Running other;
        other.largest = __shfl_xor_sync(kFullWarp, running.largest, offset);
        other.sum = __shfl_xor_sync(kFullWarp, running.sum, offset);
        other.weighted = __shfl_xor_sync(kFullWarp, running.weighted, offset);
        running.merge(other, factor);
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = running;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < kWarps; ++w) running.merge(of_warps[w], factor);
    const std::int32_t target = targets[row];
    float own = nanf("");
    if (target >= 0 && target < valid) {
        own = logits.template get<1>(row, target)[0];
    } else {
        *fault = static_cast<int>(DeviceFault::Target);
    }
    const double log_sum = log(static_cast<double>(running.sum));
    lse[row] = static_cast<float>(static_cast<double>(running.largest) * scale + log_sum);
    logp[row] = static_cast<float>((static_cast<double>(own) - running.largest) * scale - log_sum);
    // H = -sum p log p, log p = ln 2 z - log_sum
    if constexpr (Entropy) {
        entropy[row] = static_cast<float>(log_sum - 0.69314718055994531 * static_cast<double>(running.weighted) / running.sum);
    }
}

/// `InPlace`: dlogits are narrower than logits and lie in the same rows. A block then reads a piece of the row as a whole before it writes
/// the gradient of that piece, which lies over what was read already.
template <typename In, typename Out, int V, bool InPlace>
__global__ void __launch_bounds__(kThreads)
    logprob_backward_kernel(Rows<Out> dlogits, Rows<In> logits, const float* lse, const float* entropy, const std::int32_t* targets,
                            const float* dlogp, const float* dentropy, float scale, std::int64_t valid, std::int64_t columns, int* fault) {
    const std::int64_t row = blockIdx.x;
    const float seed = dlogp[row], entropy_seed = dentropy != nullptr ? dentropy[row] : 0.0f;
    const bool idle = seed == 0.0f && entropy_seed == 0.0f;
    const float own_entropy = entropy_seed != 0.0f ? entropy[row] : 0.0f;
    const std::int64_t target = targets[row];
    if (!idle && (target < 0 || target >= valid)) *fault = static_cast<int>(DeviceFault::Target);
    const float own_lse = lse[row];
    const auto gradient = [&](float x, std::int64_t at) {
        if (idle || at >= valid) return 0.0f;
        const float log_p = fmaf(x, scale, -own_lse), p = exp2_fast(log_p * kLog2e);
        // d logp = 1[target] - p, dH = -p (log p + H)
        float result = seed * ((at == target ? 1.0f : 0.0f) - p);
        if (entropy_seed != 0.0f && p != 0.0f) result -= entropy_seed * p * (log_p + own_entropy);
        return result * scale;
    };
    constexpr std::int64_t kStep = std::int64_t{kThreads} * V;
    constexpr int kAhead = 2;
    const std::int64_t whole = columns / V * V;
    for (std::int64_t first = 0; first < whole; first += kAhead * kStep) {
        Vec<In, V> in[kAhead];
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            const std::int64_t at = first + n * kStep + static_cast<std::int64_t>(threadIdx.x) * V;
            in[n].zero();
            if (!idle && at < whole) in[n] = logits.template get<V>(row, at);
        }
        if constexpr (InPlace) __syncthreads();
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            const std::int64_t at = first + n * kStep + static_cast<std::int64_t>(threadIdx.x) * V;
            if (at >= whole) continue;
            float out[V];
#pragma unroll
            for (int i = 0; i < V; ++i) out[i] = gradient(in[n][i], at + i);
            dlogits.template put<V>(row, at, out);
        }
    }
    if constexpr (V > 1) {
        const std::int64_t at = whole + threadIdx.x;
        float x = 0.0f;
        if (!idle && at < columns) x = logits.template get<1>(row, at)[0];
        if constexpr (InPlace) __syncthreads();
        if (at < columns) {
            const float out[1] = {gradient(x, at)};
            dlogits.template put<1>(row, at, out);
        }
    }
}

std::int64_t check_logprob(const char* op, const Tensor& logits, const Tensor& lse, const Tensor& targets, float temperature,
                           std::int64_t valid_vocab) {
    check(op, "logits", logits, logits.rows, logits.columns);
    check_vector(op, "lse", lse, logits.rows, DType::Float32);
    check_vector(op, "targets", targets, logits.rows, DType::Int32);
    require(temperature > 0.0f && std::isfinite(temperature), op, "temperature", "a number above 0", temperature);
    require(valid_vocab >= 0 && valid_vocab <= logits.columns, op, "valid_vocab", logits.columns, valid_vocab);
    return valid_vocab == 0 ? logits.columns : valid_vocab;
}

/// Whether rows start where vectors of 8 can be read; unlike elsewhere the last vector may be cut short.
bool aligned(const Tensor& t) { return vectors_of_8(0, {&t}); }

}  // namespace

void CudaBackend::logprob_forward(const Tensor& logp, const Tensor& entropy, const Tensor& lse, const Tensor& logits, const Tensor& targets,
                                  float temperature, std::int64_t valid_vocab) {
    const char* op = "logprob_forward";
    const CudaOp scope(*this, op);
    const std::int64_t valid = check_logprob(op, logits, lse, targets, temperature, valid_vocab);
    check_vector(op, "logp", logp, logits.rows, DType::Float32);
    const bool with_entropy = entropy.data != nullptr;
    if (with_entropy) check_vector(op, "entropy", entropy, logits.rows, DType::Float32);
    if (logits.size() == 0) return;
    const auto rows = static_cast<unsigned>(logits.rows);
    const float scale = 1.0f / temperature;
    by_type({&logits}, [&](auto type) {
        using T = typename decltype(type)::type;
        by_width(aligned(logits), [&](auto width) {
            constexpr int V = width();
            if (with_entropy) {
                logprob_forward_kernel<T, V, true><<<rows, kThreads, 0, stream_>>>(logp.f32(), entropy.f32(), lse.f32(), rows_of<T>(logits),
                                                                                   targets.i32(), scale, valid, fault_);
            } else {
                logprob_forward_kernel<T, V, false><<<rows, kThreads, 0, stream_>>>(logp.f32(), nullptr, lse.f32(), rows_of<T>(logits),
                                                                                    targets.i32(), scale, valid, fault_);
            }
        });
    });
    CUDA_LAUNCHED(op);
}

void CudaBackend::logprob_backward(const Tensor& dlogits, const Tensor& logits, const Tensor& lse, const Tensor& entropy,
                                   const Tensor& targets, const Tensor& dlogp, const Tensor& dentropy, float temperature,
                                   std::int64_t valid_vocab) {
    const char* op = "logprob_backward";
    const CudaOp scope(*this, op);
    const std::int64_t valid = check_logprob(op, logits, lse, targets, temperature, valid_vocab);
    check(op, "dlogits", dlogits, logits.rows, logits.columns);
    check_vector(op, "dlogp", dlogp, logits.rows, DType::Float32);
    const bool with_entropy = dentropy.data != nullptr;
    if (with_entropy) {
        check_vector(op, "dentropy", dentropy, logits.rows, DType::Float32);
        check_vector(op, "entropy", entropy, logits.rows, DType::Float32);
    }
    if (logits.size() == 0) return;

    const auto bytes_of_row = [](const Tensor& t) { return static_cast<std::size_t>(t.stride) * size_of(t.dtype); };
    const auto begin = [](const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data); };
    const auto end = [&](const Tensor& t) {
        return begin(t) + bytes_of_row(t) * static_cast<std::size_t>(t.rows - 1) + static_cast<std::size_t>(t.columns) * size_of(t.dtype);
    };
    const bool overlap = begin(dlogits) < end(logits) && begin(logits) < end(dlogits);
    const bool same_rows = begin(dlogits) == begin(logits) && (logits.rows == 1 || bytes_of_row(dlogits) == bytes_of_row(logits));
    const bool narrower = size_of(dlogits.dtype) < size_of(logits.dtype);
    if (overlap && !(same_rows && size_of(dlogits.dtype) <= size_of(logits.dtype))) {
        fail(op,
             ": dlogits: expected memory apart from that of logits, or the same rows (the same data, and rows that start at the same "
             "places) of a type no wider, got an overlap");
    }
    const bool in_place = overlap && narrower;

    const auto rows = static_cast<unsigned>(logits.rows);
    const float scale = 1.0f / temperature;
    const float* own_entropy = with_entropy ? entropy.f32() : nullptr;
    const float* entropy_seed = with_entropy ? dentropy.f32() : nullptr;
    by_width(aligned(dlogits) && aligned(logits), [&](auto width) {
        constexpr int V = width();
        const auto launch = [&](auto kernel, auto out, auto in) {
            kernel<<<rows, kThreads, 0, stream_>>>(out, in, lse.f32(), own_entropy, targets.i32(), dlogp.f32(), entropy_seed, scale, valid,
                                                   logits.columns, fault_);
        };
        const bool wide_in = logits.dtype == DType::Float32, wide_out = dlogits.dtype == DType::Float32;
        if (wide_in && wide_out) {
            launch(logprob_backward_kernel<float, float, V, false>, rows_of<float>(dlogits), rows_of<float>(logits));
        } else if (wide_in && in_place) {
            launch(logprob_backward_kernel<float, bf16, V, true>, rows_of<bf16>(dlogits), rows_of<float>(logits));
        } else if (wide_in) {
            launch(logprob_backward_kernel<float, bf16, V, false>, rows_of<bf16>(dlogits), rows_of<float>(logits));
        } else if (wide_out) {
            launch(logprob_backward_kernel<bf16, float, V, false>, rows_of<float>(dlogits), rows_of<bf16>(logits));
        } else {
            launch(logprob_backward_kernel<bf16, bf16, V, false>, rows_of<bf16>(dlogits), rows_of<bf16>(logits));
        }
    });
    CUDA_LAUNCHED(op);
}

}  // namespace surogate
