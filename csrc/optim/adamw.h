#pragma once

#include <cstdint>
#include <vector>

#include "model/learner.h"

namespace surogate {

/// Parameters that lie in one piece and share their weight decay; all [n].
struct ParameterSpan {
    Tensor weight, master, gradient, m, v;  // master may be empty
    bool decay = false;
};

/// The norm of all gradients: sums of squares in double, the spans in their order.
double gradient_norm(Backend& backend, const std::vector<ParameterSpan>& spans);

/// AdamW with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019) and clipping to a global
/// norm (as torch.nn.utils.clip_grad_norm_: times max_norm / (norm + 1e-6) if that is below 1). If the norm is not finite nothing changes.
/// The gradients stay as they are. `count` is the number of updates applied so far, and grows by one if this one is.
/// `seed` is that of stochastic rounding.
StepStats adamw_step(Backend& backend, const std::vector<ParameterSpan>& spans, const StepOptions& options, std::uint64_t seed,
                     std::int64_t& count);

void zero_gradients(Backend& backend, const std::vector<ParameterSpan>& spans);

}  // namespace surogate
