#define SUROGATE_ISA generic
#define SUROGATE_NAME "generic"
#define SUROGATE_LANES 4

#include "backend/cpu/attention_kernels_impl.h"
#include "backend/cpu/gemm_kernels_impl.h"
#include "backend/cpu/kernels_impl.h"
