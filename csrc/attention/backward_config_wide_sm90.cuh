// The config and shared memory of the backward kernel for Hopper with more than 128 dims.
// backward_key_value_wide_sm90.cuh describes how the warps of this kernel work together.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward_config_sm90.cuh"
#include "device/registers.h"

namespace fastattn {

template <int kHeadDim_, int kValueDim_, bool kOptions_ = false>
struct BackwardWideConfigSm90 : BackwardWideTileSm90<kHeadDim_> {
    using Tile = BackwardWideTileSm90<kHeadDim_>;
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    static constexpr bool kOptions = kOptions_;
    static constexpr int kBlockM = 64, kBlockN = kWarpgroupM;
    static constexpr int kKeyOwners = 1;  // every warpgroup has all keys of the tile
    static constexpr int kConsumerKeys = kBlockN;
    static constexpr bool kSkipsHidden = false;
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
    using Terms = std::conditional_t<kOptions, TransposedOptionsTerms<kBlockM>, TransposedRowTerms<kBlockM>>;
    static constexpr int kQueryPanels = RowTile::kNumBlocks;
    static constexpr int kValuePanels = GradOutTile::kNumBlocks;

    static_assert(kQueryPanels * kPanelElements == query_tile_elements(/*in_panels=*/true, kBlockM, kHeadDim),
                  "the host counts as the kernel does");
    static_assert(kBlockM == kPanelRows && RowTile::kBlockColumns == kPanelDims, "one m64n64 of dQ");
    static_assert(kBlockM <= kMostRowsInBlock, "see backward_rows_sm80.cuh");
    static constexpr bool kAddsDqFromRegisters = false;
    // One reduction warp adds all panels. For a split key tile, these are the panels of dK, then the panels of dV.
    static constexpr int kReductionWarps = 1, kPanelsPerReductionWarp = kQueryPanels;
    static constexpr int kKeyPanels = 2 * kQueryPanels, kKeyPanelsPerReductionWarp = kQueryPanels + kValuePanels;
    FASTATTN_DEVICE static constexpr int key_panel(int, int i) { return i; }
    static_assert(kKeyPanels * kPanelElements == key_tile_elements(kBlockN, kHeadDim), "as the host counts");
    static_assert(kBlockN == kPanelRows && kValuePanels <= kQueryPanels, "a panel has all keys of a tile");
    static_assert(has_registers_for(kNumWarpgroups,
                                    2 * Tile::kScoreRegisters + Tile::kQueryRegisters + Tile::kProducerRegisters));
};

template <int kHeadDim, int kValueDim, bool kOptions>
struct alignas(1024) BackwardStorageSm90<BackwardWideConfigSm90<kHeadDim, kValueDim, kOptions>> {
    using Config = BackwardWideConfigSm90<kHeadDim, kValueDim, kOptions>;
    // The layouts of tiles are those of TmaTile (device/tma_tile.cuh): blocks of columns, each in a swizzle.
    uint16_t sK[Config::KeyTile::kElements];                          // [kBlockN, kHeadDim]
    uint16_t sV[Config::ValueTile::kElements];                        // [kBlockN, kValueDim]
    uint16_t sQ[Config::kStages][Config::RowTile::kElements];         // [kBlockM, kHeadDim]
    uint16_t sdO[Config::kStages][Config::GradOutTile::kElements];    // [kBlockM, kValueDim]
    uint16_t sdS[Config::kPassStages][Config::ScoreTile::kElements];  // dSᵀ: [kBlockN, kBlockM]
    uint4 sP[Config::kPassStages][Config::kTilesK][kWarpgroupSize];   // Pᵀ, as each thread's registers of operand A
    float sPanel[Config::kPanelStages][kPanelElements];               // of dQ, dK or dV
    typename Config::Terms terms[Config::kStages];
    RowStep steps[Config::kStages];  // with options only
    int64_t dropout_seed;
    RingBarriers<2> work;
    RingBarriers<1> keys;
    RingBarriers<Config::kStages> rows;                   // Q, dO and row terms
    RingBarriers<Config::kPassStages> probabilities, ds;  // Pᵀ, dSᵀ
    RingBarriers<Config::kPanelStages> panels;
    uint64_t rows_issued;               // completes when the copies of a work tile's last rows have been issued
    uint64_t rows_to_trim_landed;       // completes when a tile has landed whose last rows the producer zeroes
    KeyWorkTile<Config> work_tiles[2];  // for each stage of `work`
    bool is_end[2];                     // for each stage of `work`: true if no work tile is left for the stage
};

// Ids of named barriers; __syncthreads() uses 0.
enum BackwardWideBarrierSm90 : int { kQueryWarpgroup = 1, kDqStored, kDkStored };

template <int kHeadDim, int kValueDim, bool kOptions>
FASTATTN_DEVICE void init_barriers(BackwardStorageSm90<BackwardWideConfigSm90<kHeadDim, kValueDim, kOptions>>& shared) {
    constexpr int kWarps = 4;  // of a warpgroup
    shared.work.init(3 * kWarps + 2);
    shared.keys.init(3 * kWarps);
    shared.rows.init(2 * kWarps);
    shared.probabilities.init(kWarps, /*num_producers=*/kWarps);
    shared.ds.init(kWarps, /*num_producers=*/kWarps);
    shared.panels.init(1, /*num_producers=*/kWarps);
    ptx::mbarrier_init(shared_address(&shared.rows_issued), 1);
    ptx::mbarrier_init(shared_address(&shared.rows_to_trim_landed), 1);
}

}  // namespace fastattn
