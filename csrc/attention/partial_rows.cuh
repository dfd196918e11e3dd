// How a forward kernel stores rows that it does not simply round to 16 bits: the partial rows of a split, rows combined
// from partials (scheduler/combine.cuh), and fp32 output (params.exact_out).
#pragma once

#include <cstdint>

#include "device/finish_row.cuh"
#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/softmax.cuh"
#include "device/store_rows.cuh"
#include "device/tile_copy.cuh"
#include "host/params.h"
#include "scheduler/combine.cuh"
#include "scheduler/key_splits.h"
#include "scheduler/workspace_slots.cuh"

namespace fastattn {

// The rows of a tile, as scheduler/combine.cuh takes them. A Locator finds them in memory. It has batch(),
// head_of(row), row_in_memory(row), and num_rows(): how many rows exist from the tile's first row on, which may be less
// than 0 or more than kBlockM. kSlotsPerCta: 1 if a CTA has a single split, else 2. kQuadsAtOnce: see
// scheduler/combine.cuh.
template <int kBlockM_, int kValueDim_, DataType kDataType, int kSlotsPerCta, int kQuadsAtOnce_, typename Locator>
struct PartialRows {
    static constexpr int kBlockM = kBlockM_, kValueDim = kValueDim_, kLog2Nodes = 2, kQuadsAtOnce = kQuadsAtOnce_;

    const AttentionForwardParams& params;
    const Locator locator;
    float factor = 1.0f;  // multiplies the output

    FASTATTN_DEVICE int num_rows() const { return min(max(locator.num_rows(), 0), kBlockM); }

    FASTATTN_DEVICE int32_t slots_per_cta() const { return kSlotsPerCta; }

    FASTATTN_DEVICE WorkspaceSlots<kBlockM> slots() const { return {params.partials, params.value.head_dim}; }

    // Writes four columns of a combined row and, with column 0, its lse. finish_row() gets no sink, because the first
    // split's partial has counted it.
    FASTATTN_DEVICE void store_result(int row, int column, const RowPartial& partial) const {
        const RowResult result = finish_row(partial.max, partial.sum, -kInfinity);
        const int32_t head = locator.head_of(row), row_in_memory = locator.row_in_memory(row);
        if (column == 0) row_pointer(params.lse, locator.batch(), head)[row_in_memory] = result.lse;
        if (column >= params.out.head_dim) return;
        if (params.exact_out.data != nullptr) {
            store_fp32(row_pointer(params.exact_out, locator.batch(), head, row_in_memory) + column, partial.values,
                       result.factor * factor);
        } else {
            store_rounded<kDataType>(row_pointer(params.out, locator.batch(), head, row_in_memory) + column,
                                     partial.values, result.factor * factor);
        }
    }

    // Stores a warp's accumulators, softmax references and sums in a workspace slot. first_row: the warp's first row in
    // the tile.
    template <int kTilesM, int kTilesD, typename Softmax>
    FASTATTN_DEVICE void store_partial(int64_t slot, int first_row, const float (&rO)[kTilesM][kTilesD][4],
                                       const Softmax& softmax, int lane) const {
        const WorkspaceSlots<kBlockM> own_slots = slots();
        for_own_rows<kTilesM>(lane, [&](int m, int half, int warp_row) {
            const int row = first_row + warp_row;
            const float sum = row_reduce_sum(softmax.row_sum[m][half]);
            if (row >= num_rows()) return;
            const bool is_row_leader = lane % kLanesPerRow == 0;  // all four lanes of a row hold the same sum
            if (is_row_leader) own_slots.store_sums(slot, row, softmax.reference_in_nats(m, half), sum);
            store_lane_fp32(own_slots.values_of(slot, row), rO[m], half, lane, own_slots.value_dim, WritePair{});
        });
    }

    // Writes a warp's rows to the fp32 output, and their lse, for a tile that is not split.
    template <int kTilesM, int kTilesD, typename Softmax>
    FASTATTN_DEVICE void store_fp32_rows(int first_row, float (&rO)[kTilesM][kTilesD][4], Softmax& softmax,
                                         int lane) const {
        softmax.finish(rO, factor);
        for_own_rows<kTilesM>(lane, [&](int m, int half, int warp_row) {
            const int row = first_row + warp_row;
            if (row >= num_rows()) return;
            const int32_t head = locator.head_of(row), row_in_memory = locator.row_in_memory(row);
            const bool is_row_leader = lane % kLanesPerRow == 0;  // all four lanes of a row hold the same lse
            if (is_row_leader) row_pointer(params.lse, locator.batch(), head)[row_in_memory] = softmax.row_lse[m][half];
            float* gRow = row_pointer(params.exact_out, locator.batch(), head, row_in_memory);
            store_lane_fp32(gRow, rO[m], half, lane, params.out.head_dim, WritePair{});
        });
    }
};

// The threads of a CTA that has only one split and ends with it. index() reads the thread's index again: values derived
// from threadIdx.x would otherwise stay in registers during the main loops.
template <int kNumThreads>
struct LateThreadsOfCta : AllThreadsOfCta {
    static constexpr int kCount = kNumThreads;
    FASTATTN_DEVICE static int index() { return ptx::tid_x(); }
};

// Writes the fp32 output if the tile is not split. Otherwise stores this CTA's partial, and combines partials as far as
// this CTA is the last to arrive (scheduler/combine.cuh). Called by all threads; each warp has kWarpM rows. sTile:
// shared memory that the main loops no longer use.
template <int kNumThreads, int kWarpM, typename Rows, int kTilesM, int kTilesD, typename Softmax, typename Tile>
FASTATTN_DEVICE void store_or_combine_in_fp32(const Rows& rows, const KeySplit& split, float (&rO)[kTilesM][kTilesD][4],
                                              Softmax& softmax, Tile& sTile) {
    using Threads = LateThreadsOfCta<kNumThreads>;
    using Storage = typename Combiner<Rows, Threads>::Storage;
    static_assert(sizeof(Storage) <= sizeof(sTile));
    const auto cta = static_cast<int32_t>(blockIdx.x);
    const int warp = Threads::index() / kWarpSize, lane = Threads::index() % kWarpSize;
    if (split.num_splits == 1) {
        rows.store_fp32_rows(warp * kWarpM, rO, softmax, lane);
        return;
    }
    const TilePartials partials{split.num_splits, cta - split.idx, 1};
    const PartialRange own = partials.made_by(cta);
    rows.store_partial(slot_of(rows.slots_per_cta(), cta, largest_node(own.begin, own, partials.count)), warp * kWarpM,
                       rO, softmax, lane);
    Combiner<Rows, Threads>{rows, *reinterpret_cast<Storage*>(sTile), partials, own}.run();
}

}  // namespace fastattn
