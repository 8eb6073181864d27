#include "model/transfer.h"

#include <algorithm>
#include <vector>

#include "core/bfloat16.h"
#include "core/error.h"

namespace surogate {

namespace {

/// Calls body(part of `tensor`, its first element in the dense order, room for it) over ranges of rows, so that the copy that conversion
/// needs stays small beside the tensor.
template <typename Body>
void over_parts(const char* op, const Tensor& tensor, const Body& body) {
    constexpr std::int64_t kElements = 1 << 23;
    require(tensor.dtype == DType::BFloat16, op, "tensor", "float32 or bfloat16", tensor);
    const std::int64_t rows = std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, tensor.columns));
    std::vector<std::uint16_t> room(static_cast<std::size_t>(std::min(rows, tensor.rows) * tensor.columns));
    for (std::int64_t first = 0; first < tensor.rows; first += rows) {
        body(tensor.row_range(first, std::min(rows, tensor.rows - first)), first * tensor.columns, room.data());
    }
}

}  // namespace

void upload_floats(Backend& backend, const Tensor& out, const float* values) {
    if (out.dtype == DType::Float32) {
        backend.upload(out, values);
        return;
    }
    over_parts("upload", out, [&](const Tensor& part, std::int64_t first, std::uint16_t* room) {
        std::transform(values + first, values + first + part.size(), room, to_bfloat16);
        backend.upload(part, room);
    });
}

void download_floats(Backend& backend, float* values, const Tensor& in) {
    if (in.dtype == DType::Float32) {
        backend.download(values, in);
        return;
    }
    over_parts("download", in, [&](const Tensor& part, std::int64_t first, std::uint16_t* room) {
        backend.download(room, part);
        std::transform(room, room + part.size(), values + first, from_bfloat16);
    });
}

}  // namespace surogate
