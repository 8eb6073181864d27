#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/learner.h"

namespace surogate {

/// Memory that is planned as a whole before any of it is taken. The same layout code runs twice: first to measure (every view is without
/// data), then, after `allocate`, to get views of the buffers, one buffer per item.
class Arena {
   public:
    Arena() = default;
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    /// Opens the next item; what is taken from here on counts towards it.
    void item(const std::string& name);
    Tensor take(std::int64_t rows, std::int64_t columns, DType dtype = DType::Float32);
    Tensor take_vector(std::int64_t size, DType dtype = DType::Float32);

    /// The items measured, those without a byte left out.
    std::vector<MemoryItem> items() const;

    /// Takes what was measured; the layout then starts again at the first item.
    void allocate(Backend& backend);

   private:
    struct Item {
        std::string name;
        std::size_t bytes = 0;
        void* data = nullptr;
    };
    void* place(std::size_t bytes);

    Backend* backend_ = nullptr;
    std::vector<Item> items_;
    std::size_t next_ = 0;  // the item after the present one
    std::size_t used_ = 0;  // bytes of the present one
};

/// Throws OutOfMemory with every item if their sum exceeds `limit` bytes (0: what the back-end has free). `advice` says what to change.
void require_memory(const std::vector<MemoryItem>& items, std::size_t limit, const Backend& backend, const std::string& advice);

/// "1.25 GiB", "3.5 MiB"
std::string human_bytes(std::size_t bytes);

}  // namespace surogate
