#include "model/lora.h"

namespace surogate {

AdapterGroup::AdapterGroup(std::initializer_list<Site> sites) {
    for (const Site& site : sites) {
        if (!site.adapter.present()) continue;
        if (count == 0) {
            a = site.adapter.a;
        } else {
            a.rows += site.adapter.a.rows;
        }
        members[static_cast<std::size_t>(count++)] = {site.adapter.b, site.first};
    }
}

void adapter_forward(Backend& backend, const AdapterGroup& group, const Tensor& y, const Tensor& low, const Tensor& x, float scale) {
    if (group.count == 0) return;
    backend.linear_forward(low, x, group.a, {}, 1.0f, 0.0f);
    for (std::int64_t i = 0; i < group.count; ++i) {
        const auto& member = group.members[static_cast<std::size_t>(i)];
        const std::int64_t rank = member.b.columns;
        if (y.empty()) continue;
        backend.linear_forward(y.column_range(member.first, member.b.rows), low.column_range(i * rank, rank), member.b, {}, scale, 1.0f);
    }
}

void adapter_backward(Backend& backend, const AdapterGroup& group, const AdapterGroup& gradients, const Tensor& dx, const Tensor& d_low,
                      const Tensor& dy, const Tensor& x, const Tensor& low, float scale) {
    if (group.count == 0) return;
    const Tensor joined = d_low.column_range(0, low.columns);
    for (std::int64_t i = 0; i < group.count; ++i) {
        const auto& member = group.members[static_cast<std::size_t>(i)];
        const std::int64_t rank = member.b.columns;
        const Tensor dy_part = dy.column_range(member.first, member.b.rows);
        backend.linear_backward_input(joined.column_range(i * rank, rank), dy_part, member.b, scale, 0.0f);
        backend.linear_backward_weight(gradients.members[static_cast<std::size_t>(i)].b, dy_part, low.column_range(i * rank, rank), scale);
    }
    backend.linear_backward_weight(gradients.a, joined, x, 1.0f);
    if (!dx.empty()) backend.linear_backward_input(dx, joined, group.a, 1.0f, 1.0f);
}

}  // namespace surogate
