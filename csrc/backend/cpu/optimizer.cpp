#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cpu/checks.h"
#include "backend/cpu/cpu_backend.h"

namespace surogate {

namespace {

constexpr std::int64_t kSpan = 1 << 14;  // elements of one partial sum or one share of an update

/// Row and first element of span `index` of a matrix whose rows are cut into spans each.
struct Span {
    std::int64_t row, begin, count;
};

struct Spans {
    explicit Spans(const Tensor& t) {
        const bool dense = t.contiguous();
        rows = t.size() == 0 ? 0 : dense ? 1 : t.rows;
        columns = dense ? t.size() : t.columns;
        per_row = (columns + kSpan - 1) / kSpan;
    }
    std::int64_t count() const { return rows * per_row; }
    Span operator[](std::int64_t index) const {
        const std::int64_t begin = index % per_row * kSpan;
        return {index / per_row, begin, std::min(kSpan, columns - begin)};
    }
    std::int64_t rows, columns, per_row;
};

}  // namespace

double CpuBackend::sum_of_squares(const Tensor& x) {
    check("sum_of_squares", "x", x, x.rows, x.columns);
    const Spans spans(x);
    std::vector<double> partial(static_cast<std::size_t>(spans.count()));
    pool_.parallel_for(spans.count(), [&](std::int64_t index) {
        const Span s = spans[index];
        partial[static_cast<std::size_t>(index)] = kernels_.sum_of_squares(row(x, s.row) + s.begin, s.count);
    });
    double total = 0.0;
    for (const double value : partial) total += value;
    return total;
}

void CpuBackend::adamw(const Tensor& weight, const Tensor& master, const Tensor& m, const Tensor& v, const Tensor& gradient,
                       const AdamWOptions& options) {
    const char* op = "adamw";
    require(master.empty(), op, "master", "none beside float32 weights", master);
    const std::int64_t size = weight.size();
    for (const auto& [name, t] : {std::pair{"weight", &weight}, {"m", &m}, {"v", &v}, {"gradient", &gradient}}) {
        check_vector(op, name, *t, size);
    }
    require(options.step >= 1, op, "step", "a number from 1", options.step);
    const double step = static_cast<double>(options.step), rate = static_cast<double>(options.learning_rate);
    const float decay = static_cast<float>(1.0 - rate * static_cast<double>(options.weight_decay));
    const float step_size = static_cast<float>(rate / (1.0 - std::pow(static_cast<double>(options.beta1), step)));
    const float v_factor = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(options.beta2), step)));
    pool_.parallel_ranges(size, kSpan, [&](std::int64_t begin, std::int64_t end) {
        kernels_.adamw(weight.f32() + begin, m.f32() + begin, v.f32() + begin, gradient.f32() + begin, options.gradient_scale,
                       options.beta1, options.beta2, options.epsilon, decay, step_size, v_factor, end - begin);
    });
}

}  // namespace surogate
