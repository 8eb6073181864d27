#include "tests/reference.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

constexpr double kEps = 1e-6;

struct Case {
    std::int64_t tokens, heads, kv_heads, size;
    bool normed;
};
const Case kCases[] = {{1, 1, 1, 2, false}, {5, 4, 2, 6, false},  {9, 3, 1, 64, false},
                       {5, 4, 2, 6, true},  {19, 2, 2, 34, true}, {40, 2, 1, 16, true}};

struct Inputs {
    explicit Inputs(const Case& c)
        : shape{c.heads, c.kv_heads, c.size, 1.0f, 0},
          qkv(Data::random(c.tokens, (c.heads + 2 * c.kv_heads) * c.size, 1)),
          raw(c.tokens, (c.heads + c.kv_heads) * c.size),
          rstd(c.tokens, c.heads + c.kv_heads),
          q_weight(Data::dense(1, c.size, 2, 0.2, 1.0)),
          k_weight(Data::dense(1, c.size, 3, 0.2, 1.0)),
          cos(50, c.size / 2),
          sin(50, c.size / 2) {
        cos.fill([&](std::int64_t p, std::int64_t i) { return std::cos(angle(p, i)); });
        sin.fill([&](std::int64_t p, std::int64_t i) { return std::sin(angle(p, i)); });
        for (std::int64_t t = 0; t < c.tokens; ++t) positions.push_back(static_cast<std::int32_t>((t * 7) % 50));
    }
    double angle(std::int64_t position, std::int64_t i) const {
        return static_cast<double>(position) * std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(shape.head_dim));
    }
    void forward(CpuBackend& cpu, bool normed) {
        if (normed) {
            cpu.qk_norm_rope_forward(qkv.tensor(), raw.tensor(), rstd.tensor(), q_weight.tensor(), k_weight.tensor(), cos.tensor(),
                                     sin.tensor(), ids_of(positions), shape, static_cast<float>(kEps));
        } else {
            cpu.qk_norm_rope_forward(qkv.tensor(), {}, {}, {}, {}, cos.tensor(), sin.tensor(), ids_of(positions), shape,
                                     static_cast<float>(kEps));
        }
    }
    void backward(CpuBackend& cpu, Data& dqkv, const Tensor& dq_weight, const Tensor& dk_weight, bool normed) {
        if (normed) {
            cpu.qk_norm_rope_backward(dqkv.tensor(), dq_weight, dk_weight, raw.tensor(), rstd.tensor(), q_weight.tensor(),
                                      k_weight.tensor(), cos.tensor(), sin.tensor(), ids_of(positions), shape);
        } else {
            cpu.qk_norm_rope_backward(dqkv.tensor(), {}, {}, {}, {}, {}, {}, cos.tensor(), sin.tensor(), ids_of(positions), shape);
        }
    }
    AttentionShape shape;
    Data qkv, raw, rstd, q_weight, k_weight, cos, sin;
    std::vector<std::int32_t> positions;
};

/// The rotation as the Llama family defines it: x * cos + rotate_half(x) * sin, halves of the head as pairs.
Exact turned(const Inputs& in, const Exact& qkv, const Exact& q_weight, const Exact& k_weight, bool normed) {
    Exact y = qkv;
    const std::int64_t size = in.shape.head_dim, half = size / 2;
    for (std::int64_t t = 0; t < qkv.rows(); ++t) {
        for (std::int64_t h = 0; h < in.shape.heads + in.shape.kv_heads; ++h) {
            std::vector<double> x(static_cast<std::size_t>(size));
            double squares = 0.0;
            for (std::int64_t i = 0; i < size; ++i) squares += qkv(t, h * size + i) * qkv(t, h * size + i);
            const double rstd = 1.0 / std::sqrt(squares / static_cast<double>(size) + kEps);
            for (std::int64_t i = 0; i < size; ++i) {
                const double weight = h < in.shape.heads ? q_weight(0, i) : k_weight(0, i);
                x[static_cast<std::size_t>(i)] = qkv(t, h * size + i) * (normed ? rstd * weight : 1.0);
            }
            for (std::int64_t i = 0; i < size; ++i) {
                const double other = i < half ? -x[static_cast<std::size_t>(i + half)] : x[static_cast<std::size_t>(i - half)];
                const std::int64_t p = in.positions[static_cast<std::size_t>(t)];
                y(t, h * size + i) = x[static_cast<std::size_t>(i)] * static_cast<double>(in.cos(p, i % half)) +
                                     other * static_cast<double>(in.sin(p, i % half));
            }
        }
    }
    return y;
}

}  // namespace

TEST(qk_norm_rope_forward) {
    for (const Case& c : kCases) {
        Inputs in(c);
        const Data before = in.qkv;
        in.forward(backend(), c.normed);
        check_close("qkv", in.qkv, turned(in, Exact(before), Exact(in.q_weight), Exact(in.k_weight), c.normed));
        if (!c.normed) continue;
        for (std::int64_t t = 0; t < c.tokens; ++t) {
            for (std::int64_t i = 0; i < in.raw.columns(); ++i) CHECK_EQ(in.raw(t, i), before(t, i));
        }
    }
}

TEST(qk_norm_rope_backward) {
    for (const Case& c : kCases) {
        Inputs in(c);
        const Exact before(in.qkv), q_weight(in.q_weight), k_weight(in.k_weight);
        in.forward(backend(), c.normed);
        Data dqkv = Data::random(c.tokens, in.qkv.columns(), 9), dq_weight = Data::dense(1, c.size, 10),
             dk_weight = Data::dense(1, c.size, 11);
        const Data dq_before = dq_weight, dk_before = dk_weight;
        const Exact seed(dqkv);
        in.backward(backend(), dqkv, dq_weight.tensor(), dk_weight.tensor(), c.normed);
        check_close("dqkv", dqkv,
                    numeric_gradient(before, seed, [&](const Exact& at) { return turned(in, at, q_weight, k_weight, c.normed); }), 3e-6);
        if (!c.normed) continue;
        const Exact dq = numeric_gradient(q_weight, seed, [&](const Exact& at) { return turned(in, before, at, k_weight, true); });
        const Exact dk = numeric_gradient(k_weight, seed, [&](const Exact& at) { return turned(in, before, q_weight, at, true); });
        check_close("dq_weight", dq_weight, plus(dq, dq_before), 3e-6);
        check_close("dk_weight", dk_weight, plus(dk, dk_before), 3e-6);

        Data frozen = Data::random(c.tokens, in.qkv.columns(), 9);
        in.backward(backend(), frozen, {}, {}, true);
        CHECK(frozen.same_bits(dqkv));
    }
}

TEST(qk_norm_rope_bits_do_not_depend_on_threads) {
    check_any_thread_count([](CpuBackend& cpu) {
        Inputs in({130, 3, 1, 20, true});
        in.forward(cpu, true);
        Data dqkv = Data::random(130, in.qkv.columns(), 9), dq_weight(1, 20), dk_weight(1, 20);
        in.backward(cpu, dqkv, dq_weight.tensor(), dk_weight.tensor(), true);
        return std::vector<Data>{in.qkv, in.raw, in.rstd, dqkv, dq_weight, dk_weight};
    });
}

TEST(qk_norm_rope_refuses_bad_arguments) {
    Inputs in({5, 4, 2, 6, true});
    in.positions[3] = 50;
    CHECK_THROWS(in.forward(backend(), true), "qk_norm_rope_forward: positions[3]: expected 0 to 49, got 50");
    in.positions[3] = -1;
    CHECK_THROWS(in.forward(backend(), true), "positions[3]");
    in.positions[3] = 0;
    in.shape.head_dim = 5;
    CHECK_THROWS(in.forward(backend(), true), "head_dim");
    in.shape.head_dim = 4;
    CHECK_THROWS(in.forward(backend(), true), "qk_norm_rope_forward: qkv");
}
