// Persistent CTAs that claim work tiles, and CTAs that depend on all CTAs having begun.

constexpr int kTile = 32;

__device__ void square(const int* in, int* out, int tile) {
    for (int i = 0; i < 20; ++i) out[tile * kTile + threadIdx.x] = in[tile * kTile + threadIdx.x] * i / 19;
}

__device__ int claim(int* counter) {
    __shared__ int claimed;
    if (threadIdx.x == 0) claimed = atomicAdd(counter, 1);
    __syncthreads();
    const int tile = claimed;
    __syncthreads();
    return tile;
}

extern "C" __global__ void claims_in_turn(const int* in, int* out, int* counter, int num_tiles) {
    for (int tile = claim(counter); tile < num_tiles; tile = claim(counter)) square(in, out, tile);
}

// Claims the next tile before it works on the current one.
extern "C" __global__ void claims_ahead(const int* in, int* out, int* counter, int num_tiles) {
    int tile = claim(counter);
    while (tile < num_tiles) {
        const int next = claim(counter);
        square(in, out, tile);
        tile = next;
    }
}

// Each CTA sets its flag when it begins, works for a while, and counts the flags; with `waits`, until all are set.
extern "C" __global__ void counts_begun(volatile int* begun, int* counts, int steps, bool waits) {
    begun[blockIdx.x] = 1;
    const auto count = [&] {
        int sum = 0;
        for (int i = 0; i < gridDim.x; ++i) sum += begun[i];
        return sum;
    };
    for (int i = 0; i < steps; ++i) counts[blockIdx.x] = i;
    while (waits && count() < gridDim.x) {
    }
    counts[blockIdx.x] = count();
}
