#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_error.h"

namespace surogate {

namespace {

// Scratch of attention and of partial sums grows with the batch, and cuDNN and the driver load code on first use.
constexpr std::size_t kReserve = std::size_t{1} << 30;

}  // namespace

std::size_t CudaBackend::available_memory() const {
    const char* op = "available_memory";
    CUDA_CHECK(op, cudaSetDevice(options_.device));
    std::size_t free = 0, total = 0;
    CUDA_CHECK(op, cudaMemGetInfo(&free, &total));
    return free > kReserve ? free - kReserve : 0;
}

std::string cuda_unavailable_reason() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count > 0) return {};
    cudaGetLastError();
    const std::string why = status == cudaSuccess ? "no CUDA device" : cudaGetErrorString(status);
    return "this machine has no NVIDIA GPU that can be used (" + why + "); check the driver with nvidia-smi, or use device: cpu";
}

}  // namespace surogate
