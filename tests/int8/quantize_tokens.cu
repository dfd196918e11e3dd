// Tests the queue of tokens of an int8 matmul alone: CTAs quantise, wait for the tokens of a tile, and copy them.
#include "int8_matmul/quantize_tokens.cuh"

namespace fastattn {

constexpr int kBlockM = 16, kThreads = 64;

// x and q are [rows, columns], scale [rows], counters [1 + tiles], seen [CTAs / tiles, rows, columns]; all are
// contiguous. CTA c waits for tile c % tiles.
template <DataType kDataType>
__device__ void quantize(const uint16_t* x, int32_t rows, int32_t columns, int8_t* q, float* scale, uint64_t* counters,
                         uint64_t token, int8_t* seen) {
    __shared__ QuantizeStorage<kThreads> shared;
    const QuantizedTokens tokens{q, scale, counters, counters + 1, token};
    const int32_t tiles = (rows + kBlockM - 1) / kBlockM, tile = blockIdx.x % tiles;
    quantize_tokens<kDataType, kBlockM, kThreads>({x, rows, columns, columns}, tokens, shared);
    wait_for_tokens<kBlockM, kThreads>(tokens, rows, tile);
    const int32_t begin = tile * kBlockM * columns, end = min((tile + 1) * kBlockM, rows) * columns;
    for (int32_t i = begin + threadIdx.x; i < end; i += kThreads) {
        seen[int64_t{static_cast<int32_t>(blockIdx.x)} / tiles * rows * columns + i] = q[i];
    }
    if (threadIdx.x == 0) leave_queue<kBlockM, kThreads>(tokens, rows);
}

extern "C" __global__ void quantize_f16(const uint16_t* x, int32_t rows, int32_t columns, int8_t* q, float* scale,
                                        uint64_t* counters, uint64_t token, int8_t* seen) {
    quantize<DataType::kFloat16>(x, rows, columns, q, scale, counters, token, seen);
}

extern "C" __global__ void quantize_bf16(const uint16_t* x, int32_t rows, int32_t columns, int8_t* q, float* scale,
                                         uint64_t* counters, uint64_t token, int8_t* seen) {
    quantize<DataType::kBFloat16>(x, rows, columns, q, scale, counters, token, seen);
}

}  // namespace fastattn
