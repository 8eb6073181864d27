#include "model/pass_buffers.h"

#include <algorithm>

namespace surogate {

namespace {

Tensor part(const Tensor& buffer, std::int64_t first, std::int64_t size) {
    Tensor view = buffer.column_range(first, size);
    view.stride = size;
    return view;
}

/// Collects sections on the host and says where each will lie.
class Sections {
   public:
    /// Returns the first element of the section.
    std::int64_t add(const std::int32_t* values, std::int64_t count) {
        const auto first = static_cast<std::int64_t>(values_.size());
        values_.insert(values_.end(), values, values + count);
        values_.insert(values_.end(), static_cast<std::size_t>(section_size(count) - count), 0);
        return first;
    }
    std::int64_t add(const std::vector<std::int32_t>& values) { return add(values.data(), static_cast<std::int64_t>(values.size())); }

    void upload(Backend& backend, const Tensor& buffer) const {
        backend.upload(part(buffer, 0, static_cast<std::int64_t>(values_.size())), values_.data());
    }

   private:
    std::vector<std::int32_t> values_;
};

}  // namespace

PassInputs::PassInputs(Backend& backend, const Tensor& buffer, const std::int32_t* tokens_in, const std::int32_t* positions_in,
                       std::int64_t count, const std::vector<std::int32_t>& index_in, const std::vector<std::int32_t>& targets_in) {
    Sections sections;
    const auto rows = static_cast<std::int64_t>(index_in.size());
    tokens = part(buffer, sections.add(tokens_in, count), count);
    positions = part(buffer, sections.add(positions_in, count), count);
    const std::int64_t first = sections.add(index_in);
    rows_ = part(buffer, first, 2 * section_size(rows));
    index = part(rows_, 0, rows);
    targets = part(buffer, sections.add(targets_in), rows);
    sections.upload(backend, buffer);
}

void PassInputs::replace_rows(Backend& backend, const std::vector<std::int32_t>& index_in, const std::vector<std::int32_t>& targets_in) {
    Sections sections;
    const auto rows = static_cast<std::int64_t>(index_in.size());
    index = part(rows_, sections.add(index_in), rows);
    targets = part(rows_, sections.add(targets_in), rows);
    sections.upload(backend, rows_);
}

RowValues::RowValues(const Tensor& buffer, std::int64_t n) : buffer_(buffer), n_(n), stride_(section_size(n)) {
    std::int64_t first = 0;
    // What a forward pass brings back, then what a backward pass takes there.
    for (Tensor* values : {&logp, &lse, &entropy, &d_logp, &d_entropy}) *values = section(first++, n);
}

Tensor RowValues::section(std::int64_t first, std::int64_t size) const { return part(buffer_, first * stride_, size); }

HostValues RowValues::download(Backend& backend, bool with_entropy) const {
    const std::int64_t size = (with_entropy ? 2 : 1) * stride_ + n_;
    std::vector<float> all(static_cast<std::size_t>(size));
    backend.download(all.data(), section(0, size));
    const auto values = [&](std::int64_t index) {
        const auto begin = all.begin() + index * stride_;
        return std::vector<float>(begin, begin + n_);
    };
    return {values(0), values(1), with_entropy ? values(2) : std::vector<float>{}};
}

void RowValues::put(Backend& backend, std::int64_t first, std::initializer_list<const std::vector<float>*> parts) const {
    std::vector<float> all(parts.size() * static_cast<std::size_t>(stride_));
    auto to = all.begin();
    for (const std::vector<float>* values : parts) {
        std::copy(values->begin(), values->end(), to);
        to += stride_;
    }
    backend.upload(section(first, static_cast<std::int64_t>(all.size())), all.data());
}

void RowValues::upload_seeds(Backend& backend, const std::vector<float>& d_logp_in, const std::vector<float>& d_entropy_in) const {
    put(backend, 3, {&d_logp_in, &d_entropy_in});
}

void RowValues::upload(Backend& backend, const std::vector<float>& lse_in, const std::vector<float>& entropy_in,
                       const std::vector<float>& d_logp_in, const std::vector<float>& d_entropy_in) const {
    put(backend, 1, {&lse_in, &entropy_in, &d_logp_in, &d_entropy_in});
}

}  // namespace surogate
