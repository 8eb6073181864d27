#include "backend/cpu/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/decode_row_kernels.h"

namespace surogate::cpu {

namespace {

struct Candidate {
    float weight;  // relative to the most probable token
    std::int32_t id;
};

/// More probable first, lower ids first among equals.
bool before(const Candidate& a, const Candidate& b) { return a.weight > b.weight || (a.weight == b.weight && a.id < b.id); }

std::int64_t block_count(std::int64_t vocab) { return (vocab + kSoftmaxBlock - 1) / kSoftmaxBlock; }

/// The id at which the cumulative weight passes `uniform` of the total.
std::int32_t draw(const SoftmaxTask& softmax, double uniform) {
    const double target = uniform * softmax.total;
    const std::int64_t blocks = block_count(softmax.size);
    double below = 0.0;
    std::int64_t block = 0;
    while (block + 1 < blocks && below + softmax.block_sums[block] <= target) below += softmax.block_sums[block++];

    // A block's sum was taken lane by lane and may exceed the one below by a rounding error; then the last id with any weight is meant.
    // Blocks of none at all (possible at the end only by such an error) are stepped back over.
    for (; block >= 0; --block) {
        float weights[kSoftmaxBlock];
        const std::int64_t begin = block * kSoftmaxBlock, count = std::min(kSoftmaxBlock, softmax.size - begin);
        row_kernels().exponentials(weights, softmax.logits + begin, count, softmax.max, softmax.inverse_temperature);
        std::int64_t last = -1;
        double cumulative = below;
        for (std::int64_t i = 0; i < count; ++i) {
            if (weights[i] == 0.0f) continue;
            last = i;
            cumulative += weights[i];
            if (cumulative > target) break;
        }
        if (last >= 0) return static_cast<std::int32_t>(begin + last);
        below = -std::numeric_limits<double>::infinity();  // whatever it was, the target lies above
    }
    return -1;  // not reached: the most probable token has weight 1
}

/// The same among what top-k, top-p and min-p leave.
std::int32_t draw_filtered(const SoftmaxTask& softmax, const SampleRow& row, Candidate* candidates, float* weights) {
    const std::int64_t vocab = softmax.size;
    row_kernels().exponentials(weights, softmax.logits, vocab, softmax.max, softmax.inverse_temperature);
    std::int64_t count = 0;
    double total = 0.0;
    for (std::int64_t id = 0; id < vocab; ++id) {
        if (weights[id] > 0.0f) candidates[count++] = {weights[id], static_cast<std::int32_t>(id)};
    }
    if (row.top_k > 0 && row.top_k < count) {
        std::nth_element(candidates, candidates + row.top_k - 1, candidates + count, before);
        count = row.top_k;
    }
    if (row.top_p < 1.0f) {
        // In the order of ids, so that the sum does not depend on how the selection above shuffled them.
        std::sort(candidates, candidates + count, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
        for (std::int64_t i = 0; i < count; ++i) total += candidates[i].weight;
        // The fewest of the most probable that reach top_p together: a heap gives them one by one without sorting the rest.
        const auto after = [](const Candidate& a, const Candidate& b) { return before(b, a); };
        std::make_heap(candidates, candidates + count, after);
        const double enough = static_cast<double>(row.top_p) * total;
        double reached = 0.0;
        std::int64_t kept = 0;
        while (kept < count && (kept == 0 || reached < enough)) {
            std::pop_heap(candidates, candidates + (count - kept), after);
            reached += candidates[count - 1 - kept].weight;
            ++kept;
        }
        std::move(candidates + (count - kept), candidates + count, candidates);
        count = kept;
    }
    if (row.min_p > 0.0f) {
        count = std::remove_if(candidates, candidates + count, [&](const Candidate& c) { return c.weight < row.min_p; }) - candidates;
    }
    std::sort(candidates, candidates + count, before);
    total = 0.0;
    for (std::int64_t i = 0; i < count; ++i) total += candidates[i].weight;
    const double target = row.uniform * total;
    double cumulative = 0.0;
    for (std::int64_t i = 0; i < count; ++i) {
        cumulative += candidates[i].weight;
        if (cumulative > target) return candidates[i].id;
    }
    return candidates[count - 1].id;
}

}  // namespace

std::size_t sample_scratch_floats(std::int64_t vocab) {
    // Block sums (doubles), then weights and candidates for the filters.
    const std::int64_t padded = (vocab + 15) / 16 * 16;
    return static_cast<std::size_t>(2 * ((block_count(vocab) + 15) / 16 * 16) + 3 * padded);
}

Sampled sample_row(const float* logits, std::int64_t vocab, const SampleRow& row, float* scratch) {
    const bool greedy = row.temperature == 0.0f;
    const float inverse_temperature = greedy ? 1.0f : 1.0f / row.temperature;
    SoftmaxTask softmax{logits, vocab, inverse_temperature, reinterpret_cast<double*>(scratch), 0.0f, 0.0};
    row_kernels().softmax(softmax);
    if (!std::isfinite(softmax.total)) return {-1, std::numeric_limits<float>::quiet_NaN()};

    std::int32_t token;
    const bool filtered = row.top_k > 0 || row.top_p < 1.0f || row.min_p > 0.0f;
    if (greedy) {
        token = static_cast<std::int32_t>(std::find(logits, logits + vocab, softmax.max) - logits);
    } else if (filtered) {
        float* weights = scratch + 2 * ((block_count(vocab) + 15) / 16 * 16);
        token = draw_filtered(softmax, row, reinterpret_cast<Candidate*>(weights + (vocab + 15) / 16 * 16), weights);
    } else {
        token = draw(softmax, row.uniform);
    }
    const double scaled =
        (static_cast<double>(logits[token]) - static_cast<double>(softmax.max)) * static_cast<double>(inverse_temperature);
    return {token, static_cast<float>(scaled - std::log(softmax.total))};
}

}  // namespace surogate::cpu
