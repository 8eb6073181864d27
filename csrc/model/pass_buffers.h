#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "backend/backend.h"

namespace surogate {

/// What goes to the device in one pass lies there side by side, and what comes back likewise, so that each is one transfer: sections of one
/// flat buffer, section_size(n) elements each.
inline constexpr std::int64_t kInputSections = 4, kValueSections = 5;

/// Elements of a section that holds n: whole lines of 256 bytes.
constexpr std::int64_t section_size(std::int64_t n) { return (n + 63) / 64 * 64; }

/// The integers of a batch on the device, int32.
class PassInputs {
   public:
    Tensor tokens, positions;  // [T]
    Tensor index, targets;     // [n]: rows with a target, and the target

    PassInputs() = default;
    /// Puts everything into `buffer`, kInputSections sections for T numbers at the most.
    PassInputs(Backend& backend, const Tensor& buffer, const std::int32_t* tokens, const std::int32_t* positions, std::int64_t count,
               const std::vector<std::int32_t>& index, const std::vector<std::int32_t>& targets);

    /// Takes a part of the rows in place of all.
    void replace_rows(Backend& backend, const std::vector<std::int32_t>& index, const std::vector<std::int32_t>& targets);

   private:
    Tensor rows_;  // of index and targets
};

/// Host copies of what a forward pass computed, [n] each; entropy is empty if it was not asked for.
struct HostValues {
    std::vector<float> logp, lse, entropy;
};

/// Numbers of n rows with a target on the device, float32 [n] each.
class RowValues {
   public:
    Tensor logp, lse, entropy, d_logp, d_entropy;

    /// In `buffer`, kValueSections sections for n at the least.
    RowValues(const Tensor& buffer, std::int64_t n);

    HostValues download(Backend& backend, bool with_entropy) const;
    /// An empty vector leaves zeros in its place.
    void upload_seeds(Backend& backend, const std::vector<float>& d_logp, const std::vector<float>& d_entropy) const;
    void upload(Backend& backend, const std::vector<float>& lse, const std::vector<float>& entropy, const std::vector<float>& d_logp,
                const std::vector<float>& d_entropy) const;

   private:
    Tensor section(std::int64_t first, std::int64_t size) const;
    void put(Backend& backend, std::int64_t first, std::initializer_list<const std::vector<float>*> parts) const;

    Tensor buffer_;
    std::int64_t n_, stride_;
};

}  // namespace surogate
