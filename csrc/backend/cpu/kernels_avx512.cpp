#define SUROGATE_ISA avx512
#define SUROGATE_NAME "avx512"
#define SUROGATE_LANES 16

#include "backend/cpu/attention_kernels_impl.h"
#include "backend/cpu/gemm_kernels_impl.h"
#include "backend/cpu/kernels_impl.h"
