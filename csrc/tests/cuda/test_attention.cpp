#include <algorithm>

#include "tests/cuda/device.h"

using namespace surogate;
using namespace surogate::testing;

namespace {

struct Case {
    std::vector<std::int32_t> bounds;
    std::int64_t heads, kv_heads, size, window;
    AttentionShape shape() const { return {heads, kv_heads, size, static_cast<float>(1.0 / std::sqrt(static_cast<double>(size))), window}; }
    std::int64_t tokens() const { return bounds.back(); }
    std::int64_t columns() const { return (heads + 2 * kv_heads) * size; }
    Segments segments() const { return {bounds.data(), static_cast<std::int64_t>(bounds.size()) - 1}; }
    std::string name(const char* what) const {
        return shape_name(what, {tokens(), static_cast<std::int64_t>(bounds.size()) - 1, heads, kv_heads, size, window});
    }
};

// Single tokens, empty segments, grouped heads, odd head sizes, windows below, at and above block sizes.
const Case kAny[] = {
    {{0, 1}, 1, 1, 4, 0},           {{0, 1, 3, 3, 8}, 2, 1, 3, 0}, {{0, 11, 12}, 4, 2, 5, 0},
    {{0, 13}, 3, 3, 40, 1},         {{0, 60, 150}, 6, 2, 33, 4},   {{0, 5, 300, 301, 420}, 9, 3, 64, 0},
    {{0, 230, 400}, 2, 2, 256, 40}, {{0, 520}, 4, 1, 128, 300},    {{0, 9, 77}, 8, 2, 80, 1000},
};
// What cuDNN must take: bfloat16, head sizes of models.
const Case kModels[] = {
    {{0, 1, 2, 130, 131, 700}, 16, 8, 128, 0}, {{0, 512}, 4, 4, 64, 0},         {{0, 300, 1300}, 9, 3, 64, 0},
    {{0, 1000, 2048}, 32, 8, 128, 0},          {{0, 700, 900}, 8, 2, 128, 256}, {{0, 33, 34, 400}, 14, 2, 64, 0},
    {{0, 129, 258, 1024, 1025}, 8, 1, 128, 1},
};

/// `gradient` comes on top of what rounding the result to its type costs.
struct Bounds {
    double out, lse, gradient;
};

/// Columns beside each matrix.
struct Pads {
    std::int64_t qkv, out, dout, dqkv;
    Pads(std::int64_t all) : qkv(all), out(all), dout(all), dqkv(all) {}
    Pads(std::int64_t qkv_in, std::int64_t out_in, std::int64_t dout_in, std::int64_t dqkv_in)
        : qkv(qkv_in), out(out_in), dout(dout_in), dqkv(dqkv_in) {}
};

/// `backend`'s attention against the CPU's, on inputs that both see alike. Both backwards start from the backend's own lse.
void run(CudaBackend& backend, const Case& c, DType dtype, const Bounds& bounds, const Pads& pads, const char* which) {
    Host qkv = Host::random(c.tokens(), c.columns(), 1, dtype), dout = Host::random(c.tokens(), c.heads * c.size, 2, dtype);
    Host out(c.tokens(), c.heads * c.size), lse(c.tokens(), c.heads), dqkv(c.tokens(), c.columns());
    cpu().attention_forward(out.tensor(), lse.tensor(), qkv.tensor(), c.segments(), c.shape());
    const OnDevice gqkv(backend, qkv, dtype, pads.qkv), gdout(backend, dout, dtype, pads.dout);
    const OnDevice gout = OnDevice::poisoned(backend, c.tokens(), c.heads * c.size, dtype, pads.out),
                   glse = OnDevice::poisoned(backend, c.tokens(), c.heads, DType::Float32, 0);
    const OnDevice gdqkv = OnDevice::poisoned(backend, c.tokens(), c.columns(), dtype, pads.dqkv);
    backend.attention_forward(gout.tensor(), glse.tensor(), gqkv.tensor(), c.segments(), c.shape());
    backend.attention_backward(gdqkv.tensor(), gdout.tensor(), gout.tensor(), glse.tensor(), gqkv.tensor(), c.segments(), c.shape());
    Host own_out = gout.read(), own_lse = glse.read();
    cpu().attention_backward(dqkv.tensor(), dout.tensor(), own_out.tensor(), own_lse.tensor(), qkv.tensor(), c.segments(), c.shape());
    const std::string prefix = std::string(which) + " attention ";
    compare(c.name((prefix + "out").c_str()), gout, out, bounds.out);
    compare(c.name((prefix + "lse").c_str()), glse, lse, bounds.lse);
    const std::int64_t q = c.heads * c.size, k = c.kv_heads * c.size;
    // Each of dq, dk and dv by itself: the largest must not hide the others' errors.
    const Host got = gdqkv.read();
    const auto part = [&](const Host& all, std::int64_t first, std::int64_t columns) {
        Host result(all.rows, columns);
        for (std::int64_t r = 0; r < all.rows; ++r) {
            for (std::int64_t i = 0; i < columns; ++i) result(r, i) = all(r, first + i);
        }
        return result;
    };
    for (const auto& [name, first, columns] : {std::tuple{"dq", std::int64_t{0}, q}, {"dk", q, k}, {"dv", q + k, k}}) {
        const Host expected = part(dqkv, first, columns);
        double error = relative_error(part(got, first, columns), expected);
        // Of a query that sees a single key dq and dk are zero but for the rounding of out. Numbers of about 1 cancel there, and those are
        // what the error is measured by.
        const double size = norm(expected), cancelled = std::sqrt(static_cast<double>(expected.values.size()));
        if (c.window == 1 && std::string(name) != "dv" && size > 0.0) error *= size / std::max(size, cancelled);
        const double bound = bounds.gradient + (dtype == DType::BFloat16 ? rounding_to_bfloat16(expected) : 0.0);
        const bool close = error <= bound;
        std::printf("  %-74s %-8s %.2e (<= %.1e)%s\n", c.name((prefix + name).c_str()).c_str(), name_of(dtype), error, bound,
                    close ? "" : "  TOO LARGE");
        if (!close) ++failures();
    }
    if (!gdqkv.guards_intact()) {
        std::printf("  %s: dqkv: wrote outside of the view\n", which);
        ++failures();
    }
}

CudaBackend& make(CudaOptions::Attention attention, bool deterministic) {
    CudaOptions options;
    options.attention = attention;
    options.deterministic = deterministic;
    return *new CudaBackend(options);  // never destroyed, as gpu()
}
CudaBackend& plain() {
    static CudaBackend& shared = make(CudaOptions::Attention::Plain, false);
    return shared;
}
CudaBackend& cudnn() {
    static CudaBackend& shared = make(CudaOptions::Attention::Cudnn, false);
    return shared;
}
CudaBackend& deterministic() {
    static CudaBackend& shared = make(CudaOptions::Attention::Auto, true);
    return shared;
}

// cuDNN rounds probabilities and their gradients to bfloat16 between its products; ours only rounds results. Both take the sum of dout *
// out from the rounded out, so that dq and dk have that rounding's error too (2^-8 / sqrt 3 at most).
constexpr Bounds kWide = {3e-6, 1e-6, 1e-5}, kNarrow = {3e-3, 1e-5, 2.3e-3}, kCudnn = {4e-3, 1e-4, 8e-3};

}  // namespace

TEST(attention_plain_float32) {
    for (const std::int64_t pad : {0, 3}) {
        for (const Case& c : kAny) run(plain(), c, DType::Float32, kWide, pad, "plain");
    }
}

TEST(attention_plain_bfloat16) {
    for (const Case& c : kAny) run(plain(), c, DType::BFloat16, kNarrow, 1, "plain");
    for (const Case& c : kModels) run(plain(), c, DType::BFloat16, kNarrow, 0, "plain");
}

TEST(attention_cudnn) {
    for (const Case& c : kModels) run(cudnn(), c, DType::BFloat16, kCudnn, 0, "cuDNN");
    // Rows with room at their ends, as beside an adapter's columns.
    run(cudnn(), kModels[0], DType::BFloat16, kCudnn, 16, "cuDNN");
}

TEST(attention_cudnn_strides_of_their_own) {
    const Case few{{0, 11, 12, 29}, 4, 2, 64, 0}, ungrouped{{0, 300, 301, 512}, 4, 4, 64, 0};
    const Pads all[] = {{0, 64, 0, 0}, {0, 0, 64, 0}, {0, 0, 0, 64}, {64, 0, 0, 0}, {0, 64, 0, 128}};
    for (const Pads& pads : all) {
        for (const Case& c : {few, ungrouped, kModels[0], kModels[1], kModels[5]}) {
            std::printf("  beside qkv %d, out %d, dout %d, dqkv %d columns:\n", static_cast<int>(pads.qkv), static_cast<int>(pads.out),
                        static_cast<int>(pads.dout), static_cast<int>(pads.dqkv));
            run(cudnn(), c, DType::BFloat16, kCudnn, pads, "cuDNN");
        }
    }
}

TEST(attention_deterministic) {
    for (const Case& c : kModels) {
        run(deterministic(), c, DType::BFloat16, kCudnn, 0, "deterministic");
        const std::string& refusal = deterministic().attention_refusal();
        if (!refusal.empty()) std::printf("  (not by cuDNN: %s)\n", refusal.c_str());
    }
}

TEST(attention_auto_takes_everything) {
    for (const Case& c : {kAny[2], kAny[4], kModels[2]}) {
        run(gpu(), c, DType::Float32, kWide, 0, "auto");
        run(gpu(), c, DType::BFloat16, kCudnn, 0, "auto");
    }
}

TEST(attention_deterministic_bits) {
    const Case c{{0, 700, 1500, 2048}, 16, 8, 128, 0};
    CudaBackend& backend = deterministic();
    const OnDevice qkv(backend, Host::random(c.tokens(), c.columns(), 1, DType::BFloat16), DType::BFloat16, 0);
    const OnDevice dout(backend, Host::random(c.tokens(), c.heads * c.size, 2, DType::BFloat16), DType::BFloat16, 0);
    Host first;
    for (int run = 0; run < 4; ++run) {
        const OnDevice out(backend, c.tokens(), c.heads * c.size, DType::BFloat16, 0), lse(backend, c.tokens(), c.heads, DType::Float32, 0),
            dqkv(backend, c.tokens(), c.columns(), DType::BFloat16, 0);
        backend.attention_forward(out.tensor(), lse.tensor(), qkv.tensor(), c.segments(), c.shape());
        backend.attention_backward(dqkv.tensor(), dout.tensor(), out.tensor(), lse.tensor(), qkv.tensor(), c.segments(), c.shape());
        const Host got = dqkv.read();
        if (run == 0) first = got;
        CHECK(std::memcmp(got.values.data(), first.values.data(), got.values.size() * sizeof(float)) == 0);
    }
}

TEST(attention_backward_in_spare_memory) {
    const Case c{{0, 300, 500, 501, 900, 1024}, 16, 8, 128, 0};
    CudaBackend& backend = deterministic();  // the same bits, wherever the workspace lies
    const OnDevice qkv(backend, Host::random(c.tokens(), c.columns(), 1, DType::BFloat16), DType::BFloat16, 0);
    const OnDevice dout(backend, Host::random(c.tokens(), c.heads * c.size, 2, DType::BFloat16), DType::BFloat16, 0);
    const OnDevice out(backend, c.tokens(), c.heads * c.size, DType::BFloat16, 0), lse(backend, c.tokens(), c.heads, DType::Float32, 0);
    backend.attention_forward(out.tensor(), lse.tensor(), qkv.tensor(), c.segments(), c.shape());
    Host first;
    // None, too little for a segment, enough for some at a time, enough for all.
    for (const std::int64_t spare : {0, 10, 4 << 20, 8 << 20, 12 << 20, 16 << 20, 64 << 20}) {
        const OnDevice dqkv(backend, c.tokens(), c.columns(), DType::BFloat16, 0);
        const OnDevice memory = OnDevice::poisoned(backend, 1, spare + 1, DType::BFloat16, 0);
        const Tensor given = spare == 0 ? Tensor{} : memory.tensor().column_range(1, spare);  // badly aligned
        backend.attention_backward(dqkv.tensor(), dout.tensor(), out.tensor(), lse.tensor(), qkv.tensor(), c.segments(), c.shape(), given);
        const Host got = dqkv.read();
        if (spare == 0) first = got;
        CHECK(std::memcmp(got.values.data(), first.values.data(), got.values.size() * sizeof(float)) == 0);
    }
}

TEST(attention_many_batches_share_few_graphs) {
    // Different segments every time: results stay right when a graph is reused for fewer, shorter segments.
    CudaBackend& backend = cudnn();
    for (std::int32_t i = 0; i < 6; ++i) {
        const Case c{{0, 100 + 7 * i, 230 + 5 * i, 300 + 31 * i}, 8, 4, 128, 0};
        run(backend, c, DType::BFloat16, kCudnn, 0, "cuDNN");
    }
}

TEST(attention_refuses_bad_arguments) {
    const OnDevice qkv(gpu(), Host(5, 16), DType::Float32, 0), out(gpu(), Host(5, 8), DType::Float32, 0),
        lse(gpu(), Host(5, 2), DType::Float32, 0);
    const AttentionShape shape{2, 1, 4, 1.0f, 0};
    const std::vector<std::int32_t> short_bounds = {0, 4}, backwards = {0, 4, 3, 5};
    CHECK_THROWS(gpu().attention_forward(out.tensor(), lse.tensor(), qkv.tensor(), {short_bounds.data(), 1}, shape), "cu_seqlens");
    CHECK_THROWS(gpu().attention_forward(out.tensor(), lse.tensor(), qkv.tensor(), {backwards.data(), 3}, shape), "cu_seqlens[2]");
}
