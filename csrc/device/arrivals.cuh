// Who of several CTAs is the last to arrive, counted in memory that nobody has to zero: a memset before each launch
// would be one more node of a graph, like a kernel that merges after it.
#pragma once

#include <cstdint>

#include "device/ptx/atom.cuh"

namespace fastattn {

// `token` is of this launch alone, but for replays of a CUDA graph. Its lowest three bytes are zero: there the CTAs are
// counted. What stands in `arrivals` without the token's other bytes counts as none; the last leaves zero behind, so that
// a replay does not find itself. One thread of each CTA calls this, behind a barrier after what the last is to see.
__device__ __forceinline__ bool arrives_last(uint64_t* arrivals, uint64_t token, int32_t num_ctas) {
    constexpr uint64_t kCountBits = 0xffffff;
    for (uint64_t expected = 0;;) {
        const uint64_t arrived = (expected & ~kCountBits) == token ? expected & kCountBits : 0;
        const bool is_last = arrived + 1 == static_cast<uint64_t>(num_ctas);
        const uint64_t found = ptx::atom_cas_acq_rel_b64(arrivals, expected, is_last ? 0 : token + arrived + 1);
        if (found == expected) return is_last;
        expected = found;
    }
}

// Whether all others have arrived: then this CTA is the last, counts as arrived, and need not leave anything for others.
__device__ __forceinline__ bool others_have_arrived(uint64_t* arrivals, uint64_t token, int32_t num_ctas) {
    const uint64_t others = token + static_cast<uint64_t>(num_ctas - 1);
    return ptx::atom_cas_acq_rel_b64(arrivals, others, 0) == others;
}

}  // namespace fastattn
