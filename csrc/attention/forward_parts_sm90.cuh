// What the two forward kernels for Hopper have in common: config, shared memory, the producer, products and the launch. See
// forward_sm90.cuh for how these work together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/forward_work_sm90.h"
#include "attention/key_shares.h"
#include "attention/key_tiles.cuh"
#include "attention/part_rows.cuh"
#include "attention/tiles_sm90.h"
#include "device/merge_parts.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ring.cuh"
#include "device/store_rows.cuh"
#include "device/tile_copy.cuh"
#include "device/tma_nonfinite.cuh"
#include "device/tma_tile.cuh"
#include "device/warpgroup_gemm.cuh"
#include "host/device_facts.h"
#include "host/launch.h"
#include "host/tensor_map.h"

namespace fastattn {

template <int kHeadDim_, int kValueDim_, typename Tile_ = ForwardTileSm90<kHeadDim_, kValueDim_>>
struct ForwardConfigSm90 : Tile_ {
    using Tile = Tile_;
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    static constexpr int kBlockM = Tile::kNumConsumers * kWarpgroupM;
    static constexpr int kNumWarps = 4 * Tile::kNumConsumers + 4;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr int kConsumerThreads = Tile::kNumConsumers * kWarpgroupSize;
    static constexpr int kNumThreads = kConsumerThreads + kWarpgroupSize;
    static constexpr int kTilesN = Tile::kBlockN / kMmaN;
    static constexpr int kTilesD = kValueDim / kMmaN;
    using QueryTile = TmaTile<kWarpgroupM, kHeadDim>;  // of one warpgroup
    using KeyTile = TmaTile<Tile::kBlockN, kHeadDim>;
    using ValueTile = TmaTile<Tile::kBlockN, kValueDim>;
    static_assert(Tile::kBlockN % kMmaK == 0, "P·V takes 16 keys at a time");
    // A CTA starts with as many registers as all its threads can have alike, which comes in steps of 8.
    static constexpr int kStartRegisters = 65536 / kNumThreads / 8 * 8;
    static_assert(Tile::kConsumerRegisters * Tile::kNumConsumers + Tile::kProducerRegisters <=
                      kStartRegisters * (Tile::kNumConsumers + 1),
                  "warpgroups exchange the registers that the CTA has");
};

// What the producer tells the consumers of a tile of rows. It is in shared memory, because they have no registers for it.
struct TileOfWork {
    RowsOfCta rows;
    KeyTiles tiles;   // of this CTA's part
    TileParts parts;  // of the tile
    int32_t cta;      // as parts count them

    __device__ __forceinline__ bool is_first_part() const { return parts.first == cta; }
};

inline constexpr int kPlaceOfShared = 2, kNoMoreWork = -1;

template <typename Config>
struct alignas(1024) ForwardStorageSm90 {
    uint16_t sQ[Config::kNumConsumers][Config::QueryTile::kElements];
    uint16_t sK[Config::kStages][Config::KeyTile::kElements];
    uint16_t sV[Config::kStages][Config::ValueTile::kElements];
    RingBarriers<1> query;
    RingBarriers<Config::kStages> key, value;
    RingBarriers<2> work;
    KeyShare share;  // for the producer, which has no registers for these two
    PieceWalk walk;
    TileOfWork work_places[4];  // those of the ring's stages; from kPlaceOfShared on, tiles that other CTAs share
    int place_of_next[2];       // in a stage: where the tile stands, or kNoMoreWork
    int num_shared;             // two at most: in which the CTA's share of the line begins and ends
};

// Named barriers; 0 is that of __syncthreads().
enum ForwardBarrierSm90 : int { kAllConsumers = 1, kOneConsumer };  // kOneConsumer + i: of warpgroup i

// One thread of the CTA.
template <typename Config>
__device__ __forceinline__ void init_barriers(ForwardStorageSm90<Config>& shared, int cluster_size) {
    constexpr int kConsumerWarps = 4 * Config::kNumConsumers;
    shared.work.init(kConsumerWarps);
    shared.query.init(kConsumerWarps);
    shared.key.init(kConsumerWarps * cluster_size);
    shared.value.init(kConsumerWarps * cluster_size);
    ptx::fence_mbarrier_init();
}

// Waits until every thread of the cluster is here.
__device__ __forceinline__ void wait_for_cluster(int cluster_size) {
    if (cluster_size == 1) return;
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

// The producer's warp: which pieces of work, or shares of them, this cluster takes.
template <typename Config>
__device__ __forceinline__ void find_share(ForwardStorageSm90<Config>& shared,
                                           const AttentionForwardParamsSm90& all_params, int lane) {
    const ForwardWorkSm90& work = all_params.work;
    KeyShare share{};
    if (work.may_cut) {
        const uint32_t heads = heads_of_pieces(all_params.attention, work);
        share =
            key_share(work.num / heads, heads, cluster_in_grid(work), num_clusters(work), lane, [&](uint32_t entry) {
                const RowsOfCta rows(all_params.attention, work, entry * heads, /*in_line=*/true, 0, Config::kBlockM);
                return rows.cluster_has_rows() ? max(rows.key_tiles(Config::kBlockN).num_tiles(), 1) : 0;
            });
    }
    if (lane == 0) shared.share = share;
}

// The producer, one thread: tells consumers of their work, and copies Q, and tiles of K and V, for all of it, as far ahead as
// the rings let it.
template <typename Config>
__device__ __forceinline__ void produce(ForwardStorageSm90<Config>& shared,
                                        const AttentionForwardParamsSm90& all_params, int rank, int cluster_size) {
    using QueryTile = typename Config::QueryTile;
    Ring<2> work_ring(shared.work);
    Ring<1> query_ring(shared.query);
    Ring<Config::kStages> key_ring(shared.key), value_ring(shared.value);
    const ForwardWorkSm90& all_work = all_params.work;
    const bool& is_cut = shared.share.is_cut;
    PieceWalk& walk = shared.walk;
    walk = PieceWalk(shared.share);
    shared.num_shared = 0;
    const uint32_t cluster = cluster_in_grid(all_work);
    for (;;) {
        work_ring.wait_empty();
        const uint32_t piece = is_cut ? walk.place : nth_piece(walk.place, cluster, num_clusters(all_work));
        if (is_cut ? walk.left == 0 : piece >= all_work.num) {
            shared.place_of_next[work_ring.stage] = kNoMoreWork;
            work_ring.pass_on();
            return;
        }
        // Reads of `work` below come from shared memory each time: this thread has few registers.
        const RowsOfCta rows(all_params.attention, all_work, piece, is_cut, rank, Config::kBlockM);
        const KeyTiles tiles = rows.key_tiles(Config::kBlockN);
        const TileParts parts = is_cut ? walk.parts(shared.share, cluster, tiles.num_tiles()) : TileParts{1, 0, 1};
        const int place = parts.count > 1 ? kPlaceOfShared + shared.num_shared++ : work_ring.stage;
        TileOfWork& work = shared.work_places[place];
        work.rows = rows;
        work.tiles = tiles.part(walk.steps(is_cut, tiles.num_tiles()));
        // CTAs of one rank merge among themselves, and are numbered in the order of their clusters.
        const auto first_of_rank = static_cast<int32_t>(rank * num_clusters(all_work));
        work.parts = {parts.count, first_of_rank + parts.first, 1};
        work.cta = first_of_rank + static_cast<int32_t>(cluster);
        shared.place_of_next[work_ring.stage] = place;
        walk.advance(is_cut, rows.cluster_has_rows(), tiles.num_tiles());
        work_ring.pass_on();
        if (work.tiles.num_tiles() == 0) {
            query_ring.wait_empty();
            query_ring.pass_on();
            continue;
        }

        const uint32_t q_landed = query_ring.acquire(Config::kNumConsumers * QueryTile::kBytes);
#pragma unroll
        for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
            const RowsOfCta& rows = work.rows;
            QueryTile::load(shared_address(shared.sQ[consumer]), all_params.query, rows.batch,
                            rows.head >> rows.log2_packed,
                            rows.rows.begin + rows.row_of(rows.first_row + consumer * kWarpgroupM), q_landed);
        }
        query_ring.advance();
        for (int32_t num_left = work.tiles.num_tiles(); num_left > 0; --num_left) {
            const int32_t row = work.rows.keys.begin + work.tiles.tile(num_left) * Config::kBlockN;
            const auto fill = [&](auto& ring, auto& stages, auto tile, const TensorMap& map) {
                const uint32_t landed = ring.acquire(tile.kBytes);
                const uint32_t stage = shared_address(stages[ring.stage]);
                if (cluster_size == 1) {
                    tile.load(stage, map, work.rows.batch, work.rows.kv_head, row, landed);
                } else {
                    tile.load_half(stage, map, work.rows.batch, work.rows.kv_head, row, landed, rank);
                }
                ring.advance();
            };
            fill(key_ring, shared.sK, typename Config::KeyTile{}, all_params.key);
            fill(value_ring, shared.sV, typename Config::ValueTile{}, all_params.value);
        }
    }
}

// Where the rows of a CTA's tile stand in memory.
struct PlaceOfRows {
    const RowsOfCta& work;

    __device__ __forceinline__ int32_t num_rows() const { return work.num_rows() - work.first_row; }
    __device__ __forceinline__ int32_t batch() const { return work.batch; }
    __device__ __forceinline__ int32_t head_of(int row) const { return work.head_of(work.first_row + row); }
    __device__ __forceinline__ int32_t row_in_memory(int row) const {
        return work.rows.begin + work.row_of(work.first_row + row);
    }
};

// One consumer's side of the rings, and the products that it starts, each a group of wgmma.
template <typename Config, DataType kDataType>
struct ForwardConsumerSm90 {
    static constexpr int kTilesN = Config::kTilesN, kTilesD = Config::kTilesD, kTilesK = Config::kBlockN / kMmaK;
    using ValueTile = typename Config::ValueTile;

    struct ConsumerThreads {
        static constexpr int kCount = Config::kConsumerThreads;
        __device__ __forceinline__ static int index() { return threadIdx.x; }
        __device__ __forceinline__ static void sync() { ptx::bar_sync(kAllConsumers, kCount); }
        __device__ __forceinline__ static bool sync_or(bool predicate) {
            return ptx::bar_red_or(kAllConsumers, kCount, predicate);
        }
    };

    ForwardStorageSm90<Config>& shared;
    int warpgroup, lane, cluster_size;
    uint32_t sQ;
    uint32_t num_done = 0;  // tiles of rows
    Ring<Config::kStages> key_ring, value_ring;

    __device__ __forceinline__ ForwardConsumerSm90(ForwardStorageSm90<Config>& shared, int warpgroup, int lane,
                                                   int cluster_size)
        : shared(shared),
          warpgroup(warpgroup),
          lane(lane),
          cluster_size(cluster_size),
          sQ(shared_address(shared.sQ[warpgroup])),
          key_ring(shared.key),
          value_ring(shared.value) {}

    // What comes next; waits until the producer has said it. Null: nothing more.
    __device__ __forceinline__ const TileOfWork* next_tile() const {
        const Ring<2> ring(shared.work, num_done);
        ring.wait_full();
        const int place = warp_uniform(shared.place_of_next[ring.stage]);
        return place == kNoMoreWork ? nullptr : &shared.work_places[place];
    }

    __device__ __forceinline__ void wait_query() const { Ring<1>(shared.query, num_done).wait_full(); }

    // When a warp is done with a tile, and with its Q.
    __device__ __forceinline__ void release_tile() {
        Ring<2>(shared.work, num_done).release(lane);
        ++num_done;
    }

    __device__ __forceinline__ void release_query() const { Ring<1>(shared.query, num_done).release(lane); }

    __device__ __forceinline__ void start_qk(float (&rS)[1][kTilesN][4]) {
        key_ring.wait_full();
        ptx::wgmma_fence();
        start_gemm_qk<kDataType, Config::kHeadDim>(
            rS,
            OperandDescriptor::of_rows(ptx::opaque(sQ)),  // else what follows from it takes registers in the loops
            OperandDescriptor::of_rows(shared_address(shared.sK[key_ring.stage])));
        ptx::wgmma_commit_group();
    }

    __device__ __forceinline__ void start_pv(float (&rO)[1][kTilesD][4], const uint32_t (&rP)[kTilesK][4]) {
        value_ring.wait_full();
        ptx::wgmma_fence();
        start_gemm_pv<kDataType>(
            rO, rP, OperandDescriptor::of_columns(shared_address(shared.sV[value_ring.stage]), ValueTile::kBlockBytes));
        ptx::wgmma_commit_group();
    }

    // Leaves so many products in flight: none, or P·V of the tile before.
    template <int kInFlight>
    __device__ __forceinline__ void wait_qk(float (&rS)[1][kTilesN][4]) {
        ptx::wgmma_wait_group<kInFlight>();
        ptx::written_by_wgmma(rS);
        key_ring.release_to_cluster(lane, cluster_size);
    }

    __device__ __forceinline__ void wait_pv(float (&rO)[1][kTilesD][4]) {
        ptx::wgmma_wait_group<0>();
        ptx::written_by_wgmma(rO);
    }

    __device__ __forceinline__ void release_value() { value_ring.release_to_cluster(lane, cluster_size); }

    // What nobody may see through a mask, in the tile of V that comes next: see device/nonfinite.cuh. All consumers look at
    // the whole tile and come to the same answer.
    template <typename Sees>
    __device__ __forceinline__ void separate_nonfinite_values(float (&rO)[1][kTilesD][4], Sees&& sees) {
        value_ring.wait_full();
        uint16_t* sV = shared.sV[value_ring.stage];
        if (!ptx::bar_red_or(kOneConsumer + warpgroup, kWarpgroupSize,
                             tile_has_nonfinite<kDataType, ValueTile>(sV, threadIdx.x % kWarpgroupSize))) {
            return;
        }
        const auto of_all = [] { ptx::bar_sync(kAllConsumers, Config::kConsumerThreads); };
        separate_nonfinite<kDataType>(rO, sV, SharedTile<ValueTile, Config::kBlockN, Config::kConsumerThreads>{sV},
                                      sees, lane, of_all);
        ptx::fence_proxy_async_shared();
        of_all();  // waits until wgmma can read V as it is now
    }

    using PartRowsOfTile = PartRows<Config::kBlockM, Config::kValueDim, kDataType, /*kSlotsPerCta=*/2, PlaceOfRows>;

    // Leaves a warp's rows of a part of the tile for whoever merges it.
    template <typename Softmax>
    __device__ __forceinline__ void leave_part(const AttentionForwardParams& params, const TileOfWork& tile,
                                               const float (&rO)[1][kTilesD][4], const Softmax& softmax) const {
        const PartRange own = tile.parts.of_cta(tile.cta);
        const PartNode node = largest_node(own.begin, own, tile.parts.count);
        const PartRowsOfTile rows{params, PlaceOfRows{tile.rows}};
        rows.leave(slot_of(rows.slots_per_cta(), tile.cta, node), warp_in_cta() * kMmaM, rO, softmax,
                   ptx::opaque(lane));  // what follows from it would take registers in the main loops
    }

    // All consumers, when there is no more work: merges the tiles that this CTA shares with others, where it is the last one.
    // factor: of the output.
    __device__ __forceinline__ void merge_shared_tiles(const AttentionForwardParams& params, float factor = 1.0f) {
        using Storage = MergeStorage<PartRowsOfTile>;
        static_assert(sizeof(Storage) <= sizeof(shared.sQ), "takes the place of Q");
#pragma unroll 1
        for (int i = 0; i < shared.num_shared; ++i) {
            const TileOfWork& tile = shared.work_places[kPlaceOfShared + i];
            const PartRowsOfTile rows{params, PlaceOfRows{tile.rows}, factor};
            PartMerger<PartRowsOfTile, ConsumerThreads>{rows, *reinterpret_cast<Storage*>(shared.sQ), tile.parts,
                                                        tile.parts.of_cta(tile.cta)}
                .run();
        }
    }

    // Writes the output and the lse of a warp's rows from own_row on.
    template <typename Softmax>
    __device__ __forceinline__ void store(const AttentionForwardParams& params, const RowsOfCta& work, int32_t own_row,
                                          const float (&rO)[1][kTilesD][4], const Softmax& softmax) const {
        const int32_t rows_left = work.num_rows() - own_row;
        store_accumulators<kDataType>(rO, lane, params.out.head_dim, [&](int row) -> uint16_t* {
            if (row >= rows_left) return nullptr;
            return row_pointer(params.out, work.batch, work.head_of(own_row + row),
                               work.rows.begin + work.row_of(own_row + row));
        });
        for_own_rows<1>(lane, [&](int, int half, int row) {
            const bool one_of_four = lane % kLanesPerRow == 0;  // the lanes of a row hold the same
            if (!one_of_four || row >= rows_left) return;
            row_pointer(params.lse, work.batch,
                        work.head_of(own_row + row))[work.rows.begin + work.row_of(own_row + row)] =
                softmax.row_lse[0][half];
        });
    }
};

template <typename Config, DataType kDataType>
void launch_forward_sm90(LaunchedKernel& kernel, void (*function)(AttentionForwardParamsSm90),
                         const AttentionForwardParams& params, bool packs_heads, Stream stream) {
    const DeviceFacts facts = device_facts();
    const ForwardWorkSm90 work = forward_work_sm90(params, Config::kBlockM, Config::kBlockN,
                                                   Config::kTilesToShareUnderMask, packs_heads, facts.num_sms);
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    const auto map_of = [&](const HeadsView<const uint16_t>& view, int32_t total, int group, int box_rows) {
        return tensor_map(view, is_packed ? total : view.rows, group, box_rows, kDataType);
    };
    const int packed_heads = 1 << work.log2_packed, key_rows = Config::kBlockN / work.cluster_size();
    const AttentionForwardParamsSm90 all_params{
        params, work, map_of(params.query, params.packed.total_q, packed_heads, kWarpgroupM / packed_heads),
        map_of(params.key, params.packed.total_k, 1, key_rows),
        map_of(params.value, params.packed.total_k, 1, key_rows)};
    const int64_t most_clusters = std::max(facts.num_sms / work.cluster_size(), 1);
    const int64_t num_clusters = work.may_cut ? most_clusters : std::min<int64_t>(work.num, most_clusters);
    const Launch launch{num_clusters * work.cluster_size(), Config::kNumThreads, sizeof(ForwardStorageSm90<Config>),
                        work.cluster_size()};
    kernel.launch(function, launch, all_params, stream);
}

}  // namespace fastattn
