#include "optim/adamw.h"

#include <cmath>

#include "core/error.h"
#include "core/random.h"

namespace surogate {

namespace {

constexpr std::uint64_t kRoundingStream = 0x726f756e64u;  // apart from the streams that draw weights

void check(const StepOptions& options) {
    const auto not_negative = [](const char* name, float value) {
        require(std::isfinite(value) && value >= 0.0f, "step", name, "a finite number that is not negative", value);
    };
    not_negative("learning_rate", options.learning_rate);
    not_negative("max_grad_norm", options.max_grad_norm);
    not_negative("epsilon", options.epsilon);
    not_negative("weight_decay", options.weight_decay);
    for (const auto& [name, beta] : {std::pair{"beta1", options.beta1}, std::pair{"beta2", options.beta2}}) {
        require(beta >= 0.0f && beta < 1.0f, "step", name, "a number in [0, 1)", beta);
    }
}

}  // namespace

double gradient_norm(Backend& backend, const std::vector<ParameterSpan>& spans) {
    double sum = 0.0;
    for (const ParameterSpan& span : spans) sum += backend.sum_of_squares(span.gradient);
    return std::sqrt(sum);
}

void zero_gradients(Backend& backend, const std::vector<ParameterSpan>& spans) {
    for (const ParameterSpan& span : spans) backend.fill(span.gradient, 0.0f);
}

StepStats adamw_step(Backend& backend, const std::vector<ParameterSpan>& spans, const StepOptions& options, std::uint64_t seed,
                     std::int64_t& count) {
    check(options);
    StepStats stats;
    stats.grad_norm = gradient_norm(backend, spans);
    stats.applied = std::isfinite(stats.grad_norm);
    if (stats.applied) {
        ++count;
        double scale = 1.0;
        if (options.max_grad_norm > 0.0f) scale = std::min(1.0, static_cast<double>(options.max_grad_norm) / (stats.grad_norm + 1e-6));
        std::uint64_t index = 0;
        for (const ParameterSpan& span : spans) {
            AdamWOptions adamw;
            adamw.learning_rate = options.learning_rate;
            adamw.beta1 = options.beta1;
            adamw.beta2 = options.beta2;
            adamw.epsilon = options.epsilon;
            adamw.weight_decay = span.decay ? options.weight_decay : 0.0f;
            adamw.step = count;
            adamw.gradient_scale = static_cast<float>(scale);
            const Philox::Block block = Philox(seed, kRoundingStream)(index++);
            adamw.seed = std::uint64_t{block[1]} << 32 | block[0];
            backend.adamw(span.weight, span.master, span.m, span.v, span.gradient, adamw);
        }
    }
    stats.step = count;
    return stats;
}

}  // namespace surogate
