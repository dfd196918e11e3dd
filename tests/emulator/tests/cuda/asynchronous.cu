// Kernels with cuda::pipeline, cuda::barrier, cuda::memcpy_async and cuda::atomic_ref of the toolkit's libcu++.
#include <cooperative_groups.h>

#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/pipeline>

namespace cg = cooperative_groups;

constexpr int kThreads = 64, kStages = 2;

// out[i] = the sum over tiles t of in[t * kThreads + i]. A pipeline of two stages copies the tiles.
extern "C" __global__ void pipelined(const float* in, float* out, int tiles) {
    __shared__ float buffer[kStages][kThreads];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, kStages> state;
    const auto block = cg::this_thread_block();
    auto pipeline = cuda::make_pipeline(block, &state);
    float sum = 0;
    for (int compute = 0, fetch = 0; compute < tiles; ++compute) {
        for (; fetch < tiles && fetch < compute + kStages; ++fetch) {
            pipeline.producer_acquire();
            cuda::memcpy_async(block, buffer[fetch % kStages], in + fetch * kThreads, sizeof(float) * kThreads,
                               pipeline);
            pipeline.producer_commit();
        }
        pipeline.consumer_wait();
        sum += buffer[compute % kStages][(threadIdx.x + 1) % kThreads];
        pipeline.consumer_release();
    }
    out[(threadIdx.x + 1) % kThreads] = sum;
    __syncwarp();  // one lane of the pipeline's destructor arrives for its warp, after a match, which orders no memory
}

// The same with a pipeline for each thread.
extern "C" __global__ void pipelined_by_thread(const float* in, float* out, int tiles) {
    __shared__ float buffer[kStages][kThreads];
    auto pipeline = cuda::make_pipeline();
    float sum = 0;
    for (int compute = 0, fetch = 0; compute < tiles; ++compute) {
        for (; fetch < tiles && fetch < compute + kStages; ++fetch) {
            pipeline.producer_acquire();
            cuda::memcpy_async(&buffer[fetch % kStages][threadIdx.x], in + fetch * kThreads + threadIdx.x,
                               sizeof(float), pipeline);
            pipeline.producer_commit();
        }
        pipeline.consumer_wait();
        sum += buffer[compute % kStages][threadIdx.x];
        pipeline.consumer_release();
    }
    out[threadIdx.x] = sum;
}

// A barrier with separate arrival and wait: threads publish a value, arrive, work, wait, and read a neighbour's value.
extern "C" __global__ void split_barrier(const float* in, float* out, int rounds) {
    __shared__ float shared[kThreads];
    __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
    if (threadIdx.x == 0) init(&barrier, kThreads);
    __syncthreads();
    float value = in[threadIdx.x];
    for (int round = 0; round < rounds; ++round) {
        shared[threadIdx.x] = value;
        auto token = barrier.arrive();
        value *= 0.5f;
        barrier.wait(std::move(token));
        value += shared[(threadIdx.x + 1) % kThreads];
        barrier.arrive_and_wait();
    }
    out[threadIdx.x] = value;
}

// A copy that a barrier waits for.
extern "C" __global__ void copied(const int4* in, int4* out) {
    __shared__ alignas(16) int4 shared[kThreads];
    __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
    const auto block = cg::this_thread_block();
    if (threadIdx.x == 0) init(&barrier, kThreads);
    __syncthreads();
    cuda::memcpy_async(block, shared, in, cuda::aligned_size_t<16>(sizeof(shared)), barrier);
    barrier.arrive_and_wait();
    out[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

// Each CTA passes a message to the next through release and acquire; all threads update atomics.
extern "C" __global__ void messages(int* data, int* flags, int* total, double* sum, int* most) {
    if (threadIdx.x == 0 && blockIdx.x > 0) {
        cuda::atomic_ref<int, cuda::thread_scope_device> flag(flags[blockIdx.x - 1]);
        while (flag.load(cuda::memory_order_acquire) == 0) {
        }
        data[blockIdx.x] = data[blockIdx.x - 1] + 1;
    }
    if (threadIdx.x == 0) {
        cuda::atomic_ref<int, cuda::thread_scope_device> flag(flags[blockIdx.x]);
        flag.store(1, cuda::memory_order_release);
        flag.notify_all();
    }
    cuda::atomic_ref<int, cuda::thread_scope_system> count(*total);
    count.fetch_add(1, cuda::memory_order_relaxed);
    cuda::atomic_ref<double, cuda::thread_scope_device> adder(*sum);
    adder.fetch_add(0.5, cuda::memory_order_acq_rel);
    cuda::atomic_ref<int, cuda::thread_scope_device> largest(*most);
    largest.fetch_max(static_cast<int>(threadIdx.x * 7 + blockIdx.x) % 61, cuda::memory_order_seq_cst);
}
