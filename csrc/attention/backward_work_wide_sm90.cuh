// The backward kernel for Hopper with more than 128 dims: its config, shared memory, and the warp that takes sums away. See
// backward_key_value_wide_sm90.cuh for how these work together.
#pragma once

#include <cstdint>

#include "attention/backward_work_sm90.cuh"

namespace fastattn {

template <int kHeadDim_, int kValueDim_>
struct BackwardWideConfigSm90 : BackwardWideTileSm90<kHeadDim_, kValueDim_> {
    using Tile = BackwardWideTileSm90<kHeadDim_, kValueDim_>;
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    static constexpr bool kOptions = false;
    static constexpr int kBlockM = 64, kBlockN = kWarpgroupM;
    static constexpr int kKeyOwners = 1;  // each product has all keys of the tile
    static constexpr int kConsumerKeys = kBlockN;
    static constexpr int kNumWarpgroups = 4;
    static constexpr int kNumWarps = 4 * kNumWarpgroups;
    static constexpr int kNumThreads = kNumWarpgroups * kWarpgroupSize;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr int kTilesM = kBlockM / kMmaN;  // columns of Sᵀ
    static constexpr int kTilesK = kBlockM / kMmaK;
    using RowTile = TmaTile<kBlockM, kHeadDim>;  // of Q
    using GradOutTile = TmaTile<kBlockM, kValueDim>;
    using KeyTile = TmaTile<kBlockN, kHeadDim>;
    using ValueTile = TmaTile<kBlockN, kValueDim>;
    using ScoreTile = TmaTile<kBlockN, kBlockM>;  // of dSᵀ
    using Terms = TransposedRowTerms<kBlockM>;
    static constexpr int kQueryParts = RowTile::kNumBlocks;
    static constexpr int kValueParts = GradOutTile::kNumBlocks;

    static_assert(kQueryParts * kQueryPartElements == query_tile_elements(/*in_parts=*/true, kBlockM, kHeadDim),
                  "the host counts as the kernel does");
    static_assert(kBlockM == kQueryPartRows && RowTile::kBlockColumns == kQueryPartDims, "one m64n64 of dQ");
    static_assert(kBlockM <= kMostRowsInBlock, "see backward_rows_sm80.cuh");
    // dK and dV of a tile that CTAs share: those of dV stand behind as many as dK has.
    static constexpr int kKeyParts = 2 * kQueryParts;
    static_assert(kKeyParts * kQueryPartElements == key_tile_elements(kBlockN, kHeadDim), "as the host counts");
    static_assert(kBlockN == kQueryPartRows && kValueParts <= kQueryParts, "a part has all keys of a tile");
    static constexpr int kStartRegisters = 65536 / kNumThreads / 8 * 8;
    static_assert(2 * Tile::kScoreRegisters + Tile::kQueryRegisters + Tile::kProducerRegisters <=
                      kNumWarpgroups * kStartRegisters,
                  "warpgroups exchange the registers that the CTA has");
};

template <int kHeadDim, int kValueDim>
struct alignas(1024) BackwardStorageSm90<BackwardWideConfigSm90<kHeadDim, kValueDim>> {
    using Config = BackwardWideConfigSm90<kHeadDim, kValueDim>;
    uint16_t sK[Config::KeyTile::kElements];
    uint16_t sV[Config::ValueTile::kElements];
    uint16_t sQ[Config::kStages][Config::RowTile::kElements];
    uint16_t sdO[Config::kStages][Config::GradOutTile::kElements];
    uint16_t sdS[Config::kPassStages][Config::ScoreTile::kElements];  // dSᵀ
    uint4 sP[Config::kPassStages][Config::kTilesK][kWarpgroupSize];   // Pᵀ, as a thread of either warpgroup holds it
    float sPart[Config::kPartStages][kQueryPartElements];             // of dQ, dK or dV
    typename Config::Terms terms[Config::kStages];
    RingBarriers<2> work;
    RingBarriers<1> keys;
    RingBarriers<Config::kStages> rows;  // Q, dO and terms
    RingBarriers<Config::kPassStages> probabilities, gradients;
    RingBarriers<Config::kPartStages> part;
    uint64_t landed;               // rows that the producer looks at before it passes them on
    KeysOfWork<Config> places[2];  // of the ring `work`
    bool is_last[2];               // there is no more
};

// Named barriers; 0 is that of __syncthreads().
enum BackwardWideBarrierSm90 : int { kChainOfQueries = 1, kQueriesStored, kKeysStored };

template <int kHeadDim, int kValueDim>
__device__ __forceinline__ void init_barriers(
    BackwardStorageSm90<BackwardWideConfigSm90<kHeadDim, kValueDim>>& shared) {
    constexpr int kWarps = 4;  // of a warpgroup
    const auto init = [](auto& ring, int num_producers, int num_consumers) {
        for (uint64_t& barrier : ring.full) ptx::mbarrier_init(shared_address(&barrier), num_producers);
        for (uint64_t& barrier : ring.empty) ptx::mbarrier_init(shared_address(&barrier), num_consumers);
    };
    init(shared.work, 1, 3 * kWarps + 2);
    init(shared.keys, 1, 3 * kWarps);
    init(shared.rows, 1, 2 * kWarps);
    init(shared.probabilities, kWarps, kWarps);
    init(shared.gradients, kWarps, kWarps);
    init(shared.part, kWarps, 1);
    ptx::mbarrier_init(shared_address(&shared.landed), 1);
    ptx::fence_mbarrier_init();
}

// Leaves 64 columns of a gradient, or what a product has of dQ, to the warp that adds parts.
template <int kFirstTile, typename Config, int kNumTiles>
__device__ __forceinline__ void store_part(BackwardStorageSm90<Config>& shared, const Ring<Config::kPartStages>& place,
                                           const float (&rC)[1][kNumTiles][4], int warp, int lane) {
    place.wait_empty();
    store_rows_of_part<kFirstTile>(shared_address(shared.sPart[place.stage]), rC, warp, lane);
    ptx::fence_proxy_async_shared();
    __syncwarp();  // waits until every lane has stored its numbers
    if (lane == 0) place.arrive_full();
}

// A warp that adds dQ to the sums, part by part, and dK and dV where CTAs share a tile of keys. Turns are those of add_parts().
template <typename Config>
__device__ __forceinline__ void add_parts_in_turn(BackwardStorageSm90<Config>& shared,
                                                  const AttentionBackwardParams& params, int lane) {
    const bool in_order = params.turns != nullptr;
    Ring<Config::kPartStages> ring(shared.part);
    const auto add = [&](float* sums, int num_parts) {
#pragma unroll 1
        for (int part = 0; part < num_parts; ++part, sums += kQueryPartElements) {
            ring.wait_full();
            start_to_add(sums, shared.sPart[ring.stage]);
            ring.release_by_thread();
        }
    };
    for_work(shared, lane, [&](const KeysOfWork<Config>& keys) {
        if (lane != 0) return;
        const int32_t tile = keys.first_key / Config::kBlockN;
        keys.for_steps([&](int32_t head, int32_t row_tile) {
            const int64_t sums_tile = int64_t{keys.first_sums_tile + row_tile} * params.query.heads + head;
            if (in_order) {
                const int32_t first_tile = keys.window.keys_of(row_tile * Config::kBlockM).begin / Config::kBlockN;
                wait_for_turn(params.turns + sums_tile, tile - first_tile);
            }
            add(params.query_sums + sums_tile * (Config::kQueryParts * kQueryPartElements), Config::kQueryParts);
            if (in_order) pass_turn_on(params.turns + sums_tile);
        });
        if (!keys.is_shared()) return;
        float* const sums = params.key_sums + keys.shared_tile * int64_t{Config::kKeyParts * kQueryPartElements};
        if (in_order) wait_for_turn(params.key_turns + keys.shared_tile, keys.share);
        add(sums, Config::kQueryParts);
        add(sums + Config::kQueryParts * kQueryPartElements, Config::kValueParts);
        if (in_order) pass_turn_on(params.key_turns + keys.shared_tile);
    });
    if (lane == 0) ptx::cp_async_bulk_wait_group();  // shared memory lives until the copies are over
}

}  // namespace fastattn
