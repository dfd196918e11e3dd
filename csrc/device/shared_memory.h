// How many CTAs a multiprocessor's shared memory has room for. Kernels assert it of their storage where they are
// compiled: CTAs that launch bounds ask for, and that do not fit, would be missing without a word.
#pragma once

#include <cstddef>

namespace fastattn {

// The shared memory of an SM: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
inline constexpr size_t kSharedBytesSm80 = 164 << 10;
inline constexpr size_t kSharedBytesSm86 = 100 << 10;  // sm_86, sm_89, sm_120: the least of all that run these kernels
inline constexpr size_t kLeastSharedBytesPerCta = 99 << 10;   // what a CTA can have there
inline constexpr size_t kLargeSharedBytesPerCta = 163 << 10;  // what a CTA can have on sm_80, and more on sm_90, sm_100
inline constexpr size_t kMostSharedBytesPerCta = 227 << 10;   // what a CTA can have on sm_90
inline constexpr size_t kReservedBytesPerCta = 1 << 10;       // which the system takes for itself

constexpr int ctas_with_room(size_t bytes_per_cta, size_t bytes) {
    return static_cast<int>(bytes / (bytes_per_cta + kReservedBytesPerCta));
}

// As many CTAs as are meant on sm_80, and one at least where shared memory is smallest.
constexpr bool has_room_for(int ctas_per_sm, size_t bytes_per_cta) {
    return ctas_with_room(bytes_per_cta, kSharedBytesSm80) >= ctas_per_sm &&
           ctas_with_room(bytes_per_cta, kSharedBytesSm86) >= 1;
}

}  // namespace fastattn
