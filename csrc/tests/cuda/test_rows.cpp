#include <utility>

#include "tests/cuda/device.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

struct Size {
    std::int64_t rows, columns, pad;
};
const Size kSizes[] = {{1, 8, 0},      {3, 5, 0},     {37, 64, 8},   {130, 1000, 0}, {70, 1023, 1},
                       {129, 1024, 0}, {65, 2048, 8}, {33, 5120, 0}, {9, 8192, 0}};

}  // namespace

TEST(rmsnorm_forward_and_backward) {
    for (const DType dtype : kTypes) {
        for (const DType weight_type : kTypes) {
            for (const Size& s : kSizes) {
                Host x = Host::random(s.rows, s.columns, 1, dtype, 2.0f), w = Host::random(1, s.columns, 2, weight_type, 0.2f, 1.0f);
                Host y(s.rows, s.columns), rstd(1, s.rows);
                const OnDevice gx(gpu(), x, dtype, s.pad), gw(gpu(), w, weight_type, 0);
                const OnDevice gy = OnDevice::poisoned(gpu(), s.rows, s.columns, dtype, s.pad),
                               grstd = OnDevice::poisoned(gpu(), 1, s.rows, DType::Float32, 0);
                cpu().rmsnorm_forward(y.tensor(), rstd.tensor(), x.tensor(), w.tensor(), 1e-6f);
                gpu().rmsnorm_forward(gy.tensor(), grstd.tensor(), gx.tensor(), gw.tensor(), 1e-6f);
                compare(shape_name("rmsnorm_forward y", {s.rows, s.columns, s.pad}), gy, y, bound(dtype));
                compare(shape_name("rmsnorm_forward rstd", {s.rows, s.columns, s.pad}), grstd, rstd, 1e-6);

                Host dy = Host::random(s.rows, s.columns, 3, dtype), dx = Host::random(s.rows, s.columns, 4, dtype),
                     dw = Host::random(1, s.columns, 5, DType::Float32);
                const OnDevice gdy(gpu(), dy, dtype, s.pad), gdx(gpu(), dx, dtype, s.pad), frozen(gpu(), dx, dtype, s.pad),
                    gdw(gpu(), dw, DType::Float32, 0);
                cpu().rmsnorm_backward(dx.tensor(), dw.tensor(), dy.tensor(), x.tensor(), w.tensor(), rstd.tensor());
                gpu().rmsnorm_backward(gdx.tensor(), gdw.tensor(), gdy.tensor(), gx.tensor(), gw.tensor(), grstd.tensor());
                gpu().rmsnorm_backward(frozen.tensor(), {}, gdy.tensor(), gx.tensor(), gw.tensor(), grstd.tensor());
                compare(shape_name("rmsnorm_backward dx", {s.rows, s.columns, s.pad}), gdx, dx, bound(dtype));
                compare(shape_name("rmsnorm_backward dx, frozen", {s.rows, s.columns, s.pad}), frozen, dx, bound(dtype));
                compare(shape_name("rmsnorm_backward dweight", {s.rows, s.columns, s.pad}), gdw, dw, 3e-6);
            }
        }
    }
}

TEST(rmsnorm_with_residual) {
    for (const DType dtype : kTypes) {
        for (const DType stream_type : kTypes) {
            for (const Size& s : kSizes) {
                Host x = Host::random(s.rows, s.columns, 1, dtype), residual = Host::random(s.rows, s.columns, 2, stream_type),
                     w = Host::random(1, s.columns, 3, dtype, 0.2f, 1.0f);
                Host sum(s.rows, s.columns), y(s.rows, s.columns), rstd(1, s.rows);
                const OnDevice gx(gpu(), x, dtype, s.pad), gresidual(gpu(), residual, stream_type, s.pad), gw(gpu(), w, dtype, 0);
                const OnDevice gy = OnDevice::poisoned(gpu(), s.rows, s.columns, dtype, s.pad),
                               grstd = OnDevice::poisoned(gpu(), 1, s.rows, DType::Float32, 0);
                cpu().add_rmsnorm_forward(sum.tensor(), y.tensor(), rstd.tensor(), x.tensor(), residual.tensor(), w.tensor(), 1e-5f);
                // In place: the sum replaces the residual.
                gpu().add_rmsnorm_forward(gresidual.tensor(), gy.tensor(), grstd.tensor(), gx.tensor(), gresidual.tensor(), gw.tensor(),
                                          1e-5f);
                compare(shape_name("add_rmsnorm_forward sum", {s.rows, s.columns, s.pad}), gresidual, sum, bound(stream_type));
                compare(shape_name("add_rmsnorm_forward y", {s.rows, s.columns, s.pad}), gy, y,
                        bound(dtype, stream_type == DType::Float32 ? 2e-6 : 2.5e-3, 4e-3));
            }
        }
    }
}

TEST(rmsnorm_sums_have_the_same_bits_every_time) {
    const Host x = Host::random(3000, 1024, 1, DType::BFloat16), dy = Host::random(3000, 1024, 2, DType::BFloat16),
               w = Host::random(1, 1024, 3, DType::BFloat16);
    const Host rstd(1, 3000, 0.9f);
    const OnDevice gx(gpu(), x, DType::BFloat16, 0), gdy(gpu(), dy, DType::BFloat16, 0), gw(gpu(), w, DType::BFloat16, 0),
        grstd(gpu(), rstd, DType::Float32, 0);
    Host first;
    for (int run = 0; run < 3; ++run) {
        const OnDevice dx(gpu(), Host(3000, 1024), DType::BFloat16, 0), dw(gpu(), Host(1, 1024), DType::Float32, 0);
        gpu().rmsnorm_backward(dx.tensor(), dw.tensor(), gdy.tensor(), gx.tensor(), gw.tensor(), grstd.tensor());
        const Host got = dw.read();
        if (run == 0) first = got;
        CHECK(std::memcmp(got.values.data(), first.values.data(), got.values.size() * sizeof(float)) == 0);
    }
}

TEST(swiglu_forward_and_backward) {
    for (const DType dtype : kTypes) {
        for (const Size& s : {Size{1, 8, 0}, {5, 7, 3}, {129, 96, 8}, {64, 3072, 0}, {3, 12289, 0}}) {
            Host gate_up = Host::random(s.rows, 2 * s.columns, 1, dtype, 3.0f), dy = Host::random(s.rows, s.columns, 2, dtype);
            Host y(s.rows, s.columns), d(s.rows, 2 * s.columns);
            const OnDevice ggate_up(gpu(), gate_up, dtype, s.pad), gdy(gpu(), dy, dtype, s.pad);
            const OnDevice gy = OnDevice::poisoned(gpu(), s.rows, s.columns, dtype, s.pad),
                           gd = OnDevice::poisoned(gpu(), s.rows, 2 * s.columns, dtype, s.pad);
            cpu().swiglu_forward(y.tensor(), gate_up.tensor());
            gpu().swiglu_forward(gy.tensor(), ggate_up.tensor());
            compare(shape_name("swiglu_forward", {s.rows, s.columns, s.pad}), gy, y, bound(dtype));
            cpu().swiglu_backward(d.tensor(), dy.tensor(), gate_up.tensor());
            gpu().swiglu_backward(gd.tensor(), gdy.tensor(), ggate_up.tensor());
            compare(shape_name("swiglu_backward", {s.rows, s.columns, s.pad}), gd, d, bound(dtype));
            // Both at once, apart and in place.
            const OnDevice gy_again = OnDevice::poisoned(gpu(), s.rows, s.columns, dtype, s.pad),
                           gd_again = OnDevice::poisoned(gpu(), s.rows, 2 * s.columns, dtype, s.pad);
            gpu().swiglu_recompute_backward(gd_again.tensor(), gy_again.tensor(), gdy.tensor(), ggate_up.tensor());
            compare(shape_name("swiglu_recompute_backward", {s.rows, s.columns, s.pad}), gd_again, gd.read(), 0.0);
            compare(shape_name("swiglu_recompute_backward y", {s.rows, s.columns, s.pad}), gy_again, gy.read(), 0.0);
            gpu().swiglu_recompute_backward(ggate_up.tensor(), gdy.tensor(), gdy.tensor(), ggate_up.tensor());
            compare(shape_name("swiglu_recompute_backward in place", {s.rows, s.columns, s.pad}), ggate_up, gd.read(), 0.0);
            compare(shape_name("swiglu_recompute_backward y in place", {s.rows, s.columns, s.pad}), gdy, gy.read(), 0.0);
        }
    }
}

TEST(embedding_and_rows) {
    for (const DType dtype : kTypes) {
        for (const Size& s : {Size{1, 8, 0}, {300, 65, 3}, {2000, 1024, 0}}) {
            const std::int64_t table_rows = 97;
            std::vector<std::int32_t> ids(static_cast<std::size_t>(s.rows));
            const Philox draw(7, 1);
            // Few ids, one of them in every third row: long runs.
            for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = i % 3 == 0 ? 5 : static_cast<std::int32_t>(draw(i)[0] % 97u);
            const OnDevice gids(gpu(), ids);
            Host table = Host::random(table_rows, s.columns, 1, dtype), out(s.rows, s.columns),
                 dout = Host::random(s.rows, s.columns, 2, dtype);
            Host dtable = Host::random(table_rows, s.columns, 3, DType::Float32), scattered = Host::random(table_rows, s.columns, 4, dtype);
            const OnDevice gtable(gpu(), table, dtype, s.pad), gdout(gpu(), dout, dtype, s.pad),
                gdtable(gpu(), dtable, DType::Float32, s.pad), gscattered(gpu(), scattered, dtype, s.pad);
            const OnDevice gout = OnDevice::poisoned(gpu(), s.rows, s.columns, dtype, s.pad),
                           gathered = OnDevice::poisoned(gpu(), s.rows, s.columns, dtype, s.pad);
            cpu().embedding_forward(out.tensor(), table.tensor(), ids_of(ids));
            gpu().embedding_forward(gout.tensor(), gtable.tensor(), gids.tensor());
            compare(shape_name("embedding_forward", {s.rows, s.columns, s.pad}), gout, out, 0.0);
            gpu().gather_rows(gathered.tensor(), gtable.tensor(), gids.tensor());
            compare(shape_name("gather_rows", {s.rows, s.columns, s.pad}), gathered, out, 0.0);
            cpu().embedding_backward(dtable.tensor(), dout.tensor(), ids_of(ids));
            gpu().embedding_backward(gdtable.tensor(), gdout.tensor(), gids.tensor());
            // The same order of the same float32 sums.
            compare(shape_name("embedding_backward", {s.rows, s.columns, s.pad}), gdtable, dtable, 1e-7);
            cpu().scatter_add_rows(scattered.tensor(), dout.tensor(), ids_of(ids));
            gpu().scatter_add_rows(gscattered.tensor(), gdout.tensor(), gids.tensor());
            compare(shape_name("scatter_add_rows, repeated", {s.rows, s.columns, s.pad}), gscattered, scattered, bound(dtype, 1e-7));
        }
        std::vector<std::int32_t> rising = {1, 2, 5, 40, 41, 96};
        Host in = Host::random(6, 128, 1, dtype), out = Host::random(97, 128, 2, dtype);
        const OnDevice gin(gpu(), in, dtype, 0), gout(gpu(), out, dtype, 0), index(gpu(), rising);
        cpu().scatter_add_rows(out.tensor(), in.tensor(), ids_of(rising));
        gpu().scatter_add_rows(gout.tensor(), gin.tensor(), index.tensor());
        compare("scatter_add_rows, rising", gout, out, bound(dtype, 1e-7));
        // A scale of 0 keeps even a NaN out.
        in(3, 5) = std::numeric_limits<float>::quiet_NaN();
        Host scale = Host::random(1, 6, 3, DType::Float32);
        scale(0, 3) = 0.0f;
        const OnDevice gscaled(gpu(), in, dtype, 8), gscale(gpu(), scale, DType::Float32, 0);
        cpu().scatter_add_scaled_rows(out.tensor(), in.tensor(), ids_of(rising), scale.tensor());
        gpu().scatter_add_scaled_rows(gout.tensor(), gscaled.tensor(), index.tensor(), gscale.tensor());
        compare("scatter_add_scaled_rows", gout, out, bound(dtype, 1e-6));
    }
}

TEST(embedding_backward_of_long_runs) {
    // Runs of 1, around a warp and around what is fetched ahead, one of thousands; several tables' widths, so that ids need few or many
    // bits.
    for (const std::int64_t table_rows : {1, 2, 300, 70000}) {
        for (const auto& [columns, pad] : {std::pair<std::int64_t, std::int64_t>{7, 0}, {264, 8}, {1024, 0}}) {
            if (table_rows * columns > 2000000) continue;  // only to draw it would take seconds
            for (const DType dtype : kTypes) {
                std::vector<std::int32_t> ids;
                const Philox draw(3, static_cast<std::uint64_t>(table_rows));
                for (const int length : {1, 15, 16, 17, 31, 32, 33, 64, 65, 3000, 2}) {
                    const auto id = static_cast<std::int32_t>(draw(ids.size())[0] % static_cast<std::uint32_t>(table_rows));
                    ids.insert(ids.end(), static_cast<std::size_t>(length), id);
                }
                // Shuffled, so that the rows of a run lie apart.
                for (std::size_t i = ids.size() - 1; i > 0; --i) std::swap(ids[i], ids[draw(7919 + i)[0] % (i + 1)]);
                const auto count = static_cast<std::int64_t>(ids.size());
                Host dout = Host::random(count, columns, 2, dtype), dtable = Host::random(table_rows, columns, 3, DType::Float32);
                const OnDevice gids(gpu(), ids), gdout(gpu(), dout, dtype, pad), gdtable(gpu(), dtable, DType::Float32, pad);
                cpu().embedding_backward(dtable.tensor(), dout.tensor(), ids_of(ids));
                gpu().embedding_backward(gdtable.tensor(), gdout.tensor(), gids.tensor());
                compare(shape_name("embedding_backward, long runs", {count, table_rows, columns, pad}), gdtable, dtable, 1e-7);
            }
        }
    }
}

TEST(embedding_ids_outside_are_reported) {
    const OnDevice table(gpu(), Host(10, 8), DType::BFloat16, 0), out(gpu(), Host(3, 8), DType::BFloat16, 0);
    for (const std::int32_t bad : {-1, 10}) {
        const OnDevice ids(gpu(), std::vector<std::int32_t>{1, bad, 2});
        gpu().embedding_forward(out.tensor(), table.tensor(), ids.tensor());
        CHECK_THROWS(gpu().synchronize(), "ids");
        gpu().synchronize();  // once
        gpu().gather_rows(out.tensor(), table.tensor(), ids.tensor());
        CHECK_THROWS(out.read(), "index");
        gpu().embedding_backward(table.tensor(), out.tensor(), ids.tensor());
        CHECK_THROWS(gpu().synchronize(), "ids");
    }
}
