#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "model/parameters.h"

namespace surogate {

/// The adapters of linears that read the same input and write side by side: those of q, k and v, of gate and up, or a single one.
struct AdapterGroup {
    struct Member {
        Tensor b;                // [out, r]
        std::int64_t first = 0;  // its first column in the joined output
    };
    Tensor a;  // [members * r, in], one below the other
    std::array<Member, 3> members;
    std::int64_t count = 0;

    struct Site {
        const Adapter& adapter;
        std::int64_t first;
    };
    /// Absent adapters are left out.
    AdapterGroup(std::initializer_list<Site> sites);
};

/// A linear, or several that are one product, with the adapters beside it.
struct Projection {
    Tensor weight, bias;  // [N, K], [N] or empty
    Border border;        // may be absent
    AdapterGroup adapters;
};

/// y = x W^T (+ bias) (+ residual) + scale * (x A^T) B^T. `low` receives x A^T, in the border's room beside x if there is one (then
/// scaled). An empty y: only `low`.
void projection_forward(Backend& backend, const Projection& projection, const Tensor& y, const Tensor& low, const Tensor& x,
                        const Tensor& residual, float scale);

/// dx = the gradient of x (dx may be empty), and the adapters' gradients +=. With a border there is room beside dy, otherwise `d_low` is
/// scratch, at least as wide as low. An empty x: the gradients of A are left to projection_backward_a, which must find `d_low` and what
/// lies beside dy as this left them.
void projection_backward(Backend& backend, const Projection& projection, const AdapterGroup& gradients, const Tensor& dx,
                         const Tensor& d_low, const Tensor& dy, const Tensor& x, const Tensor& low, float scale);

void projection_backward_a(Backend& backend, const Projection& projection, const AdapterGroup& gradients, const Tensor& d_low,
                           const Tensor& dy, const Tensor& x);

/// For a product that is there already: low = x A^T, then y += scale * low B^T, for all that are present.
void adapter_forward(Backend& backend, const AdapterGroup& group, const Tensor& y, const Tensor& low, const Tensor& x, float scale);

/// dA += dlow^T x with dlow = scale * dy B, dB += scale * dy^T low, dx += dlow A (dx may be empty). `d_low` is scratch, at least as wide as
/// low.
void adapter_backward(Backend& backend, const AdapterGroup& group, const AdapterGroup& gradients, const Tensor& dx, const Tensor& d_low,
                      const Tensor& dy, const Tensor& x, const Tensor& low, float scale);

}  // namespace surogate
