// Computes the gradient of a bias, which is dY [M, N] summed over the tokens, from the tiles of dY that a matmul has in
// shared memory.
//
// The matmul is the input gradient dX = dY · W, whose CTAs step through N. All CTAs in one row of result tiles load the
// same dY, so they divide the steps: with `columns` CTAs in the row, the CTA in column c adds up the tokens of steps c,
// c + columns, …, on the tensor cores, as a product with ones. If there are several rows of result tiles, each CTA
// stores its sums in memory. The last CTA of a column to do so adds up the column's sums in the order of the tokens, so
// that results repeat bit by bit.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/swizzle.cuh"
#include "int8_matmul/int8_matmul.h"
#include "scheduler/arrivals.cuh"
#include "scheduler/stream_k.h"

namespace fastattn {

// The steps whose tokens a CTA adds up while it computes a work tile, and where it leaves the sums. The CTA is in
// column `column` of `columns`.
struct TokenSumWork {
    const TokenSumsView& view;
    int32_t m_tile, column, columns;
    int32_t next_step;  // the next step that this CTA adds up

    FASTATTN_DEVICE TokenSumWork(const TokenSumsView& view, int32_t m_tile, int32_t column, int32_t columns,
                                 int32_t begin_step)
        : view(view), m_tile(m_tile), column(column), columns(columns) {
        next_step = column + ceil_div(max(begin_step - column, 0), columns) * columns;
    }

    // Returns whether the CTA adds up the tokens of this step. Call it once for each step, in order.
    FASTATTN_DEVICE bool takes(int32_t step) {
        if (step != next_step) return false;
        next_step += columns;
        return true;
    }

    // Adds up the sums that the CTAs of this column have stored, and stores the results. `threads` threads divide the
    // columns of dY; `thread` is the index of the caller. kBlockN: the columns of dY in a step. kAtOnce: how many loads
    // are in flight together.
    template <DataType kDataType, int kBlockN, int kAtOnce>
    FASTATTN_DEVICE void add_tiles(int32_t m_tiles, int thread, int threads) const {
        constexpr int kChunks = kBlockN / kEpilogueColumns;
        for (int chunk = thread;; chunk += threads) {
            const int32_t step = column + chunk / kChunks * columns;
            const int32_t n = step * kBlockN + chunk % kChunks * kEpilogueColumns;
            if (n >= view.columns) return;
            float4 sums = {};
#pragma unroll kAtOnce
            for (int32_t tile = 0; tile < m_tiles; ++tile) {
                const float* partial = view.partial + int64_t{tile} * view.columns + n;
                const float4 more = __ldcg(reinterpret_cast<const float4*>(partial));
                sums = {sums.x + more.x, sums.y + more.y, sums.z + more.z, sums.w + more.w};
            }
            const uint2 bits = {pack<kDataType>(sums.x, sums.y), pack<kDataType>(sums.z, sums.w)};
            *reinterpret_cast<uint2*>(view.out + n) = bits;
        }
    }
};

// Sums tokens with all threads of a CTA. In a step, Config::kBlockM tokens and Config::kBlockN columns of dY are in
// shared memory.
template <DataType kDataType, typename Config>
struct TokenSums {
    static constexpr int kBlockN = Config::kBlockN;
    static constexpr int kWarpN = 2 * kMmaN;  // columns of dY that a warp adds up
    static_assert(kBlockN == Config::kNumWarps * kWarpN, "the warps divide a step");

    const TokenSumsView& view;
    TokenSumWork own;

    FASTATTN_DEVICE TokenSums(const TokenSumsView& view, const TilePosition& position, int32_t begin_step,
                              int32_t tile_columns)
        : view(view), own(view, position.m_tile, position.n_tile, tile_columns, begin_step) {}

    FASTATTN_DEVICE bool are_wanted() const { return view.out != nullptr; }

    FASTATTN_DEVICE bool are_shared() const { return are_wanted() && view.partial != nullptr; }

    // Prepares finish_tile(). Call it before the steps, which hide the trip to L2.
    FASTATTN_DEVICE void open(uint64_t launch_id) const {
        if (threadIdx.x == 0 && are_shared()) open_arrivals(view.arrivals + own.column, launch_id);
    }

    // Adds up the tokens of a step, if it is one of this CTA's. sdY: the step's dY, [kBlockM, kBlockN].
    FASTATTN_DEVICE void sum(int32_t step, const uint16_t* sdY) {
        if (!own.takes(step)) return;
        constexpr uint32_t kOnes = kDataType == DataType::kFloat16 ? 0x3c003c00 : 0x3f803f80;
        constexpr uint32_t rOnes[4] = {kOnes, kOnes, kOnes, kOnes};
        const int warp_n = threadIdx.x / kWarpSize * kWarpN, lane = threadIdx.x % kWarpSize;
        const SwizzledBlocks<kBlockN> blocks(sdY, ldmatrix_lane(lane));
        float rSums[kWarpN / kMmaN][4] = {};  // all rows are equal
#pragma unroll
        for (int m = 0; m < Config::kBlockM; m += kMmaK) {
            uint32_t rdY[4];
            ptx::ldmatrix_m8n8_x4_trans(rdY, blocks.address(m, warp_n));
            mma_m16n8k16<kDataType>(rSums[0], rOnes, rdY[0], rdY[1]);
            mma_m16n8k16<kDataType>(rSums[1], rOnes, rdY[2], rdY[3]);
        }
        if (accumulator_row(lane) != 0) return;
#pragma unroll
        for (int tile = 0; tile < kWarpN / kMmaN; ++tile) {
            const int32_t n = step * kBlockN + warp_n + tile * kMmaN + accumulator_column(lane);
            if (n >= view.columns) return;
            if (view.partial == nullptr) {
                *reinterpret_cast<uint32_t*>(view.out + n) = pack<kDataType>(rSums[tile][0], rSums[tile][1]);
            } else {
                float* partial = view.partial + int64_t{own.m_tile} * view.columns + n;
                *reinterpret_cast<float2*>(partial) = {rSums[tile][0], rSums[tile][1]};
            }
        }
    }

    // Adds up a column's sums in the column's last CTA. Called by the whole CTA after a barrier, when the tile's result
    // is complete.
    FASTATTN_DEVICE void finish_tile(int32_t m_tiles) const {
        if (!are_shared()) return;
        const bool is_last = threadIdx.x == 0 && arrives_last(view.arrivals + own.column, m_tiles);
        if (!__syncthreads_or(is_last)) return;
        own.template add_tiles<kDataType, kBlockN, 8>(m_tiles, threadIdx.x, Config::kNumThreads);
    }
};

}  // namespace fastattn
