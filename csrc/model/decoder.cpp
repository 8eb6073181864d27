#include "model/decoder.h"

#include <cmath>

#include "model/lora.h"

namespace surogate {

namespace {

AdapterGroup qkv_adapters(const ModelSpec& spec, const BlockWeights& w) {
    return {{w.q_lora, 0}, {w.k_lora, spec.q_columns()}, {w.v_lora, spec.q_columns() + spec.kv_columns()}};
}
AdapterGroup o_adapter(const BlockWeights& w) { return {{w.o_lora, 0}}; }
AdapterGroup gate_up_adapters(const ModelSpec& spec, const BlockWeights& w) { return {{w.gate_lora, 0}, {w.up_lora, spec.ffn}}; }
AdapterGroup down_adapter(const BlockWeights& w) { return {{w.down_lora, 0}}; }

Projection qkv_projection(const ModelSpec& spec, const BlockWeights& w) { return {w.qkv, w.qkv_bias, w.qkv_border, qkv_adapters(spec, w)}; }
Projection o_projection(const BlockWeights& w) { return {w.o, w.o_bias, w.o_border, o_adapter(w)}; }
Projection gate_up_projection(const ModelSpec& spec, const BlockWeights& w) {
    return {w.gate_up, w.gate_up_bias, w.gate_up_border, gate_up_adapters(spec, w)};
}
Projection down_projection(const BlockWeights& w) { return {w.down, w.down_bias, w.down_border, down_adapter(w)}; }

void linear_gradients(const PassContext& pass, const Tensor& dw, const Tensor& db, const Tensor& dy, const Tensor& x) {
    if (!dw.empty()) pass.backend.linear_backward_weight(dw, dy, x, 1.0f, pass.add_gradients ? 1.0f : 0.0f);
    if (!db.empty()) pass.backend.bias_backward(db, dy);
}

}  // namespace

AttentionShape PassContext::attention(std::int64_t layer) const {
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.head_dim)));
    return {spec.heads, spec.kv_heads, spec.head_dim, scale, spec.windows[static_cast<std::size_t>(layer)]};
}

void block_forward(const PassContext& pass, std::int64_t layer, const BlockWeights& w, const Tensor& out, const BlockActivations& kept,
                   const Scratch& scratch, const Tensor& x) {
    Backend& backend = pass.backend;
    const ModelSpec& spec = pass.spec;
    const AttentionShape shape = pass.attention(layer);

    backend.rmsnorm_forward(kept.attention_in, kept.attention_rstd, x, w.input_norm, spec.norm_eps);
    projection_forward(backend, qkv_projection(spec, w), kept.qkv, kept.qkv_low, kept.attention_in, {}, pass.lora_scale);
    backend.qk_norm_rope_forward(kept.qkv, kept.raw_qk, kept.qk_rstd, w.q_norm, w.k_norm, pass.rope_cos, pass.rope_sin, pass.positions,
                                 shape, spec.norm_eps);
    backend.attention_forward(kept.attention_out, kept.lse, kept.qkv, pass.segments, shape);
    projection_forward(backend, o_projection(w), kept.branch, kept.o_low, kept.attention_out, {}, pass.lora_scale);

    backend.add_rmsnorm_forward(kept.middle, kept.mlp_in, kept.mlp_rstd, kept.branch, x, w.post_norm, spec.norm_eps);
    projection_forward(backend, gate_up_projection(spec, w), kept.gate_up, kept.gate_up_low, kept.mlp_in, {}, pass.lora_scale);
    if (!out.empty() || w.down_lora.present()) backend.swiglu_forward(scratch.activated, kept.gate_up);
    projection_forward(backend, down_projection(w), out, kept.down_low, scratch.activated, kept.middle, pass.lora_scale);
    if (w.down_border.present()) {
        backend.copy(kept.down_low, scratch.activated.column_range(scratch.activated.columns, w.down_border.width));
    }
}

void block_backward(const PassContext& pass, std::int64_t layer, const BlockWeights& w, const BlockWeights& g, const BlockActivations& kept,
                    const Scratch& scratch, const Tensor& x, Depth depth) {
    Backend& backend = pass.backend;
    const ModelSpec& spec = pass.spec;
    const AttentionShape shape = pass.attention(layer);
    const float scale = pass.lora_scale;
    const Tensor &d_stream = scratch.d_stream, &d_gate_up = kept.gate_up;

    projection_backward(backend, down_projection(w), down_adapter(g), scratch.activated, scratch.d_low, d_stream, {}, kept.down_low, scale);
    // The activation's output is not kept: it costs F columns per layer to keep, and little to compute again beside its gradient, whose
    // place it takes.
    if (!g.down.empty() || w.down_lora.present()) {
        backend.swiglu_recompute_backward(d_gate_up, scratch.activated, scratch.activated, kept.gate_up);
    } else {
        backend.swiglu_backward(d_gate_up, scratch.activated, kept.gate_up);
    }
    linear_gradients(pass, g.down, g.down_bias, d_stream, scratch.activated);
    projection_backward_a(backend, down_projection(w), down_adapter(g), scratch.d_low, d_stream, scratch.activated);
    linear_gradients(pass, g.gate_up, g.gate_up_bias, d_gate_up, kept.mlp_in);
    const bool below_mlp = depth > Depth::Mlp;
    // The gradient of what a product read is written last, over what it read.
    const Tensor &d_mlp_in = kept.mlp_in, &d_attention_in = kept.attention_in;
    projection_backward(backend, gate_up_projection(spec, w), gate_up_adapters(spec, g), below_mlp ? d_mlp_in : Tensor{}, scratch.d_low,
                        d_gate_up, kept.mlp_in, kept.gate_up_low, scale);
    if (!below_mlp) return;
    backend.rmsnorm_backward(d_stream, g.post_norm, d_mlp_in, kept.middle, w.post_norm, kept.mlp_rstd);

    linear_gradients(pass, g.o, g.o_bias, d_stream, kept.attention_out);
    const bool below_output = depth > Depth::AttentionOutput;
    projection_backward(backend, o_projection(w), o_adapter(g), below_output ? kept.d_attention_out : Tensor{}, scratch.d_low, d_stream,
                        kept.attention_out, kept.o_low, scale);
    if (!below_output) return;
    const Tensor& d_qkv = kept.d_qkv;
    backend.attention_backward(d_qkv, kept.d_attention_out, kept.attention_out, kept.lse, kept.qkv, pass.segments, shape, kept.spare);
    backend.qk_norm_rope_backward(d_qkv, g.q_norm, g.k_norm, kept.raw_qk, kept.qk_rstd, w.q_norm, w.k_norm, pass.rope_cos, pass.rope_sin,
                                  pass.positions, shape);
    if (kept.attention_in.data == kept.mlp_in.data) {
        backend.rmsnorm_forward(kept.attention_in, kept.attention_rstd, x, w.input_norm, spec.norm_eps);
    }
    linear_gradients(pass, g.qkv, g.qkv_bias, d_qkv, kept.attention_in);
    const bool below_qkv = depth > Depth::Qkv;
    projection_backward(backend, qkv_projection(spec, w), qkv_adapters(spec, g), below_qkv ? d_attention_in : Tensor{}, scratch.d_low,
                        d_qkv, kept.attention_in, kept.qkv_low, scale);
    if (below_qkv) backend.rmsnorm_backward(d_stream, g.input_norm, d_attention_in, x, w.input_norm, kept.attention_rstd);
}

}  // namespace surogate
