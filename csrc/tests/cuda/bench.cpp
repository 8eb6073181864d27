#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "backend/cuda/cuda_error.h"
#include "tests/cuda/device.h"

// surogate_cuda_bench [0.6B|1.7B|8B|optimizer|attention ...] [--jsonl FILE]: the rate of each operation at the shapes of Qwen3 models,
// sustained: the median of three runs of a few tenths of a second each, timed by events. Buffers take turns, so that what is read is not
// what lies in the cache.

using namespace surogate;
using namespace surogate::testing;

namespace {

struct Model {
    const char* name;
    std::int64_t hidden, ffn, heads, kv_heads, size, vocab, tokens, segments;
};
const Model kModels[] = {
    {"0.6B", 1024, 3072, 16, 8, 128, 151936, 16384, 8},
    {"1.7B", 2048, 6144, 16, 8, 128, 151936, 16384, 8},
    {"8B", 4096, 12288, 32, 8, 128, 151936, 8192, 4},
};
constexpr std::int64_t kRank = 16;
constexpr double kSeconds = 0.25;

std::FILE* jsonl = nullptr;

/// Normal numbers out of a pool: to draw as many as the matrices here hold would take minutes.
Host random_rows(std::int64_t rows, std::int64_t columns, float scale) {
    static const Host pool = Host::random(1, 1048573, 1, DType::Float32);
    Host result(rows, columns);
    for (std::size_t i = 0; i < result.values.size(); ++i) result.values[i] = scale * pool.values[i % pool.values.size()];
    return result;
}

/// A matrix in several copies that take turns.
class Turning {
   public:
    Turning(CudaBackend& backend, std::int64_t rows, std::int64_t columns, DType dtype = DType::BFloat16, int copies = 0,
            float scale = 1.0f, std::int64_t pad = 0) {
        const std::size_t bytes = static_cast<std::size_t>(rows * (columns + pad)) * size_of(dtype);
        // Enough copies to exceed the cache, and no more: memory is large but not endless.
        if (copies == 0)
            copies = static_cast<int>(std::clamp<std::size_t>((std::size_t{256} << 20) / std::max<std::size_t>(bytes, 1), 1, 4));
        const Host block = random_rows(64, columns + pad, scale);
        for (int i = 0; i < copies; ++i) {
            owned_.push_back(std::make_unique<OnDevice>(backend, rows, columns + pad, dtype, 0));
            const Tensor whole = owned_.back()->tensor();
            // Random numbers, repeated every 64 rows: multiplying zeros is faster than any real product.
            for (std::int64_t row = 0; row < rows; row += 64) {
                const std::int64_t count = std::min<std::int64_t>(64, rows - row);
                if (row == 0) {
                    backend.upload(whole.row_range(0, count), block.values.data());
                } else {
                    backend.copy(whole.row_range(row, count), whole.row_range(0, count));
                }
            }
            views_.push_back(whole.column_range(0, columns));
        }
    }
    const Tensor& operator()(std::int64_t i) const { return views_[static_cast<std::size_t>(i) % views_.size()]; }

   private:
    std::vector<std::unique_ptr<OnDevice>> owned_;
    std::vector<Tensor> views_;
};

class Bench {
   public:
    explicit Bench(CudaBackend& backend) : backend_(backend) {
        CUDA_CHECK("bench", cudaEventCreate(&begin_));
        CUDA_CHECK("bench", cudaEventCreate(&end_));
    }

    /// Work in floating-point operations or bytes, whichever of the two is given.
    void time(const char* model, const std::string& op, double flops, double bytes, const std::function<void(std::int64_t)>& run) {
        for (std::int64_t i = 0; i < 4; ++i) run(i);
        const double first = seconds(8, run) / 8.0;
        const auto count = static_cast<std::int64_t>(std::clamp(kSeconds / std::max(first, 1e-7), 5.0, 20000.0));
        std::vector<double> times;
        for (int i = 0; i < 3; ++i) times.push_back(seconds(count, run) / static_cast<double>(count));
        std::sort(times.begin(), times.end());
        const double median = times[1], rate = (flops > 0.0 ? flops : bytes) / median * 1e-12;
        std::printf("%-5s %-48s %10.1f us %8.2f %s\n", model, op.c_str(), median * 1e6, rate, flops > 0.0 ? "TFLOP/s" : "TB/s");
        std::fflush(stdout);
        if (jsonl != nullptr) {
            std::fprintf(jsonl, "{\"bench\": \"op\", \"model\": \"%s\", \"op\": \"%s\", \"us\": %.2f, \"rate\": %.3f, \"unit\": \"%s\"}\n",
                         model, op.c_str(), median * 1e6, rate, flops > 0.0 ? "TFLOP/s" : "TB/s");
            std::fflush(jsonl);
        }
    }

   private:
    double seconds(std::int64_t count, const std::function<void(std::int64_t)>& run) {
        CUDA_CHECK("bench", cudaEventRecord(begin_, backend_.stream()));
        for (std::int64_t i = 0; i < count; ++i) run(i);
        CUDA_CHECK("bench", cudaEventRecord(end_, backend_.stream()));
        CUDA_CHECK("bench", cudaEventSynchronize(end_));
        float milliseconds = 0.0f;
        CUDA_CHECK("bench", cudaEventElapsedTime(&milliseconds, begin_, end_));
        return static_cast<double>(milliseconds) * 1e-3;
    }

    CudaBackend& backend_;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

std::string numbers(const char* name, std::initializer_list<std::int64_t> shape) {
    std::string result = name;
    for (const std::int64_t n : shape) result += " " + std::to_string(n);
    return result;
}

void products(CudaBackend& b, Bench& bench, const Model& m) {
    const std::int64_t t = m.tokens, columns = (m.heads + 2 * m.kv_heads) * m.size;
    const auto linear = [&](const char* name, std::int64_t out, std::int64_t in, std::int64_t pad) {
        const double flops = 2.0 * static_cast<double>(t) * static_cast<double>(out) * static_cast<double>(in);
        const Turning x(b, t, in, DType::BFloat16, 2, 1.0f, pad), w(b, out, in, DType::BFloat16, 2, 0.02f, pad),
            y(b, t, out, DType::BFloat16, 2, 1.0f, pad);
        const Turning dw(b, out, in, DType::Float32, 1);
        bench.time(m.name, numbers((std::string(name) + " forward").c_str(), {t, out, in}), flops, 0.0,
                   [&](std::int64_t i) { b.linear_forward(y(i), x(i), w(i), {}, 1.0f, 0.0f); });
        bench.time(m.name, numbers((std::string(name) + " backward input").c_str(), {t, out, in}), flops, 0.0,
                   [&](std::int64_t i) { b.linear_backward_input(x(i), y(i), w(i), 1.0f, 0.0f); });
        bench.time(m.name, numbers((std::string(name) + " backward weight, f32 +=").c_str(), {t, out, in}), flops, 0.0,
                   [&](std::int64_t i) { b.linear_backward_weight(dw(i), y(i), x(i), 1.0f); });
        bench.time(m.name, numbers((std::string(name) + " backward weight, f32 =").c_str(), {t, out, in}), flops, 0.0,
                   [&](std::int64_t i) { b.linear_backward_weight(dw(i), y(i), x(i), 1.0f, 0.0f); });
        const Turning narrow(b, out, in, DType::BFloat16, 1);
        bench.time(m.name, numbers((std::string(name) + " backward weight, bf16 +=").c_str(), {t, out, in}), flops, 0.0,
                   [&](std::int64_t i) { b.linear_backward_weight(narrow(i), y(i), x(i), 1.0f); });
        bench.time(m.name, numbers((std::string(name) + " backward weight, bf16 =").c_str(), {t, out, in}), flops, 0.0,
                   [&](std::int64_t i) { b.linear_backward_weight(narrow(i), y(i), x(i), 1.0f, 0.0f); });
    };
    linear("qkv", columns, m.hidden, 0);
    linear("o", m.hidden, m.heads * m.size, 0);
    linear("gate_up", 2 * m.ffn, m.hidden, 0);
    linear("down", m.hidden, m.ffn, 0);
    // With the adapters' border: three A below, three B to the right.
    linear("qkv + border", columns + 3 * kRank, m.hidden + 3 * kRank, 0);
    linear("gate_up + border", 2 * m.ffn + 2 * kRank, m.hidden + 2 * kRank, 0);
    linear("down + border", m.hidden + kRank, m.ffn + kRank, 0);

    {
        const Turning x(b, t, m.ffn), w(b, m.hidden, m.ffn, DType::BFloat16, 2, 0.02f), y(b, t, m.hidden), residual(b, t, m.hidden);
        const double flops = 2.0 * static_cast<double>(t) * static_cast<double>(m.ffn) * static_cast<double>(m.hidden);
        bench.time(m.name, numbers("down + residual, copied first", {t, m.hidden, m.ffn}), flops, 0.0,
                   [&](std::int64_t i) { b.Backend::linear_add_forward(y(i), residual(i), x(i), w(i), {}); });
        bench.time(m.name, numbers("down + residual", {t, m.hidden, m.ffn}), flops, 0.0,
                   [&](std::int64_t i) { b.linear_add_forward(y(i), residual(i), x(i), w(i), {}); });
    }
    {
        // Adapters of eight layers into the borders of their weights.
        std::vector<std::unique_ptr<OnDevice>> memory;
        std::vector<Backend::CopyItem> items;
        double bytes = 0.0;
        for (int layer = 0; layer < 8; ++layer) {
            for (const auto& [rows, width] : {std::pair{3 * kRank, m.hidden}, {columns, kRank}, {2 * m.ffn, kRank}, {kRank, m.ffn}}) {
                memory.push_back(std::make_unique<OnDevice>(b, rows, width, DType::Float32, 0));
                const Tensor exact = memory.back()->tensor();
                memory.push_back(std::make_unique<OnDevice>(b, rows, width, DType::BFloat16, 64));
                items.push_back({memory.back()->tensor(), exact});
                bytes += 6.0 * static_cast<double>(rows * width);
            }
        }
        bench.time(m.name, "refresh adapters of 8 layers, one by one", 0.0, bytes, [&](std::int64_t) { b.Backend::copy_all(items); });
        bench.time(m.name, "refresh adapters of 8 layers", 0.0, bytes, [&](std::int64_t) { b.copy_all(items); });
    }

    // An adapter as four thin products.
    const Turning x(b, t, m.hidden), a(b, 3 * kRank, m.hidden, DType::BFloat16, 1, 0.02f), low(b, t, 3 * kRank), y(b, t, columns),
        bq(b, m.heads * m.size, kRank, DType::BFloat16, 1, 0.02f);
    const Turning da(b, 3 * kRank, m.hidden, DType::Float32, 1), db(b, m.heads * m.size, kRank, DType::Float32, 1);
    const auto bytes = [](double elements) { return 2.0 * elements; };
    const double tokens = static_cast<double>(t), q = static_cast<double>(m.heads * m.size), hidden = static_cast<double>(m.hidden);
    bench.time(m.name, numbers("lora low = x A'", {t, 3 * kRank, m.hidden}), 0.0, bytes(tokens * (hidden + 48.0)),
               [&](std::int64_t i) { b.linear_forward(low(i), x(i), a(i), {}, 1.0f, 0.0f); });
    bench.time(m.name, numbers("lora q += low B'", {t, m.heads * m.size, kRank}), 0.0, bytes(tokens * (2.0 * q + 16.0)),
               [&](std::int64_t i) {
                   b.linear_forward(y(i).column_range(0, m.heads * m.size), low(i).column_range(0, kRank), bq(i), {}, 2.0f, 1.0f);
               });
    bench.time(m.name, numbers("lora dlow = dq B", {t, m.heads * m.size, kRank}), 0.0, bytes(tokens * (q + 16.0)), [&](std::int64_t i) {
        b.linear_backward_input(low(i).column_range(0, kRank), y(i).column_range(0, m.heads * m.size), bq(i), 2.0f, 0.0f);
    });
    bench.time(m.name, numbers("lora dB += dq' low", {t, m.heads * m.size, kRank}), 0.0, bytes(tokens * (q + 16.0)), [&](std::int64_t i) {
        b.linear_backward_weight(db(i), y(i).column_range(0, m.heads * m.size), low(i).column_range(0, kRank), 2.0f);
    });
    bench.time(m.name, numbers("lora dA += dlow' x", {t, 3 * kRank, m.hidden}), 0.0, bytes(tokens * (hidden + 48.0)),
               [&](std::int64_t i) { b.linear_backward_weight(da(i), low(i), x(i), 1.0f); });
}

void attention(CudaBackend& b, Bench& bench, const Model& m, const std::string& name = "attention") {
    const std::int64_t t = m.tokens, columns = (m.heads + 2 * m.kv_heads) * m.size;
    const Turning qkv(b, t, columns, DType::BFloat16, 2), out(b, t, m.heads * m.size, DType::BFloat16, 2),
        dout(b, t, m.heads * m.size, DType::BFloat16, 2), dqkv(b, t, columns, DType::BFloat16, 2), lse(b, t, m.heads, DType::Float32, 2);
    for (const std::int64_t segments : {m.segments, std::int64_t{31}}) {
        // Equal segments; 31 of them have about the length of a GRPO sample.
        std::vector<std::int32_t> bounds;
        for (std::int64_t s = 0; s <= segments; ++s) bounds.push_back(static_cast<std::int32_t>(t * s / segments));
        double pairs = 0.0;
        for (std::size_t s = 0; s + 1 < bounds.size(); ++s) {
            const double length = bounds[s + 1] - bounds[s];
            pairs += length * (length + 1.0) / 2.0;
        }
        const double flops = 4.0 * static_cast<double>(m.heads * m.size) * pairs;
        const AttentionShape shape{m.heads, m.kv_heads, m.size, 0.08838834764f, 0};
        const Segments view{bounds.data(), segments};
        bench.time(m.name, numbers((name + " forward").c_str(), {t, segments}), flops, 0.0,
                   [&](std::int64_t i) { b.attention_forward(out(i), lse(i), qkv(i), view, shape); });
        bench.time(m.name, numbers((name + " backward").c_str(), {t, segments}), 2.5 * flops, 0.0,
                   [&](std::int64_t i) { b.attention_backward(dqkv(i), dout(i), out(i), lse(i), qkv(i), view, shape); });
        if (!b.attention_refusal().empty()) std::printf("      (not by cuDNN: %s)\n", b.attention_refusal().c_str());
    }
    std::printf("      own device memory %.2f GiB\n", static_cast<double>(b.own_bytes()) / (1024.0 * 1024.0 * 1024.0));
}

/// Attention alone, a few times: for a profiler that shows the kernels of which it consists.
void attention_alone(CudaBackend& b, const Model& m) {
    const std::int64_t t = m.tokens, columns = (m.heads + 2 * m.kv_heads) * m.size;
    const Turning qkv(b, t, columns, DType::BFloat16, 1), out(b, t, m.heads * m.size, DType::BFloat16, 1),
        dout(b, t, m.heads * m.size, DType::BFloat16, 1), dqkv(b, t, columns, DType::BFloat16, 1), lse(b, t, m.heads, DType::Float32, 1);
    std::vector<std::int32_t> bounds;
    for (std::int64_t s = 0; s <= m.segments; ++s) bounds.push_back(static_cast<std::int32_t>(t * s / m.segments));
    const AttentionShape shape{m.heads, m.kv_heads, m.size, 0.08838834764f, 0};
    const Segments view{bounds.data(), m.segments};
    for (int i = 0; i < 2; ++i) {
        b.attention_forward(out(0), lse(0), qkv(0), view, shape);
        b.attention_backward(dqkv(0), dout(0), out(0), lse(0), qkv(0), view, shape);
    }
    b.synchronize();
}

void rows(CudaBackend& b, Bench& bench, const Model& m) {
    const std::int64_t t = m.tokens, columns = (m.heads + 2 * m.kv_heads) * m.size, turned = (m.heads + m.kv_heads) * m.size;
    const double tokens = static_cast<double>(t), hidden = static_cast<double>(m.hidden), ffn = static_cast<double>(m.ffn);
    {
        const Turning x(b, t, m.hidden), y(b, t, m.hidden), r(b, t, m.hidden), s(b, t, m.hidden), w(b, 1, m.hidden, DType::BFloat16, 1),
            rstd(b, 1, t, DType::Float32, 1), dw(b, 1, m.hidden, DType::Float32, 1);
        bench.time(m.name, numbers("rmsnorm forward", {t, m.hidden}), 0.0, 2.0 * tokens * hidden * 2.0,
                   [&](std::int64_t i) { b.rmsnorm_forward(y(i), rstd(i), x(i), w(i), 1e-6f); });
        bench.time(m.name, numbers("add + rmsnorm forward", {t, m.hidden}), 0.0, 2.0 * tokens * hidden * 4.0,
                   [&](std::int64_t i) { b.add_rmsnorm_forward(s(i), y(i), rstd(i), x(i), r(i), w(i), 1e-6f); });
        bench.time(m.name, numbers("rmsnorm backward, frozen", {t, m.hidden}), 0.0, 2.0 * tokens * hidden * 4.0,
                   [&](std::int64_t i) { b.rmsnorm_backward(s(i), {}, y(i), x(i), w(i), rstd(i)); });
        bench.time(m.name, numbers("rmsnorm backward", {t, m.hidden}), 0.0, 2.0 * tokens * hidden * 4.0,
                   [&](std::int64_t i) { b.rmsnorm_backward(s(i), dw(i), y(i), x(i), w(i), rstd(i)); });
    }
    {
        const Turning qkv(b, t, columns), raw(b, t, turned), w(b, 1, m.size, DType::BFloat16, 1),
            rstd(b, t, m.heads + m.kv_heads, DType::Float32, 1), cos(b, t, m.size / 2, DType::Float32, 1),
            dw(b, 1, m.size, DType::Float32, 1);
        std::vector<std::int32_t> positions(static_cast<std::size_t>(t));
        for (std::int64_t i = 0; i < t; ++i) positions[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % (t / m.segments));
        const OnDevice at(b, positions);
        const AttentionShape shape{m.heads, m.kv_heads, m.size, 1.0f, 0};
        const double bytes = 2.0 * tokens * static_cast<double>(turned) * 3.0;
        bench.time(m.name, numbers("qk norm + rope forward", {t, turned}), 0.0, bytes, [&](std::int64_t i) {
            b.qk_norm_rope_forward(qkv(i), raw(i), rstd(i), w(i), w(i), cos(i), cos(i), at.tensor(), shape, 1e-6f);
        });
        bench.time(m.name, numbers("qk norm + rope backward, frozen", {t, turned}), 0.0, bytes, [&](std::int64_t i) {
            b.qk_norm_rope_backward(qkv(i), {}, {}, raw(i), rstd(i), w(i), w(i), cos(i), cos(i), at.tensor(), shape);
        });
        bench.time(m.name, numbers("qk norm + rope backward", {t, turned}), 0.0, bytes, [&](std::int64_t i) {
            b.qk_norm_rope_backward(qkv(i), dw(i), dw(i), raw(i), rstd(i), w(i), w(i), cos(i), cos(i), at.tensor(), shape);
        });
    }
    {
        const Turning gate_up(b, t, 2 * m.ffn), y(b, t, m.ffn), d(b, t, 2 * m.ffn);
        bench.time(m.name, numbers("swiglu forward", {t, m.ffn}), 0.0, 2.0 * tokens * ffn * 3.0,
                   [&](std::int64_t i) { b.swiglu_forward(y(i), gate_up(i)); });
        bench.time(m.name, numbers("swiglu backward", {t, m.ffn}), 0.0, 2.0 * tokens * ffn * 5.0,
                   [&](std::int64_t i) { b.swiglu_backward(d(i), y(i), gate_up(i)); });
        bench.time(m.name, numbers("swiglu backward and forward again", {t, m.ffn}), 0.0, 2.0 * tokens * ffn * 6.0,
                   [&](std::int64_t i) { b.swiglu_recompute_backward(d(i), y(i), y(i), gate_up(i)); });
    }
    {
        std::vector<std::int32_t> ids(static_cast<std::size_t>(t)), picked(static_cast<std::size_t>(t / 2));
        for (std::size_t i = 0; i < ids.size(); ++i)
            ids[i] = static_cast<std::int32_t>(i % 7 == 0 ? 11 : (i * 2654435761u) % static_cast<std::uint32_t>(m.vocab));
        for (std::size_t i = 0; i < picked.size(); ++i) picked[i] = static_cast<std::int32_t>(2 * i);
        const OnDevice gids(b, ids), gpicked(b, picked);
        const Turning table(b, m.vocab, m.hidden, DType::BFloat16, 1), dtable(b, m.vocab, m.hidden, DType::Float32, 1), x(b, t, m.hidden),
            half(b, t / 2, m.hidden);
        bench.time(m.name, numbers("embedding forward", {t, m.hidden}), 0.0, 2.0 * tokens * hidden * 2.0,
                   [&](std::int64_t i) { b.embedding_forward(x(i), table(i), gids.tensor()); });
        bench.time(m.name, numbers("embedding backward", {t, m.hidden}), 0.0, tokens * hidden * (2.0 + 8.0),
                   [&](std::int64_t i) { b.embedding_backward(dtable(i), x(i), gids.tensor()); });
        bench.time(m.name, numbers("gather rows", {t / 2, m.hidden}), 0.0, tokens * hidden * 2.0,
                   [&](std::int64_t i) { b.gather_rows(half(i), x(i), gpicked.tensor()); });
        bench.time(m.name, numbers("scatter add rows", {t / 2, m.hidden}), 0.0, tokens * hidden * 3.0,
                   [&](std::int64_t i) { b.scatter_add_rows(x(i), half(i), gpicked.tensor()); });
    }
    {
        const Turning x(b, t, m.hidden), y(b, t, m.hidden);
        bench.time(m.name, numbers("copy", {t, m.hidden}), 0.0, 2.0 * tokens * hidden * 2.0, [&](std::int64_t i) { b.copy(y(i), x(i)); });
    }
}

void head(CudaBackend& b, Bench& bench, const Model& m) {
    const std::int64_t n = 2048;
    const double count = static_cast<double>(n), vocab = static_cast<double>(m.vocab),
                 flops = 2.0 * count * vocab * static_cast<double>(m.hidden);
    const Turning x(b, n, m.hidden, DType::BFloat16, 2), w(b, m.vocab, m.hidden, DType::BFloat16, 1, 0.02f),
        dw(b, m.vocab, m.hidden, DType::Float32, 1);
    const Turning wide(b, n, m.vocab, DType::Float32, 1, 3.0f), narrow(b, n, m.vocab, DType::BFloat16, 2, 3.0f);
    const Turning logp(b, 1, n, DType::Float32, 1), lse(b, 1, n, DType::Float32, 1), entropy(b, 1, n, DType::Float32, 1),
        seed(b, 1, n, DType::Float32, 1);
    std::vector<std::int32_t> targets(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<std::int32_t>(i * 70);
    const OnDevice at(b, targets);
    bench.time(m.name, numbers("head forward, float32 logits", {n, m.vocab, m.hidden}), flops, 0.0,
               [&](std::int64_t i) { b.linear_forward(wide(i), x(i), w(i), {}, 1.0f, 0.0f); });
    bench.time(m.name, numbers("head forward, bfloat16 logits", {n, m.vocab, m.hidden}), flops, 0.0,
               [&](std::int64_t i) { b.linear_forward(narrow(i), x(i), w(i), {}, 1.0f, 0.0f); });
    bench.time(m.name, numbers("head backward input", {n, m.vocab, m.hidden}), flops, 0.0,
               [&](std::int64_t i) { b.linear_backward_input(x(i), narrow(i), w(i), 1.0f, 0.0f); });
    bench.time(m.name, numbers("head backward weight, f32 +=", {n, m.vocab, m.hidden}), flops, 0.0,
               [&](std::int64_t i) { b.linear_backward_weight(dw(i), narrow(i), x(i), 1.0f); });
    bench.time(m.name, numbers("logprob forward, float32", {n, m.vocab}), 0.0, 4.0 * count * vocab,
               [&](std::int64_t i) { b.logprob_forward(logp(i), {}, lse(i), wide(i), at.tensor(), 1.0f, 151669); });
    bench.time(m.name, numbers("logprob forward, bfloat16", {n, m.vocab}), 0.0, 2.0 * count * vocab,
               [&](std::int64_t i) { b.logprob_forward(logp(i), {}, lse(i), narrow(i), at.tensor(), 1.0f, 151669); });
    bench.time(m.name, numbers("logprob + entropy forward, bfloat16", {n, m.vocab}), 0.0, 2.0 * count * vocab,
               [&](std::int64_t i) { b.logprob_forward(logp(i), entropy(i), lse(i), narrow(i), at.tensor(), 1.0f, 151669); });
    bench.time(m.name, numbers("logprob backward, float32 to bfloat16", {n, m.vocab}), 0.0, 6.0 * count * vocab,
               [&](std::int64_t i) { b.logprob_backward(narrow(i), wide(i), lse(i), {}, at.tensor(), seed(i), {}, 1.0f, 151669); });
    Tensor inside = wide(0);
    inside.dtype = DType::BFloat16;
    inside.stride *= 2;
    bench.time(m.name, numbers("logprob backward, narrower in place", {n, m.vocab}), 0.0, 6.0 * count * vocab,
               [&](std::int64_t) { b.logprob_backward(inside, wide(0), lse(0), {}, at.tensor(), seed(0), {}, 1.0f, 151669); });
    bench.time(m.name, numbers("logprob backward, bfloat16 in place", {n, m.vocab}), 0.0, 4.0 * count * vocab,
               [&](std::int64_t i) { b.logprob_backward(narrow(i), narrow(i), lse(i), {}, at.tensor(), seed(i), {}, 1.0f, 151669); });
}

/// What a chunk of the head costs by its number of rows: each one reads and writes the whole gradient of the weight.
void head_chunks(CudaBackend& b, Bench& bench, const Model& m) {
    for (const std::int64_t n : {1792, 3584, 7168}) {
        const double flops = 2.0 * static_cast<double>(n) * static_cast<double>(m.vocab) * static_cast<double>(m.hidden);
        const Turning x(b, n, m.hidden, DType::BFloat16, 1), d(b, n, m.vocab, DType::BFloat16, 1, 3.0f);
        for (const DType type : {DType::Float32, DType::BFloat16}) {
            const Turning dw(b, m.vocab, m.hidden, type, 1);
            const std::string name = std::string("head backward weight, ") + (type == DType::Float32 ? "f32" : "bf16");
            bench.time(m.name, numbers((name + " +=").c_str(), {n, m.vocab, m.hidden}), flops, 0.0,
                       [&](std::int64_t i) { b.linear_backward_weight(dw(i), d(i), x(i), 1.0f); });
            bench.time(m.name, numbers((name + " =").c_str(), {n, m.vocab, m.hidden}), flops, 0.0,
                       [&](std::int64_t i) { b.linear_backward_weight(dw(i), d(i), x(i), 1.0f, 0.0f); });
        }
    }
}

void optimizer(CudaBackend& b, Bench& bench) {
    const std::int64_t n = std::int64_t{1} << 28;
    const double count = static_cast<double>(n);
    const auto flat = [](const Turning& t) { return vector(t(0).data, t(0).size(), t(0).dtype, t(0).device); };
    const Turning w(b, n / 4096, 4096, DType::BFloat16, 1), master(b, n / 4096, 4096, DType::Float32, 1),
        m(b, n / 4096, 4096, DType::Float32, 1), v(b, n / 4096, 4096, DType::Float32, 1, 0.0f), g(b, n / 4096, 4096, DType::Float32, 1);
    AdamWOptions options{};
    options.learning_rate = 1e-4f;
    options.beta1 = 0.9f;
    options.beta2 = 0.95f;
    options.epsilon = 1e-8f;
    options.step = 1;
    options.gradient_scale = 1.0f;
    b.fill(v(0), 1.0f);
    bench.time("all", "adamw bf16 + master, f32 states 2^28", 0.0, count * (2.0 + 8.0 + 16.0 + 4.0),
               [&](std::int64_t) { b.adamw(flat(w), flat(master), flat(m), flat(v), flat(g), options); });
    bench.time("all", "adamw bf16 stochastic, f32 states 2^28", 0.0, count * (4.0 + 16.0 + 4.0),
               [&](std::int64_t) { b.adamw(flat(w), {}, flat(m), flat(v), flat(g), options); });
    const Turning m16(b, n / 4096, 4096, DType::BFloat16, 1), v16(b, n / 4096, 4096, DType::BFloat16, 1);
    b.fill(v16(0), 1.0f);
    bench.time("all", "adamw bf16 stochastic, bf16 states 2^28", 0.0, count * (4.0 + 8.0 + 4.0),
               [&](std::int64_t) { b.adamw(flat(w), {}, flat(m16), flat(v16), flat(g), options); });
    const Turning g16(b, n / 4096, 4096, DType::BFloat16, 1);
    bench.time("all", "adamw bf16 stochastic, bf16 states and gradient 2^28", 0.0, count * (4.0 + 8.0 + 2.0),
               [&](std::int64_t) { b.adamw(flat(w), {}, flat(m16), flat(v16), flat(g16), options); });
    bench.time("all", "sum of squares f32 2^28", 0.0, count * 4.0, [&](std::int64_t) { b.sum_of_squares(flat(g)); });
    bench.time("all", "fill 0 f32 2^28", 0.0, count * 4.0, [&](std::int64_t) { b.fill(g(0), 0.0f); });
}

}  // namespace

int main(int count, char** arguments) {
    std::vector<std::string> wanted;
    for (int i = 1; i < count; ++i) {
        if (std::string(arguments[i]) == "--jsonl" && i + 1 < count) {
            jsonl = std::fopen(arguments[++i], "a");
            if (jsonl == nullptr) {
                std::fprintf(stderr, "cannot write %s\n", arguments[i]);
                return 1;
            }
        } else {
            wanted.push_back(arguments[i]);
        }
    }
    try {
        CudaBackend& backend = gpu();
        Bench bench(backend);
        bool any = false;
        for (const Model& model : kModels) {
            if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), model.name) == wanted.end()) continue;
            any = true;
            products(backend, bench, model);
            attention(backend, bench, model);
            {
                CudaOptions options;
                options.tune_attention = true;
                CudaBackend tuned(options);
                Bench tuned_bench(tuned);
                attention(tuned, tuned_bench, model, "attention, plans timed,");
            }
            rows(backend, bench, model);
            head(backend, bench, model);
            head_chunks(backend, bench, model);
        }
        if (wanted.empty() || std::find(wanted.begin(), wanted.end(), "optimizer") != wanted.end()) {
            any = true;
            optimizer(backend, bench);
        }
        if (std::find(wanted.begin(), wanted.end(), "attention") != wanted.end()) {
            any = true;
            for (const Model& model : kModels) attention_alone(backend, model);
        }
        std::printf("%s", backend.product_table().c_str());
        if (!any) {
            std::fprintf(stderr, "no such model; there are 0.6B, 1.7B, 8B, optimizer and attention\n");
            return 1;
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    if (jsonl != nullptr) std::fclose(jsonl);
    return 0;
}
