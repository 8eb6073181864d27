#include "model/spec.h"

#include <cmath>

#include "core/error.h"

namespace surogate {

void ModelSpec::validate() const {
    const auto positive = [](const char* name, std::int64_t value) { require(value > 0, "ModelSpec", name, "a positive number", value); };
    positive("layers", layers);
    positive("hidden", hidden);
    positive("heads", heads);
    positive("kv_heads", kv_heads);
    positive("head_dim", head_dim);
    positive("ffn", ffn);
    positive("vocab", vocab);
    positive("max_positions", max_positions);
    if (heads % kv_heads != 0) fail("ModelSpec: heads: expected a multiple of kv_heads (", kv_heads, "), got ", heads);
    require(head_dim % 2 == 0, "ModelSpec", "head_dim", "an even number (the rotation turns pairs)", head_dim);
    require(std::isfinite(norm_eps) && norm_eps >= 0.0f, "ModelSpec", "norm_eps", "a finite number that is not negative", norm_eps);
    require(activation == "silu", "ModelSpec", "activation", "'silu' (the only one there is)", "'" + activation + "'");
    const auto half = static_cast<std::size_t>(head_dim / 2);
    if (rope_inv_freq.size() != half) {
        fail("ModelSpec: rope_inv_freq: expected head_dim / 2 = ", half, " frequencies, got ", rope_inv_freq.size());
    }
    for (std::size_t i = 0; i < rope_inv_freq.size(); ++i) {
        if (!std::isfinite(rope_inv_freq[i])) fail("ModelSpec: rope_inv_freq[", i, "]: expected a finite number, got ", rope_inv_freq[i]);
    }
    require(std::isfinite(rope_attention_scale) && rope_attention_scale > 0.0f, "ModelSpec", "rope_attention_scale", "a positive number",
            rope_attention_scale);
    if (!windows.empty() && windows.size() != static_cast<std::size_t>(layers)) {
        fail("ModelSpec: windows: expected one per layer (", layers, ") or none at all, got ", windows.size());
    }
    for (std::size_t i = 0; i < windows.size(); ++i) {
        if (windows[i] < 0) fail("ModelSpec: windows[", i, "]: expected 0 (whole segment) or a positive number, got ", windows[i]);
    }
}

}  // namespace surogate
