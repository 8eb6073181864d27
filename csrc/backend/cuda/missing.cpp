#include "backend/backend.h"
#include "core/error.h"

namespace surogate {

std::string cuda_unavailable_reason() {
    return "this build has no CUDA back-end; build again with SUROGATE_CUDA=ON (a CUDA toolkit, cuBLAS, cuDNN and the package "
           "nvidia-cudnn-frontend are needed), or use device: cpu";
}

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions&) { fail("device: ", cuda_unavailable_reason()); }

}  // namespace surogate
