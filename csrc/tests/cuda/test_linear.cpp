#include "tests/cuda/device.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

struct Size {
    std::int64_t tokens, out, in, pad;
};
// Odd sizes and strides, one row, LoRA's thin products, and sizes that fill tiles.
const Size kSizes[] = {{1, 8, 16, 0},     {5, 7, 3, 0},      {64, 64, 64, 8},     {129, 48, 1024, 0}, {200, 1000, 65, 3},
                       {300, 16, 256, 8}, {300, 256, 16, 0}, {1024, 512, 768, 0}, {777, 1536, 512, 0}};

}  // namespace

TEST(linear_forward_and_backward) {
    for (const DType dtype : kTypes) {
        for (const DType out_type : kTypes) {
            for (const Size& s : kSizes) {
                Host x = Host::random(s.tokens, s.in, 1, dtype), w = Host::random(s.out, s.in, 2, dtype);
                Host dy = Host::random(s.tokens, s.out, 3, dtype), bias = Host::random(1, s.out, 4, out_type);
                const OnDevice gx(gpu(), x, dtype, s.pad), gw(gpu(), w, dtype, s.pad), gdy(gpu(), dy, dtype, s.pad),
                    gbias(gpu(), bias, out_type, 0);
                for (const float beta : {0.0f, 1.0f}) {
                    const bool with_bias = beta == 0.0f;
                    Host y = Host::random(s.tokens, s.out, 5, out_type), dx = Host::random(s.tokens, s.in, 6, out_type);
                    const OnDevice gy =
                        beta == 0.0f ? OnDevice::poisoned(gpu(), s.tokens, s.out, out_type, s.pad) : OnDevice(gpu(), y, out_type, s.pad);
                    const OnDevice gdx =
                        beta == 0.0f ? OnDevice::poisoned(gpu(), s.tokens, s.in, out_type, s.pad) : OnDevice(gpu(), dx, out_type, s.pad);
                    const char* note = beta == 0.0f ? "bias" : "beta 1";
                    cpu().linear_forward(y.tensor(), x.tensor(), w.tensor(), with_bias ? bias.tensor() : Tensor{}, 0.5f, beta);
                    gpu().linear_forward(gy.tensor(), gx.tensor(), gw.tensor(), with_bias ? gbias.tensor() : Tensor{}, 0.5f, beta);
                    compare(shape_name("linear_forward", {s.tokens, s.out, s.in, s.pad}, note), gy, y, bound(out_type, 4e-6));
                    cpu().linear_backward_input(dx.tensor(), dy.tensor(), w.tensor(), 0.5f, beta);
                    gpu().linear_backward_input(gdx.tensor(), gdy.tensor(), gw.tensor(), 0.5f, beta);
                    compare(shape_name("linear_backward_input", {s.tokens, s.out, s.in, s.pad}, note), gdx, dx, bound(out_type, 4e-6));
                }
                Host dw = Host::random(s.out, s.in, 7, out_type);
                const OnDevice gdw(gpu(), dw, out_type, s.pad);
                cpu().linear_backward_weight(dw.tensor(), dy.tensor(), x.tensor(), 2.0f);
                gpu().linear_backward_weight(gdw.tensor(), gdy.tensor(), gx.tensor(), 2.0f);
                compare(shape_name("linear_backward_weight", {s.tokens, s.out, s.in, s.pad}), gdw, dw, bound(out_type, 4e-6));
                const OnDevice set = OnDevice::poisoned(gpu(), s.out, s.in, out_type, s.pad);
                cpu().linear_backward_weight(dw.tensor(), dy.tensor(), x.tensor(), 2.0f, 0.0f);
                gpu().linear_backward_weight(set.tensor(), gdy.tensor(), gx.tensor(), 2.0f, 0.0f);
                compare(shape_name("linear_backward_weight", {s.tokens, s.out, s.in, s.pad}, "beta 0"), set, dw,
                        4e-6 + (out_type == DType::BFloat16 ? rounding_to_bfloat16(dw) : 0.0));
            }
        }
    }
}

TEST(linear_add_forward) {
    for (const DType dtype : kTypes) {
        for (const DType residual_type : kTypes) {
            for (const Size& s : kSizes) {
                Host x = Host::random(s.tokens, s.in, 1, dtype), w = Host::random(s.out, s.in, 2, dtype),
                     residual = Host::random(s.tokens, s.out, 3, residual_type, 5.0f), bias = Host::random(1, s.out, 4, dtype);
                // In bfloat16 a residual of the other type is rounded first.
                Host seen = residual, y(s.tokens, s.out);
                if (dtype == DType::BFloat16) {
                    for (float& value : seen.values) value = to_bf16(value);
                }
                const OnDevice gx(gpu(), x, dtype, s.pad), gw(gpu(), w, dtype, s.pad), gbias(gpu(), bias, dtype, 0);
                // Of another stride than y.
                const OnDevice gresidual(gpu(), residual, residual_type, s.pad + 8);
                for (const bool with_bias : {false, true}) {
                    const OnDevice gy = OnDevice::poisoned(gpu(), s.tokens, s.out, dtype, s.pad);
                    cpu().linear_add_forward(y.tensor(), seen.tensor(), x.tensor(), w.tensor(), with_bias ? bias.tensor() : Tensor{});
                    gpu().linear_add_forward(gy.tensor(), gresidual.tensor(), gx.tensor(), gw.tensor(),
                                             with_bias ? gbias.tensor() : Tensor{});
                    // Seen on an H200: up to the error of two roundings, where the residual has another type or there is a bias.
                    compare(shape_name("linear_add_forward", {s.tokens, s.out, s.in, s.pad}, with_bias ? "bias" : ""), gy, y,
                            4e-6 + (dtype == DType::BFloat16 ? std::sqrt(2.0) * rounding_to_bfloat16(y) : 0.0));
                    compare(shape_name("linear_add_forward, its residual", {s.tokens, s.out, s.in, s.pad}), gresidual, residual, 0.0);
                }
            }
        }
    }
}

TEST(linear_operands_of_different_types) {
    Host x = Host::random(70, 40, 1, DType::BFloat16), w = Host::random(30, 40, 2, DType::Float32),
         bias = Host::random(1, 30, 3, DType::BFloat16);
    Host y(70, 30);
    const OnDevice gx(gpu(), x, DType::BFloat16, 0), gw(gpu(), w, DType::Float32, 0), gbias(gpu(), bias, DType::BFloat16, 0);
    const OnDevice gy = OnDevice::poisoned(gpu(), 70, 30, DType::Float32, 1);
    cpu().linear_forward(y.tensor(), x.tensor(), w.tensor(), bias.tensor(), 1.0f, 0.0f);
    gpu().linear_forward(gy.tensor(), gx.tensor(), gw.tensor(), gbias.tensor(), 1.0f, 0.0f);
    compare("linear_forward x bfloat16, w float32", gy, y, 4e-6);
}

TEST(linear_bias_of_another_type) {
    Host x = Host::random(70, 64, 1, DType::BFloat16), w = Host::random(32, 64, 2, DType::BFloat16),
         bias = Host::random(1, 32, 3, DType::Float32);
    Host y(70, 32);
    const OnDevice gx(gpu(), x, DType::BFloat16, 0), gw(gpu(), w, DType::BFloat16, 0), gbias(gpu(), bias, DType::Float32, 0);
    const OnDevice gy = OnDevice::poisoned(gpu(), 70, 32, DType::BFloat16, 0);
    cpu().linear_forward(y.tensor(), x.tensor(), w.tensor(), bias.tensor(), 1.0f, 0.0f);
    gpu().linear_forward(gy.tensor(), gx.tensor(), gw.tensor(), gbias.tensor(), 1.0f, 0.0f);
    compare("linear_forward y bfloat16, bias float32", gy, y, 3.5e-3);
}

TEST(linear_views_are_column_ranges) {
    // As an adapter writes the columns of k into a joined q, k, v.
    Host low = Host::random(100, 48, 1, DType::BFloat16), b = Host::random(64, 16, 2, DType::BFloat16),
         y = Host::random(100, 192, 3, DType::BFloat16);
    const OnDevice glow(gpu(), low, DType::BFloat16, 0), gb(gpu(), b, DType::BFloat16, 0), gy(gpu(), y, DType::BFloat16, 0);
    cpu().linear_forward(y.tensor().column_range(64, 64), low.tensor().column_range(16, 16), b.tensor(), {}, 2.0f, 1.0f);
    gpu().linear_forward(gy.tensor().column_range(64, 64), glow.tensor().column_range(16, 16), gb.tensor(), {}, 2.0f, 1.0f);
    compare("linear_forward on column ranges", gy, y, 2.5e-3);
}

TEST(linear_bias_backward) {
    for (const DType dtype : kTypes) {
        for (const auto& [rows, columns, pad] :
             {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1, 5, 0}, {300, 77, 3}, {1025, 512, 8}}) {
            Host dy = Host::random(rows, columns, 1, dtype), db = Host::random(1, columns, 2, DType::Float32);
            const OnDevice gdy(gpu(), dy, dtype, pad), gdb(gpu(), db, DType::Float32, 0);
            cpu().bias_backward(db.tensor(), dy.tensor());
            gpu().bias_backward(gdb.tensor(), gdy.tensor());
            compare(shape_name("bias_backward", {rows, columns, pad}, name_of(dtype)), gdb, db, 2e-6);
        }
    }
}

TEST(linear_empty) {
    const OnDevice x(gpu(), 0, 8, DType::BFloat16, 0), w(gpu(), Host(4, 8), DType::BFloat16, 0), y(gpu(), 0, 4, DType::BFloat16, 0);
    gpu().linear_forward(y.tensor(), x.tensor(), w.tensor(), {}, 1.0f, 0.0f);
    gpu().synchronize();
}
