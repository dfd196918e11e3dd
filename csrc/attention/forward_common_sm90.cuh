// What the two forward kernels for Hopper have in common: config, shared memory, the producer, products and the launch.
// See forward_sm90.cuh for how these work together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/forward_work_sm90.h"
#include "attention/key_shares.h"
#include "attention/key_tiles.cuh"
#include "attention/part_rows.cuh"
#include "attention/tiles_sm90.h"
#include "device/largest_score.cuh"
#include "device/mask.cuh"
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

// Of the producer's four warps, those that gather rows where keys lie in small pages.
inline constexpr int kGatheringWarps = 3;
inline constexpr int kGatheringThreads = kGatheringWarps * kWarpSize;

// What the producer tells the consumers of a tile of rows. It is in shared memory, because they have no registers for
// it.
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
    GatherBarriers<Config::kStages> gathered_key, gathered_value;
    int32_t first_bits[Config::kStages];                    // of the tiles in the ring of keys: see ColumnBits
    int32_t some_pages_missing[4 * Config::kNumConsumers];  // see MissingPages
    LargestScores<4 * Config::kNumConsumers> largest_scores;
    RingBarriers<2> work;
    KeyShare share;  // for the producer, which has no registers for these two
    PieceWalk walk;
    TileOfWork work_places[4];  // those of the ring's stages; from kPlaceOfShared on, tiles that other CTAs share
    int place_of_next[2];       // in a stage: where the tile stands, or kNoMoreWork
    int num_shared;             // two at most: in which the CTA's share of the line begins and ends
};

// Named barriers; 0 is that of __syncthreads().
enum ForwardBarrierSm90 : int { kAllConsumers = 1, kOneConsumer };  // kOneConsumer + i: of warpgroup i

// One thread of the CTA. gathers: whether rows are gathered; these warps then are told of the work too.
template <typename Config>
__device__ __forceinline__ void init_barriers(ForwardStorageSm90<Config>& shared, int cluster_size, bool gathers) {
    constexpr int kConsumerWarps = 4 * Config::kNumConsumers;
    shared.work.init(kConsumerWarps + (gathers ? kGatheringWarps : 0));
    shared.query.init(kConsumerWarps);
    shared.key.init(kConsumerWarps * cluster_size);
    shared.value.init(kConsumerWarps * cluster_size);
    shared.gathered_key.init(kGatheringThreads);
    shared.gathered_value.init(kGatheringThreads);
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
    if (lane != 0) return;
    shared.share = share;
    shared.walk = PieceWalk(share);
    shared.num_shared = 0;
}

// The producer, one thread: tells of the next tile of work. The ring stays where it is.
template <typename Config>
__device__ __forceinline__ void tell_next_work(ForwardStorageSm90<Config>& shared,
                                               const AttentionForwardParamsSm90& all_params, int rank,
                                               const Ring<2>& ring) {
    const ForwardWorkSm90& all_work = all_params.work;
    PieceWalk& walk = shared.walk;
    const bool is_cut = shared.share.is_cut;
    const uint32_t cluster = cluster_in_grid(all_work);
    const uint32_t piece = is_cut ? walk.place : nth_piece(walk.place, cluster, num_clusters(all_work));
    ring.wait_empty();
    int place = kNoMoreWork;
    if (is_cut ? walk.left > 0 : piece < all_work.num) {
        const RowsOfCta rows(all_params.attention, all_work, piece, is_cut, rank, Config::kBlockM);
        const KeyTiles tiles = rows.key_tiles(Config::kBlockN);
        const TileParts parts = is_cut ? walk.parts(shared.share, cluster, tiles.num_tiles())
                                       : TileParts{1, static_cast<int32_t>(cluster), 1};
        place = parts.count > 1 ? kPlaceOfShared + shared.num_shared++ : ring.stage;
        TileOfWork& work = shared.work_places[place];
        work.rows = rows;
        work.tiles = tiles.part(walk.steps(is_cut, tiles.num_tiles()));
        // CTAs of one rank merge among themselves, and are numbered in the order of their clusters.
        const auto first_of_rank = static_cast<int32_t>(rank * num_clusters(all_work));
        work.parts = {parts.count, first_of_rank + parts.first, 1};
        work.cta = first_of_rank + static_cast<int32_t>(cluster);
        walk.advance(is_cut, rows.cluster_has_rows(), tiles.num_tiles());
    }
    shared.place_of_next[ring.stage] = place;
    ring.arrive_full();
}

// What a warp of the producer copies: calls begin(work) for each tile of work, then take(work, tile) with each of its
// tiles of keys, in the order in which consumers take them. The warp that tells of the work, and those
// that are told.
template <bool kTells, typename Config, typename Begin, typename Take>
__device__ __forceinline__ void for_tiles_of_cta(ForwardStorageSm90<Config>& shared,
                                                 const AttentionForwardParamsSm90& all_params, int rank, int lane,
                                                 Begin&& begin, Take&& take) {
    for (Ring<2> ring(shared.work);;) {
        if (!kTells) {
            ring.wait_full();
        } else if (lane == 0) {
            tell_next_work(shared, all_params, rank, ring);
        }
        __syncwarp();  // all lanes see what has been told
        const int place = shared.place_of_next[ring.stage];
        if (place == kNoMoreWork) return;
        // Read from shared memory again each time: the producer has few registers.
        const TileOfWork& work = shared.work_places[place];
        begin(work);
        for (int32_t num_left = work.tiles.num_tiles(); num_left > 0; --num_left) {
            take(work.rows, work.tiles.tile(num_left));
        }
        __syncwarp();  // waits until every lane has read it
        if (kTells) {
            ring.advance();
        } else {
            ring.release(lane);
        }
    }
}

// One thread: copies Q of a tile of work.
template <typename Config>
__device__ __forceinline__ void load_query(ForwardStorageSm90<Config>& shared, const TensorMap& query,
                                           const TileOfWork& work, Ring<1>& ring) {
    using QueryTile = typename Config::QueryTile;
    if (work.tiles.num_tiles() == 0) {  // there are no products: consumers pass it
        ring.wait_empty();
        ring.arrive_full();
        ring.advance();
        return;
    }
    const uint32_t landed = ring.acquire(Config::kNumConsumers * QueryTile::kBytes);
#pragma unroll
    for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        const RowsOfCta& rows = work.rows;
        QueryTile::load(shared_address(shared.sQ[consumer]), query, rows.batch, rows.head >> rows.log2_packed,
                        rows.rows.begin + rows.row_of(rows.first_row + consumer * kWarpgroupM), landed);
    }
    ring.advance();
}

// One thread, before it arrives at `full`: which tile of keys the stage gets. Masks take it as it is, with no instruction
// in between.
template <typename Config>
__device__ __forceinline__ void tell_tile(ForwardStorageSm90<Config>& shared, const Ring<Config::kStages>& key_ring,
                                          int32_t tile) {
    key_ring.wait_empty();
    shared.first_bits[key_ring.stage] = tile * ColumnBits<Config::kTilesN>::kPerTile;
}

// One warp: copies Q by its first lane, and of each tile of K and V a box by each lane that has one. A tile is a box,
// or in pages several, none of which lies in two pages. ahead(work, key) does what else is to be done before consumers come
// to a tile.
template <typename Config, typename Ahead>
__device__ __forceinline__ void produce_boxes(ForwardStorageSm90<Config>& shared,
                                              const AttentionForwardParamsSm90& all_params, int rank, int cluster_size,
                                              int lane, Ahead&& ahead) {
    const AttentionForwardParams& params = all_params.attention;
    Ring<1> query_ring(shared.query);
    Ring<Config::kStages> key_ring(shared.key);
    const int rows_of_cta = Config::kBlockN / cluster_size, own_row = lane * all_params.key_box_rows;
    const int first_row = rank * rows_of_cta + own_row;
    for_tiles_of_cta</*kTells=*/true>(
        shared, all_params, rank, lane,
        [&](const TileOfWork& work) {
            if (lane == 0) load_query(shared, all_params.query, work, query_ring);
        },
        [&](const RowsOfCta& work, int32_t key_tile) {
            const int32_t first_key = key_tile * Config::kBlockN;
            const bool has_box = own_row < rows_of_cta;
            const TokenPlace place = has_box ? work.place_of(params, first_key + first_row) : TokenPlace{};
            const auto fill = [&](const auto& ring, auto& stages, auto tile, const TensorMap& map) {
                const uint32_t landed = ring.acquire_by_warp(tile.kBytes, lane);
                const uint32_t rows = shared_address(stages[ring.stage]) + first_row * tile.kRowBytes;
                if (has_box && cluster_size == 1) {
                    tile.load(rows, map, place.block, work.kv_head, place.row, landed);
                } else if (has_box) {
                    tile.load_into_both(rows, map, place.block, work.kv_head, place.row, landed);
                }
            };
            if (lane == 0) tell_tile(shared, key_ring, key_tile);
            fill(key_ring, shared.sK, typename Config::KeyTile{}, all_params.key);
            fill(key_ring.at_same_stage(shared.value), shared.sV, typename Config::ValueTile{}, all_params.value);
            key_ring.advance();
            ahead(work, first_key);
        });
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
        __syncwarp();  // waits until every lane has read what is said of it
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

    // Of the tile of keys whose product has been started last; to be asked before the wait for it.
    __device__ __forceinline__ int32_t first_bit() const { return shared.first_bits[key_ring.stage]; }

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

    // What nobody may see through a mask, in the tile of V that comes next: see device/nonfinite.cuh. kTogether: each
    // consumer looks at its share of the tile, and waits for the others; else at all of it. They come to the same answer.
    template <bool kTogether, typename Sees>
    __device__ __forceinline__ void separate_nonfinite_values(float (&rO)[1][kTilesD][4], Sees&& sees) {
        value_ring.wait_full();
        uint16_t* sV = shared.sV[value_ring.stage];
        constexpr int kThreads = kTogether ? Config::kConsumerThreads : kWarpgroupSize;
        if (!ptx::bar_red_or(kTogether ? kAllConsumers : kOneConsumer + warpgroup, kThreads,
                             tile_has_nonfinite<kDataType, ValueTile, kThreads>(sV, threadIdx.x % kThreads))) {
            return;
        }
        const auto of_all = [] { ptx::bar_sync(kAllConsumers, Config::kConsumerThreads); };
        separate_nonfinite<kDataType>(rO, sV, SharedTile<ValueTile, Config::kBlockN, Config::kConsumerThreads>{sV},
                                      sees, lane, of_all);
        ptx::fence_proxy_async_shared();
        of_all();  // waits until wgmma can read V as it is now
    }

    using PartRowsOfTile =
        PartRows<Config::kBlockM, Config::kValueDim, kDataType, /*kSlotsPerCta=*/2, /*kQuadsAtOnce=*/4, PlaceOfRows>;

    // Whether rows leave in fp32, by the function below, or rounded, by store().
    __device__ __forceinline__ static bool leaves_in_fp32(const AttentionForwardParams& params,
                                                          const TileOfWork& tile) {
        return tile.parts.count > 1 || params.exact_out.data != nullptr;
    }

    // A warp's rows: of a part of the tile, for whoever merges it, else of the output.
    template <typename Softmax>
    __device__ __forceinline__ void leave_in_fp32(const AttentionForwardParams& params, const TileOfWork& tile,
                                                  float (&rO)[1][kTilesD][4], Softmax& softmax,
                                                  float factor = 1.0f) const {
        const PartRowsOfTile rows{params, PlaceOfRows{tile.rows}, factor};
        const int first_row = warp_in_cta() * kMmaM;
        const int own_lane = ptx::opaque(lane);  // what follows from it would take registers in the main loops
        if (tile.parts.count == 1) {
            rows.store_exact_rows(first_row, rO, softmax, own_lane);
            return;
        }
        const PartRange own = tile.parts.of_cta(tile.cta);
        const PartNode node = largest_node(own.begin, own, tile.parts.count);
        rows.leave(slot_of(rows.slots_per_cta(), tile.cta, node), first_row, rO, softmax, own_lane);
    }

    // All consumers, when there is no more work: merges the tiles that this CTA shares with others, where it is the
    // last one. factor: of the output.
    __device__ __forceinline__ void merge_shared_tiles(const AttentionForwardParams& params, float factor = 1.0f) {
        using Storage = MergeStorage<PartRowsOfTile, ConsumerThreads>;
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
    const bool is_packed = params.packed.cu_seqlens_q != nullptr, is_paged = params.paged.block_table != nullptr;
    // Heads that are the same memory have no stride that a map of several in a box could hold.
    const bool may_pack = packs_heads && params.max_logits == nullptr && params.query.head_stride != 0;
    const auto box_rows = [&](int rows) { return key_box_rows(params.paged, params.key.batch, rows); };
    const bool has_boxes = box_rows(Config::kBlockN) > 0;
    const ForwardWorkSm90 work =
        forward_work_sm90(params, Config::kBlockM, Config::kBlockN, has_boxes ? Config::kTilesToShareUnderMask : 0,
                          may_pack, facts.num_sms);
    const int packed_heads = 1 << work.log2_packed, rows_of_box = box_rows(Config::kBlockN / work.cluster_size());
    const auto map_of_keys = [&](const HeadsView<const uint16_t>& view, int32_t box_columns) {
        const int32_t rows = is_paged ? params.paged.page_size : is_packed ? params.packed.total_k : view.rows;
        return tensor_map(view, has_boxes && view.rows > 0 ? rows : 0, 1, rows_of_box, box_columns, kDataType);
    };
    const AttentionForwardParamsSm90 all_params{
        params,
        work,
        tensor_map(params.query, is_packed ? params.packed.total_q : params.query.rows, packed_heads,
                   kWarpgroupM / packed_heads, Config::QueryTile::kBlockColumns, kDataType),
        map_of_keys(params.key, Config::KeyTile::kBlockColumns),
        map_of_keys(params.value, Config::ValueTile::kBlockColumns),
        rows_of_box};
    const int64_t most_clusters = std::max(facts.num_sms / work.cluster_size(), 1);
    const int64_t num_clusters = work.may_cut ? most_clusters : std::min<int64_t>(work.num, most_clusters);
    const Launch launch{num_clusters * work.cluster_size(), Config::kNumThreads, sizeof(ForwardStorageSm90<Config>),
                        work.cluster_size()};
    kernel.launch(function, launch, all_params, stream);
}

}  // namespace fastattn
