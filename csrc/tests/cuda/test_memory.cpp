#include <limits>
#include <memory>
#include <vector>

#include "tests/cuda/device.h"

using namespace surogate;
using namespace surogate::testing;

TEST(memory_round_trips_views_of_both_types) {
    for (const DType dtype : kTypes) {
        for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {7, 33}, {129, 4096}, {2, 4300000}}) {
            const Host host = Host::random(rows, columns, 1, dtype);
            for (const std::int64_t pad : {0, 3}) {
                const OnDevice device(gpu(), host, dtype, pad);
                compare(shape_name("upload, download", {rows, columns}, pad ? "strided" : ""), device, host, 0.0);
            }
        }
    }
}

TEST(memory_upload_rounds_to_nearest) {
    const Host host = Host::random(9, 77, 2, DType::Float32);
    Host expected = host;
    for (float& value : expected.values) value = to_bf16(value);
    compare("upload of float32 into bfloat16", OnDevice(gpu(), host, DType::BFloat16, 1), expected, 0.0);
}

TEST(memory_int32_as_it_is) {
    std::vector<std::int32_t> ids(70000);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 2654435761u);
    const OnDevice device(gpu(), ids);
    std::vector<std::int32_t> back(ids.size());
    gpu().download(back.data(), device.tensor());
    CHECK(back == ids);
}

TEST(memory_copy_fill_scale) {
    for (const DType from : kTypes) {
        for (const DType to : kTypes) {
            for (const auto& [rows, columns, pad] :
                 {std::tuple<std::int64_t, std::int64_t, std::int64_t>{64, 256, 0}, {5, 77, 3}, {33, 64, 8}}) {
                const Host host = Host::random(rows, columns, 3, from);
                Host expected = host;
                if (to == DType::BFloat16) {
                    for (float& value : expected.values) value = to_bf16(value);
                }
                const OnDevice in(gpu(), host, from, pad), out = OnDevice::poisoned(gpu(), rows, columns, to, pad);
                gpu().copy(out.tensor(), in.tensor());
                compare(shape_name("copy", {rows, columns, pad}, name_of(from)), out, expected, 0.0);
                gpu().scale(out.tensor(), 0.5f);
                for (float& value : expected.values) value *= 0.5f;
                compare(shape_name("scale", {rows, columns, pad}), out, expected, 0.0);
                gpu().fill(out.tensor(), -1.25f);
                compare(shape_name("fill", {rows, columns, pad}), out, Host(rows, columns, -1.25f), 0.0);
                gpu().fill(out.tensor(), 0.0f);
                compare(shape_name("fill 0", {rows, columns, pad}), out, Host(rows, columns), 0.0);
            }
        }
    }
}

TEST(memory_copies_all_at_once) {
    struct Part {
        std::int64_t rows, columns, pad_in, pad_out;
        DType from, to;
    };
    const std::vector<Part> parts = {{16, 1024, 0, 64, DType::Float32, DType::BFloat16},  {3, 5, 0, 3, DType::BFloat16, DType::Float32},
                                     {2048, 16, 0, 112, DType::Float32, DType::BFloat16}, {1, 1, 0, 0, DType::Float32, DType::Float32},
                                     {7, 24, 8, 16, DType::BFloat16, DType::BFloat16},    {300, 9, 1, 2, DType::Float32, DType::BFloat16}};
    // Again with other numbers in the same places, then with other places.
    for (std::uint64_t round = 0; round < 3; ++round) {
        std::vector<std::unique_ptr<OnDevice>> in, out;
        std::vector<Host> expected;
        std::vector<Backend::CopyItem> items;
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const Part& p = parts[i];
            Host host = Host::random(p.rows, p.columns, 10 * round + i, p.from);
            in.push_back(std::make_unique<OnDevice>(gpu(), host, p.from, p.pad_in));
            out.push_back(
                std::make_unique<OnDevice>(gpu(), Host(p.rows, p.columns, std::numeric_limits<float>::quiet_NaN()), p.to, p.pad_out));
            if (p.to == DType::BFloat16) {
                for (float& value : host.values) value = to_bf16(value);
            }
            expected.push_back(host);
            items.push_back({out.back()->tensor(), in.back()->tensor()});
        }
        gpu().copy_all(items);
        gpu().copy_all(items);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            compare(shape_name("copy_all", {parts[i].rows, parts[i].columns, parts[i].pad_out}), *out[i], expected[i], 0.0);
        }
    }
    gpu().copy_all({});
    const OnDevice ids(gpu(), std::vector<std::int32_t>{1, 2, 3}), same(gpu(), std::vector<std::int32_t>{0, 0, 0});
    gpu().copy_all({{same.tensor(), ids.tensor()}});
    std::vector<std::int32_t> back(3);
    gpu().download(back.data(), same.tensor());
    CHECK(back == (std::vector<std::int32_t>{1, 2, 3}));
    CHECK_THROWS(gpu().copy_all({{same.tensor(), ids.tensor().column_range(0, 2)}}), "copy_all: out");
}

TEST(memory_errors_say_what_and_where) {
    CHECK_THROWS(gpu().allocate(std::size_t{1} << 50), "asked for");
    Host host(2, 2);
    const OnDevice device(gpu(), host, DType::Float32, 0);
    CHECK_THROWS(gpu().copy(device.tensor(), host.tensor()), "device memory");
    const OnDevice other(gpu(), 3, 2, DType::Float32, 0);
    CHECK_THROWS(gpu().copy(device.tensor(), other.tensor()), "copy: out");
    CHECK_THROWS(gpu().upload(device.tensor(), nullptr), "a null pointer");
    // The device works on after each.
    compare("after errors", device, host, 0.0);
}
