#define SUROGATE_ISA avx2
#define SUROGATE_NAME "avx2"
#define SUROGATE_LANES 8

#include "backend/cpu/attention_kernels_impl.h"
#include "backend/cpu/gemm_kernels_impl.h"
#include "backend/cpu/kernels_impl.h"
