// The producer of the forward kernels for Hopper, for contiguous keys and for keys in pages. produce() copies K and V
// by TMA in boxes (produce_tiles()), or gathers their rows with cp.async (gather_rows()). MissingPages tells the
// consumers which keys to mask.
//
// A box never crosses a page. A key tile is one box without pages, with pages that hold whole tiles, and with only one
// page per sequence. Otherwise a key tile is several boxes, and each lane of a warp looks up and copies one box. With
// some page sizes, boxes would begin in the middle of the swizzle's pattern (key_box_rows() returns 0). Three warps
// then gather the rows instead:
//
//   warps 1 to 3   wait for `empty` → look up rows, start copies → arrive at `gathered` when the copies have landed
//   warp 0         wait for `gathered` → fence between the proxies → arrive at `full` → zero NaN in V;  copies Q by TMA
//
// Warps 1 to 3 do not wait for their own copies: warp 0 waits for the copies, so that warps 1 to 3 can go on to the
// next stage. A key whose page does not exist is absent (device/paged_rows.cuh). Its row in shared memory becomes
// zeros: TMA copies a box past a page's last row, or cp.async copies 0 bytes.
#pragma once

#include <cstdint>

#include "attention/forward_producer_sm90.cuh"
#include "device/mask.cuh"
#include "device/paged_rows.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/setmaxnreg.cuh"

namespace fastattn {

// Gathers a warp's rows of a tile, kRowsPerPass rows in each pass. kLanesPerGatheredRow lanes copy a row together: the
// row has 128 or 64 bytes in each block of columns. Of every 32 rows, each lane looks up one. The lanes that copy a row
// get its location by shuffle.
template <int kBlockN, int kLanesPerGatheredRow>
struct GatheredRows {
    static constexpr int kRowsPerPass = kWarpSize / kLanesPerGatheredRow;
    static constexpr int kPasses = ceil_div(kBlockN / kRowsPerPass, kGatheringWarps);
    static constexpr int kPassesPerLookUp = kWarpSize / kRowsPerPass;
    static constexpr int kLookUps = ceil_div(kPasses, kPassesPerLookUp);

    int warp, lane;  // warp: 0 to kGatheringWarps - 1
    TokenLocation found[kLookUps];

    // Returns a row that this warp copies in a pass. It may be past the tile's last row.
    FASTATTN_DEVICE int row(int pass, int row_in_pass) const {
        return (pass * kGatheringWarps + warp) * kRowsPerPass + row_in_pass;
    }

    FASTATTN_DEVICE void find(const PageTable& table, int32_t first_key) {
#pragma unroll
        for (int i = 0; i < kLookUps; ++i) {
            const int row_here = row(i * kPassesPerLookUp + lane / kRowsPerPass, lane % kRowsPerPass);
            found[i] = table.find(first_key + row_here);
        }
    }

    // Starts to copy the rows that find() has located, of one head, into a tile in shared memory.
    template <typename Tile>
    FASTATTN_DEVICE void copy(Tile, uint32_t tile, const HeadsView<const uint16_t>& pages, const PageStrides& strides,
                              int32_t head) const {
        const int own_lane = ptx::opaque(lane);  // opaque: values derived from `lane` would take registers in the loop
        const int row_in_pass = own_lane / kLanesPerGatheredRow, chunk = own_lane % kLanesPerGatheredRow;
        const uint16_t* gHead = row_pointer(pages, 0, head, 0) + chunk * kChunkElements;
        const int chunks_from_here = pages.head_dim / kChunkElements - chunk;
        static_assert(Tile::kChunksPerRow == kLanesPerGatheredRow, "lanes copy a row of a block");
        constexpr int kUnroll = kLookUps > 1 ? kPasses : 2;  // 2: more would take more registers than the producer has
#pragma unroll kUnroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const TokenLocation& lane_found = found[kLookUps > 1 ? pass / kPassesPerLookUp : 0];
            const int from = pass % kPassesPerLookUp * kRowsPerPass + row_in_pass;
            const TokenLocation location{__shfl_sync(0xffffffff, lane_found.block, from),
                                         __shfl_sync(0xffffffff, lane_found.row, from)};
            const int row_here = row(pass, row_in_pass);
            if (row_here >= kBlockN) continue;
            const uint64_t chunks = uint64_t{static_cast<uint32_t>(location.block)} * strides.page +
                                    uint64_t{static_cast<uint32_t>(location.row)} * strides.row;
            const uint16_t* gRow = gHead + chunks * kChunkElements;
            const uint32_t sRow = tile + Tile::offset(row_here, chunk);
#pragma unroll
            for (int block = 0; block < Tile::kNumBlocks; ++block) {
                const int first_chunk = block * kLanesPerGatheredRow;
                const bool exists = first_chunk < chunks_from_here && location.is_present();
                ptx::cp_async_cg_16(sRow + block * Tile::kBlockBytes, gRow + first_chunk * kChunkElements,
                                    exists ? kChunkBytes : 0);
            }
        }
    }
};

// Copies K and V row by row. Called by kGatheringWarps warps. warp: 0 to kGatheringWarps - 1.
template <typename Config>
FASTATTN_DEVICE void gather_rows(ForwardStorageSm90<Config>& shared, const AttentionForwardParamsSm90& all_params,
                                 int warp, int lane) {
    const AttentionForwardParams& params = all_params.attention;
    Ring<Config::kStages> key_ring(shared.key);
    GatheredRows<Config::kBlockN, Config::KeyTile::kChunksPerRow> gathered_rows{warp, lane};
    for_tiles_of_cta</*kPublishes=*/false>(
        shared, all_params, /*rank=*/0, lane, [](const CtaWorkTile&) {},
        [&](const CtaWorkTile& tile, int32_t key_tile, bool) {
            gathered_rows.find(tile.rows.page_table(params), key_tile * Config::kBlockN);
            const auto fill = [&](const auto& ring, auto& stages, auto layout, const HeadsView<const uint16_t>& pages,
                                  const PageStrides& strides, const auto& gathered) {
                ring.wait_empty();
                gathered_rows.copy(layout, shared_address(stages[ring.stage]), pages, strides, tile.rows.kv_head);
                ptx::cp_async_mbarrier_arrive_noinc(shared_address(&gathered.done[ring.stage]));
            };
            fill(key_ring, shared.sK, typename Config::KeyTile{}, params.key, params.paged.key, shared.gathered_key);
            fill(key_ring.at_same_stage(shared.value), shared.sV, typename Config::ValueTile{}, params.value,
                 params.paged.value, shared.gathered_value);
            key_ring.advance();
        });
    ptx::cp_async_wait_all();  // the last copies arrive at their barriers before the thread exits
}

// Runs the producer's warpgroup. ahead: see produce_tiles().
template <DataType kDataType, typename Config, typename Ahead>
FASTATTN_DEVICE void produce(ForwardStorageSm90<Config>& shared, const AttentionForwardParamsSm90& all_params,
                             int cluster_size, Ahead&& ahead) {
    const int warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize, rank = ptx::cluster_ctarank();
    if (warp == 0) find_steps(shared, all_params, lane);
    __syncwarp();  // waits until the steps are in shared memory; setmaxnreg needs all lanes together
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (warp == 0) {
        produce_tiles<kDataType>(shared, all_params, rank, cluster_size, lane, ahead);
    } else if (all_params.key_box_rows == 0) {
        gather_rows(shared, all_params, warp - 1, lane);
    } else if (warp == 1) {
        Ring<Config::kStages> value_ring(shared.value);
        for_tiles_of_cta</*kPublishes=*/false>(
            shared, all_params, rank, lane, [](const CtaWorkTile&) {},
            [&](CtaWorkTile& tile, int32_t key_tile, bool is_masked) {
                keep_values_finite<kDataType>(shared, all_params.attention.scores.bias, value_ring, tile, key_tile,
                                              is_masked, lane);
                value_ring.advance();
            });
    }
    __syncwarp();                    // waits until all lanes are here, because the cluster's barrier counts whole warps
    wait_for_cluster(cluster_size);  // waits until no CTA will arrive at this CTA's barriers any more
}

// Finds which keys of a work tile are in missing pages. If there are any, all key tiles of the work tile are masked.
// Otherwise the same key tiles are masked as without pages.
template <typename Config>
struct MissingPages {
    PageTable table;
    int32_t num_full;  // number of key tiles of which, with all pages, every row sees every key
    int32_t* some;     // the warp's flag, in shared memory because some loops have no register for it

    // Called by all threads of a warpgroup. All warpgroups get the same result.
    FASTATTN_DEVICE MissingPages(ForwardStorageSm90<Config>& shared, const AttentionForwardParams& params,
                                 const RowsOfCta& rows, const KeyTiles& tiles, int warpgroup)
        : table(rows.page_table(params)), num_full(tiles.num_full), some(&shared.some_pages_missing[warp_in_cta()]) {
        bool any = false;
        if (table.params.block_table != nullptr) {
            const KeyTiles all = rows.key_tiles(Config::kBlockN);  // also of other splits, and where ranges hide keys
            const bool lacks =
                table.lacks_some(all.begin * Config::kBlockN, (all.begin + all.num_tiles()) * Config::kBlockN,
                                 threadIdx.x % kWarpgroupSize, kWarpgroupSize);
            any = ptx::bar_red_or(kOneConsumer + warpgroup, kWarpgroupSize, lacks);
        }
        if (threadIdx.x % kWarpSize == 0) *some = any ? 1 : 0;
        __syncwarp();  // waits until the first lane has written the flag
    }

    // Returns how many of the last tiles that the CTA visits need no mask.
    FASTATTN_DEVICE int32_t num_unmasked() const { return is_any() ? 0 : num_full; }

    // Returns which columns of a masked tile are present, as the bits that mask_warpgroup_scores() takes.
    FASTATTN_DEVICE uint32_t present(int32_t first_bit, int lane) const {
        if (!is_any()) return 0xffffffff;
        using Bits = ColumnBits<Config::kTilesN>;
        const int32_t first_key = first_bit / Bits::kPerTile * Config::kBlockN;
        return Bits::spread(present_columns<Config::kTilesN>(table, first_key, lane));
    }

    // Returns which columns of the tile that starts at first_key are present, with column i of this lane in bit i.
    FASTATTN_DEVICE uint32_t present_in_order(int32_t first_key, int lane) const {
        return is_any() ? present_columns<Config::kTilesN>(table, first_key, lane) : 0xffffffff;
    }

  private:
    FASTATTN_DEVICE bool is_any() const { return *some != 0; }
};

}  // namespace fastattn
