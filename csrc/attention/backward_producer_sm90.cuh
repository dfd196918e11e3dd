// The producer warps of the backward kernels for Hopper: one claims work tiles, and one copies their operands.
#pragma once

#include <cstdint>

#include "attention/backward_config_sm90.cuh"
#include "attention/backward_work_sm90.cuh"
#include "device/bias_tile.cuh"
#include "device/key_ranges.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/ring.cuh"
#include "device/scores.cuh"
#include "scheduler/row_splits.h"

namespace fastattn {

// Calls take(keys) for each work tile that this CTA claims, and returns when none is left.
template <typename Config, typename Take>
FASTATTN_DEVICE void for_work(BackwardStorageSm90<Config>& shared, int lane, Take&& take) {
    for (Ring<2> ring(shared.work);;) {
        ring.wait_full();
        if (warp_uniform(shared.is_end[ring.stage]) != 0) return;
        take(shared.work_tiles[ring.stage]);
        __syncwarp();  // waits until every lane has read the work tile
        ring.release(lane);
    }
}

// Claims work tiles, and passes them to all other warps. Claims the next work tile only when the copies of the current
// tile's last rows have been issued, at most kStages steps before the current tile is finished. So CTAs that finish
// sooner get more work tiles. Called by one warp.
template <typename Config>
FASTATTN_DEVICE void claim(BackwardStorageSm90<Config>& shared, const AttentionBackwardParams& params, int lane) {
    const KeyTileOrder order(params, Config::kBlockN, lane);
    for (Ring<2> ring(shared.work);; ring.advance()) {
        if (lane == 0) {
            // Waits until the copies of the previous tile's last rows have been issued. rows_issued completes one phase
            // for each tile, so the parity of the previous tile's phase is the other stage's index. The first wait
            // returns at once.
            ptx::mbarrier_wait_parity(shared_address(&shared.rows_issued), ring.stage ^ 1);
            ring.wait_empty();
        }
        bool is_end, exists;
        do {
            const uint32_t claimed = lane == 0 ? atomicAdd(params.num_claimed, 1) : 0;
            const RowSplit row_split = nth_row_split(params.row_splits, __shfl_sync(0xffffffff, claimed, 0));
            WorkTile found;
            is_end = !order.find(found, params, row_split.tile, Config::kBlockN);
            const bool finds = lane == 0 && !is_end && shared.work_tiles[ring.stage].find(params, row_split, found);
            exists = __any_sync(0xffffffff, finds);
            if (Config::kOptions && exists && params.scores.ranges.data != nullptr) {
                __syncwarp();  // waits until lane 0 has written the work tile
                shared.work_tiles[ring.stage].find_through_ranges(lane);
            }
        } while (!is_end && !exists);
        if (lane == 0) {
            shared.is_end[ring.stage] = is_end;
            ring.arrive_full();
        }
        if (is_end) return;
    }
}

// Copies K, V, Q, dO and row terms of all work tiles to shared memory. Called by one warp.
template <typename Config>
FASTATTN_DEVICE void produce(BackwardStorageSm90<Config>& shared, const AttentionBackwardParamsSm90& all_params,
                             int lane) {
    using RowTile = typename Config::RowTile;
    using GradOutTile = typename Config::GradOutTile;
    using KeyTile = typename Config::KeyTile;
    using ValueTile = typename Config::ValueTile;
    using Terms = typename Config::Terms;
    constexpr int kBlockM = Config::kBlockM;
    const AttentionBackwardParams& params = all_params.attention;
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    Ring<1> key_ring(shared.keys);
    Ring<Config::kStages> row_ring(shared.rows);
    uint32_t times_trimmed = 0;
    for_work(shared, lane, [&](const KeyWorkTile<Config>& keys) {
        if (lane == 0) {
            const uint32_t barrier = key_ring.acquire(KeyTile::kBytes + ValueTile::kBytes);
            const int32_t first_key = keys.sequence_begin + keys.first_key;
            KeyTile::load(shared_address(shared.sK), all_params.key, keys.batch, keys.head, first_key, barrier);
            ValueTile::load(shared_address(shared.sV), all_params.value, keys.batch, keys.head, first_key, barrier);
        }
        key_ring.advance();
        keys.for_steps([&](int32_t head, int32_t row_tile, bool ranges_hide_none) {
            const int stage = row_ring.stage;
            const int32_t first_row = row_tile * kBlockM, num_rows = keys.rows.length - first_row;
            // Past the end of a packed sequence are rows of the next sequence, which may contain NaN: they are zeroed.
            const bool has_others = is_packed && num_rows < kBlockM;
            constexpr uint32_t kBytes = RowTile::kBytes + GradOutTile::kBytes + sizeof(Terms);
            if (lane == 0) {
                row_ring.wait_empty_for_tma();
                const uint32_t barrier =
                    has_others ? shared_address(&shared.rows_to_trim_landed) : row_ring.full_barrier();
                if constexpr (Config::kOptions) {
                    RowStep& step = shared.steps[stage];
                    step = {head, row_tile, ranges_hide_none ? ~0u : keys.full_for(row_tile),
                            HeadScores::slope_of(params.scores, keys.batch, head)};
                    if (keys.has_ranges && !ranges_hide_none) {
                        step.ranges = RowRanges(params.scores.ranges, keys.batch, head, keys.rows).of(first_row);
                    }
                }
                const int64_t block = int64_t{keys.first_sums_tile + row_tile} * params.query.heads + head;
                if constexpr (Config::kAddsDqFromRegisters) {
                    shared.steps[stage].query_sums =
                        params.query_sums + block * (Config::kQueryPanels * kPanelElements);
                }
                ptx::mbarrier_arrive_expect_tx(barrier, kBytes);
                const int32_t first = keys.rows.begin + first_row;
                RowTile::load(shared_address(shared.sQ[stage]), all_params.query, keys.batch, head, first, barrier);
                GradOutTile::load(shared_address(shared.sdO[stage]), all_params.grad_out, keys.batch, head, first,
                                  barrier);
                ptx::cp_async_bulk_shared_global(shared_address(&shared.terms[stage]),
                                                 params.row_terms.data + block * (sizeof(Terms) / sizeof(float)),
                                                 sizeof(Terms), barrier);
            }
            if constexpr (Config::kOptions) {
                prefetch_bias(params.scores.bias, keys.batch, head, first_row, min(num_rows, kBlockM), keys.first_key,
                              min(keys.num_keys - keys.first_key, Config::kBlockN), lane);
            }
            if (has_others) {
                __syncwarp();  // waits until `rows_to_trim_landed` expects the bytes
                ptx::mbarrier_wait_parity(shared_address(&shared.rows_to_trim_landed), times_trimmed++ % 2);
                RowTile::zero_rows(shared.sQ[stage], num_rows, lane, kWarpSize);
                GradOutTile::zero_rows(shared.sdO[stage], num_rows, lane, kWarpSize);
                ptx::fence_proxy_async_shared();  // makes the zeros visible to wgmma
                __syncwarp();                     // waits until every lane has written its zeros
                if (lane == 0) row_ring.arrive_full();
            }
            row_ring.advance();
        });
        if (lane == 0) ptx::mbarrier_arrive(shared_address(&shared.rows_issued));
    });
}

}  // namespace fastattn
