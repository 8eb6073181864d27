#include <cstdio>
#include <exception>
#include <string>

#include "backend/cpu/kernels.h"
#include "tests/harness.h"

namespace surogate::testing {

std::vector<Test>& registry() {
    static std::vector<Test> tests;
    return tests;
}

namespace {

std::string& current_set() {
    static std::string name;
    return name;
}

std::string stem(const std::string& path) {
    const std::size_t slash = path.find_last_of('/');
    const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
    return name.substr(0, name.find_last_of('.'));
}

}  // namespace

const std::string& kernel_set_name() { return current_set(); }

}  // namespace surogate::testing

int main(int count, char** arguments) {
    using namespace surogate::testing;
    int ran = 0, failed = 0;
    for (const char* set : {"generic", "avx2", "avx512"}) {
        if (surogate::find_kernels(set) == nullptr) continue;
        current_set() = set;
        for (const Test& test : registry()) {
            bool wanted = count == 1;
            for (int i = 1; i < count; ++i) wanted = wanted || stem(test.file) == arguments[i];
            if (!wanted) continue;
            ++ran;
            try {
                test.run();
            } catch (const std::exception& error) {
                ++failed;
                std::fprintf(stderr, "FAILED %s.%s (%s kernels)\n  %s\n", stem(test.file).c_str(), test.name, set, error.what());
            }
        }
    }
    std::printf("%d tests, %d failed\n", ran, failed);
    // A name that selects nothing is a mistake in the call, not a success.
    return ran > 0 && failed == 0 ? 0 : 1;
}
