#pragma once

#include <bit>
#include <cstdint>

namespace surogate::testing {

/// The upper half of a float32, rounded to nearest, ties to even; a NaN stays one.
inline std::uint16_t to_bfloat16(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    // Rounding could carry a NaN with a small payload over to infinity, so its quiet bit is set.
    const std::uint32_t rounded = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
    return static_cast<std::uint16_t>(rounded >> 16);
}

inline float from_bfloat16(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }

}  // namespace surogate::testing
