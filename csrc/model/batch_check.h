#pragma once

#include "model/learner.h"
#include "model/spec.h"

namespace surogate {

/// Throws std::invalid_argument that names the operation, the argument, the place, what was expected and what came.
void check_batch(const char* op, const ModelSpec& spec, const LearnerOptions& options, const Batch& batch, const PassOptions& pass);
void check_options(const ModelSpec& spec, const LearnerOptions& options);

}  // namespace surogate
