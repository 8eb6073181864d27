#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

/// A small test harness: TEST(name) { CHECK(...); ... } in a file test_<area>.cpp; `surogate_tests test_<area> ...` runs the named files,
/// without arguments all of them. A failed check ends its test.
namespace surogate::testing {

struct Test {
    const char* file;
    const char* name;
    void (*run)();
};

std::vector<Test>& registry();

/// The set of CPU kernels that the tests of operations use in this round (see backend/cpu/kernels.h).
const std::string& kernel_set_name();

struct Register {
    Register(const char* file, const char* name, void (*run)()) { registry().push_back({file, name, run}); }
};

class Failure : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void report(const char* file, int line, const Parts&... parts) {
    std::ostringstream message;
    message << file << ":" << line << ": ";
    (message << ... << parts);
    throw Failure(message.str());
}

}  // namespace surogate::testing

#define TEST(name)                                                                             \
    static void test_##name();                                                                 \
    static const ::surogate::testing::Register register_##name(__FILE__, #name, &test_##name); \
    static void test_##name()

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) ::surogate::testing::report(__FILE__, __LINE__, "failed: ", #condition); \
    } while (false)

#define CHECK_EQ(got, expected)                                                                                        \
    do {                                                                                                               \
        const auto got_value = (got);                                                                                  \
        const auto expected_value = (expected);                                                                        \
        if (!(got_value == expected_value))                                                                            \
            ::surogate::testing::report(__FILE__, __LINE__, #got, ": expected ", expected_value, ", got ", got_value); \
    } while (false)

#define CHECK_NEAR(got, expected, tolerance)                                                                                      \
    do {                                                                                                                          \
        const double got_value = static_cast<double>(got);                                                                        \
        const double expected_value = static_cast<double>(expected);                                                              \
        if (!(std::abs(got_value - expected_value) <= static_cast<double>(tolerance)))                                            \
            ::surogate::testing::report(__FILE__, __LINE__, #got, ": expected ", expected_value, " within ", tolerance, ", got ", \
                                        got_value);                                                                               \
    } while (false)

/// The statement must throw a std::exception with `part` in its message.
#define CHECK_THROWS(statement, part)                                                                                       \
    do {                                                                                                                    \
        std::string message_of_throw;                                                                                       \
        bool thrown = false;                                                                                                \
        try {                                                                                                               \
            statement;                                                                                                      \
        } catch (const std::exception& error) {                                                                             \
            thrown = true;                                                                                                  \
            message_of_throw = error.what();                                                                                \
        }                                                                                                                   \
        if (!thrown) ::surogate::testing::report(__FILE__, __LINE__, #statement, ": expected an exception, got none");      \
        if (message_of_throw.find(part) == std::string::npos)                                                               \
            ::surogate::testing::report(__FILE__, __LINE__, #statement, ": expected a message with \"", part, "\", got \"", \
                                        message_of_throw, "\"");                                                            \
    } while (false)
