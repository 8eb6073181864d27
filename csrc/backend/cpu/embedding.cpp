#include <cstring>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"

namespace surogate {

namespace {

constexpr std::int64_t kRowGrain = 32;
// Columns of one thread: whole cache lines, and every thread walks the rows in their order, so that equal indices add up in that order.
constexpr std::int64_t kColumnGrain = 64;

void take_rows(ThreadPool& pool, const char* op, const Tensor& out, const Tensor& in, const Tensor& index, const char* in_name,
               const char* index_name) {
    check(op, in_name, in, in.rows, in.columns);
    check(op, "out", out, index.size(), in.columns);
    check_vector(op, index_name, index, index.size(), DType::Int32);
    check_indices(op, index_name, index, in.rows);
    const std::size_t bytes = static_cast<std::size_t>(in.columns) * sizeof(float);
    pool.parallel_ranges(out.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) std::memcpy(row(out, i), row(in, index.i32()[i]), bytes);
    });
}

void add_rows(CpuBackend& backend, const char* op, const Tensor& out, const Tensor& in, const Tensor& index, const char* out_name,
              const char* in_name, const char* index_name) {
    check(op, out_name, out, out.rows, in.columns);
    check(op, in_name, in, index.size(), in.columns);
    check_vector(op, index_name, index, index.size(), DType::Int32);
    check_indices(op, index_name, index, out.rows);
    backend.pool().parallel_ranges(in.columns, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = 0; i < in.rows; ++i) {
            backend.kernels().add(row(out, index.i32()[i]) + begin, row(in, i) + begin, end - begin);
        }
    });
}

}  // namespace

void CpuBackend::embedding_forward(const Tensor& out, const Tensor& table, const Tensor& ids) {
    take_rows(pool_, "embedding_forward", out, table, ids, "table", "ids");
}

void CpuBackend::embedding_backward(const Tensor& dtable, const Tensor& dout, const Tensor& ids) {
    add_rows(*this, "embedding_backward", dtable, dout, ids, "dtable", "dout", "ids");
}

void CpuBackend::gather_rows(const Tensor& out, const Tensor& in, const Tensor& index) {
    take_rows(pool_, "gather_rows", out, in, index, "in", "index");
}

void CpuBackend::scatter_add_rows(const Tensor& out, const Tensor& in, const Tensor& index) {
    add_rows(*this, "scatter_add_rows", out, in, index, "out", "in", "index");
}

void CpuBackend::scatter_add_scaled_rows(const Tensor& out, const Tensor& in, const Tensor& index, const Tensor& scale) {
    const char* op = "scatter_add_scaled_rows";
    check(op, "out", out, out.rows, in.columns);
    check(op, "in", in, index.size(), in.columns);
    check_vector(op, "index", index, index.size(), DType::Int32);
    check_vector(op, "scale", scale, index.size());
    check_indices(op, "index", index, out.rows);
    pool_.parallel_ranges(in.columns, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = 0; i < in.rows; ++i) {
            const float factor = scale.f32()[i];
            if (factor == 0.0f) continue;
            float* to = row(out, index.i32()[i]);
            const float* from = row(in, i);
            for (std::int64_t c = begin; c < end; ++c) to[c] += factor * from[c];
        }
    });
}

}  // namespace surogate
