#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace surogate {

/// Thrown when a plan does not fit into memory; `what()` itemises what each part costs. Python sees it as MemoryError.
class OutOfMemory : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

/// Builds one message from its parts and throws it as `std::invalid_argument`, which Python sees as ValueError.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
}

/// Checks an argument: `require(ok, "attention_forward", "out", expected, got)` names the operation, what was expected and what came.
template <typename Expected, typename Got>
void require(bool ok, const char* op, const char* name, const Expected& expected, const Got& got) {
    if (!ok) fail(op, ": ", name, ": expected ", expected, ", got ", got);
}

}  // namespace surogate
