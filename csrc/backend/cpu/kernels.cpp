#include "backend/cpu/kernels.h"

#include <cstring>
#include <initializer_list>

namespace surogate {

namespace generic {
extern const Kernels kernels;
}
#ifdef SUROGATE_X86_KERNELS
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

const Kernels* find_kernels(const char* name) {
    if (std::strcmp(name, "generic") == 0) return &generic::kernels;
#ifdef SUROGATE_X86_KERNELS
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (std::strcmp(name, "avx2") == 0 && fma) return &avx2::kernels;
    const bool wide = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (std::strcmp(name, "avx512") == 0 && wide) return &avx512::kernels;
#endif
    return nullptr;
}

const Kernels& best_kernels() {
    for (const char* name : {"avx512", "avx2"}) {
        if (const Kernels* found = find_kernels(name)) return *found;
    }
    return generic::kernels;
}

}  // namespace surogate
