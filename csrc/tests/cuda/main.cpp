#include <cstdio>
#include <exception>
#include <string>

#include "tests/cuda/device.h"
#include "tests/harness.h"

// surogate_cuda_tests [name ...]: every operation of the CUDA back-end beside the CPU's, or beside a formula, on random inputs. Prints the
// error of each comparison and its bound. Without arguments all tests; else those whose names contain one of the arguments.

namespace surogate::testing {

std::vector<Test>& registry() {
    static std::vector<Test> tests;
    return tests;
}

}  // namespace surogate::testing

int main(int count, char** arguments) {
    using namespace surogate::testing;
    int ran = 0, failed = 0;
    for (const Test& test : registry()) {
        bool wanted = count == 1;
        for (int i = 1; i < count; ++i) wanted = wanted || std::string(test.name).find(arguments[i]) != std::string::npos;
        if (!wanted) continue;
        ++ran;
        const int before = failures();
        try {
            test.run();
        } catch (const std::exception& error) {
            ++failures();
            std::printf("FAILED  %s: %s\n", test.name, error.what());
        }
        std::printf("%s %s\n", failures() == before ? "ok     " : "FAILED ", test.name);
        std::fflush(stdout);
        failed += failures() == before ? 0 : 1;
    }
    std::printf("%d tests, %d failed\n", ran, failed);
    return ran > 0 && failed == 0 ? 0 : 1;
}
