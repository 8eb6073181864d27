#include "backend/cpu/gemm.h"
#include "backend/cpu/packed_gemm.h"
#include "tests/reference.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

struct Sizes {
    std::int64_t t, n, k;
};
// One row, odd sizes, thin and thick products, and sizes beyond one piece of the output or one block of the sum, in each direction.
const Sizes kSizes[] = {{1, 1, 1},       {1, 17, 5},      {7, 33, 19},      {16, 16, 16},   {64, 48, 32},   {3, 801, 9},
                        {1030, 5, 11},   {300, 16, 200},  {200, 300, 16},   {16, 300, 200}, {530, 770, 13}, {96, 97, 98},
                        {131, 200, 577}, {99, 600, 1300}, {100, 3700, 590}, {97, 101, 9001}};

Exact turn(const Exact& x) {
    Exact y(x.columns(), x.rows());
    for (std::int64_t r = 0; r < x.rows(); ++r) {
        for (std::int64_t c = 0; c < x.columns(); ++c) y(c, r) = x(r, c);
    }
    return y;
}

/// The innermost loop of the reference. It alone is not instrumented: it runs billions of times, over rows whose length is checked outside
/// of it.
__attribute__((no_sanitize("address", "undefined"))) void add_scaled(double* to, const double* from, double factor, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) to[j] += factor * from[j];
}

Exact product(const Exact& a, bool a_turned, const Exact& b, bool b_turned, double alpha) {
    const Exact left = a_turned ? turn(a) : a, right = b_turned ? turn(b) : b;
    Exact c(left.rows(), right.columns());
    for (std::int64_t i = 0; i < c.rows() && c.columns() > 0; ++i) {
        for (std::int64_t p = 0; p < left.columns(); ++p) add_scaled(&c(i, 0), right.row(p), alpha * left(i, p), c.columns());
    }
    return c;
}

}  // namespace

TEST(linear_forward) {
    for (const auto& [t, n, k] : kSizes) {
        Data x = Data::random(t, k, 1), w = Data::random(n, k, 2), bias = Data::dense(1, n, 3), y = Data::random(t, n, 4);
        const Data before = y;
        backend().linear_forward(y.tensor(), x.tensor(), w.tensor(), {}, 1.0f, 0.0f);
        check_close("y", y, product(Exact(x), false, Exact(w), true, 1.0));
        y = before;
        backend().linear_forward(y.tensor(), x.tensor(), w.tensor(), bias.tensor(), 0.5f, 2.0f);
        Exact expected = product(Exact(x), false, Exact(w), true, 0.5);
        for (std::int64_t i = 0; i < t; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
                expected(i, j) += 2.0 * static_cast<double>(before(i, j)) + static_cast<double>(bias(0, j));
            }
        }
        check_close("alpha, beta and bias", y, expected);
    }
}

TEST(linear_forward_does_not_read_what_beta_zero_replaces) {
    Data x = Data::random(5, 6, 1), w = Data::random(7, 6, 2), y(5, 7);
    y.fill([](std::int64_t, std::int64_t) { return std::nan(""); });
    backend().linear_forward(y.tensor(), x.tensor(), w.tensor(), {}, 1.0f, 0.0f);
    check_close("y", y, product(Exact(x), false, Exact(w), true, 1.0));
}

TEST(linear_backward_input) {
    for (const auto& [t, n, k] : kSizes) {
        Data dy = Data::random(t, n, 1), w = Data::random(n, k, 2), dx = Data::random(t, k, 3);
        const Data before = dx;
        backend().linear_backward_input(dx.tensor(), dy.tensor(), w.tensor(), 1.0f, 0.0f);
        check_close("dx", dx, product(Exact(dy), false, Exact(w), false, 1.0));
        dx = before;
        backend().linear_backward_input(dx.tensor(), dy.tensor(), w.tensor(), 0.25f, 1.0f);
        check_close("dx, added", dx, plus(product(Exact(dy), false, Exact(w), false, 0.25), before));
    }
}

TEST(linear_add_forward) {
    for (const auto& [t, n, k] : kSizes) {
        Data x = Data::random(t, k, 1), w = Data::random(n, k, 2), bias = Data::dense(1, n, 3), residual = Data::random(t, n, 4), y(t, n);
        y.fill([](std::int64_t, std::int64_t) { return std::nan(""); });
        backend().linear_add_forward(y.tensor(), residual.tensor(), x.tensor(), w.tensor(), bias.tensor());
        Exact expected = plus(product(Exact(x), false, Exact(w), true, 1.0), residual);
        for (std::int64_t i = 0; i < t; ++i) {
            for (std::int64_t j = 0; j < n; ++j) expected(i, j) += static_cast<double>(bias(0, j));
        }
        check_close("y", y, expected);
    }
}

namespace {

/// Two adapters side by side over most of the columns; the second begins in the midst of a panel.
struct Adapters {
    Adapters(std::int64_t t, std::int64_t n, std::int64_t rank)
        : low(Data::random(t, 2 * rank, 11)), b(Data::random(n - 1, rank, 12)), split(n / 3) {}

    std::vector<AdapterOutput> views() {
        const Tensor first = low.tensor().column_range(0, b.columns()), second = low.tensor().column_range(b.columns(), b.columns());
        return {{first, b.tensor().row_range(0, split), 0}, {second, b.tensor().row_range(split, b.rows() - split), split + 1}};
    }
    void add_to(Exact& y, double scale) const {
        for (std::int64_t i = 0; i < y.rows(); ++i) {
            for (std::int64_t j = 0; j < b.rows(); ++j) {
                for (std::int64_t p = 0; p < b.columns(); ++p) {
                    const bool second = j >= split;
                    y(i, j + (second ? 1 : 0)) +=
                        scale * static_cast<double>(low(i, p + (second ? b.columns() : 0))) * static_cast<double>(b(j, p));
                }
            }
        }
    }
    Data low, b;
    std::int64_t split;
};

const Sizes kAdaptedSizes[] = {{1, 3, 2}, {7, 33, 19}, {99, 160, 130}, {131, 1600, 700}};

}  // namespace

TEST(linear_adapted_forward) {
    for (const auto& [t, n, k] : kAdaptedSizes) {
        for (const std::int64_t rank : {1, 16, 100}) {
            Data x = Data::random(t, k, 1), w = Data::random(n, k, 2), bias = Data::dense(1, n, 3), residual = Data::random(t, n, 4);
            Data y(t, n);
            y.fill([](std::int64_t, std::int64_t) { return std::nan(""); });
            Adapters adapters(t, n, rank);
            backend().linear_adapted_forward(y.tensor(), {}, x.tensor(), w.tensor(), {}, adapters.views(), 0.5f);
            Exact expected = product(Exact(x), false, Exact(w), true, 1.0);
            adapters.add_to(expected, 0.5);
            check_close("y", y, expected);
            backend().linear_adapted_forward(y.tensor(), residual.tensor(), x.tensor(), w.tensor(), bias.tensor(), adapters.views(), 0.5f);
            expected = plus(expected, residual);
            for (std::int64_t i = 0; i < t; ++i) {
                for (std::int64_t j = 0; j < n; ++j) expected(i, j) += static_cast<double>(bias(0, j));
            }
            check_close("y with residual and bias", y, expected);
        }
    }
}

TEST(linear_adapted_backward_input) {
    for (const auto& [t, n, k] : kAdaptedSizes) {
        for (const std::int64_t rank : {1, 16, 100}) {
            Data dy = Data::random(t, n, 1), w = Data::random(n, k, 2), d_low = Data::random(t, rank, 3), a = Data::random(rank, k, 4);
            Data dx(t, k);
            dx.fill([](std::int64_t, std::int64_t) { return std::nan(""); });
            backend().linear_adapted_backward_input(dx.tensor(), dy.tensor(), w.tensor(), d_low.tensor(), a.tensor());
            Exact expected = product(Exact(dy), false, Exact(w), false, 1.0);
            const Exact low = product(Exact(d_low), false, Exact(a), false, 1.0);
            for (std::int64_t i = 0; i < t; ++i) {
                for (std::int64_t j = 0; j < k; ++j) expected(i, j) += low(i, j);
            }
            check_close("dx", dx, expected);
        }
    }
}

TEST(linear_backward_weight) {
    for (const auto& [t, n, k] : kSizes) {
        Data dy = Data::random(t, n, 1), x = Data::random(t, k, 2), dw = Data::random(n, k, 3);
        const Data before = dw;
        backend().linear_backward_weight(dw.tensor(), dy.tensor(), x.tensor(), 0.5f);
        check_close("dw", dw, plus(product(Exact(dy), true, Exact(x), false, 0.5), before), 4e-6);
    }
}

TEST(linear_of_no_columns_scales_by_beta) {
    Data x(5, 0), w(7, 0), y = Data::random(5, 7, 1);
    const Data before = y;
    backend().linear_forward(y.tensor(), x.tensor(), w.tensor(), {}, 1.0f, 1.0f);
    CHECK(y.same_bits(before));
    backend().linear_forward(y.tensor(), x.tensor(), w.tensor(), {}, 1.0f, 0.0f);
    for (std::int64_t i = 0; i < 5; ++i) CHECK_EQ(y(i, 6), 0.0f);
}

TEST(linear_backward_is_the_gradient_of_forward) {
    Data x = Data::random(5, 6, 1), w = Data::random(7, 6, 2), dy = Data::random(5, 7, 3), dx(5, 6), dw(7, 6);
    backend().linear_backward_input(dx.tensor(), dy.tensor(), w.tensor(), 1.0f, 0.0f);
    backend().linear_backward_weight(dw.tensor(), dy.tensor(), x.tensor(), 1.0f);
    check_close("dx", dx, numeric_gradient(Exact(x), Exact(dy), [&](const Exact& at) { return product(at, false, Exact(w), true, 1.0); }));
    check_close("dw", dw, numeric_gradient(Exact(w), Exact(dy), [&](const Exact& at) { return product(Exact(x), false, at, true, 1.0); }));
}

TEST(bias_backward) {
    for (const auto& [t, n, k] : kSizes) {
        (void)k;
        Data dy = Data::random(t, n, 1), db = Data::dense(1, n, 2);
        Exact expected(db);
        for (std::int64_t i = 0; i < t; ++i) {
            for (std::int64_t j = 0; j < n; ++j) expected(0, j) += static_cast<double>(dy(i, j));
        }
        backend().bias_backward(db.tensor(), dy.tensor());
        check_close("db", db, expected);
    }
}

TEST(linear_bits_do_not_depend_on_threads) {
    for (const std::int64_t k : {77, 700}) {
        check_any_thread_count([k](CpuBackend& cpu) {
            Data x = Data::random(1111, k, 1), w = Data::random(905, k, 2), bias = Data::dense(1, 905, 3), y(1111, 905), dx(1111, k),
                 dw(905, k), db(1, 905);
            cpu.linear_forward(y.tensor(), x.tensor(), w.tensor(), bias.tensor(), 1.0f, 0.0f);
            cpu.linear_backward_input(dx.tensor(), y.tensor(), w.tensor(), 1.0f, 0.0f);
            cpu.linear_backward_weight(dw.tensor(), y.tensor(), x.tensor(), 1.0f);
            cpu.bias_backward(db.tensor(), y.tensor());
            Data adapted(1111, 905), d_low = Data::random(1111, 4, 5), a = Data::random(4, k, 6), d_adapted(1111, k);
            Adapters adapters(1111, 905, 4);
            cpu.linear_adapted_forward(adapted.tensor(), y.tensor(), x.tensor(), w.tensor(), {}, adapters.views(), 0.5f);
            cpu.linear_adapted_backward_input(d_adapted.tensor(), y.tensor(), w.tensor(), d_low.tensor(), a.tensor());
            return std::vector<Data>{y, dx, dw, db, adapted, d_adapted};
        });
    }
}

TEST(packed_product_has_the_same_bits_for_a_row_alone_and_among_others) {
    const GemmKernels& kernels = *find_gemm_kernels(kernel_set().name);
    Data x = Data::random(45, 700, 1), w = Data::random(75, 700, 2), all(45, 75), alone(1, 75), part(1, 20);
    ThreadPool pool(2);
    AlignedBuffer memory;
    const Tensor rows = x.tensor(), weights = w.tensor();
    const auto multiply = [&](Data& c, const float* a, const float* b) {
        const Tensor out = c.tensor();
        packed_gemm(pool, kernels, memory,
                    {out.f32(), out.stride, {a, rows.stride}, {b, weights.stride, true}, out.rows, out.columns, 700, 1.0f, 0.0f});
    };
    multiply(all, rows.f32(), weights.f32());
    for (std::int64_t t = 0; t < 45; ++t) {
        multiply(alone, rows.f32() + t * rows.stride, weights.f32());
        for (std::int64_t j = 0; j < 75; ++j) CHECK_EQ(alone(0, j), all(t, j));
        multiply(part, rows.f32() + t * rows.stride, weights.f32() + 50 * weights.stride);
        for (std::int64_t j = 0; j < 20; ++j) CHECK_EQ(part(0, j), all(t, 50 + j));
    }
}

TEST(packed_and_thin_products_of_any_shape) {
    // With every set of kernels, also where a back-end would rather call the BLAS.
    const GemmKernels& kernels = *find_gemm_kernels(kernel_set().name);
    ThreadPool pool(2);
    AlignedBuffer memory;
    for (const auto& [m, n, k] :
         {Sizes{1, 1, 0}, {1, 1, 1}, {3, 70, 65}, {70, 3, 65}, {16, 100, 300}, {200, 16, 300}, {45, 75, 700}, {31, 33, 17}}) {
        for (const bool a_turned : {false, true}) {
            for (const bool b_turned : {false, true}) {
                Data a = a_turned ? Data::random(k, m, 1) : Data::random(m, k, 1),
                     b = b_turned ? Data::random(n, k, 2) : Data::random(k, n, 2);
                const Operand left{a.tensor().f32(), a.tensor().stride, a_turned}, right{b.tensor().f32(), b.tensor().stride, b_turned};
                const Exact expected = product(Exact(a), a_turned, Exact(b), b_turned, 0.5);
                for (const auto multiply : {packed_gemm, thin_gemm}) {
                    for (const float beta : {0.0f, 1.0f}) {
                        Data c = Data::random(m, n, 3);
                        const Data before = c;
                        multiply(pool, kernels, memory, {c.tensor().f32(), c.tensor().stride, left, right, m, n, k, 0.5f, beta});
                        check_close("c", c, beta == 0.0f ? expected : plus(expected, before));
                    }
                }
            }
        }
    }
}

TEST(linear_takes_empty_inputs) {
    Data x(0, 6), w = Data::random(7, 6, 2), y(0, 7), dw = Data::random(7, 6, 3), db = Data::dense(1, 7, 4), dx(0, 6);
    const Data dw_before = dw, db_before = db;
    backend().linear_forward(y.tensor(), x.tensor(), w.tensor(), {}, 1.0f, 0.0f);
    backend().linear_backward_input(dx.tensor(), y.tensor(), w.tensor(), 1.0f, 0.0f);
    backend().linear_backward_weight(dw.tensor(), y.tensor(), x.tensor(), 1.0f);
    backend().bias_backward(db.tensor(), y.tensor());
    CHECK(dw.same_bits(dw_before) && db.same_bits(db_before));
}

TEST(linear_refuses_wrong_shapes) {
    Data x(4, 6), w(7, 5), y(4, 7), right(7, 6);
    CHECK_THROWS(backend().linear_forward(y.tensor(), x.tensor(), w.tensor(), {}, 1.0f, 0.0f),
                 "linear_forward: x: expected float32 [4, 5], got float32 [4, 6]");
    CHECK_THROWS(backend().linear_forward(y.tensor(), x.tensor(), right.tensor(), x.tensor(), 1.0f, 0.0f), "linear_forward: bias");
    CHECK_THROWS(backend().linear_backward_input(x.tensor(), y.tensor(), w.tensor(), 1.0f, 0.0f), "linear_backward_input: dx");
    CHECK_THROWS(backend().linear_backward_weight(w.tensor(), y.tensor(), x.tensor(), 1.0f), "linear_backward_weight: dw");
    CHECK_THROWS(backend().bias_backward(x.tensor(), y.tensor()), "bias_backward: db");
    const std::vector<AdapterOutput> beyond = {{Data(4, 2).tensor(), Data(3, 2).tensor(), 5}};
    CHECK_THROWS(backend().linear_adapted_forward(y.tensor(), {}, x.tensor(), right.tensor(), {}, beyond, 1.0f),
                 "linear_adapted_forward: first");
    CHECK_THROWS(backend().linear_add_forward(y.tensor(), x.tensor(), x.tensor(), right.tensor(), {}), "linear_add_forward: residual");
}

TEST(pieces_cover_the_output_once) {
    for (const auto& [m, n] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 5000}, {5000, 1}, {17, 1000}, {1000, 17}, {2048, 3072}, {513, 385}}) {
        const Pieces pieces(m, n);
        std::vector<int> covered(static_cast<std::size_t>(m * n));
        for (std::int64_t index = 0; index < pieces.count(); ++index) {
            const Piece p = pieces[index];
            for (std::int64_t r = p.row; r < p.row + p.rows; ++r) {
                for (std::int64_t c = p.column; c < p.column + p.columns; ++c) ++covered[static_cast<std::size_t>(r * n + c)];
            }
        }
        for (const int times : covered) CHECK_EQ(times, 1);
    }
}

TEST(blas_is_named) { CHECK(!blas_name().empty()); }
