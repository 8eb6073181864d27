#include <algorithm>
#include <cstring>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "core/memory.h"

namespace surogate {

namespace {

constexpr std::int64_t kRowGrain = 16;

void check_rope(const char* op, const char* name, const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                const AttentionShape& shape) {
    require(shape.head_dim > 0 && shape.head_dim % 2 == 0, op, "head_dim", "an even number above 0", shape.head_dim);
    require(shape.heads > 0 && shape.kv_heads > 0, op, "heads and kv_heads", "numbers above 0", std::min(shape.heads, shape.kv_heads));
    check(op, name, qkv, qkv.rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
    check(op, "cos", cos, cos.rows, shape.head_dim / 2);
    check(op, "sin", sin, cos.rows, shape.head_dim / 2);
    check_vector(op, "positions", positions, qkv.rows, DType::Int32);
    check_indices(op, "positions", positions, cos.rows);
}

void check_norm(const char* op, const Tensor& raw_qk, const Tensor& rstd, const Tensor& q_weight, const Tensor& k_weight, std::int64_t rows,
                const AttentionShape& shape) {
    check(op, "raw_qk", raw_qk, rows, (shape.heads + shape.kv_heads) * shape.head_dim);
    check(op, "rstd", rstd, rows, shape.heads + shape.kv_heads);
    check_vector(op, "q_weight", q_weight, shape.head_dim);
    check_vector(op, "k_weight", k_weight, shape.head_dim);
}

}  // namespace

void CpuBackend::qk_norm_rope_forward(const Tensor& qkv, const Tensor& raw_qk, const Tensor& rstd, const Tensor& q_weight,
                                      const Tensor& k_weight, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                                      const AttentionShape& shape, float eps) {
    const char* op = "qk_norm_rope_forward";
    check_rope(op, "qkv", qkv, cos, sin, positions, shape);
    const bool normed = q_weight.data != nullptr;
    if (normed) check_norm(op, raw_qk, rstd, q_weight, k_weight, qkv.rows, shape);
    const std::int64_t turned = shape.heads + shape.kv_heads, size = shape.head_dim;
    pool_.parallel_ranges(qkv.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            const std::int64_t position = positions.i32()[t];
            if (normed) std::memcpy(row(raw_qk, t), row(qkv, t), static_cast<std::size_t>(turned * size) * sizeof(float));
            for (std::int64_t h = 0; h < turned; ++h) {
                float* head = row(qkv, t) + h * size;
                if (normed) {
                    const float* weight = (h < shape.heads ? q_weight : k_weight).f32();
                    row(rstd, t)[h] = kernels_.rmsnorm(head, nullptr, row(raw_qk, t) + h * size, nullptr, weight, size, eps);
                }
                kernels_.rotate(head, row(cos, position), row(sin, position), size / 2, 1.0f);
            }
        }
    });
}

void CpuBackend::qk_norm_rope_backward(const Tensor& dqkv, const Tensor& dq_weight, const Tensor& dk_weight, const Tensor& raw_qk,
                                       const Tensor& rstd, const Tensor& q_weight, const Tensor& k_weight, const Tensor& cos,
                                       const Tensor& sin, const Tensor& positions, const AttentionShape& shape) {
    const char* op = "qk_norm_rope_backward";
    check_rope(op, "dqkv", dqkv, cos, sin, positions, shape);
    const bool normed = q_weight.data != nullptr;
    if (normed) check_norm(op, raw_qk, rstd, q_weight, k_weight, dqkv.rows, shape);
    const std::int64_t turned = shape.heads + shape.kv_heads, size = shape.head_dim;
    if (dq_weight.data != nullptr) check_vector(op, "dq_weight", dq_weight, size);
    if (dk_weight.data != nullptr) check_vector(op, "dk_weight", dk_weight, size);
    // The weights' gradients: a partial sum for each chunk of rows, and then the chunks in their order.
    const std::int64_t chunks = (dqkv.rows + kRowGrain - 1) / kRowGrain;
    const bool q_trained = normed && dq_weight.data != nullptr, k_trained = normed && dk_weight.data != nullptr;
    AlignedBuffer buffer;
    float* partial = q_trained || k_trained ? buffer.floats(static_cast<std::size_t>(chunks * 2 * size)) : nullptr;
    pool_.parallel_for(chunks, [&](std::int64_t chunk, int worker) {
        float* before = pool_.scratch(worker, static_cast<std::size_t>(size));
        const std::int64_t end = std::min(dqkv.rows, (chunk + 1) * kRowGrain);
        for (std::int64_t t = chunk * kRowGrain; t < end; ++t) {
            const std::int64_t position = positions.i32()[t];
            for (std::int64_t h = 0; h < turned; ++h) {
                float* head = row(dqkv, t) + h * size;
                kernels_.rotate(head, row(cos, position), row(sin, position), size / 2, -1.0f);
                if (!normed) continue;
                const bool query = h < shape.heads;
                float* sums = (query ? q_trained : k_trained) ? partial + (2 * chunk + (query ? 0 : 1)) * size : nullptr;
                std::fill_n(before, size, 0.0f);
                kernels_.rmsnorm_backward(before, sums, head, row(raw_qk, t) + h * size, (query ? q_weight : k_weight).f32(),
                                          row(rstd, t)[h], size);
                std::memcpy(head, before, static_cast<std::size_t>(size) * sizeof(float));
            }
        }
    });
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (q_trained) kernels_.add(dq_weight.f32(), partial + 2 * chunk * size, size);
        if (k_trained) kernels_.add(dk_weight.f32(), partial + (2 * chunk + 1) * size, size);
    }
}

}  // namespace surogate
