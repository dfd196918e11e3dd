// Tests the arrival counter: each CTA of a group stores a number, and the last CTA to arrive adds them up.
#include "scheduler/arrivals.cuh"

namespace fastattn {

// CTA c belongs to group c / per_group and counts brought[c] arrivals; its number is brought[c] * (c + 1). `asks`: a
// CTA first asks whether all others have arrived, as a CTA that counts one arrival may. [groups]: counters, sums, and
// lasts, which counts the CTAs that took themselves for the last. [CTAs]: left, the stored numbers.
extern "C" __global__ void arrive(const int32_t* brought, int32_t per_group, int32_t all, uint64_t* counters,
                                  uint64_t launch_id, int32_t asks, int32_t* left, int32_t* sums, int32_t* lasts) {
    const int32_t cta = blockIdx.x, group = cta / per_group, first = group * per_group;
    uint64_t* counter = counters + group;
    if (threadIdx.x == 0) open_arrivals(counter, launch_id);
    bool is_last = false;
    if (asks) is_last = __syncthreads_or(threadIdx.x == 0 && arrives_if_last(counter, launch_id, all));
    const bool leaves = !is_last;
    if (leaves) {
        if (threadIdx.x == 1) left[cta] = brought[cta] * (cta + 1);
        __syncthreads();  // waits until thread 1 has stored the number
        is_last = __syncthreads_or(threadIdx.x == 0 && arrives_last(counter, all, brought[cta]));
    }
    if (!is_last || threadIdx.x != 2) return;
    int32_t sum = leaves ? 0 : brought[cta] * (cta + 1);
    for (int32_t other = first; other < first + per_group; ++other) {
        if (leaves || other != cta) sum += left[other];
    }
    sums[group] = sum;
    ++lasts[group];
}

}  // namespace fastattn
