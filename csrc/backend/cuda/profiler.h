#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace surogate::cuda {

/// Time on the stream of each operation, by pairs of events, and an NVTX range around each for Nsight.
class Profiler {
   public:
    explicit Profiler(cudaStream_t stream) : stream_(stream) {}
    ~Profiler();
    Profiler(const Profiler&) = delete;
    Profiler& operator=(const Profiler&) = delete;

    /// Only the outermost operation counts; returns whether this is one, and end() is due.
    bool begin(const std::string& name);
    void end();
    /// Waits for what is in flight. Columns: operation, calls, median, calls times median, share of that: a first call that looks for the
    /// fastest algorithm, or compiles one, would say more of itself than of the others.
    std::string table();

   private:
    struct Pair {
        std::string name;
        cudaEvent_t begin, end;
    };
    cudaEvent_t event();
    void collect();

    cudaStream_t stream_;
    bool open_ = false;
    std::vector<Pair> pending_;
    std::vector<cudaEvent_t> spare_;
    std::map<std::string, std::vector<float>> times_;  // milliseconds of each call
};

}  // namespace surogate::cuda
