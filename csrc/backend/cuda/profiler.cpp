#include "backend/cuda/profiler.h"

// Some packages of the toolkit come without NVTX; ranges are then left out.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define SUROGATE_NVTX
#endif

#include <algorithm>
#include <cstddef>
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
        times_[pair.name].push_back(milliseconds);
        spare_.push_back(pair.begin);
        spare_.push_back(pair.end);
    }
    pending_.clear();
}

std::string Profiler::table() {
    collect();
    struct Line {
        const std::string* name;
        std::size_t calls;
        double median, total;  // milliseconds
    };
    std::vector<Line> lines;
    double sum = 0.0;
    for (auto& [name, times] : times_) {
        const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
        std::nth_element(times.begin(), middle, times.end());
        lines.push_back({&name, times.size(), *middle, *middle * static_cast<double>(times.size())});
        sum += lines.back().total;
    }
    std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.total > b.total; });
    char text[160];
    std::snprintf(text, sizeof text, "%-52s %9s %12s %12s %7s\n", "operation", "calls", "median us", "x calls ms", "share");
    std::string result = text;
    for (const Line& line : lines) {
        std::snprintf(text, sizeof text, "%-52s %9zu %12.1f %12.3f %6.1f%%\n", line.name->c_str(), line.calls, 1e3 * line.median,
                      line.total, 100.0 * line.total / std::max(sum, 1e-9));
        result += text;
    }
    std::snprintf(text, sizeof text, "%-52s %9s %12s %12.3f\n", "all", "", "", sum);
    return result + text;
}

}  // namespace surogate::cuda
