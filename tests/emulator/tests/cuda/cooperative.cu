// Kernels with the toolkit's cooperative groups: tiles, coalesced groups, reductions, and a barrier of the grid.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;

// One sum for each tile of 8 threads, an inclusive scan within tiles of 16, and a maximum over each warp.
extern "C" __global__ void tiles(const int* values, int* sums, int* scans, int* maxima) {
    const cg::thread_block block = cg::this_thread_block();
    const unsigned i = blockIdx.x * blockDim.x + block.thread_rank();
    const auto tile = cg::tiled_partition<8>(block);
    const int sum = cg::reduce(tile, values[i], cg::plus<int>());
    if (tile.thread_rank() == 0) sums[i / 8] = sum;
    scans[i] = cg::inclusive_scan(cg::tiled_partition<16>(block), values[i]);
    const auto warp = cg::tiled_partition<32>(block);
    const int most = cg::reduce(warp, values[i], cg::greater<int>());
    if (warp.thread_rank() == 0) maxima[i / 32] = most;
}

// Threads with a positive value form groups. Each group reserves elements of `out` with one atomic.
extern "C" __global__ void compact(const int* values, int* out, int* count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (values[i] <= 0) return;
    const cg::coalesced_group group = cg::coalesced_threads();
    int first = 0;
    if (group.thread_rank() == 0) first = atomicAdd(count, static_cast<int>(group.size()));
    out[group.shfl(first, 0) + group.thread_rank()] = values[i];
}

// For groups of equal labels in a warp: their sizes, and the sums of their values.
extern "C" __global__ void partitions(const int* labels, const float* values, int* sizes, float* sums) {
    const unsigned i = threadIdx.x;
    const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
    const auto group = cg::labeled_partition(warp, labels[i]);
    sizes[i] = static_cast<int>(group.size());
    sums[i] = cg::reduce(group, values[i], cg::plus<float>());
}

// In each round, every CTA adds what its neighbour wrote in the previous round.
extern "C" __global__ void rounds(int* cells, int* next, int count) {
    const cg::grid_group grid = cg::this_grid();
    for (int round = 0; round < count; ++round) {
        if (threadIdx.x == 0) {
            next[blockIdx.x] = cells[blockIdx.x] + cells[(blockIdx.x + 1) % gridDim.x];
        }
        grid.sync();
        if (threadIdx.x == 0) cells[blockIdx.x] = next[blockIdx.x];
        grid.sync();
    }
}
