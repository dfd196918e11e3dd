// A loop whose loads, by cp.async, run ahead of its products by as many stages of shared memory as there are but one.
#pragma once

#include <cstdint>

#include "device/ptx/cp_async.cuh"

namespace fastattn {

// For the steps [begin, end) of a CTA: load(step, stage) starts this thread's copies, multiply(step, stage) uses what all
// threads have copied. Nothing is on its way after the last step, but warps may still be in it.
template <int kNumStages, typename Load, typename Multiply>
__device__ __forceinline__ void pipelined_steps(int32_t begin, int32_t end, Load&& load, Multiply&& multiply) {
    constexpr int kAhead = kNumStages - 1;
    for (int32_t step = begin; step < begin + kAhead; ++step) {
        if (step < end) load(step, step % kNumStages);
        ptx::cp_async_commit_group();
    }
    for (int32_t step = begin; step < end; ++step) {
        ptx::cp_async_wait_group<kAhead - 1>();  // this step
        __syncthreads();  // it is there for all; all are done with the step before: it may be overwritten
        if (step + kAhead < end) load(step + kAhead, (step + kAhead) % kNumStages);
        ptx::cp_async_commit_group();
        multiply(step, step % kNumStages);
    }
}

}  // namespace fastattn
