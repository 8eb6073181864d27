#pragma once

#include <cstdint>

#include "core/error.h"
#include "core/tensor.h"

namespace surogate {

/// An argument must be a matrix of this shape, float32 unless said.
inline void check(const char* op, const char* name, const Tensor& t, std::int64_t rows, std::int64_t columns,
                  DType dtype = DType::Float32) {
    require(t.rows == rows && t.columns == columns && t.dtype == dtype, op, name, Tensor{nullptr, dtype, rows, columns, columns, {}}, t);
    require(t.device.kind == Device::Kind::Cpu, op, name, "host memory", "another device's");
    require(t.data != nullptr || t.size() == 0, op, name, "data", "a null pointer");
    require(t.rows <= 1 || t.stride >= t.columns, op, name, "rows that do not overlap", t.stride);
}

/// An argument must hold this many values without gaps; [1, n] and [n, 1] are the same.
inline void check_vector(const char* op, const char* name, const Tensor& t, std::int64_t size, DType dtype = DType::Float32) {
    require(t.size() == size && (t.rows <= 1 || t.contiguous()) && t.dtype == dtype, op, name, matrix(nullptr, 1, size, dtype), t);
    require(t.device.kind == Device::Kind::Cpu, op, name, "host memory", "another device's");
    require(t.data != nullptr || size == 0, op, name, "data", "a null pointer");
}

/// Every index must be in [0, limit).
inline void check_indices(const char* op, const char* name, const Tensor& t, std::int64_t limit) {
    const std::int32_t* index = t.i32();
    for (std::int64_t i = 0; i < t.size(); ++i) {
        if (index[i] < 0 || index[i] >= limit) fail(op, ": ", name, "[", i, "]: expected 0 to ", limit - 1, ", got ", index[i]);
    }
}

inline float* row(const Tensor& t, std::int64_t index) { return t.f32() + index * t.stride; }

}  // namespace surogate
