#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "backend/backend.h"
#include "backend/cuda/segment_cache.h"

struct cudnnContext;

namespace surogate::cuda {

class Workspace;

/// The usable part of memory that a caller can do without for the moment; may be none.
struct SpareMemory {
    static constexpr std::size_t kAligned = 256;

    void* data = nullptr;
    std::size_t bytes = 0;

    explicit SpareMemory(const Tensor& tensor);
};

/// Attention through cuDNN's graphs over packed segments of different lengths: q, k and v are column ranges of one matrix, read in place.
/// A graph is built once per shape, with the number of segments, the longest segment and (backward) the number of tokens rounded up.
class AttentionGraphs {
   public:
    AttentionGraphs(cudaStream_t stream, bool deterministic, bool tune);
    ~AttentionGraphs();
    AttentionGraphs(const AttentionGraphs&) = delete;
    AttentionGraphs& operator=(const AttentionGraphs&) = delete;

    struct Call {
        const char* op;
        SegmentsOnDevice& segments;
        SegmentCache& cache;
        Workspace& workspace;
        const AttentionShape& shape;
        Tensor spare;  // taken in place of the workspace if it is large enough
    };
    /// False if cuDNN does not take it: refusal() says why, and nothing was written.
    bool forward(const Call& call, const Tensor& out, const Tensor& lse, const Tensor& qkv);
    bool backward(const Call& call, const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv);
    /// Bytes that backward needs on its way; 0 if cuDNN does not take it.
    std::size_t backward_bytes(const Call& call, const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse,
                               const Tensor& qkv);

    const std::string& refusal() const { return refusal_; }

   private:
    using Key = std::array<std::int64_t, 14>;
    struct Plan;
    struct Layout;
    Layout layout_of(const Call& call, const Tensor& qkv) const;
    Layout backward_layout(const Call& call, const Tensor& dqkv, const Tensor& dout, const Tensor& out, const Tensor& lse,
                           const Tensor& qkv) const;
    /// Null if cuDNN does not take it.
    Plan* backward_plan(const Layout& layout, std::initializer_list<const Tensor*> matrices);
    Plan& plan_for(const Key& key, const Layout& layout, bool backward);
    void build(Plan& plan, const Layout& layout, bool backward);
    void execute(const char* op, Plan& plan, std::unordered_map<std::int64_t, void*>& pack, void* workspace);

    cudaStream_t stream_;
    bool deterministic_, tune_;
    cudnnContext* handle_ = nullptr;
    std::map<Key, std::unique_ptr<Plan>> plans_;
    std::string refusal_;
};

}  // namespace surogate::cuda
