// What the two forward kernels for Hopper have in common: config, shared memory, the producer, products and the launch. See
// forward_sm90.cuh for how these work together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/forward_work_sm90.h"
#include "attention/key_tiles.cuh"
#include "attention/tiles_sm90.h"
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

template <typename Config>
struct alignas(1024) ForwardStorageSm90 {
    uint16_t sQ[Config::kNumConsumers][Config::QueryTile::kElements];
    uint16_t sK[Config::kStages][Config::KeyTile::kElements];
    uint16_t sV[Config::kStages][Config::ValueTile::kElements];
    RingBarriers<1> query;
    RingBarriers<Config::kStages> key, value;
    GatherBarriers<Config::kStages> gathered_key, gathered_value;
    int32_t some_pages_missing[4 * Config::kNumConsumers];  // see MissingPages
};

// Named barriers; 0 is that of __syncthreads().
enum ForwardBarrierSm90 : int { kAllConsumers = 1, kOneConsumer };  // kOneConsumer + i: of warpgroup i

// One thread of the CTA.
template <typename Config>
__device__ __forceinline__ void init_barriers(ForwardStorageSm90<Config>& shared, int cluster_size) {
    constexpr int kConsumerWarps = 4 * Config::kNumConsumers;
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

// What a producer copies for the CTA's pieces of work: calls begin(work) for each that has keys, then take(work, key) with the
// first key of each of its tiles, in the order in which consumers take them.
template <typename Config, typename Begin, typename Take>
__device__ __forceinline__ void for_tiles_of_cta(const AttentionForwardParamsSm90& all_params, int rank,
                                                 int cluster_size, Begin&& begin, Take&& take) {
    const ForwardWorkSm90& all_work = all_params.work;
    const uint32_t cluster = blockIdx.x / cluster_size, num_clusters = gridDim.x / cluster_size;
    for (uint32_t n = 0, i; (i = nth_piece(n, cluster, num_clusters)) < all_work.num; ++n) {
        const RowsOfCta work(all_params.attention, all_work, i, rank, Config::kBlockM);
        const KeyTiles tiles = work.key_tiles(Config::kBlockN);
        if (tiles.num_tiles() == 0) continue;
        begin(work);
        for (int32_t num_left = tiles.num_tiles(); num_left > 0; --num_left) {
            take(work, tiles.tile(num_left) * Config::kBlockN);
        }
    }
}

// One thread: copies Q of a piece of work.
template <typename Config>
__device__ __forceinline__ void load_query(ForwardStorageSm90<Config>& shared, const TensorMap& query,
                                           const RowsOfCta& work, Ring<1>& ring) {
    using QueryTile = typename Config::QueryTile;
    const uint32_t landed = ring.acquire(Config::kNumConsumers * QueryTile::kBytes);
#pragma unroll
    for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        QueryTile::load(shared_address(shared.sQ[consumer]), query, work.batch, work.head >> work.log2_packed,
                        work.rows.begin + work.row_of(work.first_row + consumer * kWarpgroupM), landed);
    }
    ring.advance();
}

// One warp: copies Q by its first lane, and of each tile of K and V a box by each lane that has one. A tile is a box, or in
// pages several, none of which lies in two pages.
template <typename Config>
__device__ __forceinline__ void produce_boxes(ForwardStorageSm90<Config>& shared,
                                              const AttentionForwardParamsSm90& all_params, int rank, int cluster_size,
                                              int lane) {
    const AttentionForwardParams& params = all_params.attention;
    Ring<1> query_ring(shared.query);
    Ring<Config::kStages> key_ring(shared.key);
    const int rows_of_cta = Config::kBlockN / cluster_size, own_row = lane * all_params.key_box_rows;
    const int first_row = rank * rows_of_cta + own_row;
    for_tiles_of_cta<Config>(
        all_params, rank, cluster_size,
        [&](const RowsOfCta& work) {
            if (lane == 0) load_query(shared, all_params.query, work, query_ring);
        },
        [&](const RowsOfCta& work, int32_t first_key) {
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
            fill(key_ring, shared.sK, typename Config::KeyTile{}, all_params.key);
            fill(key_ring.at_same_stage(shared.value), shared.sV, typename Config::ValueTile{}, all_params.value);
            key_ring.advance();
        });
}

// One consumer's side of the rings, and the products that it starts, each a group of wgmma.
template <typename Config, DataType kDataType>
struct ForwardConsumerSm90 {
    static constexpr int kTilesN = Config::kTilesN, kTilesD = Config::kTilesD, kTilesK = Config::kBlockN / kMmaK;
    using ValueTile = typename Config::ValueTile;

    ForwardStorageSm90<Config>& shared;
    int warpgroup, lane, cluster_size;
    uint32_t sQ;
    Ring<1> query_ring;
    Ring<Config::kStages> key_ring, value_ring;

    __device__ __forceinline__ ForwardConsumerSm90(ForwardStorageSm90<Config>& shared, int warpgroup, int lane,
                                                   int cluster_size)
        : shared(shared),
          warpgroup(warpgroup),
          lane(lane),
          cluster_size(cluster_size),
          sQ(shared_address(shared.sQ[warpgroup])),
          query_ring(shared.query),
          key_ring(shared.key),
          value_ring(shared.value) {}

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
    const auto box_rows = [&](int rows) { return key_box_rows(params.paged, params.key.batch, rows); };
    const bool has_boxes = box_rows(Config::kBlockN) > 0;
    const ForwardWorkSm90 work = forward_work_sm90(
        params, Config::kBlockM, has_boxes ? Config::kTilesToShareUnderMask : 0, packs_heads, facts.num_sms);
    const int packed_heads = 1 << work.log2_packed, rows_of_box = box_rows(Config::kBlockN / work.cluster_size());
    const auto map_of_keys = [&](const HeadsView<const uint16_t>& view) {
        const int32_t rows = is_paged ? params.paged.page_size : is_packed ? params.packed.total_k : view.rows;
        return tensor_map(view, has_boxes && view.rows > 0 ? rows : 0, 1, rows_of_box, kDataType);
    };
    const AttentionForwardParamsSm90 all_params{
        params,
        work,
        tensor_map(params.query, is_packed ? params.packed.total_q : params.query.rows, packed_heads,
                   kWarpgroupM / packed_heads, kDataType),
        map_of_keys(params.key),
        map_of_keys(params.value),
        rows_of_box};
    const int64_t num_clusters = std::min<int64_t>(work.num, std::max(facts.num_sms / work.cluster_size(), 1));
    const Launch launch{num_clusters * work.cluster_size(), Config::kNumThreads, sizeof(ForwardStorageSm90<Config>),
                        work.cluster_size()};
    kernel.launch(function, launch, all_params, stream);
}

}  // namespace fastattn
