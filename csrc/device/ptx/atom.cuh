// atom: read, modify and write atomically.
// PTX ISA, "Parallel Synchronization and Communication Instructions: atom".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

// Stores `desired` if the value is `expected`, and returns the value found. A thread that reads `desired` with acquire
// semantics then sees every write that this thread made, or saw, before.
__device__ __forceinline__ uint64_t atom_cas_acq_rel_b64(uint64_t* global, uint64_t expected, uint64_t desired) {
    uint64_t found;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(found)
                 : "l"(global), "l"(expected), "l"(desired)
                 : "memory");
    return found;
}

// Adds, and returns the old value. Has the memory ordering of atom_cas_acq_rel_b64().
__device__ __forceinline__ uint64_t atom_add_acq_rel_b64(uint64_t* global, uint64_t value) {
    uint64_t found;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(found) : "l"(global), "l"(value) : "memory");
    return found;
}

// The relaxed forms of these two operations order no other accesses.
__device__ __forceinline__ uint64_t atom_cas_relaxed_b64(uint64_t* global, uint64_t expected, uint64_t desired) {
    uint64_t found;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(found)
                 : "l"(global), "l"(expected), "l"(desired)
                 : "memory");
    return found;
}

__device__ __forceinline__ uint64_t atom_add_relaxed_b64(uint64_t* global, uint64_t value) {
    uint64_t found;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(found) : "l"(global), "l"(value) : "memory");
    return found;
}

}  // namespace fastattn::ptx
