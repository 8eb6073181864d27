#include "tests/reference.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

constexpr double kEps = 1e-5;

Exact rmsnorm(const Exact& x, const Exact& weight) {
    Exact y(x.rows(), x.columns());
    for (std::int64_t r = 0; r < x.rows(); ++r) {
        double squares = 0.0;
        for (std::int64_t c = 0; c < x.columns(); ++c) squares += x(r, c) * x(r, c);
        const double rstd = 1.0 / std::sqrt(squares / static_cast<double>(x.columns()) + kEps);
        for (std::int64_t c = 0; c < x.columns(); ++c) y(r, c) = x(r, c) * rstd * weight(0, c);
    }
    return y;
}

const std::pair<std::int64_t, std::int64_t> kSizes[] = {{1, 1}, {3, 7}, {5, 64}, {33, 100}, {70, 131}, {2, 576}};

}  // namespace

TEST(rmsnorm_forward) {
    for (const auto& [t, c] : kSizes) {
        Data x = Data::random(t, c, 1), weight = Data::dense(1, c, 2, 0.2, 1.0), y(t, c), rstd = Data(1, t, 0);
        backend().rmsnorm_forward(y.tensor(), rstd.tensor(), x.tensor(), weight.tensor(), static_cast<float>(kEps));
        check_close("y", y, rmsnorm(Exact(x), Exact(weight)));
        for (std::int64_t r = 0; r < t; ++r) {
            double squares = 0.0;
            for (std::int64_t j = 0; j < c; ++j) squares += static_cast<double>(x(r, j)) * static_cast<double>(x(r, j));
            const double expected = 1.0 / std::sqrt(squares / static_cast<double>(c) + kEps);
            CHECK_NEAR(rstd(0, r), expected, 1e-6 * expected);
        }
    }
}

TEST(add_rmsnorm_forward) {
    for (const auto& [t, c] : kSizes) {
        Data x = Data::random(t, c, 1), residual = Data::random(t, c, 2), weight = Data::dense(1, c, 3, 0.2, 1.0), y(t, c), sum(t, c),
             rstd(1, t, 0);
        const Exact total = plus(Exact(x), residual);
        backend().add_rmsnorm_forward(sum.tensor(), y.tensor(), rstd.tensor(), x.tensor(), residual.tensor(), weight.tensor(),
                                      static_cast<float>(kEps));
        check_close("sum", sum, total);
        check_close("y", y, rmsnorm(total, Exact(weight)));
        // The sum may replace the residual.
        Data again(t, c);
        backend().add_rmsnorm_forward(residual.tensor(), again.tensor(), rstd.tensor(), x.tensor(), residual.tensor(), weight.tensor(),
                                      static_cast<float>(kEps));
        CHECK(residual.same_bits(sum) && again.same_bits(y));
    }
}

TEST(rmsnorm_backward) {
    for (const auto& [t, c] : kSizes) {
        Data x = Data::random(t, c, 1), weight = Data::dense(1, c, 2, 0.2, 1.0), dy = Data::random(t, c, 3), y(t, c), rstd(1, t, 0);
        Data dx = Data::random(t, c, 4), dweight = Data::dense(1, c, 5);
        const Data dx_before = dx, dweight_before = dweight;
        backend().rmsnorm_forward(y.tensor(), rstd.tensor(), x.tensor(), weight.tensor(), static_cast<float>(kEps));
        backend().rmsnorm_backward(dx.tensor(), dweight.tensor(), dy.tensor(), x.tensor(), weight.tensor(), rstd.tensor());
        if (t * c < 4000) {
            const Exact numeric = numeric_gradient(Exact(x), Exact(dy), [&](const Exact& at) { return rmsnorm(at, Exact(weight)); });
            check_close("dx", dx, plus(numeric, dx_before), 3e-6);
        }
        const Exact numeric = numeric_gradient(Exact(weight), Exact(dy), [&](const Exact& at) { return rmsnorm(Exact(x), at); });
        check_close("dweight", dweight, plus(numeric, dweight_before), 3e-6);

        Data frozen = dx_before;
        backend().rmsnorm_backward(frozen.tensor(), {}, dy.tensor(), x.tensor(), weight.tensor(), rstd.tensor());
        CHECK(frozen.same_bits(dx));
    }
}

TEST(rmsnorm_bits_do_not_depend_on_threads) {
    check_any_thread_count([](CpuBackend& cpu) {
        const std::int64_t t = 301, c = 131;
        Data x = Data::random(t, c, 1), residual = Data::random(t, c, 2), weight = Data::dense(1, c, 3), dy = Data::random(t, c, 4);
        Data y(t, c), sum(t, c), rstd(1, t, 0), dx(t, c), dweight(1, c);
        cpu.add_rmsnorm_forward(sum.tensor(), y.tensor(), rstd.tensor(), x.tensor(), residual.tensor(), weight.tensor(), 1e-6f);
        cpu.rmsnorm_backward(dx.tensor(), dweight.tensor(), dy.tensor(), sum.tensor(), weight.tensor(), rstd.tensor());
        return std::vector<Data>{sum, y, rstd, dx, dweight};
    });
}

TEST(rmsnorm_takes_empty_inputs_and_refuses_wrong_shapes) {
    Data none(0, 8), rstd(1, 0, 0), weight = Data::dense(1, 8, 1), dweight = Data::dense(1, 8, 2);
    const Data before = dweight;
    backend().rmsnorm_forward(none.tensor(), rstd.tensor(), none.tensor(), weight.tensor(), 1e-6f);
    backend().rmsnorm_backward(none.tensor(), dweight.tensor(), none.tensor(), none.tensor(), weight.tensor(), rstd.tensor());
    CHECK(dweight.same_bits(before));
    Data x(3, 8), narrow(3, 7), three(1, 3, 0);
    CHECK_THROWS(backend().rmsnorm_forward(narrow.tensor(), three.tensor(), x.tensor(), weight.tensor(), 1e-6f), "rmsnorm_forward: y");
    CHECK_THROWS(backend().rmsnorm_forward(x.tensor(), rstd.tensor(), x.tensor(), weight.tensor(), 1e-6f), "rmsnorm_forward: rstd");
    CHECK_THROWS(backend().add_rmsnorm_forward(x.tensor(), x.tensor(), three.tensor(), x.tensor(), narrow.tensor(), weight.tensor(), 1e-6f),
                 "add_rmsnorm_forward: residual");
    CHECK_THROWS(backend().rmsnorm_backward(narrow.tensor(), {}, x.tensor(), x.tensor(), weight.tensor(), three.tensor()),
                 "rmsnorm_backward: dx");
}
