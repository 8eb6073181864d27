#pragma once

#include "backend/backend.h"

namespace surogate {

/// Host float32 values, dense, into a float32 or bfloat16 view (rounded to nearest).
void upload_floats(Backend& backend, const Tensor& out, const float* values);

/// A float32 or bfloat16 view into host float32 values, dense.
void download_floats(Backend& backend, float* values, const Tensor& in);

}  // namespace surogate
