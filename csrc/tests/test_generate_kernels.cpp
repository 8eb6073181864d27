#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/decode_linear_kernels.h"
#include "backend/cpu/decode_row_kernels.h"
#include "backend/cpu/sample.h"
#include "tests/harness.h"

namespace surogate {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> normals(std::size_t count, std::uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(generator);
    return values;
}

std::vector<std::pair<std::string, cpu::LinearKernel>> linear_kernels() {
    std::vector<std::pair<std::string, cpu::LinearKernel>> kernels = {{"portable", cpu::linear_block_portable}};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels.emplace_back("avx2", cpu::linear_block_avx2);
    if (__builtin_cpu_supports("avx512f")) kernels.emplace_back("avx512", cpu::linear_block_avx512);
#endif
    return kernels;
}

std::vector<std::pair<std::string, const cpu::RowKernels*>> row_kernel_sets() {
    std::vector<std::pair<std::string, const cpu::RowKernels*>> sets = {{"portable", &cpu::row_kernels_portable()}};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.emplace_back("avx2", &cpu::row_kernels_avx2());
    if (__builtin_cpu_supports("avx512f")) sets.emplace_back("avx512", &cpu::row_kernels_avx512());
#endif
    return sets;
}

struct LinearCase {
    std::int64_t n, rows, k;
    std::vector<float> x, w, bias, before;

    LinearCase(std::int64_t the_n, std::int64_t the_rows, std::int64_t the_k)
        : n(the_n),
          rows(the_rows),
          k(the_k),
          x(normals(static_cast<std::size_t>(n * k), 1)),
          w(normals(static_cast<std::size_t>(rows * k), 2)),
          bias(normals(static_cast<std::size_t>(rows), 3)),
          before(normals(static_cast<std::size_t>(n * rows), 4)) {}

    /// Rows [first, first + count) of x, all of w, by the kernel, as one block or in blocks of `step` rows of w.
    std::vector<float> run(cpu::LinearKernel kernel, std::int64_t first, std::int64_t count, bool biased, float alpha, float beta,
                           std::int64_t step) const {
        const std::int64_t panels = (count + cpu::kPanelRows - 1) / cpu::kPanelRows;
        std::vector<float> packed(static_cast<std::size_t>(panels * cpu::kPanelRows * k), kNan);
        for (std::int64_t p = 0; p < panels; ++p) cpu::pack_panel(packed.data(), x.data() + first * k, k, count, k, p);
        // With beta 0 what lies in y must not matter.
        std::vector<float> y(static_cast<std::size_t>(count * rows), kNan);
        if (beta != 0.0f) std::copy_n(before.begin() + first * rows, count * rows, y.begin());
        for (std::int64_t j = 0; j < rows; j += step) {
            kernel({y.data(), rows, packed.data(), w.data(), k, biased ? bias.data() : nullptr, count, k, j, std::min(rows, j + step), rows,
                    alpha, beta});
        }
        return y;
    }

    double expected(std::int64_t i, std::int64_t j, bool biased, float alpha, float beta, double* magnitude) const {
        double sum = 0.0;
        *magnitude = 0.0;
        for (std::int64_t c = 0; c < k; ++c) {
            const double product = static_cast<double>(x[static_cast<std::size_t>(i * k + c)]) * w[static_cast<std::size_t>(j * k + c)];
            sum += product;
            *magnitude += std::abs(product);
        }
        return alpha * sum + (biased ? bias[static_cast<std::size_t>(j)] : 0.0) + beta * before[static_cast<std::size_t>(i * rows + j)];
    }
};

TEST(linear_kernels_agree_with_double_precision) {
    const std::int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {16, 12, 16}, {17, 29, 257}, {33, 25, 600}, {50, 61, 40}};
    for (const auto& [n, rows, k] : shapes) {
        const LinearCase c(n, rows, k);
        for (const auto& [name, kernel] : linear_kernels()) {
            for (const auto& [biased, alpha, beta] : {std::tuple{false, 1.0f, 0.0f}, {true, 1.0f, 0.0f}, {true, -0.5f, 2.0f}}) {
                const std::vector<float> y = c.run(kernel, 0, n, biased, alpha, beta, rows);
                for (std::int64_t i = 0; i < n; ++i) {
                    for (std::int64_t j = 0; j < rows; ++j) {
                        double magnitude = 0.0;
                        const double expected = c.expected(i, j, biased, alpha, beta, &magnitude);
                        CHECK_NEAR(y[static_cast<std::size_t>(i * rows + j)], expected, 1e-6 * (magnitude + 4.0));
                    }
                }
            }
        }
    }
}

TEST(linear_rows_have_the_same_bits_alone_and_among_others) {
    const LinearCase c(67, 53, 531);
    for (const auto& [name, kernel] : linear_kernels()) {
        const std::vector<float> all = c.run(kernel, 0, c.n, true, 1.5f, 1.0f, c.rows);
        for (const std::int64_t count : {1, 2, 15, 16, 17, 32, 48}) {
            for (const std::int64_t first : {0, 5, 19}) {
                for (const std::int64_t step : {12, 17, 53}) {
                    const std::vector<float> some = c.run(kernel, first, count, true, 1.5f, 1.0f, step);
                    CHECK(std::equal(some.begin(), some.end(), all.begin() + first * c.rows));
                }
            }
        }
    }
}

TEST(vector_widths_give_the_same_bits) {
    const auto kernels = linear_kernels();
    const LinearCase c(35, 47, 300);
    for (std::size_t i = 2; i < kernels.size(); ++i) {  // avx512 against avx2; the portable one has no fused multiply-add
        CHECK(c.run(kernels[i].second, 0, c.n, true, 0.7f, 1.0f, c.rows) == c.run(kernels[1].second, 0, c.n, true, 0.7f, 1.0f, c.rows));
    }
    const auto sets = row_kernel_sets();
    const std::vector<float> logits = normals(1037, 9);
    for (std::size_t i = 2; i < sets.size(); ++i) {
        std::vector<double> sums(2 * 3);
        cpu::SoftmaxTask a{logits.data(), 1037, 0.8f, sums.data(), 0.0f, 0.0}, b{logits.data(), 1037, 0.8f, sums.data() + 3, 0.0f, 0.0};
        sets[1].second->softmax(a);
        sets[i].second->softmax(b);
        CHECK(a.total == b.total);
        CHECK(a.max == b.max);
    }
}

TEST(exponentials_are_accurate) {
    std::vector<float> x;
    for (float value = 0.0f; value > -90.0f; value -= 0.00731f) x.push_back(value);
    x.push_back(-200.0f);
    x.push_back(-std::numeric_limits<float>::infinity());
    x.push_back(kNan);
    std::vector<float> out(x.size());
    for (const auto& [name, kernels] : row_kernel_sets()) {
        kernels->exponentials(out.data(), x.data(), static_cast<std::int64_t>(x.size()), 0.0f, 1.0f);
        for (std::size_t i = 0; i + 3 < x.size(); ++i) {
            const double expected = std::exp(static_cast<double>(x[i]));
            CHECK_NEAR(out[i], x[i] < -87.0f ? 0.0 : expected, x[i] < -87.0f ? 0.0 : 2.5e-7 * expected);
        }
        CHECK_EQ(out[0], 1.0f);
        CHECK_EQ(out[out.size() - 3], 0.0f);
        CHECK_EQ(out[out.size() - 2], 0.0f);
        CHECK(std::isnan(out.back()));
    }
}

TEST(softmax_sums_every_id_once) {
    for (const std::int64_t size : {1, 15, 16, 17, 511, 512, 513, 528, 1024, 1500}) {
        std::vector<float> logits = normals(static_cast<std::size_t>(size), 21);
        for (float& value : logits) value *= 5.0f;
        const double max = *std::max_element(logits.begin(), logits.end());
        double expected = 0.0;
        for (const float value : logits) expected += std::exp((value - max) * 1.25);
        for (const auto& [name, kernels] : row_kernel_sets()) {
            std::vector<double> sums(static_cast<std::size_t>((size + cpu::kSoftmaxBlock - 1) / cpu::kSoftmaxBlock));
            cpu::SoftmaxTask task{logits.data(), size, 1.25f, sums.data(), 0.0f, 0.0};
            kernels->softmax(task);
            CHECK_NEAR(task.total, expected, 1e-6 * expected);
            CHECK_NEAR(std::accumulate(sums.begin(), sums.end(), 0.0), expected, 1e-6 * expected);
            for (const float bad : {kNan, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
                std::vector<float> broken = logits;
                broken[static_cast<std::size_t>(size / 2)] = bad;
                cpu::SoftmaxTask other{broken.data(), size, 1.25f, sums.data(), 0.0f, 0.0};
                kernels->softmax(other);
                CHECK(std::isnan(other.total));
            }
        }
    }
}

// ---- Sampling

cpu::Sampled sample(const std::vector<float>& logits, SampleRow row) {
    const auto vocab = static_cast<std::int64_t>(logits.size());
    std::vector<float> scratch(cpu::sample_scratch_floats(vocab) + 16);
    void* data = scratch.data();
    std::size_t space = scratch.size() * sizeof(float);
    return cpu::sample_row(logits.data(), vocab, row, static_cast<float*>(std::align(64, 16, data, space)));
}

SampleRow plain(double uniform, float temperature = 1.0f) { return {temperature, 1.0f, 0.0f, 0, uniform}; }

TEST(a_sample_is_the_inverse_of_the_cumulative_distribution) {
    // 2,000 ids over several blocks; the boundaries between ids by long double sums.
    std::vector<float> logits = normals(2000, 5);
    for (float& value : logits) value *= 2.0f;
    std::vector<long double> cumulative(logits.size());
    long double total = 0.0L;
    for (std::size_t i = 0; i < logits.size(); ++i) cumulative[i] = total += std::exp(static_cast<long double>(logits[i]) / 0.9L);
    std::mt19937_64 generator(3);
    for (int draw = 0; draw < 3000; ++draw) {
        const double uniform = (static_cast<double>(generator() >> 11) + 0.5) * 0x1p-53;
        const cpu::Sampled got = sample(logits, plain(uniform, 0.9f));
        const long double target = uniform * total, slack = 1e-6L * total;
        const auto token = static_cast<std::size_t>(got.token);
        CHECK(token < logits.size());
        CHECK(cumulative[token] > target - slack);
        CHECK((token == 0 ? 0.0L : cumulative[token - 1]) <= target + slack);
        CHECK_NEAR(got.logp, static_cast<double>(static_cast<long double>(logits[token]) / 0.9L - std::log(total)), 1e-5);
    }
}

TEST(extremes_of_the_uniform_number_give_ids_that_exist) {
    // Nothing but id 700 has any weight, and then nothing but ids 3 and 1,234.
    std::vector<float> one(1600, -1000.0f), two(1600, -1000.0f);
    one[700] = 0.0f;
    two[3] = two[1234] = 5.0f;
    for (const double uniform : {0x1p-54, 0.25, 0.4999, 0.5001, 1.0 - 0x1p-53}) {
        CHECK_EQ(sample(one, plain(uniform)).token, 700);
        CHECK_EQ(sample(one, plain(uniform)).logp, 0.0f);
        CHECK_EQ(sample(two, plain(uniform)).token, uniform < 0.5 ? 3 : 1234);
        CHECK_EQ(sample(two, {1.0f, 0.99f, 0.0f, 0, uniform}).token, uniform < 0.5 ? 3 : 1234);
    }
    const std::vector<float> equal(1600, 1.0f);
    CHECK_EQ(sample(equal, plain(0x1p-54)).token, 0);
    CHECK_EQ(sample(equal, plain(1.0 - 0x1p-53)).token, 1599);
    CHECK_EQ(sample({2.5f}, plain(0.5)).token, 0);
}

TEST(greedy_takes_the_lowest_of_equal_ids) {
    std::vector<float> logits = normals(900, 6);
    logits[77] = logits[500] = 9.0f;
    CHECK_EQ(sample(logits, plain(0.99, 0.0f)).token, 77);
    double total = 0.0;
    for (const float value : logits) total += std::exp(static_cast<double>(value));
    CHECK_NEAR(sample(logits, plain(0.99, 0.0f)).logp, 9.0 - std::log(total), 1e-5);
}

TEST(filters_keep_what_they_should) {
    // Weights 8, 4, 2, 1, 1 of 16.
    const std::vector<float> logits = {std::log(2.0f), std::log(8.0f), std::log(1.0f), std::log(4.0f), std::log(1.0f)};
    const auto seen = [&](float top_p, float min_p, std::int32_t top_k) {
        std::string result;
        for (int i = 0; i < 64; ++i) {
            const cpu::Sampled got = sample(logits, {1.0f, top_p, min_p, top_k, (i + 0.5) / 64});
            if (result.find(static_cast<char>('0' + got.token)) == std::string::npos) result += static_cast<char>('0' + got.token);
            CHECK_NEAR(got.logp, std::log(std::exp(logits[static_cast<std::size_t>(got.token)]) / 16.0), 1e-6);
        }
        std::sort(result.begin(), result.end());
        return result;
    };
    CHECK_EQ(seen(1.0f, 0.0f, 0), "01234");
    CHECK_EQ(seen(1.0f, 0.0f, 1), "1");
    CHECK_EQ(seen(1.0f, 0.0f, 4), "0123");  // of the two with weight 1 the lower id
    CHECK_EQ(seen(0.74f, 0.0f, 0), "13");
    CHECK_EQ(seen(0.76f, 0.0f, 0), "013");
    CHECK_EQ(seen(0.01f, 0.0f, 0), "1");
    CHECK_EQ(seen(0.84f, 0.0f, 3), "13");  // 12 of the 14 that top-k leaves are 0.857
    CHECK_EQ(seen(1.0f, 0.24f, 0), "013");
    CHECK_EQ(seen(1.0f, 1.0f, 0), "1");
}

TEST(logits_that_are_not_finite_give_no_token) {
    std::vector<float> logits = normals(40, 8);
    logits[39] = kNan;
    CHECK_EQ(sample(logits, plain(0.5)).token, -1);
    CHECK_EQ(sample(logits, plain(0.5, 0.0f)).token, -1);
    CHECK(std::isnan(sample(logits, plain(0.5)).logp));
}

// ---- Attention over the paged cache

struct AttentionCase {
    AttentionShape shape;
    std::vector<std::int32_t> lengths;
    std::int64_t block_size;
};

TEST(paged_attention_agrees_with_double_precision) {
    const AttentionCase cases[] = {
        {{6, 2, 12, 0.3f, 0}, {1, 5, 16, 17, 40}, 16},  {{4, 4, 64, 0.125f, 0}, {33, 90}, 32}, {{9, 3, 64, 0.125f, 0}, {70, 31, 1}, 16},
        {{8, 1, 80, 0.1f, 11}, {3, 11, 12, 60}, 16},    {{5, 1, 130, 0.09f, 0}, {64, 65}, 16}, {{2, 1, 2, 0.7f, 1}, {1, 2, 50}, 16},
        {{14, 2, 16, 0.25f, 16}, {15, 16, 17, 48}, 16},
    };
    for (const AttentionCase& c : cases) {
        const AttentionShape& s = c.shape;
        const auto n = static_cast<std::int64_t>(c.lengths.size());
        const std::int64_t kv = s.kv_heads * s.head_dim, q = s.heads * s.head_dim, columns = q + 2 * kv;
        const std::unique_ptr<Backend> backend = make_cpu_backend({2});

        // Every sequence has its blocks in another order; what was never written is NaN.
        std::int64_t width = 0, blocks = 0;
        for (const std::int32_t length : c.lengths) {
            width = std::max(width, (length + c.block_size - 1) / c.block_size);
            blocks += (length + c.block_size - 1) / c.block_size;
        }
        std::vector<std::int32_t> order(static_cast<std::size_t>(blocks)), table(static_cast<std::size_t>(n * width), 0);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(4));
        std::vector<float> keys(static_cast<std::size_t>(blocks * c.block_size * kv), kNan), values = keys;
        PagedCache cache;
        cache.keys = matrix(keys.data(), blocks * c.block_size, kv);
        cache.values = matrix(values.data(), blocks * c.block_size, kv);
        cache.block_size = c.block_size;
        cache.block_tables = table.data();
        cache.max_blocks = width;
        cache.lengths = c.lengths.data();

        std::vector<std::vector<float>> history;
        std::vector<float> last(static_cast<std::size_t>(n * columns));
        std::size_t next = 0;
        for (std::int64_t i = 0; i < n; ++i) {
            const std::int32_t length = c.lengths[static_cast<std::size_t>(i)];
            std::vector<float> qkv = normals(static_cast<std::size_t>(length * columns), static_cast<std::uint32_t>(50 + i));
            std::vector<std::int32_t> slots;
            for (std::int32_t p = 0; p < length; ++p) {
                auto& block = table[static_cast<std::size_t>(i * width + p / c.block_size)];
                if (p % c.block_size == 0) block = order[next++];
                slots.push_back(static_cast<std::int32_t>(block * c.block_size + p % c.block_size));
            }
            backend->cache_write(cache, matrix(qkv.data(), length, columns), vector(slots.data(), length, DType::Int32), s);
            std::copy_n(qkv.end() - columns, columns, last.begin() + i * columns);
            history.push_back(std::move(qkv));
        }
        std::vector<float> out(static_cast<std::size_t>(n * q), kNan);
        backend->paged_attention(matrix(out.data(), n, q), matrix(last.data(), n, columns), cache, s);

        for (std::int64_t i = 0; i < n; ++i) {
            const std::int64_t length = c.lengths[static_cast<std::size_t>(i)],
                               first = s.window > 0 ? std::max<std::int64_t>(0, length - s.window) : 0;
            const std::vector<float>& qkv = history[static_cast<std::size_t>(i)];
            const auto at = [&](std::int64_t p, std::int64_t column) {
                return static_cast<double>(qkv[static_cast<std::size_t>(p * columns + column)]);
            };
            for (std::int64_t h = 0; h < s.heads; ++h) {
                const std::int64_t group = h / (s.heads / s.kv_heads);
                std::vector<double> weight(static_cast<std::size_t>(length), 0.0);
                double sum = 0.0;
                for (std::int64_t p = first; p < length; ++p) {
                    double score = 0.0;
                    for (std::int64_t d = 0; d < s.head_dim; ++d)
                        score += at(length - 1, h * s.head_dim + d) * at(p, q + group * s.head_dim + d);
                    sum += weight[static_cast<std::size_t>(p)] = std::exp(score * static_cast<double>(s.scale));
                }
                for (std::int64_t d = 0; d < s.head_dim; ++d) {
                    double expected = 0.0;
                    for (std::int64_t p = first; p < length; ++p) {
                        expected += weight[static_cast<std::size_t>(p)] / sum * at(p, q + kv + group * s.head_dim + d);
                    }
                    CHECK_NEAR(out[static_cast<std::size_t>(i * q + h * s.head_dim + d)], expected, 3e-6);
                }
            }
        }
    }
}

TEST(attention_kernels_of_all_widths_agree) {
    const std::int64_t head_dim = 20, groups = 7, length = 45, blocks = 3;
    const std::vector<float> q = normals(static_cast<std::size_t>(groups * head_dim), 1),
                             keys = normals(static_cast<std::size_t>(blocks * 16 * head_dim), 2), values = normals(keys.size(), 3);
    const std::int32_t table[] = {2, 0, 1};
    std::vector<std::vector<float>> outs;
    for (const auto& [name, kernels] : row_kernel_sets()) {
        std::vector<float> out(q.size()), scratch(static_cast<std::size_t>(cpu::attention_scratch(length)));
        kernels->attention(
            {out.data(), q.data(), keys.data(), values.data(), table, 16, head_dim, 0, head_dim, groups, 7, length, 0.2f, scratch.data()});
        outs.push_back(out);
    }
    for (const std::vector<float>& out : outs) {
        for (std::size_t i = 0; i < out.size(); ++i) CHECK_NEAR(out[i], outs[0][i], 1e-5);
    }
    for (std::size_t i = 2; i < outs.size(); ++i) CHECK(outs[i] == outs[1]);
}

TEST(arguments_that_do_not_fit_are_refused) {
    const std::unique_ptr<Backend> backend = make_cpu_backend({1});
    std::vector<float> data(4096);
    std::vector<std::int32_t> table(8, 0), lengths(4, 1), slots(4, 0);
    const auto m = [&](std::int64_t rows, std::int64_t columns) { return matrix(data.data(), rows, columns); };
    CHECK_THROWS(backend->decode_linear(m(2, 5), m(2, 4), m(6, 4), {}, 1.0f, 0.0f),
                 "decode_linear: y: expected float32 [2, 6], got float32 [2, 5]");
    CHECK_THROWS(backend->decode_linear(m(2, 6), m(2, 4), m(6, 4), vector(data.data(), 5), 1.0f, 0.0f), "decode_linear: bias");

    PagedCache cache;
    cache.keys = cache.values = m(32, 8);
    cache.block_size = 16;
    cache.block_tables = table.data();
    cache.max_blocks = 2;
    cache.lengths = lengths.data();
    const AttentionShape shape{4, 2, 4, 1.0f, 0};
    lengths[1] = 33;
    CHECK_THROWS(backend->paged_attention(m(2, 16), m(2, 32), cache, shape), "paged_attention: lengths[1]: expected 1 to 32, got 33");
    lengths[1] = 20;
    table[3] = 2;
    CHECK_THROWS(backend->paged_attention(m(2, 16), m(2, 32), cache, shape), "paged_attention: block_tables[1, 1]: expected 0 to 1, got 2");
    slots[1] = 32;
    CHECK_THROWS(backend->cache_write(cache, m(2, 32), vector(slots.data(), 2, DType::Int32), shape),
                 "cache_write: slots[1]: expected 0 to 31, got 32");
    cache.block_size = 8;
    CHECK_THROWS(backend->paged_attention(m(2, 16), m(2, 32), cache, shape), "block_size: expected a positive multiple of 16, got 8");
    std::int32_t token = 0;
    float logp = 0.0f;
    const SampleRow row = plain(0.5);
    CHECK_THROWS(backend->sample(&token, &logp, m(1, 8), &row, 9), "sample: valid_vocab");
}

}  // namespace
}  // namespace surogate
