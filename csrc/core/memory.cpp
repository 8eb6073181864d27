#include "core/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "core/error.h"

namespace surogate {

namespace {

constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;

/// The number in a file of one number, or `missing` (also for "max").
std::size_t read_number(const std::string& path, std::size_t missing) {
    std::ifstream file(path);
    std::size_t value = 0;
    return file >> value ? value : missing;
}

/// What the control group at `directory` still allows. Cached files count as used there, but give way when memory is asked for.
std::size_t cgroup_available(const std::string& directory) {
    constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
    const std::size_t limit = read_number(directory + "/memory.max", unlimited);
    if (limit == unlimited) return unlimited;
    std::size_t used = read_number(directory + "/memory.current", 0);
    std::ifstream statistics(directory + "/memory.stat");
    std::string key;
    std::size_t value = 0;
    while (statistics >> key >> value) {
        if (key == "inactive_file") used -= std::min(used, value);
    }
    return limit - std::min(limit, used);
}

}  // namespace

void* allocate_aligned(std::size_t bytes) {
    const std::size_t extra = kAlignment + sizeof(void*);
    void* raw = nullptr;
    // calloc takes fresh pages from the system for large blocks, so nothing is touched before its first use.
    if (bytes <= std::numeric_limits<std::size_t>::max() - extra) raw = std::calloc(1, bytes + extra);
    if (raw == nullptr) throw OutOfMemory("cannot allocate " + std::to_string(bytes) + " bytes of host memory");
    const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(raw) + sizeof(void*);
    const std::uintptr_t aligned = (start + kAlignment - 1) / kAlignment * kAlignment;
    reinterpret_cast<void**>(aligned)[-1] = raw;
#ifdef MADV_HUGEPAGE
    const std::uintptr_t first = (aligned + kHugePage - 1) / kHugePage * kHugePage;
    const std::uintptr_t last = (aligned + bytes) / kHugePage * kHugePage;
    if (last > first) {
        // Only advice: without it the memory is the same, merely slower to walk.
        (void)::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
    }
#endif
    return reinterpret_cast<void*>(aligned);
}

void release_aligned(void* data) noexcept {
    if (data != nullptr) std::free(static_cast<void**>(data)[-1]);
}

std::size_t available_host_memory() {
    std::size_t available = std::numeric_limits<std::size_t>::max();
    std::ifstream meminfo("/proc/meminfo");
    std::string line;
    while (std::getline(meminfo, line)) {
        std::istringstream fields(line);
        std::string key;
        std::size_t kibibytes = 0;
        if (fields >> key >> kibibytes && key == "MemAvailable:") available = kibibytes * 1024;
    }
    // A limit may sit at any level between the process's group and the root; "0::/path" is the line of the unified hierarchy.
    std::ifstream groups("/proc/self/cgroup");
    while (std::getline(groups, line)) {
        if (line.rfind("0::", 0) != 0) continue;
        std::string path = line.substr(3);
        while (true) {
            available = std::min(available, cgroup_available("/sys/fs/cgroup" + path));
            if (path.empty()) break;
            path.erase(path.rfind('/'));
        }
    }
    return available;
}

void* AlignedBuffer::reserve(std::size_t bytes) {
    if (bytes > capacity_) {
        release_aligned(std::exchange(data_, nullptr));
        capacity_ = 0;
        data_ = allocate_aligned(bytes);
        capacity_ = bytes;
    }
    return data_;
}

}  // namespace surogate
