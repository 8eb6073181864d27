#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/cuda_backend.h"
#include "core/random.h"
#include "tests/harness.h"

namespace surogate::testing {

inline int& failures() {
    static int count = 0;
    return count;
}

inline Backend& cpu() {
    static const std::unique_ptr<Backend> shared = make_cpu_backend({});
    return *shared;
}

/// Never destroyed: when static objects are, the CUDA runtime may be gone already.
inline CudaBackend& gpu() {
    static CudaBackend& shared = *new CudaBackend(CudaOptions{});
    return shared;
}

inline float to_bf16(float value) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7f800000u) != 0x7f800000u) bits += 0x7fffu + (bits >> 16 & 1u);
    bits &= 0xffff0000u;
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

/// A dense float32 matrix on the host: what the CPU back-end works on.
struct Host {
    std::int64_t rows = 0, columns = 0;
    std::vector<float> values;

    Host() = default;
    Host(std::int64_t r, std::int64_t c, float value = 0.0f) : rows(r), columns(c), values(static_cast<std::size_t>(r * c), value) {}
    /// Normal; rounded to what `dtype` holds, so that both back-ends see the same numbers.
    static Host random(std::int64_t rows, std::int64_t columns, std::uint64_t seed, DType dtype, float scale = 1.0f, float shift = 0.0f) {
        Host result(rows, columns);
        const Philox draw(seed, 11);
        for (std::size_t i = 0; i < result.values.size(); ++i) {
            result.values[i] = shift + scale * static_cast<float>(draw.normal(i));
            if (dtype == DType::BFloat16) result.values[i] = to_bf16(result.values[i]);
        }
        return result;
    }
    Tensor tensor() { return matrix(values.data(), rows, columns); }
    float& operator()(std::int64_t r, std::int64_t c) { return values[static_cast<std::size_t>(r * columns + c)]; }
    float operator()(std::int64_t r, std::int64_t c) const { return values[static_cast<std::size_t>(r * columns + c)]; }
};

/// A matrix on the device with `pad` guard columns after each row, so that a view with a stride is the normal case.
class OnDevice {
   public:
    OnDevice(CudaBackend& backend, std::int64_t rows, std::int64_t columns, DType dtype, std::int64_t pad)
        : backend_(backend), rows_(rows), columns_(columns), pad_(pad) {
        const std::int64_t stride = columns + pad;
        data_ = backend.allocate(static_cast<std::size_t>(std::max<std::int64_t>(1, rows * stride)) * size_of(dtype));
        whole_ = matrix(data_, rows, stride, dtype, backend.device());
        const std::vector<float> guards(static_cast<std::size_t>(rows * stride), kGuard);
        if (dtype != DType::Int32) backend.upload(whole_, guards.data());
    }
    OnDevice(CudaBackend& backend, const Host& host, DType dtype, std::int64_t pad)
        : OnDevice(backend, host.rows, host.columns, dtype, pad) {
        backend.upload(tensor(), host.values.data());
    }
    OnDevice(CudaBackend& backend, const std::vector<std::int32_t>& values)
        : OnDevice(backend, 1, static_cast<std::int64_t>(values.size()), DType::Int32, 0) {
        backend.upload(tensor(), values.data());
    }
    /// Full of NaN: what is not written shows.
    static OnDevice poisoned(CudaBackend& backend, std::int64_t rows, std::int64_t columns, DType dtype, std::int64_t pad) {
        return {backend, Host(rows, columns, std::numeric_limits<float>::quiet_NaN()), dtype, pad};
    }
    ~OnDevice() { backend_.release(data_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    Tensor tensor() const { return whole_.column_range(0, columns_); }
    /// The same values as one row, of a matrix without padding.
    Tensor vector() const { return surogate::vector(data_, rows_ * columns_, whole_.dtype, whole_.device); }
    DType dtype() const { return whole_.dtype; }

    Host read() const {
        Host result(rows_, columns_);
        backend_.download(result.values.data(), tensor());
        return result;
    }
    bool guards_intact() const {
        if (pad_ == 0) return true;
        Host all(rows_, columns_ + pad_);
        backend_.download(all.values.data(), whole_);
        for (std::int64_t r = 0; r < rows_; ++r) {
            for (std::int64_t c = columns_; c < columns_ + pad_; ++c) {
                if (all(r, c) != kGuard) return false;
            }
        }
        return true;
    }

   private:
    static constexpr float kGuard = -1024.0f;
    CudaBackend& backend_;
    std::int64_t rows_, columns_, pad_;
    void* data_ = nullptr;
    Tensor whole_;
};

inline double relative_error(const Host& got, const Host& expected) {
    double error = 0.0, norm = 0.0;
    for (std::size_t i = 0; i < expected.values.size(); ++i) {
        const double difference = static_cast<double>(got.values[i]) - static_cast<double>(expected.values[i]);
        error += difference * difference;
        norm += static_cast<double>(expected.values[i]) * static_cast<double>(expected.values[i]);
    }
    return norm > 0.0 ? std::sqrt(error / norm) : std::sqrt(error);
}

inline double norm(const Host& host) {
    double sum = 0.0;
    for (const float value : host.values) sum += static_cast<double>(value) * static_cast<double>(value);
    return std::sqrt(sum);
}

/// What rounding numbers of these sizes to bfloat16 may cost, norm-wise. A number loses at most u = 2^-8 of itself, and its square in the
/// mean u^2 / 3 at most (uniform within the spacing, which is widest beside a power of two). Of n numbers of one size the mean of the
/// squares exceeds that by u^2 sqrt(ln(1/p) / 2n) with probability p (Hoeffding; here p = 1e-6); n is counted by weight,
/// (sum x^2)^2 / sum x^4.
inline double rounding_to_bfloat16(const Host& expected) {
    constexpr double u = 1.0 / 256.0, deviation = 2.63;
    double squares = 0.0, fourths = 0.0;
    for (const float value : expected.values) {
        const double square = static_cast<double>(value) * static_cast<double>(value);
        squares += square;
        fourths += square * square;
    }
    const double count = fourths > 0.0 ? std::max(1.0, squares * squares / fourths) : 1.0;
    return u * std::sqrt(std::min(1.0, 1.0 / 3.0 + deviation / std::sqrt(count)));
}

/// Prints ||got - expected|| / ||expected|| beside its bound; too large, NaN, or a write beside the view counts as a failure. `absolute` is
/// an error of the norm that does not shrink with the expected numbers, as where large numbers cancel.
inline void compare(const std::string& what, const OnDevice& got, const Host& expected, double bound, double absolute = 0.0) {
    const double error = relative_error(got.read(), expected), size = norm(expected);
    bound += size > 0.0 ? absolute / size : absolute;  // relative_error is absolute where all is expected to be zero
    const bool close = error <= bound, clean = got.guards_intact();
    std::printf("  %-74s %-8s %.2e (<= %.1e)%s%s\n", what.c_str(), name_of(got.dtype()), error, bound, close ? "" : "  TOO LARGE",
                clean ? "" : "  WROTE OUTSIDE OF THE VIEW");
    if (!close || !clean) ++failures();
}

/// The bound for a result of this type: `wide` if float32, else rounding to 8 bits of mantissa (2^-9 / sqrt 3 = 1.1e-3) and some more.
inline double bound(DType dtype, double wide = 2e-6, double narrow = 2.5e-3) { return dtype == DType::Float32 ? wide : narrow; }

inline std::string shape_name(const char* op, std::initializer_list<std::int64_t> numbers, const char* note = "") {
    std::string result = op;
    result += " [";
    for (const std::int64_t number : numbers) result += (result.back() == '[' ? "" : ",") + std::to_string(number);
    return result + "] " + note;
}

inline Tensor ids_of(std::vector<std::int32_t>& ids) { return vector(ids.data(), static_cast<std::int64_t>(ids.size()), DType::Int32); }

inline constexpr DType kTypes[] = {DType::Float32, DType::BFloat16};

}  // namespace surogate::testing
