#include <algorithm>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "core/memory.h"

namespace surogate {

namespace {
constexpr std::int64_t kRowGrain = 32;
}

void CpuBackend::rmsnorm_forward(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& weight, float eps) {
    const char* op = "rmsnorm_forward";
    check(op, "x", x, x.rows, x.columns);
    check(op, "y", y, x.rows, x.columns);
    check_vector(op, "rstd", rstd, x.rows);
    check_vector(op, "weight", weight, x.columns);
    pool_.parallel_ranges(x.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            rstd.f32()[t] = kernels_.rmsnorm(row(y, t), nullptr, row(x, t), nullptr, weight.f32(), x.columns, eps);
        }
    });
}

void CpuBackend::add_rmsnorm_forward(const Tensor& sum, const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& residual,
                                     const Tensor& weight, float eps) {
    const char* op = "add_rmsnorm_forward";
    check(op, "x", x, x.rows, x.columns);
    check(op, "residual", residual, x.rows, x.columns);
    check(op, "sum", sum, x.rows, x.columns);
    check(op, "y", y, x.rows, x.columns);
    check_vector(op, "rstd", rstd, x.rows);
    check_vector(op, "weight", weight, x.columns);
    pool_.parallel_ranges(x.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            rstd.f32()[t] = kernels_.rmsnorm(row(y, t), row(sum, t), row(x, t), row(residual, t), weight.f32(), x.columns, eps);
        }
    });
}

void CpuBackend::rmsnorm_backward(const Tensor& dx, const Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& weight,
                                  const Tensor& rstd) {
    const char* op = "rmsnorm_backward";
    check(op, "x", x, x.rows, x.columns);
    check(op, "dx", dx, x.rows, x.columns);
    check(op, "dy", dy, x.rows, x.columns);
    check_vector(op, "rstd", rstd, x.rows);
    check_vector(op, "weight", weight, x.columns);
    const bool trained = dweight.data != nullptr;
    if (trained) check_vector(op, "dweight", dweight, x.columns);
    // The weight's gradient: a partial sum for each chunk of rows, and then the chunks in their order.
    const std::int64_t chunks = (x.rows + kRowGrain - 1) / kRowGrain;
    AlignedBuffer buffer;
    float* partial = trained ? buffer.floats(static_cast<std::size_t>(chunks * x.columns)) : nullptr;
    pool_.parallel_for(chunks, [&](std::int64_t chunk) {
        float* sums = trained ? partial + chunk * x.columns : nullptr;
        const std::int64_t end = std::min(x.rows, (chunk + 1) * kRowGrain);
        for (std::int64_t t = chunk * kRowGrain; t < end; ++t) {
            kernels_.rmsnorm_backward(row(dx, t), sums, row(dy, t), row(x, t), weight.f32(), rstd.f32()[t], x.columns);
        }
    });
    for (std::int64_t chunk = 0; trained && chunk < chunks; ++chunk) {
        kernels_.add(dweight.f32(), partial + chunk * x.columns, x.columns);
    }
}

}  // namespace surogate
