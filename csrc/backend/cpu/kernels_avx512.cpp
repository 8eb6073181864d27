#define SUROGATE_ISA avx512
#define SUROGATE_NAME "avx512"
#define SUROGATE_LANES 16

#include "backend/cpu/kernels_impl.h"
