#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "core/random.h"
#include "tests/harness.h"

namespace surogate::testing {

/// A float matrix with `pad` guard columns after each row, so that a view with a stride is the normal case and writing beside it is seen.
class Data {
   public:
    Data() = default;
    Data(std::int64_t rows, std::int64_t columns, std::int64_t pad = 3)
        : rows_(rows), columns_(columns), stride_(columns + pad), values_(static_cast<std::size_t>(rows * stride_), kGuard) {
        fill([](std::int64_t, std::int64_t) { return 0.0; });
    }
    static Data random(std::int64_t rows, std::int64_t columns, std::uint64_t seed, double scale = 1.0, double shift = 0.0,
                       std::int64_t pad = 3) {
        Data data(rows, columns, pad);
        const Philox draw(seed, 7);
        data.fill([&](std::int64_t r, std::int64_t c) { return shift + scale * draw.normal(static_cast<std::uint64_t>(r * columns + c)); });
        return data;
    }
    /// Without padding: what takes flat spans.
    static Data dense(std::int64_t rows, std::int64_t columns, std::uint64_t seed, double scale = 1.0, double shift = 0.0) {
        return random(rows, columns, seed, scale, shift, 0);
    }

    void fill(const std::function<double(std::int64_t, std::int64_t)>& value) {
        for (std::int64_t r = 0; r < rows_; ++r) {
            for (std::int64_t c = 0; c < columns_; ++c) (*this)(r, c) = static_cast<float>(value(r, c));
        }
    }

    std::int64_t rows() const { return rows_; }
    std::int64_t columns() const { return columns_; }
    float& operator()(std::int64_t r, std::int64_t c) { return values_[static_cast<std::size_t>(r * stride_ + c)]; }
    float operator()(std::int64_t r, std::int64_t c) const { return values_[static_cast<std::size_t>(r * stride_ + c)]; }

    Tensor tensor() { return Tensor{values_.data(), DType::Float32, rows_, columns_, stride_, {}}; }

    bool guards_intact() const {
        for (std::int64_t r = 0; r < rows_; ++r) {
            for (std::int64_t c = columns_; c < stride_; ++c) {
                if ((*this)(r, c) != kGuard) return false;
            }
        }
        return true;
    }
    bool same_bits(const Data& other) const {
        return values_.size() == other.values_.size() &&
               (values_.empty() || std::memcmp(values_.data(), other.values_.data(), values_.size() * sizeof(float)) == 0);
    }

   private:
    static constexpr float kGuard = -12345.5f;
    std::int64_t rows_ = 0, columns_ = 0, stride_ = 0;
    std::vector<float> values_;
};

/// Double-precision matrix of the naive references.
class Exact {
   public:
    Exact() = default;
    Exact(std::int64_t rows, std::int64_t columns) : rows_(rows), columns_(columns), values_(static_cast<std::size_t>(rows * columns)) {}
    explicit Exact(const Data& data) : Exact(data.rows(), data.columns()) {
        for (std::int64_t r = 0; r < rows_; ++r) {
            for (std::int64_t c = 0; c < columns_; ++c) (*this)(r, c) = static_cast<double>(data(r, c));
        }
    }
    std::int64_t rows() const { return rows_; }
    std::int64_t columns() const { return columns_; }
    double& operator()(std::int64_t r, std::int64_t c) { return values_[static_cast<std::size_t>(r * columns_ + c)]; }
    double operator()(std::int64_t r, std::int64_t c) const { return values_[static_cast<std::size_t>(r * columns_ + c)]; }
    const double* row(std::int64_t r) const { return values_.data() + r * columns_; }

   private:
    std::int64_t rows_ = 0, columns_ = 0;
    std::vector<double> values_;
};

/// ||got - expected|| <= tolerance * ||expected|| (+ a little for an expected zero), and nothing written beside the view.
inline void check_close(const char* what, const Data& got, const Exact& expected, double tolerance = 2e-6) {
    double error = 0.0, norm = 0.0;
    for (std::int64_t r = 0; r < got.rows(); ++r) {
        for (std::int64_t c = 0; c < got.columns(); ++c) {
            const double difference = static_cast<double>(got(r, c)) - expected(r, c);
            error += difference * difference;
            norm += expected(r, c) * expected(r, c);
        }
    }
    if (!(std::sqrt(error) <= tolerance * std::sqrt(norm) + 1e-12)) {
        report(__FILE__, __LINE__, what, ": relative error ", std::sqrt(error / norm), " above ", tolerance);
    }
    if (!got.guards_intact()) report(__FILE__, __LINE__, what, ": wrote outside of the view");
}

/// Gradient of sum(seed * forward(x)) by central differences of a double-precision forward.
inline Exact numeric_gradient(const Exact& x, const Exact& seed, const std::function<Exact(const Exact&)>& forward, double step = 1e-5) {
    const auto loss = [&](const Exact& at) {
        const Exact y = forward(at);
        double sum = 0.0;
        for (std::int64_t r = 0; r < y.rows(); ++r) {
            for (std::int64_t c = 0; c < y.columns(); ++c) sum += y(r, c) * seed(r, c);
        }
        return sum;
    };
    Exact gradient(x.rows(), x.columns()), at = x;
    for (std::int64_t r = 0; r < x.rows(); ++r) {
        for (std::int64_t c = 0; c < x.columns(); ++c) {
            at(r, c) = x(r, c) + step;
            const double above = loss(at);
            at(r, c) = x(r, c) - step;
            const double below = loss(at);
            at(r, c) = x(r, c);
            gradient(r, c) = (above - below) / (2.0 * step);
        }
    }
    return gradient;
}

inline Exact plus(const Exact& a, const Data& b) {
    Exact sum = a;
    for (std::int64_t r = 0; r < a.rows(); ++r) {
        for (std::int64_t c = 0; c < a.columns(); ++c) sum(r, c) += static_cast<double>(b(r, c));
    }
    return sum;
}

/// The set of kernels under test: main.cpp runs all tests once with each that the processor has.
inline const Kernels& kernel_set() { return *find_kernels(kernel_set_name().c_str()); }

inline CpuBackend& backend() {
    static std::map<std::string, std::unique_ptr<CpuBackend>> backends;
    std::unique_ptr<CpuBackend>& cpu = backends[kernel_set_name()];
    if (cpu == nullptr) cpu = std::make_unique<CpuBackend>(CpuOptions{2}, kernel_set());
    return *cpu;
}

/// Runs an operation with 1, 2, 3 and 7 threads; its results must have the same bits.
inline void check_any_thread_count(const std::function<std::vector<Data>(CpuBackend&)>& operation) {
    std::vector<Data> first;
    for (const int threads : {1, 2, 3, 7}) {
        CpuBackend cpu(CpuOptions{threads}, kernel_set());
        std::vector<Data> results = operation(cpu);
        if (threads == 1) {
            first = std::move(results);
            continue;
        }
        for (std::size_t i = 0; i < results.size(); ++i) {
            if (!results[i].same_bits(first[i])) report(__FILE__, __LINE__, "result ", i, " differs with ", threads, " threads");
        }
    }
}

inline Tensor ids_of(std::vector<std::int32_t>& ids) { return vector(ids.data(), static_cast<std::int64_t>(ids.size()), DType::Int32); }

}  // namespace surogate::testing
