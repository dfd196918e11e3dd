// Runs a loop of products whose operands are loaded by cp.async, kNumStages - 1 steps ahead. Each step uses one stage
// of shared memory. A load overwrites the stage whose product was computed in the previous step.
#pragma once

#include <cstdint>

#include "device/ptx/cp_async.cuh"
#include "host/host_device.h"

namespace fastattn {

// Starts the loads of a CTA's first steps of [begin, end). load(step, stage) starts this thread's copies.
template <int kNumStages, typename Load>
FASTATTN_DEVICE void start_pipeline(int32_t begin, int32_t end, Load&& load) {
    for (int32_t step = begin; step < begin + kNumStages - 1; ++step) {
        if (step < end) load(step, step % kNumStages);
        ptx::cp_async_commit_group();
    }
}

// Runs steps [begin, end), after start_pipeline(). In multiply(step, stage), all threads' copies are visible. After the
// last step no copies are in flight, but other warps may still be multiplying.
template <int kNumStages, typename Load, typename Multiply>
FASTATTN_DEVICE void run_pipeline(int32_t begin, int32_t end, Load&& load, Multiply&& multiply) {
    constexpr int kAhead = kNumStages - 1;
    for (int32_t step = begin; step < end; ++step) {
        ptx::cp_async_wait_group<kAhead - 1>();  // waits for this thread's copies of the step
        __syncthreads();  // waits for every thread's copies, and until every warp has read the step before
        if (step + kAhead < end) load(step + kAhead, (step + kAhead) % kNumStages);
        ptx::cp_async_commit_group();
        multiply(step, step % kNumStages);
    }
}

}  // namespace fastattn
