#define SUROGATE_ISA avx2
#define SUROGATE_NAME "avx2"
#define SUROGATE_LANES 8

#include "backend/cpu/kernels_impl.h"
