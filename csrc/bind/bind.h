#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "model/learner.h"

namespace surogate {

/// What Python's Learner holds: the learner and the lock that every call takes, so that calls from several threads queue up.
/// Whoever shares the learner (a Generator) keeps a shared_ptr to this and takes the same lock around its own work: the two share weights
/// and a back-end. The lock is taken only after the GIL was released, and the GIL is never taken under it.
struct LearnerHandle {
    LearnerHandle(std::shared_ptr<Backend> backend, ModelSpec spec, LearnerOptions options)
        : learner(std::move(backend), std::move(spec), std::move(options)) {}

    Learner learner;
    std::mutex mutex;
};

using Int32Array = pybind11::array_t<std::int32_t, pybind11::array::c_style>;
using Float32Array = pybind11::array_t<float, pybind11::array::c_style>;

/// A C-contiguous int32 or float32 numpy array of one dimension, or an error that names operation, argument, expected and got. `size` < 0:
/// any.
Int32Array int32_vector(const char* op, const char* name, const pybind11::object& value, std::int64_t size = -1);
Float32Array float32_vector(const char* op, const char* name, const pybind11::object& value, std::int64_t size = -1);

/// What a value is, for an error message: dtype and shape of an array, or the type's name.
std::string describe(const pybind11::object& value);

/// A numpy array that owns a copy of the values.
pybind11::object owned(const std::vector<float>& values);

/// [(name, bytes), ...]
pybind11::list memory_list(const std::vector<MemoryItem>& items);

void bind_learner(pybind11::module_& module);
void bind_generator(pybind11::module_& module);

}  // namespace surogate
