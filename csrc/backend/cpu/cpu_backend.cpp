#include "backend/cpu/cpu_backend.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "backend/cpu/checks.h"
#include "backend/cpu/gemm.h"
#include "core/memory.h"

namespace surogate {

namespace {

constexpr std::int64_t kSpanBytes = 1 << 18;    // what one thread takes of a copy at a time
constexpr std::int64_t kCacheFloats = 1 << 22;  // more than this is not worth keeping in the caches

void check_any(const char* op, const char* name, const Tensor& t) { check(op, name, t, t.rows, t.columns, t.dtype); }

/// To nearest, ties to even; a NaN stays one.
void round_to_bfloat16(std::uint16_t* out, const float* in, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(in[i]);
        // Rounding could carry a NaN with a small payload over to infinity, so its quiet bit is set.
        const std::uint32_t rounded = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
        out[i] = static_cast<std::uint16_t>(rounded >> 16);
    }
}

/// Calls body(row, first column, columns) over all of [rows, columns] in spans of about kSpanBytes; dense matrices count as one long row.
template <typename Body>
void over_spans(ThreadPool& pool, std::int64_t rows, std::int64_t columns, bool dense, const Body& body) {
    if (dense) {
        columns *= rows;
        rows = rows > 0 ? 1 : 0;
    }
    const std::int64_t span = kSpanBytes / 4;
    if (columns >= span) {
        const std::int64_t spans = (columns + span - 1) / span;
        pool.parallel_for(rows * spans, [&](std::int64_t index) {
            const std::int64_t begin = index % spans * span;
            body(index / spans, begin, std::min(span, columns - begin));
        });
    } else if (columns > 0) {
        pool.parallel_ranges(rows, span / columns, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t r = begin; r < end; ++r) body(r, 0, columns);
        });
    }
}

}  // namespace

CpuBackend::CpuBackend(const CpuOptions& options) : CpuBackend(options, best_kernels()) {}

CpuBackend::CpuBackend(const CpuOptions& options, const Kernels& kernels)
    : pool_(options.threads),
      kernels_(kernels),
      gemm_kernels_(*find_gemm_kernels(kernels.name)),
      attention_kernels_(*find_attention_kernels(kernels.name)) {
    use_one_blas_thread();
}

void* CpuBackend::allocate(std::size_t bytes) { return allocate_aligned(bytes); }

void CpuBackend::release(void* data) noexcept { release_aligned(data); }

void CpuBackend::upload(const Tensor& out, const void* host) {
    check_any("upload", "out", out);
    require(host != nullptr || out.size() == 0, "upload", "host", "data", "a null pointer");
    Tensor in = matrix(const_cast<void*>(host), out.rows, out.columns, out.dtype);  // only read
    copy(out, in);
}

void CpuBackend::download(void* host, const Tensor& in) {
    require(host != nullptr || in.size() == 0, "download", "host", "data", "a null pointer");
    copy(matrix(host, in.rows, in.columns, in.dtype), in);
}

void CpuBackend::copy(const Tensor& out, const Tensor& in) {
    check_any("copy", "in", in);
    const bool rounds = in.dtype == DType::Float32 && out.dtype == DType::BFloat16;  // weights on their way to an engine
    check("copy", "out", out, in.rows, in.columns, rounds ? DType::BFloat16 : in.dtype);
    const std::size_t to = size_of(out.dtype), from = size_of(in.dtype);
    over_spans(pool_, in.rows, in.columns, in.contiguous() && out.contiguous(),
               [&](std::int64_t r, std::int64_t begin, std::int64_t count) {
                   char* target = out.as<char>() + static_cast<std::size_t>(r * out.stride + begin) * to;
                   const char* source = in.as<char>() + static_cast<std::size_t>(r * in.stride + begin) * from;
                   if (rounds) {
                       round_to_bfloat16(reinterpret_cast<std::uint16_t*>(target), reinterpret_cast<const float*>(source), count);
                   } else {
                       std::memcpy(target, source, static_cast<std::size_t>(count) * from);
                   }
               });
}

void CpuBackend::fill(const Tensor& out, float value) {
    check("fill", "out", out, out.rows, out.columns);
    const bool large = out.size() >= kCacheFloats;
    over_spans(pool_, out.rows, out.columns, out.contiguous(), [&](std::int64_t r, std::int64_t begin, std::int64_t count) {
        float* at = row(out, r) + begin;
        if (large) {
            kernels_.fill_uncached(at, value, count);
        } else {
            std::fill_n(at, count, value);
        }
    });
}

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) { return std::make_unique<CpuBackend>(options); }

}  // namespace surogate
