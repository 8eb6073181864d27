#include "tests/cuda/device.h"

using namespace surogate;
using namespace surogate::testing;

TEST(qk_norm_rope_forward_and_backward) {
    struct Case {
        std::int64_t rows, heads, kv_heads, size, pad;
    };
    for (const DType dtype : kTypes) {
        for (const Case& c : {Case{1, 1, 1, 2, 0},
                              {5, 3, 1, 6, 1},
                              {40, 4, 2, 64, 8},
                              {33, 9, 3, 80, 0},
                              {130, 16, 8, 128, 0},
                              {50, 2, 1, 96, 3},
                              {20, 2, 2, 256, 0},
                              {7, 2, 1, 34, 0}}) {
            const AttentionShape shape{c.heads, c.kv_heads, c.size, 1.0f, 0};
            const std::int64_t columns = (c.heads + 2 * c.kv_heads) * c.size, turned = (c.heads + c.kv_heads) * c.size, limit = 70;
            Host cos(limit, c.size / 2), sin(limit, c.size / 2);
            for (std::int64_t p = 0; p < limit; ++p) {
                for (std::int64_t i = 0; i < c.size / 2; ++i) {
                    const double angle =
                        static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(c.size));
                    cos(p, i) = static_cast<float>(std::cos(angle));
                    sin(p, i) = static_cast<float>(std::sin(angle));
                }
            }
            std::vector<std::int32_t> positions(static_cast<std::size_t>(c.rows));
            for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int32_t>((i * 7) % 70);
            const OnDevice gcos(gpu(), cos, DType::Float32, 0), gsin(gpu(), sin, DType::Float32, 0), gpositions(gpu(), positions);
            Host qw = Host::random(1, c.size, 1, dtype, 0.2f, 1.0f), kw = Host::random(1, c.size, 2, dtype, 0.2f, 1.0f);
            const OnDevice gqw(gpu(), qw, dtype, 0), gkw(gpu(), kw, dtype, 0);
            for (const bool norm : {true, false}) {
                const char* note = norm ? "norm" : "";
                Host qkv = Host::random(c.rows, columns, 3, dtype, 1.5f), raw(c.rows, turned), rstd(c.rows, c.heads + c.kv_heads);
                const OnDevice gqkv(gpu(), qkv, dtype, c.pad),
                    graw = OnDevice::poisoned(gpu(), c.rows, turned, dtype, c.pad),
                    grstd = OnDevice::poisoned(gpu(), c.rows, c.heads + c.kv_heads, DType::Float32, 0);
                const auto if_normed = [&](const Tensor& t) { return norm ? t : Tensor{}; };
                cpu().qk_norm_rope_forward(qkv.tensor(), if_normed(raw.tensor()), if_normed(rstd.tensor()), if_normed(qw.tensor()),
                                           if_normed(kw.tensor()), cos.tensor(), sin.tensor(), ids_of(positions), shape, 1e-6f);
                gpu().qk_norm_rope_forward(gqkv.tensor(), if_normed(graw.tensor()), if_normed(grstd.tensor()), if_normed(gqw.tensor()),
                                           if_normed(gkw.tensor()), gcos.tensor(), gsin.tensor(), gpositions.tensor(), shape, 1e-6f);
                compare(shape_name("qk_norm_rope_forward qkv", {c.rows, c.heads, c.kv_heads, c.size, c.pad}, note), gqkv, qkv,
                        bound(dtype));
                if (norm) {
                    compare(shape_name("qk_norm_rope_forward raw", {c.rows, c.heads, c.kv_heads, c.size, c.pad}), graw, raw, 0.0);
                    compare(shape_name("qk_norm_rope_forward rstd", {c.rows, c.heads, c.kv_heads, c.size, c.pad}), grstd, rstd, 1e-6);
                }
                Host d = Host::random(c.rows, columns, 4, dtype), dqw = Host::random(1, c.size, 5, DType::Float32),
                     dkw = Host::random(1, c.size, 6, DType::Float32);
                const OnDevice gd(gpu(), d, dtype, c.pad), frozen(gpu(), d, dtype, c.pad), gdqw(gpu(), dqw, DType::Float32, 0),
                    gdkw(gpu(), dkw, DType::Float32, 0);
                cpu().qk_norm_rope_backward(d.tensor(), if_normed(dqw.tensor()), if_normed(dkw.tensor()), if_normed(raw.tensor()),
                                            if_normed(rstd.tensor()), if_normed(qw.tensor()), if_normed(kw.tensor()), cos.tensor(),
                                            sin.tensor(), ids_of(positions), shape);
                gpu().qk_norm_rope_backward(gd.tensor(), if_normed(gdqw.tensor()), if_normed(gdkw.tensor()), if_normed(graw.tensor()),
                                            if_normed(grstd.tensor()), if_normed(gqw.tensor()), if_normed(gkw.tensor()), gcos.tensor(),
                                            gsin.tensor(), gpositions.tensor(), shape);
                compare(shape_name("qk_norm_rope_backward dqkv", {c.rows, c.heads, c.kv_heads, c.size, c.pad}, note), gd, d, bound(dtype));
                if (!norm) continue;
                compare(shape_name("qk_norm_rope_backward dq_weight", {c.rows, c.heads, c.kv_heads, c.size, c.pad}), gdqw, dqw, 5e-6);
                compare(shape_name("qk_norm_rope_backward dk_weight", {c.rows, c.heads, c.kv_heads, c.size, c.pad}), gdkw, dkw, 5e-6);
                gpu().qk_norm_rope_backward(frozen.tensor(), {}, {}, graw.tensor(), grstd.tensor(), gqw.tensor(), gkw.tensor(),
                                            gcos.tensor(), gsin.tensor(), gpositions.tensor(), shape);
                compare(shape_name("qk_norm_rope_backward dqkv, frozen", {c.rows, c.heads, c.kv_heads, c.size, c.pad}), frozen, d,
                        bound(dtype));
            }
        }
    }
}

TEST(rope_positions_outside_are_reported) {
    const OnDevice qkv(gpu(), Host(2, 24), DType::Float32, 0), cos(gpu(), Host(4, 4), DType::Float32, 0),
        sin(gpu(), Host(4, 4), DType::Float32, 0), positions(gpu(), std::vector<std::int32_t>{0, 4});
    gpu().qk_norm_rope_forward(qkv.tensor(), {}, {}, {}, {}, cos.tensor(), sin.tensor(), positions.tensor(), {1, 1, 8, 1.0f, 0}, 1e-6f);
    CHECK_THROWS(gpu().synchronize(), "positions");
}
