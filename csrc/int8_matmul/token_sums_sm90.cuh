// Computes the gradient of a bias as token_sums.cuh does, but in a separate warp, which is one more reader of the ring.
// The warp adds up a step's tokens on the tensor cores, as a product with ones, while the consumers multiply the same
// tile of dY. So dY is loaded only once, and the consumers do nothing for this gradient. Arrivals count steps and not
// tiles, because the warp does not wait until a tile's result is complete.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/swizzle.cuh"
#include "int8_matmul/cluster_sm90.cuh"
#include "int8_matmul/token_sums.cuh"
#include "scheduler/arrivals.cuh"

namespace fastattn {

// Adds up kBlockM tokens of sdY [kBlockM, 64]. The rows of the product are 16 columns of dY; all columns of the product
// are equal.
template <DataType kDataType, int kBlockM>
FASTATTN_DEVICE void sum_step(const TokenSumWork& own, const uint16_t* sdY, int32_t first_n, int lane) {
    constexpr int kColumns = 64, kBlocks = 2;  // two chains of sums at a time
    constexpr uint32_t kOnes = kDataType == DataType::kFloat16 ? 0x3c003c00 : 0x3f803f80;
    const SwizzledBlocks<kColumns> blocks(sdY, ldmatrix_lane_b(lane));
    const TokenSumsView& view = own.view;
#pragma unroll
    for (int first = 0; first < kColumns; first += kBlocks * kMmaM) {
        float rSums[kBlocks][4] = {};
#pragma unroll 2
        for (int m = 0; m < kBlockM; m += kMmaK) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                uint32_t rdY[4];  // transposed: operand A
                ptx::ldmatrix_m8n8_x4_trans(rdY, blocks.below(m).address(0, first + block * kMmaM));
                mma_m16n8k16<kDataType>(rSums[block], rdY, kOnes, kOnes);
            }
        }
        if (accumulator_column(lane) != 0) continue;
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            const int32_t n = first_n + first + i * 8 + accumulator_row(lane);
            const float sum = rSums[i / 2][i % 2 * 2];
            if (n >= view.columns) continue;
            if (view.partial == nullptr) {
                view.out[n] = static_cast<uint16_t>(pack<kDataType>(sum, 0.0f));
            } else {
                view.partial[int64_t{own.m_tile} * view.columns + n] = sum;
            }
        }
    }
}

// Adds up the tokens of all work tiles. Called by one warp, which releases every stage, even one whose tokens another
// CTA adds up.
template <DataType kDataType, typename Tile>
FASTATTN_DEVICE void sum_tokens(ClusterStorage<Tile>& shared, const ClusterParams& params, int rank, int lane) {
    const MatmulEpilogue& epilogue = params.matmul.epilogue;
    const MatmulSchedule& schedule = epilogue.schedule;
    const TokenSumsView& view = params.matmul.token_sums;
    const int32_t columns = schedule.n_tiles * kClusterSize;
    Ring<Tile::kNumStages> ring(shared.ring);
    for_cluster_tiles(schedule, [&](const MatmulWorkTile& work) {
        const CtaTile tile(schedule, work, rank);
        TokenSumWork own(view, tile.m_tile, tile.n_tile, columns, work.begin_step);
        const bool counts = view.partial != nullptr && own.next_step < work.end_step;
        // Opens the counter long before the arrival, so that the trip to L2 is hidden.
        if (counts && lane == 0) open_arrivals(view.arrivals + own.column, epilogue.launch_id);
        int32_t num_summed = 0;
        for (int32_t step = work.begin_step; step < work.end_step; ++step) {
            ring.wait_full();
            if (own.takes(step)) {
                const auto* sdY = reinterpret_cast<const uint16_t*>(shared.stages[ring.stage]);
                sum_step<kDataType, Tile::kBlockM>(own, sdY, step * Tile::kBlockK, lane);
                ptx::fence_proxy_async_shared();  // so that the other CTA may overwrite what this lane has read
                ++num_summed;
            }
            __syncwarp();  // waits until every lane has read the step
            ring.release_to_cluster(lane, kClusterSize);
        }
        if (!counts) return;
        __syncwarp();  // waits until all lanes have stored their sums
        const int32_t column_steps = ceil_div(schedule.steps - own.column, columns) * schedule.m_tiles;
        const bool is_last = lane == 0 && arrives_last(view.arrivals + own.column, column_steps, num_summed);
        if (__any_sync(0xffffffff, is_last)) {
            __syncwarp();  // makes the sums that the first lane has acquired visible to all lanes
            own.template add_tiles<kDataType, Tile::kBlockK, 4>(schedule.m_tiles, lane, kWarpSize);
        }
    });
}

}  // namespace fastattn
