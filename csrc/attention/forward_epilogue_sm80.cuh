// How the forward kernels for sm_80 store the rows of a tile.
#pragma once

#include <cstdint>

#include "attention/forward_work_sm80.h"
#include "attention/partial_rows.cuh"
#include "device/fragment.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// Locates the rows of a tile in memory: the Locator of partial_rows.cuh.
struct TileRowLocator {
    QueryTile tile;
    Sequence rows;
    int32_t first_row;

    FASTATTN_DEVICE int32_t num_rows() const { return rows.length - first_row; }
    FASTATTN_DEVICE int32_t batch() const { return tile.batch; }
    FASTATTN_DEVICE int32_t head_of(int) const { return tile.head; }
    FASTATTN_DEVICE int32_t row_in_memory(int row) const { return rows.begin + first_row + row; }
};

// kQuadsAtOnce is 2, because with more the plain kernel for 32 dims spills in its loops. Other CTAs on the SM hide the
// latency of the loads.
template <int kBlockM, int kHeadDim, DataType kDataType>
using PartialRowsSm80 =
    PartialRows<kBlockM, kHeadDim, kDataType, /*kSlotsPerCta=*/1, /*kQuadsAtOnce=*/2, TileRowLocator>;

// Stores a warp's rows of O, rounded to 16 bits, and their lse. sO: shared memory in which the warp stages its rows,
// [kWarpM, kHeadDim].
template <typename Config, DataType kDataType, typename Softmax>
FASTATTN_DEVICE void store_rounded_rows(const AttentionForwardParams& params, const QueryTile& tile,
                                        const Sequence& rows, float (&rO)[Config::kTilesM][Config::kTilesD][4],
                                        Softmax& softmax, uint16_t* sO, int warp, int lane, float factor) {
    constexpr int kBlockM = Config::kBlockM, kWarpM = Config::kWarpM, kHeadDim = Config::kHeadDim;
    softmax.finish(rO, factor);
    stage_rows<kDataType>(sO, rO, lane);
    __syncwarp();  // waits until every lane has staged its values
    const int32_t first_row = tile.idx * kBlockM + warp * kWarpM;
    uint16_t* gO = row_pointer(params.out, tile.batch, tile.head, rows.begin + first_row);
    store_rows<kWarpM, kHeadDim>(gO, params.out.row_stride, rows.length - first_row, sO, lane, params.out.head_dim);
    float* gLse = row_pointer(params.lse, tile.batch, tile.head) + rows.begin;
    for_own_rows<Config::kTilesM>(lane, [&](int m, int half, int row) {
        const bool is_row_leader = lane % kLanesPerRow == 0;  // all four lanes of a row hold the same lse
        if (is_row_leader && first_row + row < rows.length) gLse[first_row + row] = softmax.row_lse[m][half];
    });
}

}  // namespace fastattn
