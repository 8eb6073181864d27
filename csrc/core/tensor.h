#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>

#include "core/error.h"

namespace surogate {

enum class DType : std::uint8_t { Float32, BFloat16, Int32 };

constexpr std::size_t size_of(DType dtype) { return dtype == DType::BFloat16 ? 2 : 4; }

constexpr const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::Float32:
            return "float32";
        case DType::BFloat16:
            return "bfloat16";
        case DType::Int32:
            return "int32";
    }
    return "unknown";
}

struct Device {
    enum class Kind : std::uint8_t { Cpu, Cuda } kind = Kind::Cpu;
    int index = 0;
    friend bool operator==(const Device&, const Device&) = default;
};

/// A non-owning view of a vector or a row-major matrix, [rows, columns]; a vector has one row.
/// `stride` is the distance between rows in elements, so that a column range of a joined buffer (q, k and v in one) is a view too.
struct Tensor {
    void* data = nullptr;
    DType dtype = DType::Float32;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::int64_t stride = 0;
    Device device{};

    bool empty() const { return data == nullptr || rows == 0 || columns == 0; }
    std::int64_t size() const { return rows * columns; }
    bool contiguous() const { return stride == columns || rows <= 1; }

    template <typename T>
    T* as() const {
        return static_cast<T*>(data);
    }
    float* f32() const { return as<float>(); }
    std::int32_t* i32() const { return as<std::int32_t>(); }

    /// Rows [first, first + count) of a matrix.
    Tensor row_range(std::int64_t first, std::int64_t count) const {
        Tensor view = *this;
        if (data != nullptr) view.data = static_cast<char*>(data) + static_cast<std::size_t>(first * stride) * size_of(dtype);
        view.rows = count;
        return view;
    }
    /// Columns [first, first + count) of a matrix.
    Tensor column_range(std::int64_t first, std::int64_t count) const {
        Tensor view = *this;
        if (data != nullptr) view.data = static_cast<char*>(data) + static_cast<std::size_t>(first) * size_of(dtype);
        view.columns = count;
        return view;
    }
};

inline Tensor matrix(void* data, std::int64_t rows, std::int64_t columns, DType dtype = DType::Float32, Device device = {}) {
    return Tensor{data, dtype, rows, columns, columns, device};
}

inline Tensor vector(void* data, std::int64_t size, DType dtype = DType::Float32, Device device = {}) {
    return Tensor{data, dtype, 1, size, size, device};
}

inline std::ostream& operator<<(std::ostream& out, const Tensor& t) {
    return out << name_of(t.dtype) << " [" << t.rows << ", " << t.columns << "]";
}

}  // namespace surogate
