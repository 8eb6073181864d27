#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/error.h"
#include "core/tensor.h"

namespace surogate::cuda {

inline bool is_real(DType dtype) { return dtype == DType::Float32 || dtype == DType::BFloat16; }

inline void check_place(const char* op, const char* name, const Tensor& t) {
    require(t.device.kind == Device::Kind::Cuda, op, name, "device memory", "host memory");
    require(t.data != nullptr || t.size() == 0, op, name, "data", "a null pointer");
    require(t.rows <= 1 || t.stride >= t.columns, op, name, "rows that do not overlap", t.stride);
}

/// An argument must be a matrix of this shape, of float32 or bfloat16.
inline void check(const char* op, const char* name, const Tensor& t, std::int64_t rows, std::int64_t columns) {
    if (t.rows != rows || t.columns != columns || !is_real(t.dtype)) {
        fail(op, ": ", name, ": expected float32 or bfloat16 [", rows, ", ", columns, "], got ", t);
    }
    check_place(op, name, t);
}

/// The same, of one type.
inline void check(const char* op, const char* name, const Tensor& t, std::int64_t rows, std::int64_t columns, DType dtype) {
    require(t.rows == rows && t.columns == columns && t.dtype == dtype, op, name, Tensor{nullptr, dtype, rows, columns, columns, {}}, t);
    check_place(op, name, t);
}

/// An argument must hold this many values without gaps; [1, n] and [n, 1] are the same.
inline void check_vector(const char* op, const char* name, const Tensor& t, std::int64_t size) {
    if (t.size() != size || !(t.rows <= 1 || t.contiguous()) || !is_real(t.dtype)) {
        fail(op, ": ", name, ": expected float32 or bfloat16 [", size, "] without gaps, got ", t);
    }
    check_place(op, name, t);
}
inline void check_vector(const char* op, const char* name, const Tensor& t, std::int64_t size, DType dtype) {
    require(t.size() == size && (t.rows <= 1 || t.contiguous()) && t.dtype == dtype, op, name, matrix(nullptr, 1, size, dtype), t);
    check_place(op, name, t);
}

}  // namespace surogate::cuda
