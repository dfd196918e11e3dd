// The config, shared memory and launch of the backward kernel for Hopper. backward_key_value_sm90.cuh describes how the
// warps of this kernel work together.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward.h"
#include "attention/backward_work_sm90.cuh"
#include "attention/query_sums.h"
#include "attention/tiles_sm90.h"
#include "device/cluster.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/registers.h"
#include "device/ring.cuh"
#include "device/tma_tile.cuh"
#include "device/transposed_scores.cuh"
#include "device/variants.h"
#include "device/warpgroup_gemm.cuh"
#include "host/device_facts.h"
#include "host/launch.h"
#include "host/min_max.h"
#include "host/params.h"
#include "host/tensor_map.h"
#include "scheduler/row_splits.h"

namespace fastattn {

struct AttentionBackwardParamsSm90 {
    AttentionBackwardParams attention;
    TensorMap query, grad_out, key, value;
};

template <int kHeadDim_, bool kOptions_ = false>
struct BackwardConfigSm90 : BackwardTileSm90<kHeadDim_> {
    using Tile = BackwardTileSm90<kHeadDim_>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kOptions = kOptions_;
    static constexpr int kNumWarps = 4 * Tile::kNumConsumers + 4;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr int kConsumerThreads = Tile::kNumConsumers * kWarpgroupSize;
    static constexpr int kNumThreads = kConsumerThreads + kWarpgroupSize;
    static constexpr int kTilesM = Tile::kBlockM / kMmaN;  // columns of Sᵀ
    static constexpr int kTilesK = Tile::kBlockM / kMmaK;
    static constexpr int kTilesD = kHeadDim / kMmaN;
    static constexpr int kKeyOwners = Tile::kNumConsumers;  // each owns kConsumerKeys of the tile's keys
    static constexpr int kConsumerKeys = Tile::kKeyBlocks * kWarpgroupM;
    using RowTile = TmaTile<Tile::kBlockM, kHeadDim>;  // of Q and dO
    using GradOutTile = RowTile;
    using KeyTile = TmaTile<Tile::kBlockN, kHeadDim, kPanelDims>;  // a block of columns for each panel of dQ
    using ValueTile = TmaTile<Tile::kBlockN, kHeadDim>;
    using Terms =
        std::conditional_t<kOptions, TransposedOptionsTerms<Tile::kBlockM>, TransposedRowTerms<Tile::kBlockM>>;
    static_assert(sizeof(Terms) == Tile::kBlockM * RowTermsView::numbers_per_row(kOptions) * sizeof(float));

    // In each step, a consumer computes one panel of dQ: 64 rows by 64 dims. If the head dim is one panel, each
    // consumer's panel is a partial sum over the consumer's own keys. Otherwise the panel is the sum over all keys of
    // the tile, for which the consumers share a buffer of dS.
    static constexpr int kQueryPanels = KeyTile::kNumBlocks;
    static constexpr bool kSharesDs = kQueryPanels > 1;
    static_assert(!kSharesDs || kQueryPanels == Tile::kNumConsumers, "each consumer has a panel of dQ");
    static constexpr int kDsBuffers = kSharesDs ? 1 : Tile::kNumConsumers;
    static constexpr int kKeysPerDsBuffer = Tile::kBlockN / kDsBuffers;
    static constexpr bool kSkipsHidden = !kSharesDs;  // a consumer whose keys no row sees skips the step
    static constexpr int kWarpsPerDsBuffer = 4 * Tile::kNumConsumers / kDsBuffers;
    using ScoreTile = TmaTile<kKeysPerDsBuffer, Tile::kBlockM>;  // of dSᵀ

    static constexpr bool kAddsDqFromRegisters = FASTATTN_DQ_FROM_REGISTERS && !kOptions;

    // A reduction warp adds the panels of one consumer to sums in global memory: one panel of dQ in each step and, for
    // a split key tile, the panels of dK and dV. key_panel() returns where, among the key tile's sums, the consumer's
    // i-th panel of dK and dV belongs. For each of its blocks of keys, the consumer passes the panels of dK, then the
    // panels of dV.
    static constexpr int kReductionWarps = Tile::kNumConsumers, kPanelsPerReductionWarp = 1;
    static constexpr int kKeyPanels = 2 * Tile::kBlockN / kPanelRows * kQueryPanels;
    static constexpr int kKeyPanelsPerReductionWarp = kKeyPanels / kReductionWarps;
    FASTATTN_DEVICE static constexpr int key_panel(int consumer, int i) {
        const int block = consumer * Tile::kKeyBlocks + i / (2 * kQueryPanels);
        const int which = i / kQueryPanels % 2;  // 0: dK, 1: dV
        return (which * (Tile::kBlockN / kPanelRows) + block) * kQueryPanels + i % kQueryPanels;
    }
    static_assert(kKeyPanels * kPanelElements == key_tile_elements(Tile::kBlockN, kHeadDim), "as the host counts");
    static_assert(kKeyPanelsPerReductionWarp / Tile::kKeyBlocks % 2 == 0, "see BackwardConsumerSm90::store_key_panels");

    static_assert(kQueryPanels * kPanelElements == query_tile_elements(/*in_panels=*/true, Tile::kBlockM, kHeadDim),
                  "the host counts as the kernel does");
    static_assert(Tile::kBlockM == kPanelRows, "one m64n64 of dQ");
    static_assert(Tile::kBlockM <= kMostRowsInBlock, "see backward_rows_sm80.cuh");
    static_assert(Tile::kNumConsumers <= kMostConsumersOfTile, "as the host counts");
    static_assert(has_registers_for(Tile::kNumConsumers + 1,
                                    Tile::kProducerRegisters + Tile::kNumConsumers * Tile::kConsumerRegisters));
};

// The row tile of a step, as the producer passes it to the consumers. full_for: bit i says that every row sees every
// key of consumer i. ranges: the ranges of keys of the first row; null if ranges hide no key of the tile.
struct RowStep {
    int32_t head, row_tile;
    uint32_t full_for = 0;
    float slope = 0.0f;  // of ALiBi
    const int2* ranges = nullptr;
    float* query_sums = nullptr;  // with kAddsDqFromRegisters only: where the tile's dQ is added
};

inline constexpr int kDsStages = 2;  // for dS of even and of odd steps: see BackwardConsumerSm90::ds_buffer()

template <typename Config>
struct alignas(1024) BackwardStorageSm90 {
    // The layouts of tiles are those of TmaTile (device/tma_tile.cuh): blocks of columns, each in a swizzle.
    uint16_t sK[Config::KeyTile::kElements];                   // [kBlockN, kHeadDim]
    uint16_t sV[Config::ValueTile::kElements];                 // [kBlockN, kHeadDim]
    uint16_t sFiniteK[Config::KeyTile::kElements];             // K with zeros instead of NaN and infinity, if K has any
    uint16_t sQ[Config::kStages][Config::RowTile::kElements];  // [kBlockM, kHeadDim]
    uint16_t sdO[Config::kStages][Config::RowTile::kElements];                  // [kBlockM, kHeadDim]
    uint16_t sdS[Config::kDsBuffers][kDsStages][Config::ScoreTile::kElements];  // dSᵀ: [keys, kBlockM]
    float sPanel[Config::kNumConsumers][kPanelElements];                        // of dQ, dK or dV
    typename Config::Terms terms[Config::kStages];
    RowStep steps[Config::kStages];  // with options or kAddsDqFromRegisters only
    int64_t dropout_seed;
    RingBarriers<2> work;
    RingBarriers<1> keys;
    RingBarriers<Config::kStages> rows;  // Q, dO and row terms
    RingBarriers<1> panels[Config::kNumConsumers];
    // Complete when all warps that share a buffer of dS have stored dS. Even and odd steps have different barriers.
    uint64_t ds_stored[Config::kDsBuffers][kDsStages];
    uint64_t rows_issued;               // completes when the copies of a work tile's last rows have been issued
    uint64_t rows_to_trim_landed;       // completes when a tile has landed whose last rows the producer zeroes
    KeyWorkTile<Config> work_tiles[2];  // for each stage of `work`
    bool is_end[2];                     // for each stage of `work`: true if no work tile is left for the stage
};

// Opaque: otherwise the compiler computes the address of every product before the loop, and all these addresses take
// registers during the loop.
FASTATTN_DEVICE uint32_t opaque_shared_address(const uint16_t* sTile) {
    return ptx::opaque(shared_address(sTile));
}

// Ids of named barriers; __syncthreads() uses 0.
enum BackwardBarrierSm90 : int { kAllBackwardConsumers = 1 };

template <typename Config>
FASTATTN_DEVICE void init_barriers(BackwardStorageSm90<Config>& shared) {
    constexpr int kConsumerWarps = 4 * Config::kNumConsumers;
    shared.work.init(kConsumerWarps + 1 + Config::kNumConsumers);
    shared.keys.init(kConsumerWarps);
    shared.rows.init(kConsumerWarps);
    for (RingBarriers<1>& panel : shared.panels) panel.init(/*num_consumers=*/1, /*num_producers=*/4);
    for (auto& barriers : shared.ds_stored) {
        for (uint64_t& barrier : barriers) ptx::mbarrier_init(shared_address(&barrier), Config::kWarpsPerDsBuffer);
    }
    ptx::mbarrier_init(shared_address(&shared.rows_issued), 1);
    ptx::mbarrier_init(shared_address(&shared.rows_to_trim_landed), 1);
}

// Initialises the barriers, loads the dropout seed, and waits for the previous kernel. Called by all threads.
template <typename Config>
FASTATTN_DEVICE void start_backward(BackwardStorageSm90<Config>& shared, const AttentionBackwardParams& params) {
    start_barriers(/*cluster_size=*/1, [&] {
        init_barriers(shared);
        // No kernel of this backward pass writes the seed, so the seed can be read before the wait below.
        const int64_t* seed = params.scores.dropout_seed;
        if (Config::kOptions) shared.dropout_seed = seed != nullptr ? *seed : 0;
    });
    ptx::griddepcontrol_wait();  // waits until the previous kernel has written the row terms
}

template <typename Config, DataType kDataType>
void launch_backward_sm90(LaunchedKernel& kernel, void (*function)(AttentionBackwardParamsSm90),
                          const AttentionBackwardParams& params, Stream stream) {
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    const auto map_of = [&](const HeadsView<const uint16_t>& view, int32_t total, auto tile) {
        return tensor_map(view, is_packed ? total : view.rows, /*group=*/1, tile.kNumRows, tile.kBlockColumns,
                          kDataType);
    };
    const int64_t first_tile = params.row_splits.first_tile;
    const int64_t num_work_tiles = first_tile + (num_key_tiles(params, Config::kBlockN) - first_tile) *
                                                    params.row_splits.over_heads * params.row_splits.over_rows;
    // Each CTA also claims a number past the last work tile, so the check leaves room for these numbers below 2^32.
    kernel.check_work_tiles(num_work_tiles, "tiles of keys, and splits of these,");
    const AttentionBackwardParamsSm90 all_params{
        params, map_of(params.query, params.packed.total_q, typename Config::RowTile{}),
        map_of(params.grad_out, params.packed.total_q, typename Config::GradOutTile{}),
        map_of(params.key, params.packed.total_k, typename Config::KeyTile{}),
        map_of(params.value, params.packed.total_k, typename Config::ValueTile{})};
    const Launch launch{std::min<int64_t>(num_work_tiles, device_facts().num_sms), Config::kNumThreads,
                        sizeof(BackwardStorageSm90<Config>), /*cluster_size=*/1, /*is_dependent=*/true};
    kernel.launch(function, launch, all_params, stream);
}

}  // namespace fastattn
