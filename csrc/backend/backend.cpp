#include "backend/backend.h"

#include "core/error.h"

namespace surogate {

namespace {

[[noreturn]] void no_sampler(const char* op, const Device& device) {
    fail(op, ": the native sampler is not available on ", device.kind == Device::Kind::Cuda ? "cuda" : "this device",
         "; sample on the cpu, or with another engine");
}

}  // namespace

void Backend::copy_all(const std::vector<CopyItem>& items) {
    for (const CopyItem& item : items) copy(item.out, item.in);
}

void Backend::linear_add_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias) {
    copy(y, residual);
    linear_forward(y, x, w, bias, 1.0f, 1.0f);
}

void Backend::linear_adapted_forward(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& w, const Tensor& bias,
                                     const std::vector<AdapterOutput>& adapters, float scale) {
    if (residual.empty()) {
        linear_forward(y, x, w, bias, 1.0f, 0.0f);
    } else {
        linear_add_forward(y, residual, x, w, bias);
    }
    for (const AdapterOutput& adapter : adapters) {
        linear_forward(y.column_range(adapter.first, adapter.b.rows), adapter.low, adapter.b, {}, scale, 1.0f);
    }
}

void Backend::linear_adapted_backward_input(const Tensor& dx, const Tensor& dy, const Tensor& w, const Tensor& d_low, const Tensor& a) {
    linear_backward_input(dx, dy, w, 1.0f, 0.0f);
    linear_backward_input(dx, d_low, a, 1.0f, 1.0f);
}

void Backend::decode_linear(const Tensor&, const Tensor&, const Tensor&, const Tensor&, float, float) {
    no_sampler("decode_linear", device());
}

void Backend::cache_write(const PagedCache&, const Tensor&, const Tensor&, const AttentionShape&) { no_sampler("cache_write", device()); }

void Backend::paged_attention(const Tensor&, const Tensor&, const PagedCache&, const AttentionShape&) {
    no_sampler("paged_attention", device());
}

void Backend::sample(std::int32_t*, float*, const Tensor&, const SampleRow*, std::int64_t) { no_sampler("sample", device()); }

}  // namespace surogate
