#include "backend/cuda/profiler.h"

// Some packages of the toolkit come without NVTX; ranges are then left out.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define SUROGATE_NVTX
#endif

#include <algorithm>
#include <cstdio>

#include "backend/cuda/cuda_error.h"

namespace surogate::cuda {

namespace {
constexpr std::size_t kMostPending = 4096;
}

Profiler::~Profiler() {
    for (const Pair& pair : pending_) {
        cudaEventDestroy(pair.begin);
        cudaEventDestroy(pair.end);
    }
    for (const cudaEvent_t spare : spare_) cudaEventDestroy(spare);
}

cudaEvent_t Profiler::event() {
    cudaEvent_t result = nullptr;
    if (spare_.empty()) {
        CUDA_CHECK("profile", cudaEventCreate(&result));
    } else {
        result = spare_.back();
        spare_.pop_back();
    }
    return result;
}

bool Profiler::begin(const std::string& name) {
    if (open_) return false;
    if (pending_.size() >= kMostPending) collect();
#ifdef SUROGATE_NVTX
    nvtxRangePushA(name.c_str());
#endif
    open_ = true;
    pending_.push_back({name, event(), event()});
    cudaEventRecord(pending_.back().begin, stream_);
    return true;
}

void Profiler::end() {
    cudaEventRecord(pending_.back().end, stream_);
    open_ = false;
#ifdef SUROGATE_NVTX
    nvtxRangePop();
#endif
}

void Profiler::collect() {
    CUDA_CHECK("profile", cudaStreamSynchronize(stream_));
    for (const Pair& pair : pending_) {
        float milliseconds = 0.0f;
        CUDA_CHECK("profile", cudaEventElapsedTime(&milliseconds, pair.begin, pair.end));
        Total& total = totals_[pair.name];
        ++total.calls;
        total.milliseconds += static_cast<double>(milliseconds);
        spare_.push_back(pair.begin);
        spare_.push_back(pair.end);
    }
    pending_.clear();
}

std::string Profiler::table() {
    collect();
    std::vector<std::pair<std::string, Total>> lines(totals_.begin(), totals_.end());
    std::sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.second.milliseconds > b.second.milliseconds; });
    double sum = 0.0;
    for (const auto& [name, total] : lines) sum += total.milliseconds;
    char text[160];
    std::snprintf(text, sizeof text, "%-52s %9s %12s %10s %7s\n", "operation", "calls", "total ms", "mean us", "share");
    std::string result = text;
    for (const auto& [name, total] : lines) {
        std::snprintf(text, sizeof text, "%-52s %9ld %12.3f %10.1f %6.1f%%\n", name.c_str(), total.calls, total.milliseconds,
                      1e3 * total.milliseconds / static_cast<double>(total.calls), 100.0 * total.milliseconds / std::max(sum, 1e-9));
        result += text;
    }
    std::snprintf(text, sizeof text, "%-52s %9s %12.3f\n", "all", "", sum);
    return result + text;
}

}  // namespace surogate::cuda
