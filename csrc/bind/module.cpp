#include "backend/backend.h"
#include "backend/cpu/gemm.h"
#include "bind/bind.h"
#include "core/error.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
    module.doc() = "The native core. Arrays are C-contiguous numpy arrays; what a call returns is an owned copy; calls release the GIL.";

    py::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const surogate::OutOfMemory& e) {
            PyErr_SetString(PyExc_MemoryError, e.what());
        }
    });

    surogate::bind_learner(module);
    surogate::bind_generator(module);
    module.def(
        "cuda_available", [] { return surogate::cuda_unavailable_reason().empty(); }, "Whether a learner can be made with device='cuda'.");
    module.def("cuda_unavailable_reason", &surogate::cuda_unavailable_reason, "Why not, and what to do; empty if it can.");
    module.def("blas_name", &surogate::blas_name, "The BLAS that does the matrix products, with its version where it tells one.");
}
