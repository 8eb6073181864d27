#include "backend/cuda/attention_graphs.h"

#include <cudnn.h>
#include <cudnn_frontend.h>

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"

namespace surogate::cuda {

namespace fe = cudnn_frontend;

namespace {

/// Names of a graph's tensors.
enum Id : std::int64_t {
    Q = 1,
    K,
    V,
    Out,
    Lse,
    DOut,
    DQ,
    DK,
    DV,
    LengthsQ,
    LengthsKv,
    OffsetQ,
    OffsetK,
    OffsetV,
    OffsetOut,
    OffsetLse,
    OffsetDOut,
    OffsetDKv
};

constexpr std::size_t kAligned = SpareMemory::kAligned;

// cuDNN's deterministic backward on Hopper keeps the whole of dP, which grows with the square of the longest segment.
constexpr std::int64_t kMostDeterministicBytes = std::int64_t{8} << 30;

void dnn_check(cudnnStatus_t status, const char* op, const char* call) {
    if (status != CUDNN_STATUS_SUCCESS) throw CudaError(op, call, cudnnGetErrorString(status));
}

/// Rounded up in steps of a quarter of the power of two below: at most a quarter too long, and few different values.
std::int64_t round_up(std::int64_t value, std::int64_t smallest) {
    std::int64_t step = smallest;
    while (step * 8 <= value) step *= 2;
    return (value + step - 1) / step * step;
}

void* workspace_of(const AttentionGraphs::Call& call, std::size_t bytes) {
    const SpareMemory spare(call.spare);
    if (bytes <= spare.bytes) return spare.data;
    return call.workspace.reserve(call.op, std::max<std::size_t>(bytes, 1));
}

}  // namespace

SpareMemory::SpareMemory(const Tensor& tensor) {
    if (tensor.empty() || !tensor.contiguous()) return;
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data), aligned = (begin + kAligned - 1) / kAligned * kAligned;
    const auto end = begin + static_cast<std::uintptr_t>(tensor.size()) * size_of(tensor.dtype);
    if (aligned >= end) return;
    data = reinterpret_cast<void*>(aligned);
    bytes = end - aligned;
}

/// What a graph is built for.
struct AttentionGraphs::Layout {
    std::int64_t segments, longest, tokens, heads, kv_heads, size, window;
    float scale;
    bool wide;  // offsets of 64 bits
    std::int64_t qkv_stride, out_stride, lse_stride, dqkv_stride = 0, dout_stride = 0;
    // Of dk and dv. Where several query heads share a key head, cuDNN first computes a gradient for each of them, in memory of this stride
    // times their number: a whole row of dqkv for each head would be several times what is needed, to be written and read.
    std::int64_t dkv_stride = 0;

    // cuDNN takes dq to begin each segment where q does, whatever its own offsets say.
    bool dq_apart() const { return dqkv_stride != qkv_stride; }
    bool dkv_apart() const { return kv_heads != heads || dq_apart(); }
    /// Bytes of dq, and of each of dk and dv, where they do not lie in dqkv.
    std::size_t dq_bytes() const { return dq_apart() ? aligned_bytes(tokens * qkv_stride) : 0; }
    std::size_t dkv_bytes() const { return dkv_apart() ? aligned_bytes(tokens * dkv_stride) : 0; }

    static std::size_t aligned_bytes(std::int64_t count) {
        return (static_cast<std::size_t>(count) * 2 + kAligned - 1) / kAligned * kAligned;
    }

    Key key(bool backward) const {
        std::int64_t scale_bits = 0;
        std::memcpy(&scale_bits, &scale, sizeof scale);
        return {backward ? 1 : 0,
                segments,
                longest,
                backward ? tokens : 0,
                heads,
                kv_heads,
                size,
                window,
                scale_bits,
                wide ? 1 : 0,
                qkv_stride,
                out_stride,
                lse_stride,
                dqkv_stride * (std::int64_t{1} << 24) + dout_stride};
    }
};

struct AttentionGraphs::Plan {
    std::shared_ptr<fe::graph::Graph> graph;  // none: refused
    std::string refusal;
    std::int64_t workspace = 0;
    bool to_be_tuned = false;
};

AttentionGraphs::AttentionGraphs(cudaStream_t stream, bool deterministic, bool tune)
    : stream_(stream), deterministic_(deterministic), tune_(tune && !deterministic) {
    const char* op = "make_cuda_backend";
    dnn_check(cudnnCreate(&handle_), op, "cudnnCreate");
    const cudnnStatus_t status = cudnnSetStream(handle_, stream_);
    if (status != CUDNN_STATUS_SUCCESS) cudnnDestroy(handle_);
    dnn_check(status, op, "cudnnSetStream");
}

AttentionGraphs::~AttentionGraphs() {
    plans_.clear();
    cudnnDestroy(handle_);
}

AttentionGraphs::Layout AttentionGraphs::layout_of(const Call& call, const Tensor& qkv) const {
    Layout layout{};
    layout.segments = call.segments.bucket;
    layout.longest = round_up(call.segments.longest, 128);
    layout.tokens = round_up(qkv.rows, 512);
    layout.heads = call.shape.heads;
    layout.kv_heads = call.shape.kv_heads;
    layout.size = call.shape.head_dim;
    // A window that no segment fills is none.
    layout.window = call.shape.window >= call.segments.longest ? 0 : call.shape.window;
    layout.scale = call.shape.scale;
    layout.qkv_stride = qkv.stride;
    return layout;
}

void AttentionGraphs::build(Plan& plan, const Layout& s, bool backward) {
    using Attributes = fe::graph::Tensor_attributes;
    auto graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);

    const auto integers = [&](const char* name, Id id, std::int64_t count, bool wide) {
        return graph->tensor(Attributes()
                                 .set_name(name)
                                 .set_uid(id)
                                 .set_dim({count, 1, 1, 1})
                                 .set_stride({1, 1, 1, 1})
                                 .set_data_type(wide ? fe::DataType_t::INT64 : fe::DataType_t::INT32));
    };
    const auto offsets = [&](const char* name, Id id) { return integers(name, id, s.segments + 1, s.wide); };
    // Heads lie side by side in a row; a segment starts at its offset, so that the batch stride only has to be large enough.
    const auto describe = [&](auto& tensor, const char* name, Id id, std::int64_t heads, std::int64_t stride, const auto& offset) {
        tensor.set_name(name)
            .set_uid(id)
            .set_dim({s.segments, heads, s.longest, s.size})
            .set_stride({s.longest * stride, s.size, stride, 1})
            .set_ragged_offset(offset);
    };
    const auto input = [&](const char* name, Id id, std::int64_t heads, std::int64_t stride, const auto& offset) {
        Attributes attributes;
        describe(attributes, name, id, heads, stride, offset);
        return graph->tensor(attributes);
    };
    const auto describe_lse = [&](auto& tensor, const auto& offset) {
        tensor.set_name("lse")
            .set_uid(Lse)
            .set_dim({s.segments, s.heads, s.longest, 1})
            .set_stride({s.longest * s.lse_stride, 1, s.lse_stride, 1})
            .set_data_type(fe::DataType_t::FLOAT)
            .set_ragged_offset(offset);
    };

    const auto lengths_q = integers("lengths_q", LengthsQ, s.segments, false),
               lengths_kv = integers("lengths_kv", LengthsKv, s.segments, false);
    const auto offset_q = offsets("offset_q", OffsetQ), offset_k = offsets("offset_k", OffsetK), offset_v = offsets("offset_v", OffsetV);
    const auto offset_out = offsets("offset_out", OffsetOut), offset_lse = offsets("offset_lse", OffsetLse);
    const auto q = input("q", Q, s.heads, s.qkv_stride, offset_q), k = input("k", K, s.kv_heads, s.qkv_stride, offset_k),
               v = input("v", V, s.kv_heads, s.qkv_stride, offset_v);
    const auto common = [&](auto& attributes) {
        attributes.set_attn_scale(s.scale)
            .set_padding_mask(true)
            .set_seq_len_q(lengths_q)
            .set_seq_len_kv(lengths_kv)
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0);
        // Keys from position - bound + 1 on, as our window counts.
        if (s.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(s.window));
    };
    if (!backward) {
        fe::graph::SDPA_attributes attributes;
        attributes.set_name("attention_forward").set_generate_stats(true);
        common(attributes);
        auto [out, lse] = graph->sdpa(q, k, v, attributes);
        out->set_output(true);
        describe(*out, "out", Out, s.heads, s.out_stride, offset_out);
        lse->set_output(true);
        describe_lse(*lse, offset_lse);
    } else {
        const auto out = input("out", Out, s.heads, s.out_stride, offset_out);
        const auto offset_dout = s.dout_stride == s.out_stride ? offset_out : offsets("offset_dout", OffsetDOut);
        const auto dout = input("dout", DOut, s.heads, s.dout_stride, offset_dout);
        Attributes lse_attributes;
        describe_lse(lse_attributes, offset_lse);
        const auto lse = graph->tensor(lse_attributes);
        fe::graph::SDPA_backward_attributes attributes;
        attributes.set_name("attention_backward")
            .set_deterministic_algorithm(deterministic_)
            .set_max_total_seq_len_q(s.tokens)
            .set_max_total_seq_len_kv(s.tokens);
        common(attributes);
        auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, out, dout, lse, attributes);
        const auto offset_dkv = s.dkv_apart() ? offsets("offset_dkv", OffsetDKv) : nullptr;
        dq->set_output(true);
        describe(*dq, "dq", DQ, s.heads, s.qkv_stride, offset_q);
        dk->set_output(true);
        describe(*dk, "dk", DK, s.kv_heads, s.dkv_stride, s.dkv_apart() ? offset_dkv : offset_k);
        dv->set_output(true);
        describe(*dv, "dv", DV, s.kv_heads, s.dkv_stride, s.dkv_apart() ? offset_dkv : offset_v);
    }

    fe::error_t status =
        graph->build(handle_, {fe::HeurMode_t::A}, tune_ ? fe::BuildPlanPolicy_t::ALL : fe::BuildPlanPolicy_t::HEURISTICS_CHOICE);
    if (status.is_bad()) {
        plan.refusal = status.get_message();
        return;
    }
    std::int64_t workspace = 0;
    fe::error_t sized = graph->get_workspace_size(workspace);
    if (sized.is_bad()) {
        plan.refusal = sized.get_message();
    } else if (backward && deterministic_ && workspace > kMostDeterministicBytes) {
        plan.refusal = "its deterministic algorithm needs " + std::to_string(workspace >> 20) + " MiB";
    } else {
        plan.workspace = tune_ ? std::max(workspace, graph->get_autotune_workspace_size()) : workspace;
        plan.to_be_tuned = tune_;
        plan.graph = std::move(graph);
    }
}

AttentionGraphs::Plan& AttentionGraphs::plan_for(const Key& key, const Layout& layout, bool backward) {
    std::unique_ptr<Plan>& known = plans_[key];
    if (!known) {
        auto plan = std::make_unique<Plan>();
        try {
            build(*plan, layout, backward);
        } catch (const std::exception& error) {
            plan->refusal = error.what();
        }
        cudaGetLastError();  // a refusal must not show up as the error of our next launch
        known = std::move(plan);
    }
    refusal_ = known->refusal;
    return *known;
}

void AttentionGraphs::execute(const char* op, Plan& plan, std::unordered_map<std::int64_t, void*>& pack, void* workspace) {
    // Outputs are overwritten, never added to, so that timing runs do no harm.
    if (plan.to_be_tuned) {
        plan.to_be_tuned = false;
        fe::error_t tuned = plan.graph->autotune(handle_, pack, workspace);
        if (tuned.is_bad()) throw CudaError(op, "timing cuDNN's plans", tuned.get_message());
    }
    fe::error_t status = plan.graph->execute(handle_, pack, workspace);
    if (status.is_bad()) throw CudaError(op, "executing cuDNN's graph", status.get_message());
}

bool AttentionGraphs::forward(const Call& call, const Tensor& out, const Tensor& lse, const Tensor& qkv) {
    if (qkv.dtype != DType::BFloat16 || out.dtype != DType::BFloat16) {
        refusal_ = "only bfloat16 is taken";
        return false;
    }
    const AttentionShape& shape = call.shape;
    Layout layout = layout_of(call, qkv);
    layout.out_stride = out.stride;
    layout.lse_stride = lse.stride;
    layout.wide = qkv.rows * std::max({qkv.stride, out.stride, lse.stride}) >= (std::int64_t{1} << 31);
    Plan& plan = plan_for(layout.key(false), layout, false);
    if (!plan.graph) return false;

    auto* columns = qkv.as<char>();
    void* offset_qkv = call.cache.offsets(call.op, call.segments, qkv.stride, layout.wide);
    void* lengths = const_cast<std::int32_t*>(call.segments.lengths);
    std::unordered_map<std::int64_t, void*> pack = {
        {Q, columns},
        {K, columns + shape.heads * shape.head_dim * 2},
        {V, columns + (shape.heads + shape.kv_heads) * shape.head_dim * 2},
        {Out, out.data},
        {Lse, lse.data},
        {LengthsQ, lengths},
        {LengthsKv, lengths},
        {OffsetQ, offset_qkv},
        {OffsetK, offset_qkv},
        {OffsetV, offset_qkv},
        {OffsetOut, call.cache.offsets(call.op, call.segments, out.stride, layout.wide)},
        {OffsetLse, call.cache.offsets(call.op, call.segments, lse.stride, layout.wide)},
    };
    execute(call.op, plan, pack, workspace_of(call, static_cast<std::size_t>(plan.workspace)));
    return true;
}

AttentionGraphs::Layout AttentionGraphs::backward_layout(const Call& call, const Tensor& dqkv, const Tensor& dout, const Tensor& out,
                                                         const Tensor& lse, const Tensor& qkv) const {
    const AttentionShape& shape = call.shape;
    Layout layout = layout_of(call, qkv);
    layout.out_stride = out.stride;
    layout.lse_stride = lse.stride;
    layout.dqkv_stride = dqkv.stride;
    layout.dout_stride = dout.stride;
    layout.dkv_stride = layout.dkv_apart() ? shape.kv_heads * shape.head_dim : dqkv.stride;
    layout.wide = qkv.rows * std::max({qkv.stride, out.stride, lse.stride, dqkv.stride, dout.stride}) * (shape.heads / shape.kv_heads) >=
                  (std::int64_t{1} << 31);
    return layout;
}

AttentionGraphs::Plan* AttentionGraphs::backward_plan(const Layout& layout, std::initializer_list<const Tensor*> matrices) {
    for (const Tensor* tensor : matrices) {
        if (tensor->dtype != DType::BFloat16) {
            refusal_ = "only bfloat16 is taken";
            return nullptr;
        }
    }
    Plan& plan = plan_for(layout.key(true), layout, true);
    return plan.graph ? &plan : nullptr;
}

std::size_t AttentionGraphs::backward_bytes(const Call& call, const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse,
                                            const Tensor& qkv) {
    const Layout layout = backward_layout(call, dqkv, dout, out, lse, qkv);
    const Plan* plan = backward_plan(layout, {&dqkv, &dout, &out, &qkv});
    return plan != nullptr ? static_cast<std::size_t>(plan->workspace) + layout.dq_bytes() + 2 * layout.dkv_bytes() : 0;
}

bool AttentionGraphs::backward(const Call& call, const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse,
                               const Tensor& qkv) {
    const Layout layout = backward_layout(call, dqkv, dout, out, lse, qkv);
    Plan* plan = backward_plan(layout, {&dqkv, &dout, &out, &qkv});
    if (plan == nullptr) return false;

    const AttentionShape& shape = call.shape;
    const std::size_t dq_bytes = layout.dq_bytes(), dkv_bytes = layout.dkv_bytes(), apart = dq_bytes + 2 * dkv_bytes;
    auto* memory = static_cast<char*>(workspace_of(call, apart + static_cast<std::size_t>(plan->workspace)));
    auto* columns = qkv.as<char>();
    auto* gradients = dqkv.as<char>();
    const std::int64_t k_bytes = shape.heads * shape.head_dim * 2, v_bytes = (shape.heads + shape.kv_heads) * shape.head_dim * 2;
    char* dq = layout.dq_apart() ? memory : gradients;
    char* dk = layout.dkv_apart() ? memory + dq_bytes : gradients + k_bytes;
    char* dv = layout.dkv_apart() ? memory + dq_bytes + dkv_bytes : gradients + v_bytes;
    void* offset_qkv = call.cache.offsets(call.op, call.segments, qkv.stride, layout.wide);
    void* lengths = const_cast<std::int32_t*>(call.segments.lengths);
    std::unordered_map<std::int64_t, void*> pack = {
        {Q, columns},
        {K, columns + k_bytes},
        {V, columns + v_bytes},
        {Out, out.data},
        {Lse, lse.data},
        {DOut, dout.data},
        {DQ, dq},
        {DK, dk},
        {DV, dv},
        {LengthsQ, lengths},
        {LengthsKv, lengths},
        {OffsetQ, offset_qkv},
        {OffsetK, offset_qkv},
        {OffsetV, offset_qkv},
        {OffsetOut, call.cache.offsets(call.op, call.segments, out.stride, layout.wide)},
        {OffsetLse, call.cache.offsets(call.op, call.segments, lse.stride, layout.wide)},
        {OffsetDOut, call.cache.offsets(call.op, call.segments, dout.stride, layout.wide)},
        {OffsetDKv, call.cache.offsets(call.op, call.segments, layout.dkv_stride, layout.wide)},
    };
    execute(call.op, *plan, pack, memory + apart);
    const auto put = [&](char* out_columns, const char* in, std::int64_t columns_in, std::int64_t stride_in) {
        CUDA_CHECK(call.op, cudaMemcpy2DAsync(out_columns, static_cast<std::size_t>(dqkv.stride) * 2, in,
                                              static_cast<std::size_t>(stride_in) * 2, static_cast<std::size_t>(columns_in) * 2,
                                              static_cast<std::size_t>(qkv.rows), cudaMemcpyDeviceToDevice, stream_));
    };
    if (layout.dq_apart()) put(gradients, dq, shape.heads * shape.head_dim, layout.qkv_stride);
    if (layout.dkv_apart()) {
        put(gradients + k_bytes, dk, layout.dkv_stride, layout.dkv_stride);
        put(gradients + v_bytes, dv, layout.dkv_stride, layout.dkv_stride);
    }
    return true;
}

}  // namespace surogate::cuda
