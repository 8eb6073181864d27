#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"

namespace surogate {

namespace {
constexpr std::int64_t kRowGrain = 16;
}

void CpuBackend::swiglu_forward(const Tensor& y, const Tensor& gate_up) {
    const char* op = "swiglu_forward";
    check(op, "y", y, y.rows, y.columns);
    check(op, "gate_up", gate_up, y.rows, 2 * y.columns);
    const std::int64_t width = y.columns;
    pool_.parallel_ranges(y.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) kernels_.swiglu(row(y, t), row(gate_up, t), row(gate_up, t) + width, width);
    });
}

void CpuBackend::swiglu_backward(const Tensor& dgate_up, const Tensor& dy, const Tensor& gate_up) {
    swiglu_recompute_backward(dgate_up, {}, dy, gate_up);
}

void CpuBackend::swiglu_recompute_backward(const Tensor& dgate_up, const Tensor& y, const Tensor& dy, const Tensor& gate_up) {
    const char* op = "swiglu_backward";
    check(op, "dy", dy, dy.rows, dy.columns);
    check(op, "gate_up", gate_up, dy.rows, 2 * dy.columns);
    check(op, "dgate_up", dgate_up, dy.rows, 2 * dy.columns);
    if (!y.empty()) check(op, "y", y, dy.rows, dy.columns);
    const std::int64_t width = dy.columns;
    pool_.parallel_ranges(dy.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            kernels_.swiglu_backward(row(dgate_up, t), row(dgate_up, t) + width, y.empty() ? nullptr : row(y, t), row(dy, t),
                                     row(gate_up, t), row(gate_up, t) + width, width);
        }
    });
}

}  // namespace surogate
