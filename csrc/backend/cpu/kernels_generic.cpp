#define SUROGATE_ISA generic
#define SUROGATE_NAME "generic"
#define SUROGATE_LANES 4

#include "backend/cpu/kernels_impl.h"
