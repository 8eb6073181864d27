#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/linear_call.h"

// Which of the algorithms that the library proposes for a product is taken.

namespace surogate::cuda {

namespace {

constexpr int kProposals = 32;
constexpr std::size_t kFinalists = 4;
constexpr int kBriefRuns = 3, kLongRuns = 6, kTurns = 3;
constexpr float kHopeless = 1.3f;  // times the best so far: not timed again

}  // namespace

cublasLtMatmulAlgo_t Linear::choose(const char* op, const Call& call, const Product& p, bool& found) {
    cublasLtMatmulPreferenceOpaque_t preference;
    BLAS_CHECK(op, cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        BLAS_CHECK(op, cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    // Partial sums of a product that is split along k are kept in float32 and added in a fixed order.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b.data, p.b.stride, p.b.dtype));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a.data, p.a.stride, p.a.dtype));
    const Tensor& from = p.start.data != nullptr ? p.start : p.out;
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(from.data, from.stride, from.dtype));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.out.data, p.out.stride, p.out.dtype));

    std::vector<cublasLtMatmulHeuristicResult_t> proposals(autotune_ ? kProposals : 1);
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&call.description), Call::mutable_layout(call.a),
                                       Call::mutable_layout(call.b), Call::mutable_layout(call.start), Call::mutable_layout(call.out),
                                       &preference, static_cast<int>(proposals.size()), proposals.data(), &count);
    proposals.resize(static_cast<std::size_t>(std::max(count, 0)));
    std::erase_if(proposals, [](const auto& proposal) { return proposal.state != CUBLAS_STATUS_SUCCESS; });
    found = status == CUBLAS_STATUS_SUCCESS && !proposals.empty();
    if (!found) {
        if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) {
            blas_check(status, op, "cublasLtMatmulAlgoGetHeuristic");
        }
        return {};
    }
    return proposals[proposals.size() > 1 ? fastest(op, call, p, proposals) : 0].algo;
}

/// The index of the proposal that takes the least time. They are timed into memory of their own, since the result must not be added up more
/// than once; without room for that, the library's first. The best of a brief round are timed again in turns, so that a clock that falls
/// while they run (products draw as much power as the device may) falls for all alike.
std::size_t Linear::fastest(const char* op, const Call& call, const Product& p,
                            const std::vector<cublasLtMatmulHeuristicResult_t>& proposals) {
    struct Event {
        cudaEvent_t event = nullptr;
        explicit Event(const char* op) { CUDA_CHECK(op, cudaEventCreate(&event)); }
        ~Event() { cudaEventDestroy(event); }
        Event(const Event&) = delete;
        Event& operator=(const Event&) = delete;
    };
    struct Memory {
        void* data = nullptr;
        ~Memory() { cudaFree(data); }
    } target;
    const std::size_t bytes = static_cast<std::size_t>((p.m - 1) * std::max(p.out.stride, p.n) + p.n) * size_of(p.out.dtype);
    if (cudaMalloc(&target.data, bytes) != cudaSuccess) {
        cudaGetLastError();
        target.data = nullptr;
        return 0;
    }
    const Event begin(op), end(op);
    /// Milliseconds of one run; negative if the library refuses after all.
    const auto time = [&](std::size_t i, int runs) {
        CUDA_CHECK(op, cudaEventRecord(begin.event, stream_));
        for (int r = 0; r < runs; ++r) {
            if (call.run(handle_, p, target.data, proposals[i].algo, workspace_, stream_) != CUBLAS_STATUS_SUCCESS) return -1.0f;
        }
        CUDA_CHECK(op, cudaEventRecord(end.event, stream_));
        CUDA_CHECK(op, cudaEventSynchronize(end.event));
        float milliseconds = 0.0f;
        CUDA_CHECK(op, cudaEventElapsedTime(&milliseconds, begin.event, end.event));
        return milliseconds / static_cast<float>(runs);
    };

    std::vector<std::pair<float, std::size_t>> ranking;
    float best = 0.0f;
    for (std::size_t i = 0; i < proposals.size(); ++i) {
        const float first = time(i, 1);  // loads the kernel
        if (first < 0.0f) continue;
        float brief = time(i, 1);
        if (brief < 0.0f) continue;
        if (best == 0.0f || brief < kHopeless * best) brief = std::min(brief, time(i, kBriefRuns));
        best = best == 0.0f ? brief : std::min(best, brief);
        ranking.emplace_back(brief, i);
    }
    if (ranking.empty()) return 0;
    std::sort(ranking.begin(), ranking.end());
    // The library's own first choice takes part in any case.
    std::vector<std::size_t> finalists;
    for (std::size_t i = 0; i < std::min(kFinalists, ranking.size()); ++i) finalists.push_back(ranking[i].second);
    if (std::find(finalists.begin(), finalists.end(), 0) == finalists.end()) {
        const auto own = std::find_if(ranking.begin(), ranking.end(), [](const auto& ranked) { return ranked.second == 0; });
        if (own != ranking.end()) finalists.push_back(0);
    }
    std::vector<float> total(finalists.size(), 0.0f);
    for (int turn = 0; turn < kTurns; ++turn) {
        for (std::size_t i = 0; i < finalists.size(); ++i) total[i] += time(finalists[i], kLongRuns);
    }
    const auto winner = static_cast<std::size_t>(std::min_element(total.begin(), total.end()) - total.begin());
    const auto own = static_cast<std::size_t>(std::find(finalists.begin(), finalists.end(), 0) - finalists.begin());
    std::string text = std::string(op) + " " + std::to_string(p.m) + "x" + std::to_string(p.n) + "x" + std::to_string(p.k);
    text += std::string(p.out.dtype == DType::Float32 ? " to float32" : "") + (p.beta != 0.0f ? " +=" : "");
    timed_.push_back({text, 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k),
                      own < finalists.size() ? static_cast<double>(total[own]) / kTurns : 0.0, static_cast<double>(total[winner]) / kTurns,
                      proposals.size(), finalists[winner]});
    return finalists[winner];
}

std::string Linear::choices() const {
    std::string result;
    for (const Timed& timed : timed_) {
        const auto rate = [&](double ms) { return ms > 0.0 ? timed.flops / ms * 1e-9 : 0.0; };
        char text[256];
        std::snprintf(text, sizeof text, "%-60s %9.1f us %7.1f TFLOP/s  (proposal %zu of %zu; the first: %.1f TFLOP/s)\n",
                      timed.product.c_str(), 1e3 * timed.best_ms, rate(timed.best_ms), timed.rank + 1, timed.proposals,
                      rate(timed.first_ms));
        result += text;
    }
    return result;
}

}  // namespace surogate::cuda
