// Kernels with CUB's reductions, scans and sorts over a CTA.
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

constexpr int kThreads = 128;

extern "C" __global__ void reduce_and_scan(const int* in, int* sums, int* scans) {
    using Reduce = cub::BlockReduce<int, kThreads>;
    using Scan = cub::BlockScan<int, kThreads>;
    __shared__ union {
        typename Reduce::TempStorage reduce;
        typename Scan::TempStorage scan;
    } storage;
    const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x), value = in[i];
    const int sum = Reduce(storage.reduce).Sum(value);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
    __syncthreads();
    int scanned;
    Scan(storage.scan).ExclusiveSum(value, scanned);
    scans[i] = scanned;
}

extern "C" __global__ void sort(int* values) {
    using Sort = cub::BlockRadixSort<int, kThreads, 2>;
    __shared__ typename Sort::TempStorage storage;
    int mine[2] = {values[2 * threadIdx.x], values[2 * threadIdx.x + 1]};
    Sort(storage).Sort(mine);
    values[2 * threadIdx.x] = mine[0];
    values[2 * threadIdx.x + 1] = mine[1];
}
