// A loop of products whose loads, by cp.async, run kNumStages - 1 steps ahead. Each step has a stage of shared memory;
// the one that was multiplied last is loaded next.
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

// Runs the steps, after start_pipeline(). multiply(step, stage) uses what all threads have copied. After the last step
// no copies are in flight, but other warps may still be multiplying.
template <int kNumStages, typename Load, typename Multiply>
FASTATTN_DEVICE void run_pipeline(int32_t begin, int32_t end, Load&& load, Multiply&& multiply) {
    constexpr int kAhead = kNumStages - 1;
    for (int32_t step = begin; step < end; ++step) {
        ptx::cp_async_wait_group<kAhead - 1>();  // this step
        __syncthreads();  // waits for every thread's copies, and until every warp has read the step before
        if (step + kAhead < end) load(step + kAhead, (step + kAhead) % kNumStages);
        ptx::cp_async_commit_group();
        multiply(step, step % kNumStages);
    }
}

}  // namespace fastattn
