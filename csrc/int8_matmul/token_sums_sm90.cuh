// The gradient of a bias, as in token_sums.cuh, where a warp of its own makes it: one more reader of the ring. It adds a step's
// tokens up on the tensor cores, as a product with ones, while others work with the same tile of dY; so dY is read once, and
// consumers do nothing for it. What it leaves is counted in steps: nobody waits for a tile's result.
#pragma once

#include <cstdint>

#include "device/arrivals.cuh"
#include "device/fragment.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/swizzle.cuh"
#include "int8_matmul/team_sm90.cuh"
#include "int8_matmul/token_sums.cuh"

namespace fastattn {

// Sums of kBlockM tokens from sdY [kBlockM, 64]. A product's rows are 16 columns of dY, and its own columns are alike.
template <DataType kDataType, int kBlockM>
__device__ __forceinline__ void sum_step(const TokenShare& share, const uint16_t* sdY, int32_t first_n, int lane) {
    constexpr int kColumns = 64, kBlocks = 2;  // two chains of sums at a time
    constexpr uint32_t kOnes = kDataType == DataType::kFloat16 ? 0x3c003c00 : 0x3f803f80;
    const SwizzledBlocks<kColumns> blocks(sdY, ldmatrix_lane_b(lane));
    const TokenSumsView& view = share.view;
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
                view.partial[int64_t{share.token_tile} * view.columns + n] = sum;
            }
        }
    }
}

// One warp, for all pieces of work. It releases every stage, also where it takes nothing from it.
template <DataType kDataType, typename Tile>
__device__ __forceinline__ void sum_tokens(TeamStorage<Tile>& shared, const TeamParams& params, int rank, int lane) {
    const MatmulEpilogue& epilogue = params.matmul.epilogue;
    const MatmulPlan& plan = epilogue.plan;
    const TokenSumsView& view = params.matmul.token_sums;
    const int32_t columns = plan.output_tiles * kTeamCtas;
    Ring<Tile::kNumStages> ring(shared.ring);
    MatmulWork work;
    for (bool has_work = first_piece(plan, team_of_cta(), work); has_work;
         has_work = next_piece(plan, team_of_cta(), teams_of_launch(), work)) {
        const CtaTile tile(plan, work, rank);
        TokenShare share(view, tile.token_tile, tile.output_tile, columns, work.begin_step);
        const bool counts = view.partial != nullptr && share.next_step < work.end_step;
        if (counts && lane == 0) open_arrivals(view.arrivals + share.column, epilogue.token);  // long before it arrives
        int32_t num_summed = 0;
        for (int32_t step = work.begin_step; step < work.end_step; ++step) {
            ring.wait_full();
            if (share.takes(step)) {
                const auto* sdY = reinterpret_cast<const uint16_t*>(shared.stages[ring.stage]);
                sum_step<kDataType, Tile::kBlockM>(share, sdY, step * Tile::kBlockK, lane);
                ++num_summed;
            }
            __syncwarp();  // waits until every lane has read the step
            ring.release_to_cluster(lane, kTeamCtas);
        }
        if (!counts) continue;
        __syncwarp();  // waits until all lanes have stored their sums
        const int32_t of_column = ceil_div(plan.steps - share.column, columns) * plan.token_tiles;
        const bool is_last = lane == 0 && arrives_last(view.arrivals + share.column, of_column, num_summed);
        if (__any_sync(0xffffffff, is_last)) {
            __syncwarp();  // what the first lane has acquired, all may read
            share.template add_tiles<kDataType, Tile::kBlockK, 4>(plan.token_tiles, lane, kWarpSize);
        }
    }
}

}  // namespace fastattn
