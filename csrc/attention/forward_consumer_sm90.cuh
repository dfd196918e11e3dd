// A consumer warpgroup of the forward kernels for Hopper: waits for and releases stages of the rings, starts products,
// and stores its rows.
#pragma once

#include <cstdint>

#include "attention/forward_config_sm90.cuh"
#include "attention/forward_work_sm90.h"
#include "attention/partial_rows.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ring.cuh"
#include "device/store_rows.cuh"
#include "device/tile_copy.cuh"
#include "device/warpgroup_gemm.cuh"
#include "scheduler/combine.cuh"

namespace fastattn {

// Locates the rows of a CTA's tile in memory: the Locator of partial_rows.cuh.
struct CtaRowLocator {
    const RowsOfCta& rows;

    FASTATTN_DEVICE int32_t num_rows() const { return rows.num_rows() - rows.first_row; }
    FASTATTN_DEVICE int32_t batch() const { return rows.batch; }
    FASTATTN_DEVICE int32_t head_of(int row) const { return rows.head_of(rows.first_row + row); }
    FASTATTN_DEVICE int32_t row_in_memory(int row) const {
        return rows.queries.begin + rows.row_of(rows.first_row + row);
    }
};

template <typename Config, DataType kDataType>
struct ForwardConsumerSm90 {
    static constexpr int kTilesN = Config::kTilesN, kTilesD = Config::kTilesD, kTilesK = Config::kBlockN / kMmaK;
    using ValueTile = typename Config::ValueTile;

    struct ConsumerThreads {
        static constexpr int kCount = Config::kConsumerThreads;
        FASTATTN_DEVICE static int index() { return threadIdx.x; }
        FASTATTN_DEVICE static void sync() { ptx::bar_sync(kAllConsumers, kCount); }
        FASTATTN_DEVICE static bool sync_or(bool predicate) {
            return ptx::bar_red_or(kAllConsumers, kCount, predicate);
        }
    };

    ForwardStorageSm90<Config>& shared;
    int warpgroup, lane, cluster_size;
    uint32_t sQ;
    uint32_t num_done = 0;  // work tiles that this consumer has finished
    Ring<Config::kStages> key_ring, value_ring;

    FASTATTN_DEVICE ForwardConsumerSm90(ForwardStorageSm90<Config>& shared, int warpgroup, int lane, int cluster_size)
        : shared(shared),
          warpgroup(warpgroup),
          lane(lane),
          cluster_size(cluster_size),
          sQ(shared_address(shared.sQ[warpgroup])),
          key_ring(shared.key),
          value_ring(shared.value) {}

    // Waits until the producer has published the next work tile, and returns it. Returns null after the last one.
    FASTATTN_DEVICE const CtaWorkTile* next_tile() const {
        const Ring<2> ring(shared.work, num_done);
        ring.wait_full();
        const int idx = warp_uniform(shared.next_tile[ring.stage]);
        return idx == kNoMoreTiles ? nullptr : &shared.work_tiles[idx];
    }

    FASTATTN_DEVICE void wait_query() const { Ring<1>(shared.query, num_done).wait_full(); }

    // Releases the work tile and advances to the next. Call release_query() before.
    FASTATTN_DEVICE void release_tile() {
        __syncwarp();  // waits until every lane has read the work tile
        Ring<2>(shared.work, num_done).release(lane);
        ++num_done;
    }

    FASTATTN_DEVICE void release_query() const { Ring<1>(shared.query, num_done).release(lane); }

    FASTATTN_DEVICE void start_qk(float (&rS)[1][kTilesN][4]) {
        key_ring.wait_full();
        ptx::wgmma_fence();
        start_gemm_qk<kDataType, Config::kHeadDim>(
            rS,
            OperandDescriptor::k_major(
                ptx::opaque(sQ)),  // opaque: values derived from sQ would take registers in the loops
            OperandDescriptor::k_major(shared_address(shared.sK[key_ring.stage])));
        ptx::wgmma_commit_group();
    }

    // Returns the first bit (ColumnBits) of the key tile whose Q·Kᵀ was started last. Call it before wait_qk(), which
    // releases the stage.
    FASTATTN_DEVICE int32_t first_bit() const { return shared.first_bits[key_ring.stage]; }

    FASTATTN_DEVICE void start_pv(float (&rO)[1][kTilesD][4], const uint32_t (&rP)[kTilesK][4]) {
        value_ring.wait_full();
        ptx::wgmma_fence();
        start_gemm_pv<kDataType>(
            rO, rP, OperandDescriptor::mn_major(shared_address(shared.sV[value_ring.stage]), ValueTile::kBlockBytes));
        ptx::wgmma_commit_group();
    }

    // Waits for Q·Kᵀ, and releases K. Leaves kInFlight products in flight: none, or P·V of the tile before.
    template <int kInFlight>
    FASTATTN_DEVICE void wait_qk(float (&rS)[1][kTilesN][4]) {
        wait_gemm<kInFlight>(rS);
        key_ring.release_to_cluster(lane, cluster_size);
    }

    FASTATTN_DEVICE void wait_pv(float (&rO)[1][kTilesD][4]) { wait_gemm<0>(rO); }  // leaves no product in flight

    FASTATTN_DEVICE void release_value() { value_ring.release_to_cluster(lane, cluster_size); }

    // Waits until V has landed and keep_values_finite() has zeroed NaN and infinity in it. The second wait tests only
    // the parity of a phase, and would also succeed at the phase of two rounds ago. The first wait rules that out: V
    // lands only after the warp of keep_values_finite() has released the stage's previous round, and so has completed
    // that round's phase of finite_value.
    FASTATTN_DEVICE void wait_finite_value() const {
        value_ring.wait_full();
        value_ring.wait(shared.finite_value);
    }

    // Adds to O the NaN and infinity that make_finite() zeroed in V, in the rows that see their keys: sees(row, key).
    // Reads V again from global memory, from the first to the last key whose V make_finite() changed. There it may also
    // find NaN and infinity that were not zeroed. P·V has already added these values, and adding NaN or infinity a
    // second time changes nothing. Every value is added with the weight 1, because its weight in P does not matter (see
    // device/nonfinite.cuh).
    template <typename Sees>
    FASTATTN_DEVICE void add_nonfinite_values(const AttentionForwardParams& params, const CtaWorkTile& tile,
                                              float (&rO)[1][kTilesD][4], Sees&& sees) const {
        if (tile.last_nonfinite < 0) return;
        const RowsOfCta& rows = tile.rows;
        const int thread = ptx::tid_x(), own_lane = thread % kWarpSize;  // read again: saves a register in the loops
        const int32_t own_row = rows.first_row + thread / kWarpSize * kMmaM + accumulator_row(own_lane);
        const int32_t own_columns = params.value.head_dim - accumulator_column(own_lane);
#pragma unroll 1
        for (int32_t key = tile.first_nonfinite; key <= tile.last_nonfinite; ++key) {
            const bool is_seen[2] = {sees(own_row, key), sees(own_row + 8, key)};
            if (!is_seen[0] && !is_seen[1]) continue;
            const TokenLocation location = rows.location_of(params, key);
            if (!location.is_present()) continue;
            const uint16_t* gRow = row_pointer(params.value, location.block, rows.kv_head, location.row);
            gRow += accumulator_column(own_lane);
#pragma unroll
            for (int d = 0; d < kTilesD; ++d) {
                if (d * kMmaN >= own_columns) break;
                const uint32_t pair = *reinterpret_cast<const uint32_t*>(gRow + d * kMmaN);
                const uint32_t nonfinite = pair & nonfinite_mask<kDataType>(pair);
                if (nonfinite == 0) continue;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float value = unpack<kDataType>(static_cast<uint16_t>(nonfinite >> 16 * (e % 2)));
                    rO[0][d][e] += is_seen[e / 2] ? value : 0.0f;
                }
            }
        }
    }

    using PartialRowsOfTile = PartialRows<Config::kBlockM, Config::kValueDim, kDataType, /*kSlotsPerCta=*/2,
                                          /*kQuadsAtOnce=*/4, CtaRowLocator>;

    // Stores a warp's rows in fp32: as a partial in the workspace, or as the output.
    template <typename Softmax>
    FASTATTN_DEVICE void store_fp32(const AttentionForwardParams& params, const CtaWorkTile& tile,
                                    float (&rO)[1][kTilesD][4], Softmax& softmax, float factor = 1.0f) const {
        const PartialRowsOfTile rows{params, CtaRowLocator{tile.rows}, factor};
        const int first_row = warp_in_cta() * kMmaM;
        // Opaque: values derived from `lane` would take registers in the main loops.
        const int own_lane = ptx::opaque(lane);
        if (tile.partials.count == 1) {
            rows.store_fp32_rows(first_row, rO, softmax, own_lane);
            return;
        }
        const PartialRange own = tile.partials.made_by(tile.cta);
        const PartialNode node = largest_node(own.begin, own, tile.partials.count);
        rows.store_partial(slot_of(rows.slots_per_cta(), tile.cta, node), first_row, rO, softmax, own_lane);
    }

    // Stores a warp's rows from own_row on, times `factor`: rounded to 16 bits, or in fp32.
    template <typename Softmax>
    FASTATTN_DEVICE void write_rows(const AttentionForwardParams& params, const CtaWorkTile& tile, int32_t own_row,
                                    float (&rO)[1][kTilesD][4], Softmax& softmax, float factor = 1.0f) const {
        if (tile.partials.count > 1 || params.exact_out.data != nullptr) {
            store_fp32(params, tile, rO, softmax, factor);
        } else {
            softmax.finish(rO, factor);
            store(params, tile.rows, own_row, rO, softmax);
        }
    }

    // Combines the partials of this CTA's split tiles, as far as this CTA is the last to arrive
    // (scheduler/combine.cuh). Called by all consumers after the last work tile. `factor` multiplies the output.
    FASTATTN_DEVICE void combine_split_tiles(const AttentionForwardParams& params, float factor = 1.0f) {
        using TileCombiner = Combiner<PartialRowsOfTile, ConsumerThreads>;
        using Storage = typename TileCombiner::Storage;
        static_assert(sizeof(Storage) <= sizeof(shared.sQ), "it overlays Q");
#pragma unroll 1
        for (int i = 0; i < shared.num_split_tiles; ++i) {
            const CtaWorkTile& tile = shared.work_tiles[kSplitTiles + i];
            const PartialRowsOfTile rows{params, CtaRowLocator{tile.rows}, factor};
            TileCombiner{rows, *reinterpret_cast<Storage*>(shared.sQ), tile.partials, tile.partials.made_by(tile.cta)}
                .run();
        }
    }

    // Writes the 16-bit output and the lse of a warp's rows from own_row on.
    template <typename Softmax>
    FASTATTN_DEVICE void store(const AttentionForwardParams& params, const RowsOfCta& rows, int32_t own_row,
                               const float (&rO)[1][kTilesD][4], const Softmax& softmax) const {
        const int32_t rows_left = rows.num_rows() - own_row;
        store_accumulators<kDataType>(rO, lane, params.out.head_dim, [&](int row) -> uint16_t* {
            if (row >= rows_left) return nullptr;
            return row_pointer(params.out, rows.batch, rows.head_of(own_row + row),
                               rows.queries.begin + rows.row_of(own_row + row));
        });
        for_own_rows<1>(lane, [&](int, int half, int row) {
            const bool is_row_leader = lane % kLanesPerRow == 0;  // all four lanes of a row hold the same lse
            if (!is_row_leader || row >= rows_left) return;
            row_pointer(params.lse, rows.batch,
                        rows.head_of(own_row + row))[rows.queries.begin + rows.row_of(own_row + row)] =
                softmax.row_lse[0][half];
        });
    }
};

}  // namespace fastattn
