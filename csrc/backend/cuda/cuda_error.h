#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace surogate {

/// A call of CUDA or one of its libraries that failed: which operation, which call, and the library's own reason.
class CudaError : public std::runtime_error {
   public:
    CudaError(const char* op, const std::string& call, const std::string& reason)
        : std::runtime_error(std::string(op) + ": " + call + " failed: " + reason) {}
};

inline void cuda_check(cudaError_t status, const char* op, const char* call) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // an error that is not sticky must not show up again in the next call
    throw CudaError(op, call, std::string(cudaGetErrorName(status)) + ", " + cudaGetErrorString(status));
}

}  // namespace surogate

#define CUDA_CHECK(op, call) ::surogate::cuda_check((call), op, #call)

/// After a launch: what was wrong with its configuration. What goes wrong while it runs shows at the next synchronisation.
#define CUDA_LAUNCHED(op) ::surogate::cuda_check(cudaGetLastError(), op, "kernel launch")
