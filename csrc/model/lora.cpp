#include "model/lora.h"

#include <vector>

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

namespace {

/// A view that takes in what lies right of it as well.
Tensor widen(const Tensor& t, std::int64_t columns) { return t.column_range(0, t.columns + columns); }

/// low = x A^T of all adapters of the group
void narrow(Backend& backend, const AdapterGroup& group, const Tensor& low, const Tensor& x) {
    backend.linear_forward(low.column_range(0, group.a.rows), x, group.a, {}, 1.0f, 0.0f);
}

/// d_low = scale * dy B of all adapters of the group, whose columns of d_low are returned; and the gradients of B +=.
Tensor narrow_gradient(Backend& backend, const AdapterGroup& group, const AdapterGroup& gradients, const Tensor& d_low, const Tensor& dy,
                       const Tensor& low, float scale) {
    const Tensor joined = d_low.column_range(0, group.a.rows);
    for (std::int64_t i = 0; i < group.count; ++i) {
        const auto& member = group.members[static_cast<std::size_t>(i)];
        const std::int64_t rank = member.b.columns;
        const Tensor dy_part = dy.column_range(member.first, member.b.rows);
        backend.linear_backward_input(joined.column_range(i * rank, rank), dy_part, member.b, scale, 0.0f);
        backend.linear_backward_weight(gradients.members[static_cast<std::size_t>(i)].b, dy_part, low.column_range(i * rank, rank), scale);
    }
    return joined;
}

}  // namespace

void projection_forward(Backend& backend, const Projection& projection, const Tensor& y, const Tensor& low, const Tensor& x,
                        const Tensor& residual, float scale) {
    const auto multiply = [&](const Tensor& input, const Tensor& weight) {
        if (y.empty()) return;
        if (residual.empty()) {
            backend.linear_forward(y, input, weight, projection.bias, 1.0f, 0.0f);
        } else {
            backend.linear_add_forward(y, residual, input, weight, projection.bias);
        }
    };
    const Border& border = projection.border;
    const AdapterGroup& group = projection.adapters;
    if (border.present()) {
        backend.linear_forward(x.column_range(x.columns, border.width), x, border.a(), {}, scale, 0.0f);
        multiply(widen(x, border.width), border.forward());
    } else if (group.count == 0) {
        multiply(x, projection.weight);
    } else {
        narrow(backend, group, low, x);
        if (y.empty()) return;
        std::vector<AdapterOutput> adapters;
        for (std::int64_t i = 0; i < group.count; ++i) {
            const auto& member = group.members[static_cast<std::size_t>(i)];
            adapters.push_back({low.column_range(i * member.b.columns, member.b.columns), member.b, member.first});
        }
        backend.linear_adapted_forward(y, residual, x, projection.weight, projection.bias, adapters, scale);
    }
}

void projection_backward(Backend& backend, const Projection& projection, const AdapterGroup& gradients, const Tensor& dx,
                         const Tensor& d_low, const Tensor& dy, const Tensor& x, const Tensor& low, float scale) {
    const Border& border = projection.border;
    const AdapterGroup& group = projection.adapters;
    if (!border.present()) {
        if (group.count == 0) {
            if (!dx.empty()) backend.linear_backward_input(dx, dy, projection.weight, 1.0f, 0.0f);
            return;
        }
        const Tensor joined = narrow_gradient(backend, group, gradients, d_low, dy, low, scale);
        if (!x.empty()) projection_backward_a(backend, projection, gradients, d_low, dy, x);
        if (!dx.empty()) backend.linear_adapted_backward_input(dx, dy, projection.weight, joined, group.a);
        return;
    }
    const Tensor beside = dy.column_range(dy.columns, border.width);
    backend.linear_backward_input(beside, dy, border.b(), scale, 0.0f);
    for (std::int64_t i = 0; i < gradients.count; ++i) {
        const Tensor& db = gradients.members[static_cast<std::size_t>(i)].b;
        const Tensor dy_part = dy.column_range(gradients.members[static_cast<std::size_t>(i)].first, db.rows);
        backend.linear_backward_weight(db, dy_part, low.column_range(i * db.columns, db.columns), 1.0f);
    }
    if (!x.empty()) projection_backward_a(backend, projection, gradients, d_low, dy, x);
    if (!dx.empty()) backend.linear_backward_input(dx, widen(dy, border.width), border.backward(), 1.0f, 0.0f);
}

void projection_backward_a(Backend& backend, const Projection& projection, const AdapterGroup& gradients, const Tensor& d_low,
                           const Tensor& dy, const Tensor& x) {
    if (gradients.count == 0) return;
    const std::int64_t ranks = gradients.a.rows;
    const bool border = projection.border.present();
    backend.linear_backward_weight(gradients.a, border ? dy.column_range(dy.columns, ranks) : d_low.column_range(0, ranks), x, 1.0f);
}

void adapter_forward(Backend& backend, const AdapterGroup& group, const Tensor& y, const Tensor& low, const Tensor& x, float scale) {
    if (group.count == 0) return;
    narrow(backend, group, low, x);
    for (std::int64_t i = 0; i < group.count; ++i) {
        const auto& member = group.members[static_cast<std::size_t>(i)];
        const std::int64_t rank = member.b.columns;
        backend.linear_forward(y.column_range(member.first, member.b.rows), low.column_range(i * rank, rank), member.b, {}, scale, 1.0f);
    }
}

void adapter_backward(Backend& backend, const AdapterGroup& group, const AdapterGroup& gradients, const Tensor& dx, const Tensor& d_low,
                      const Tensor& dy, const Tensor& x, const Tensor& low, float scale) {
    if (group.count == 0) return;
    const Tensor joined = narrow_gradient(backend, group, gradients, d_low, dy, low, scale);
    backend.linear_backward_weight(gradients.a, joined, x, 1.0f);
    if (!dx.empty()) backend.linear_backward_input(dx, joined, group.a, 1.0f, 1.0f);
}

}  // namespace surogate
