// How the backward kernels for Hopper write dQ, dK and dV. dQ, and dK and dV of split key tiles, are passed in panels
// of 64 rows by 64 dims to a reduction warp, which adds them to sums in global memory. dK and dV of other key tiles are
// stored directly in the gradients.
#pragma once

#include <cstdint>

#include "attention/backward_config_sm90.cuh"
#include "attention/backward_producer_sm90.cuh"
#include "attention/backward_work_sm90.cuh"
#include "attention/query_sums.h"
#include "device/fragment.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/st_shared.cuh"
#include "device/ring.cuh"
#include "device/store_rows.cuh"
#include "device/tile_copy.cuh"
#include "scheduler/semaphore.cuh"

namespace fastattn {

// Starts to add a panel to sums in global memory, and waits until the panel has been read from shared memory. The panel
// can then be overwritten, although the addition may not be complete. Called by one thread.
FASTATTN_DEVICE void start_to_add(float* sums, const float* sPanel) {
    ptx::cp_reduce_async_bulk_add_f32(sums, shared_address(sPanel), kPanelElements * sizeof(float));
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read();
}

// Stores a warp's 16 rows of the panel at address sPanel: 64 columns of the accumulators rC, from column 8 * kFirstTile
// on, and zeros past the last column of rC.
template <int kFirstTile, int kNumTiles>
FASTATTN_DEVICE void store_panel_rows(uint32_t sPanel, const float (&rC)[1][kNumTiles][4], int warp, int lane) {
    sPanel += (warp * kWarpSize + lane) * sizeof(float4);
#pragma unroll
    for (int block = 0; block < kPanelDims / kMmaN; ++block) {
        const uint32_t own = sPanel + block * kPanelBlockElements * sizeof(float);
        if (kFirstTile + block < kNumTiles) {
            ptx::st_shared_v4_f32(own, rC[0][kFirstTile + block]);
        } else {
            const float zeros[4] = {};
            ptx::st_shared_v4_f32(own, zeros);
        }
    }
}

// Passes 64 columns of a gradient to a reduction warp, through the ring's stage of sPanels.
template <int kFirstTile, int kStages, int kNumTiles>
FASTATTN_DEVICE void store_panel(const Ring<kStages>& ring, const float (*sPanels)[kPanelElements],
                                 const float (&rC)[1][kNumTiles][4], int warp, int lane) {
    ring.wait_empty();
    store_panel_rows<kFirstTile>(shared_address(sPanels[ring.stage]), rC, warp, lane);
    ptx::fence_proxy_async_shared();  // makes the panel visible to the bulk copy
    __syncwarp();                     // waits until every lane has stored its values
    if (lane == 0) ring.arrive_full();
}

// Stores dK or dV of a warp's 16 keys, times factor, in `view`. If `sums` has data, adds them to `sums` instead.
// first_key: the warp's first key, counted from the first key of the key tile.
template <DataType kDataType, typename Config, int kTilesD>
FASTATTN_DEVICE void store_key_rows(const HeadsView<uint16_t>& view, const HeadsView<float>& sums,
                                    const KeyWorkTile<Config>& keys, float (&rC)[1][kTilesD][4], int first_key,
                                    int lane, float factor) {
#pragma unroll
    for (auto& tile : rC[0]) {
#pragma unroll
        for (float& number : tile) number *= factor;
    }
    const int32_t own_key = keys.first_key + first_key;
    if (sums.data == nullptr) {
        store_accumulators<kDataType>(rC, lane, view.head_dim, [&](int key) -> uint16_t* {
            if (own_key + key >= keys.num_keys) return nullptr;
            return row_pointer(view, keys.batch, keys.head, keys.sequence_begin + own_key + key);
        });
        return;
    }
    for_own_rows<1>(lane, [&](int, int half, int key) {
        if (own_key + key >= keys.num_keys) return;
        float* gRow = row_pointer(sums, keys.batch, keys.head, keys.sequence_begin + own_key + key);
        store_lane_fp32(gRow, rC[0], half, lane, view.head_dim, AddPair{});
    });
}

// Returns whether dQ is added to its sums through panels. Otherwise consumers add dQ to the sums from registers.
template <typename Config>
FASTATTN_DEVICE bool dq_takes_panels(const AttentionBackwardParams& params) {
    return !Config::kAddsDqFromRegisters || params.semaphores != nullptr;
}

// Adds the panels that one reduction warp receives: panels of dQ in each step and, for a split key tile, panels of dK
// and dV. With semaphores, dQ is added from the first keys to the last, and dK and dV from the first split to the last.
// So a reduction warp waits only for CTAs that have claimed their work earlier, and for reduction warps of its own CTA.
// own: the number of the calling reduction warp. barriers: the barriers of the ring that passes its panels.
template <typename Config, int kStages>
FASTATTN_DEVICE void reduce_panels(BackwardStorageSm90<Config>& shared, const AttentionBackwardParams& params,
                                   const RingBarriers<kStages>& barriers, const float (*sPanels)[kPanelElements],
                                   int own, int lane) {
    // Each reduction warp has its own panels of dQ. But if a tile of dQ has only one panel, all reduction warps add to
    // this panel: with semaphores, one after another.
    const int first_panel = own * Config::kPanelsPerReductionWarp % Config::kQueryPanels,
              warps_before = own * Config::kPanelsPerReductionWarp / Config::kQueryPanels;
    const bool in_order = params.semaphores != nullptr;
    Ring<kStages> ring(barriers);
    const auto add = [&](float* sums) {
        start_to_add(sums, sPanels[ring.stage]);
        ring.release_by_thread();
    };
    for_work(shared, lane, [&](const KeyWorkTile<Config>& keys) {
        keys.for_steps([&](int32_t head, int32_t row_tile, bool) {
            if (lane != 0 || !dq_takes_panels<Config>(params)) return;
            const int32_t num_before = in_order ? keys.num_before(head, row_tile) : 0;
            const int64_t sums_tile = int64_t{keys.first_sums_tile + row_tile} * params.query.heads + head;
            float* sums = params.query_sums + (sums_tile * Config::kQueryPanels + first_panel) * kPanelElements;
#pragma unroll 1
            for (int panel = 0; panel < Config::kPanelsPerReductionWarp; ++panel, sums += kPanelElements) {
                ring.wait_full();
                if (in_order && panel == 0)
                    semaphore_wait(params.semaphores + sums_tile, num_before * Config::kReductionWarps + warps_before);
                if (Config::kSkipsHidden && !keys.sees(row_tile, own)) {
                    ring.release_by_thread();
                } else {
                    add(sums);
                }
            }
            if (in_order) semaphore_release(params.semaphores + sums_tile);
        });
        if (lane != 0 || !keys.is_split()) return;
        int32_t* semaphore = params.key_semaphores + int64_t{keys.split_tile} * Config::kReductionWarps + own;
#pragma unroll 1
        for (int i = 0; i < Config::kKeyPanelsPerReductionWarp; ++i) {
            ring.wait_full();
            if (in_order && i == 0) semaphore_wait(semaphore, keys.split);
            const int64_t key_panel = Config::key_panel(own, i);
            add(params.key_sums + (keys.split_tile * int64_t{Config::kKeyPanels} + key_panel) * kPanelElements);
        }
        if (in_order) semaphore_release(semaphore);
    });
    if (lane == 0) ptx::cp_async_bulk_wait_group();  // waits until the last additions are complete
}

}  // namespace fastattn
