// Computes how many CTAs fit in the shared memory of an SM. Kernels assert that as many CTAs fit as their launch bounds
// ask for, because otherwise fewer CTAs would run, without an error.
#pragma once

#include <cstddef>

namespace fastattn {

// The shared memory of an SM: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
inline constexpr size_t kSharedBytesSm80 = 164 << 10;
inline constexpr size_t kSharedBytesSm86 = 100 << 10;  // sm_86, sm_89, sm_120: the least of all that run these kernels
inline constexpr size_t kSharedBytesPerCtaSm86 = 99 << 10;   // what a CTA can have on these GPUs
inline constexpr size_t kSharedBytesPerCtaSm80 = 163 << 10;  // what a CTA can have on sm_80; sm_90, sm_100 allow more
inline constexpr size_t kSharedBytesPerCtaSm90 = 227 << 10;  // what a CTA can have on sm_90
inline constexpr size_t kReservedBytesPerCta = 1 << 10;      // what the system reserves for each CTA

constexpr int ctas_with_room(size_t bytes_per_cta, size_t bytes) {
    return static_cast<int>(bytes / (bytes_per_cta + kReservedBytesPerCta));
}

// Returns whether ctas_per_sm CTAs fit on sm_80, and at least one CTA on the GPUs with the least shared memory.
constexpr bool has_room_for(int ctas_per_sm, size_t bytes_per_cta) {
    return ctas_with_room(bytes_per_cta, kSharedBytesSm80) >= ctas_per_sm &&
           ctas_with_room(bytes_per_cta, kSharedBytesSm86) >= 1;
}

}  // namespace fastattn
