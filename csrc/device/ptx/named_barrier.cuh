// bar.sync with an id and a count: a barrier for some of a CTA's warps. Id 0 is the barrier of __syncthreads().
// PTX ISA, "Parallel Synchronization and Communication Instructions: bar".
#pragma once

namespace fastattn::ptx {

// num_threads: how many threads meet at the barrier.
__device__ __forceinline__ void bar_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Does the same, and returns whether the predicate holds for any of the threads.
__device__ __forceinline__ bool bar_red_or(int id, int num_threads, bool predicate) {
    int any;
    asm volatile(
        "{\n.reg .pred in, out;\nsetp.ne.b32 in, %3, 0;\nbar.red.or.pred out, %1, %2, in;\nselp.b32 %0, 1, 0, out;\n}"
        : "=r"(any)
        : "r"(id), "r"(num_threads), "r"(int{predicate})
        : "memory");
    return any != 0;
}

}  // namespace fastattn::ptx
