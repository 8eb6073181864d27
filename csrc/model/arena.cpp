#include "model/arena.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/error.h"

namespace surogate {

namespace {

constexpr std::size_t kPadding = 64;  // bytes: a view starts on a cache line

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

Arena::~Arena() {
    for (const Item& item : items_) {
        if (item.data != nullptr) backend_->release(item.data);
    }
}

void Arena::item(const std::string& name) {
    if (backend_ == nullptr) items_.push_back({name, 0, nullptr});
    ++next_;
    used_ = 0;
}

void* Arena::place(std::size_t bytes) {
    const std::size_t padded = (bytes + kPadding - 1) / kPadding * kPadding;
    Item& item = items_[next_ - 1];
    const std::size_t offset = used_;
    used_ += padded;
    if (backend_ == nullptr) {
        item.bytes = used_;
        return nullptr;
    }
    if (used_ > item.bytes) throw std::logic_error("Arena: the second layout takes more than was measured for " + item.name);
    return bytes == 0 ? nullptr : static_cast<char*>(item.data) + offset;
}

Tensor Arena::take(std::int64_t rows, std::int64_t columns, DType dtype) {
    const Device device = backend_ == nullptr ? Device{} : backend_->device();
    return matrix(place(static_cast<std::size_t>(rows * columns) * size_of(dtype)), rows, columns, dtype, device);
}

Tensor Arena::take_vector(std::int64_t size, DType dtype) { return take(1, size, dtype); }

std::vector<MemoryItem> Arena::items() const {
    std::vector<MemoryItem> result;
    for (const Item& item : items_) {
        if (item.bytes > 0) result.push_back({item.name, item.bytes});
    }
    return result;
}

void Arena::allocate(Backend& backend) {
    backend_ = &backend;
    for (Item& item : items_) {
        if (item.bytes > 0) item.data = backend.allocate(item.bytes);
    }
    next_ = 0;
}

std::string human_bytes(std::size_t bytes) {
    const double mebibytes = static_cast<double>(bytes) / (1024.0 * 1024.0);
    char text[32];
    std::snprintf(text, sizeof text, mebibytes >= 1024.0 ? "%.2f GiB" : "%.2f MiB", mebibytes >= 1024.0 ? mebibytes / 1024.0 : mebibytes);
    return text;
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

void require_memory(const std::vector<MemoryItem>& items, std::size_t limit, const std::string& advice) {
    std::size_t total = 0;
    for (const MemoryItem& item : items) total += item.bytes;
    const std::size_t available = limit > 0 ? limit : available_host_memory();
    if (total <= available) return;
    std::ostringstream message;
    message << "not enough memory: " << human_bytes(total) << " needed, " << human_bytes(available)
            << (limit > 0 ? " allowed by memory_limit" : " available") << ". Needed for:";
    for (const MemoryItem& item : items) message << "\n  " << item.name << ": " << human_bytes(item.bytes);
    message << "\n" << advice;
    throw OutOfMemory(message.str());
}

}  // namespace surogate
