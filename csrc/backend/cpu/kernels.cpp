#include "backend/cpu/kernels.h"

#include <cstring>
#include <initializer_list>

#include "backend/cpu/attention_kernels.h"
#include "backend/cpu/packed_gemm.h"

namespace surogate {

namespace generic {
extern const Kernels kernels;
extern const GemmKernels gemm_kernels;
extern const AttentionKernels attention_kernels;
}  // namespace generic
#ifdef SUROGATE_X86_KERNELS
namespace avx2 {
extern const Kernels kernels;
extern const GemmKernels gemm_kernels;
extern const AttentionKernels attention_kernels;
}  // namespace avx2
namespace avx512 {
extern const Kernels kernels;
extern const GemmKernels gemm_kernels;
extern const AttentionKernels attention_kernels;
}  // namespace avx512
#endif

namespace {

struct Set {
    const Kernels* kernels = nullptr;
    const GemmKernels* gemm = nullptr;
    const AttentionKernels* attention = nullptr;
};

Set find(const char* name) {
    if (std::strcmp(name, "generic") == 0) return {&generic::kernels, &generic::gemm_kernels, &generic::attention_kernels};
#ifdef SUROGATE_X86_KERNELS
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (std::strcmp(name, "avx2") == 0 && fma) return {&avx2::kernels, &avx2::gemm_kernels, &avx2::attention_kernels};
    const bool wide = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (std::strcmp(name, "avx512") == 0 && wide) return {&avx512::kernels, &avx512::gemm_kernels, &avx512::attention_kernels};
#endif
    return {};
}

}  // namespace

const Kernels* find_kernels(const char* name) { return find(name).kernels; }

const GemmKernels* find_gemm_kernels(const char* name) { return find(name).gemm; }

const AttentionKernels* find_attention_kernels(const char* name) { return find(name).attention; }

const Kernels& best_kernels() {
    for (const char* name : {"avx512", "avx2"}) {
        if (const Kernels* found = find_kernels(name)) return *found;
    }
    return generic::kernels;
}

}  // namespace surogate
