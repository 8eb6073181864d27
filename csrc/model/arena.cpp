#include "model/arena.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "core/error.h"

namespace surogate {

namespace {

constexpr std::size_t kPadding = 256;  // bytes: a view starts on a line of any cache and is fit for the widest loads

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

void require_memory(const std::vector<MemoryItem>& items, std::size_t limit, const Backend& backend, const std::string& advice) {
    std::size_t total = 0;
    for (const MemoryItem& item : items) total += item.bytes;
    const std::size_t available = limit > 0 ? limit : backend.available_memory();
    if (total <= available) return;
    std::ostringstream message;
    message << "not enough memory: " << human_bytes(total) << " needed, " << human_bytes(available)
            << (limit > 0 ? " allowed by memory_limit" : " available") << ". Needed for:";
    for (const MemoryItem& item : items) message << "\n  " << item.name << ": " << human_bytes(item.bytes);
    message << "\n" << advice;
    throw OutOfMemory(message.str());
}

}  // namespace surogate
