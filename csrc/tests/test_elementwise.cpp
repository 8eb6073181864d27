#include <algorithm>

#include "tests/reference.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

Exact swiglu(const Exact& gate_up) {
    const std::int64_t f = gate_up.columns() / 2;
    Exact y(gate_up.rows(), f);
    for (std::int64_t t = 0; t < y.rows(); ++t) {
        for (std::int64_t i = 0; i < f; ++i) y(t, i) = gate_up(t, i) / (1.0 + std::exp(-gate_up(t, i))) * gate_up(t, f + i);
    }
    return y;
}

}  // namespace

TEST(swiglu_forward_and_backward) {
    for (const auto& [t, f] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 7}, {17, 48}, {35, 37}}) {
        Data gate_up = Data::random(t, 2 * f, 1, 3.0), dy = Data::random(t, f, 2), y(t, f), dgate_up = Data::random(t, 2 * f, 3);
        backend().swiglu_forward(y.tensor(), gate_up.tensor());
        check_close("y", y, swiglu(Exact(gate_up)));
        backend().swiglu_backward(dgate_up.tensor(), dy.tensor(), gate_up.tensor());
        check_close("dgate_up", dgate_up, numeric_gradient(Exact(gate_up), Exact(dy), swiglu), 3e-6);
        Data again(t, f), gradient(t, 2 * f);
        backend().swiglu_recompute_backward(gradient.tensor(), again.tensor(), dy.tensor(), gate_up.tensor());
        CHECK(again.same_bits(y) && gradient.same_bits(dgate_up));
    }
}

TEST(swiglu_at_extremes) {
    const float gates[] = {-1000.0f, -100.0f, -88.5f, 0.0f, 88.5f, 1000.0f};
    Data gate_up(1, 12), y(1, 6), dy = Data::dense(1, 6, 1), dgate_up(1, 12);
    for (std::int64_t i = 0; i < 6; ++i) {
        gate_up(0, i) = gates[i];
        gate_up(0, 6 + i) = 1.0f;
        dy(0, i) = 1.0f;
    }
    backend().swiglu_forward(y.tensor(), gate_up.tensor());
    backend().swiglu_backward(dgate_up.tensor(), dy.tensor(), gate_up.tensor());
    const double slope[] = {0.0, 0.0, 0.0, 0.5, 1.0, 1.0};
    for (std::int64_t i = 0; i < 6; ++i) {
        CHECK_NEAR(y(0, i), std::max(0.0f, gates[i]), 1e-5);
        CHECK_NEAR(dgate_up(0, i), slope[i], 1e-6);
    }
    gate_up(0, 0) = std::nanf("");
    backend().swiglu_forward(y.tensor(), gate_up.tensor());
    CHECK(std::isnan(y(0, 0)));
}

TEST(embedding) {
    for (const auto& [v, c] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {11, 7}, {50, 200}}) {
        Data table = Data::random(v, c, 1), out(40, c), dout = Data::random(40, c, 2), dtable = Data::random(v, c, 3);
        std::vector<std::int32_t> ids;
        for (std::int64_t t = 0; t < 40; ++t) ids.push_back(static_cast<std::int32_t>(t * t % v));
        backend().embedding_forward(out.tensor(), table.tensor(), ids_of(ids));
        for (std::int64_t t = 0; t < 40; ++t) {
            for (std::int64_t i = 0; i < c; ++i) CHECK_EQ(out(t, i), table(ids[static_cast<std::size_t>(t)], i));
        }
        Exact expected(dtable);
        for (std::int64_t t = 0; t < 40; ++t) {
            for (std::int64_t i = 0; i < c; ++i) expected(ids[static_cast<std::size_t>(t)], i) += static_cast<double>(dout(t, i));
        }
        backend().embedding_backward(dtable.tensor(), dout.tensor(), ids_of(ids));
        check_close("dtable", dtable, expected);
    }
}

TEST(embedding_refuses_bad_ids) {
    Data table(5, 3), out(2, 3);
    std::vector<std::int32_t> ids = {4, 5};
    CHECK_THROWS(backend().embedding_forward(out.tensor(), table.tensor(), ids_of(ids)),
                 "embedding_forward: ids[1]: expected 0 to 4, got 5");
    ids[1] = -1;
    CHECK_THROWS(backend().embedding_backward(table.tensor(), out.tensor(), ids_of(ids)), "embedding_backward: ids[1]");
}

TEST(gather_and_scatter_rows) {
    Data in = Data::random(9, 70, 1), out(4, 70), back(9, 70);
    std::vector<std::int32_t> index = {8, 0, 3, 3};
    backend().gather_rows(out.tensor(), in.tensor(), ids_of(index));
    for (std::int64_t i = 0; i < 4; ++i) {
        for (std::int64_t c = 0; c < 70; ++c) CHECK_EQ(out(i, c), in(index[static_cast<std::size_t>(i)], c));
    }
    backend().scatter_add_rows(back.tensor(), out.tensor(), ids_of(index));
    for (std::int64_t c = 0; c < 70; ++c) {
        CHECK_EQ(back(8, c), in(8, c));
        CHECK_EQ(back(3, c), 2.0f * in(3, c));
        CHECK_EQ(back(1, c), 0.0f);
    }
    CHECK(back.guards_intact() && out.guards_intact());
    std::vector<std::int32_t> none;
    Data empty(0, 70);
    backend().gather_rows(empty.tensor(), in.tensor(), ids_of(none));
    backend().scatter_add_rows(back.tensor(), empty.tensor(), ids_of(none));
}

TEST(allocate_copy_fill_upload_download) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{100}, std::size_t{5} << 20}) {
        void* data = backend().allocate(bytes);
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(data) % 64, std::uintptr_t{0});
        for (std::size_t i = 0; i < bytes; ++i) CHECK_EQ(static_cast<int>(static_cast<char*>(data)[i]), 0);
        backend().release(data);
    }
    backend().release(nullptr);
    CHECK_THROWS(backend().allocate(~std::size_t{0}), "cannot allocate");
    CHECK_THROWS(backend().allocate(std::size_t{1} << 60), "bytes of host memory");

    // Small rows, long rows, and one long dense span: each is cut in its own way.
    for (const auto& [rows, columns] :
         {std::pair<std::int64_t, std::int64_t>{7, 5}, {3, 150000}, {0, 4}, {30000, 3}, {1, 4200001}, {5, 900001}}) {
        for (const std::int64_t pad : {0, 3}) {
            Data in = Data::random(rows, columns, 1, 1.0, 0.0, pad), out(rows, columns, pad);
            backend().copy(out.tensor(), in.tensor());
            CHECK(out.same_bits(in));
            std::vector<float> host(static_cast<std::size_t>(rows * columns) + 1, -7.0f);
            backend().download(host.data(), in.tensor());
            CHECK_EQ(host.back(), -7.0f);
            Data again(rows, columns, pad);
            backend().upload(again.tensor(), host.data());
            CHECK(again.same_bits(in));
            backend().fill(again.tensor(), 2.5f);
            for (std::int64_t r = 0; r < rows; ++r) {
                for (std::int64_t c = 0; c < columns; ++c) CHECK_EQ(again(r, c), 2.5f);
            }
            CHECK(again.guards_intact());
        }
    }
    std::vector<std::int32_t> from = {1, 2, 3}, to(3);
    backend().copy(ids_of(to), ids_of(from));
    CHECK(to == from);
    Data a(2, 3), b(3, 2);
    CHECK_THROWS(backend().copy(a.tensor(), b.tensor()), "copy: out: expected float32 [3, 2], got float32 [2, 3]");
    CHECK_THROWS(backend().copy(ids_of(to), Data(1, 3).tensor()), "copy: out: expected float32");
}

TEST(sum_of_squares) {
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{0, 3}, {1, 1}, {5, 7}, {1, 40000}, {3, 20001}}) {
        for (const std::int64_t pad : {0, 5}) {
            Data x = Data::random(rows, columns, 1, 1.0, 0.0, pad);
            double expected = 0.0;
            for (std::int64_t r = 0; r < rows; ++r) {
                for (std::int64_t c = 0; c < columns; ++c) expected += static_cast<double>(x(r, c)) * static_cast<double>(x(r, c));
            }
            CHECK_NEAR(backend().sum_of_squares(x.tensor()), expected, 1e-12 * expected);
            CpuBackend alone(CpuOptions{1}, kernel_set()), many(CpuOptions{5}, kernel_set());
            CHECK_EQ(alone.sum_of_squares(x.tensor()), many.sum_of_squares(x.tensor()));
        }
    }
    // Where squares in single precision would overflow or vanish.
    Data x(1, 20, 0);
    x.fill([](std::int64_t, std::int64_t) { return 1e25; });
    CHECK_NEAR(backend().sum_of_squares(x.tensor()) / 2e51, 1.0, 1e-6);
    x(0, 19) = std::nanf("");
    CHECK(std::isnan(backend().sum_of_squares(x.tensor())));
}

TEST(adamw) {
    for (const std::int64_t n : {1, 19, 40001}) {
        Data w = Data::dense(1, n, 1), m(1, n, 0), v(1, n, 0);
        Exact ew(w), em(1, n), ev(1, n);
        for (std::int64_t step = 1; step <= 5; ++step) {
            Data g = Data::dense(1, n, 10 + static_cast<std::uint64_t>(step), 0.1);
            const AdamWOptions o{1e-2f, 0.9f, 0.99f, 1e-8f, 0.1f, step, 0.5f};
            backend().adamw(w.tensor(), {}, m.tensor(), v.tensor(), g.tensor(), o);
            // Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2, with a constant schedule.
            const double lr = static_cast<double>(o.learning_rate), b1 = static_cast<double>(o.beta1), b2 = static_cast<double>(o.beta2);
            for (std::int64_t i = 0; i < n; ++i) {
                const double gradient = 0.5 * static_cast<double>(g(0, i));
                em(0, i) = b1 * em(0, i) + (1.0 - b1) * gradient;
                ev(0, i) = b2 * ev(0, i) + (1.0 - b2) * gradient * gradient;
                const double m_hat = em(0, i) / (1.0 - std::pow(b1, static_cast<double>(step)));
                const double v_hat = ev(0, i) / (1.0 - std::pow(b2, static_cast<double>(step)));
                ew(0, i) -=
                    lr * (m_hat / (std::sqrt(v_hat) + static_cast<double>(o.epsilon)) + static_cast<double>(o.weight_decay) * ew(0, i));
            }
            check_close("w", w, ew, 1e-6);
            check_close("m", m, em, 1e-6);
            check_close("v", v, ev, 1e-6);
        }
    }
    Data w(1, 4, 0), short_v(1, 3, 0);
    CHECK_THROWS(backend().adamw(w.tensor(), {}, w.tensor(), short_v.tensor(), w.tensor(), {1e-2f, 0.9f, 0.99f, 1e-8f, 0.0f, 1, 1.0f}),
                 "adamw: v");
    CHECK_THROWS(backend().adamw(w.tensor(), {}, w.tensor(), w.tensor(), w.tensor(), {1e-2f, 0.9f, 0.99f, 1e-8f, 0.0f, 0, 1.0f}),
                 "adamw: step");
}

TEST(elementwise_bits_do_not_depend_on_threads) {
    check_any_thread_count([](CpuBackend& cpu) {
        Data gate_up = Data::random(133, 202, 1), dy = Data::random(133, 101, 2), y(133, 101), dgate_up(133, 202), dtable(9, 101);
        std::vector<std::int32_t> ids;
        for (std::int32_t t = 0; t < 133; ++t) ids.push_back(t % 9);
        cpu.swiglu_forward(y.tensor(), gate_up.tensor());
        cpu.swiglu_backward(dgate_up.tensor(), dy.tensor(), gate_up.tensor());
        cpu.embedding_backward(dtable.tensor(), dy.tensor(), ids_of(ids));
        Data w = Data::dense(1, 50001, 3), m = Data::dense(1, 50001, 4), v(1, 50001, 0), g = Data::dense(1, 50001, 5);
        cpu.adamw(w.tensor(), {}, m.tensor(), v.tensor(), g.tensor(), {1e-2f, 0.9f, 0.99f, 1e-8f, 0.1f, 3, 1.0f});
        return std::vector<Data>{y, dgate_up, dtable, w, m, v};
    });
}
