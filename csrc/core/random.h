#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace surogate {

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a keyed bijection of a 128-bit counter.
/// It has no state, so a draw depends on (seed, stream, index) alone and not on how many were drawn before or by which thread.
class Philox {
   public:
    using Block = std::array<std::uint32_t, 4>;

    Philox(std::uint64_t seed, std::uint64_t stream) : seed_(seed), stream_(stream) {}

    /// Four independent 32-bit words.
    Block operator()(std::uint64_t index) const {
        Block x = {low(index), high(index), low(stream_), high(stream_)};
        std::uint32_t k0 = low(seed_), k1 = high(seed_);
        for (int round = 0; round < 10; ++round) {
            const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * x[0];
            const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * x[2];
            x = {high(p1) ^ x[1] ^ k0, low(p1), high(p0) ^ x[3] ^ k1, low(p0)};
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        return x;
    }

    /// Uniform in the open interval (0, 1), 53 bits.
    double uniform(std::uint64_t index) const {
        const Block x = (*this)(index);
        const std::uint64_t bits = (std::uint64_t{x[1]} << 32 | x[0]) >> 11;
        return (static_cast<double>(bits) + 0.5) * 0x1p-53;
    }

    /// Standard normal (Box-Muller).
    double normal(std::uint64_t index) const {
        const Block x = (*this)(index);
        const double u = (static_cast<double>((std::uint64_t{x[1]} << 32 | x[0]) >> 11) + 0.5) * 0x1p-53;
        const double v = static_cast<double>((std::uint64_t{x[3]} << 32 | x[2]) >> 11) * 0x1p-53;
        return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
    }

   private:
    static std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
    static std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

    std::uint64_t seed_, stream_;
};

}  // namespace surogate
