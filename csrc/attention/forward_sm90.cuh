// Attention forward for Hopper, FlashAttention-2 (Dao 2023, algorithm 1) with the roles and overlaps of FlashAttention-3
// (Shah et al. 2024): O = softmax(scale · Q·Kᵀ + mask) · V, and the lse.
//
// A CTA stays on its SM and takes one tile of kBlockM rows after the other: rows of a head, or of all heads that read a key
// head. Its last warpgroup is the producer: one thread fills shared memory by TMA and runs ahead; the others, to which it
// gives registers, consume. Each of these owns 64 rows from start to end.
//
//   ring, stages    full: its bytes have landed       empty: every consumer's warps have read it
//   Q      1        before a tile's first Q·Kᵀ        after its last
//   K, V   kStages  before Q·Kᵀ, before P·V           after each
//
// Tiles of keys come as in key_tiles.cuh, masked ones first. Two products of a consumer are in flight at a time, Q·Kᵀ of a
// tile and P·V of the one before, each a wgmma group; while one consumer is in its softmax, the tensor cores have the
// products of the others. S, O and P stay in registers, P as the operand A of P·V:
//
//   tensor cores   Q·K0ᵀ |           Q·K1ᵀ | P0·V0 |           Q·K2ᵀ | P1·V1 | …
//   other units          | softmax → P0    |       softmax → P1      |       softmax → P2
//
// Where a cluster has two CTAs, both need the same tiles of keys, and each copies one half of every tile into both.
// Preconditions: those of HeadsView, head dims multiples of 8 and at most kHeadDim and kValueDim. Any lengths, packed or not,
// any window, sinks, any finite scale.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention/forward.h"
#include "attention/forward_work_sm90.h"
#include "attention/key_tiles.cuh"
#include "attention/tiles_sm90.h"
#include "device/mask.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ring.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"
#include "device/store_rows.cuh"
#include "device/tile_copy.cuh"
#include "device/tma_nonfinite.cuh"
#include "device/tma_tile.cuh"
#include "device/warpgroup_gemm.cuh"
#include "host/device_facts.h"
#include "host/launch.h"
#include "host/tensor_map.h"

namespace fastattn {

template <int kHeadDim_, int kValueDim_>
struct ForwardConfigSm90 : ForwardTileSm90<kHeadDim_, kValueDim_> {
    using Tile = ForwardTileSm90<kHeadDim_, kValueDim_>;
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

template <typename Config>
struct alignas(1024) ForwardStorageSm90 {
    uint16_t sQ[Config::kNumConsumers][Config::QueryTile::kElements];
    uint16_t sK[Config::kStages][Config::KeyTile::kElements];
    uint16_t sV[Config::kStages][Config::ValueTile::kElements];
    RingBarriers<1> query;
    RingBarriers<Config::kStages> key, value;
};

// Named barriers; 0 is that of __syncthreads().
enum ForwardBarrierSm90 : int { kAllConsumers = 1, kOneConsumer };  // kOneConsumer + i: of warpgroup i

template <int kHeadDim, int kValueDim, DataType kDataType>
__global__ void __launch_bounds__(ForwardConfigSm90<kHeadDim, kValueDim>::kNumThreads, 1)
    attention_forward_sm90(const __grid_constant__ AttentionForwardParamsSm90 all_params) {
    using Config = ForwardConfigSm90<kHeadDim, kValueDim>;
    using QueryTile = typename Config::QueryTile;
    using KeyTile = typename Config::KeyTile;
    using ValueTile = typename Config::ValueTile;
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kStages = Config::kStages;
    constexpr int kTilesN = Config::kTilesN, kTilesD = Config::kTilesD, kTilesK = kBlockN / kMmaK;
    extern __shared__ __align__(1024) char shared_bytes[];
    auto& shared = *reinterpret_cast<ForwardStorageSm90<Config>*>(shared_bytes);
    static_assert(sizeof(shared) <= 227 << 10, "sm_90");

    // Prologue: barriers; and how each side learns of its work.
    const AttentionForwardParams& params = all_params.attention;
    const int warpgroup = warp_in_cta() / 4, warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize;
    const int cluster_size = all_params.work.cluster_size();
    const int rank = ptx::cluster_ctarank();
    if (threadIdx.x == 0) {
        shared.query.init(4 * Config::kNumConsumers);
        shared.key.init(4 * Config::kNumConsumers * cluster_size);
        shared.value.init(4 * Config::kNumConsumers * cluster_size);
        ptx::fence_mbarrier_init();
    }
    const auto wait_for_cluster = [&] {
        if (cluster_size == 1) return;
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    };
    __syncthreads();     // waits until the barriers are initialised
    wait_for_cluster();  // waits until those of the other CTA are
    Ring<1> query_ring(shared.query);
    Ring<kStages> key_ring(shared.key), value_ring(shared.value);
    const ForwardWorkSm90& all_work = all_params.work;
    const uint32_t cluster = blockIdx.x / cluster_size, num_clusters = gridDim.x / cluster_size;

    // Producer.
    if (warpgroup == Config::kNumConsumers) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (warp == 0 && lane == 0) {
            for (uint32_t n = 0, i; (i = nth_piece(n, cluster, num_clusters)) < all_work.num; ++n) {
                const RowsOfCta work(params, all_work, i, rank, kBlockM);
                const KeyTiles tiles = work.key_tiles(kBlockN);
                if (tiles.num_tiles() == 0) continue;
                const uint32_t q_landed = query_ring.acquire(Config::kNumConsumers * QueryTile::kBytes);
#pragma unroll
                for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
                    QueryTile::load(shared_address(shared.sQ[consumer]), all_params.query, work.batch,
                                    work.head >> work.log2_packed,
                                    work.rows.begin + work.row_of(work.first_row + consumer * kWarpgroupM), q_landed);
                }
                query_ring.advance();
                for (int32_t num_left = tiles.num_tiles(); num_left > 0; --num_left) {
                    const int32_t row = work.keys.begin + tiles.tile(num_left) * kBlockN;
                    const auto fill = [&](auto& ring, auto& stages, auto tile, const TensorMap& map) {
                        const uint32_t landed = ring.acquire(tile.kBytes);
                        const uint32_t stage = shared_address(stages[ring.stage]);
                        if (cluster_size == 1) {
                            tile.load(stage, map, work.batch, work.kv_head, row, landed);
                        } else {
                            tile.load_half(stage, map, work.batch, work.kv_head, row, landed, rank);
                        }
                        ring.advance();
                    };
                    fill(key_ring, shared.sK, KeyTile{}, all_params.key);
                    fill(value_ring, shared.sV, ValueTile{}, all_params.value);
                }
            }
        }
        __syncwarp();
        wait_for_cluster();  // as below
        return;
    }

    // Consumers.
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    const uint32_t sQ = shared_address(shared.sQ[warpgroup]);
    const auto of_all = [&] { ptx::bar_sync(kAllConsumers, Config::kConsumerThreads); };
    const float scale = params.scores.scale, sign = scale > 0 ? 1.0f : scale < 0 ? -1.0f : scale;

    for (uint32_t n = 0, i; (i = nth_piece(n, cluster, num_clusters)) < all_work.num; ++n) {
        const RowsOfCta work(params, all_work, i, rank, kBlockM);
        const KeyTiles tiles = work.key_tiles(kBlockN);
        const int32_t own_row = work.first_row + warpgroup * kWarpgroupM + warp * kMmaM;
        OnlineSoftmax<1> softmax(params.scale_log2);
        if (params.scores.sinks != nullptr) {
            const int32_t row = own_row + accumulator_row(lane);
            softmax.set_sinks(params.scores.sinks[work.head_of(row)], params.scores.sinks[work.head_of(row + 8)],
                              lane % kLanesPerRow == 0);
        }
        float rO[1][kTilesD][4];     // [64, kValueDim] of the warpgroup
        float rS[1][kTilesN][4];     // [64, kBlockN]
        uint32_t rP[2][kTilesK][4];  // [64, kBlockN] 16-bit, of one tile of keys and the next
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) rO[0][d][0] = rO[0][d][1] = rO[0][d][2] = rO[0][d][3] = 0.0f;

        // The keys that this lane's upper and lower row see.
        const KeyRange seen_by[2] = {work.keys_of(own_row + accumulator_row(lane)),
                                     work.keys_of(own_row + accumulator_row(lane) + 8)};

        const auto start_qk = [&] {
            key_ring.wait_full();
            ptx::wgmma_fence();
            start_gemm_qk<kDataType, kHeadDim>(
                rS,
                OperandDescriptor::of_rows(ptx::opaque(sQ)),  // else what follows from it takes registers in the loops
                OperandDescriptor::of_rows(shared_address(shared.sK[key_ring.stage])));
            ptx::wgmma_commit_group();
        };
        const auto start_pv = [&](const uint32_t (&rP)[kTilesK][4]) {
            value_ring.wait_full();
            ptx::wgmma_fence();
            start_gemm_pv<kDataType>(
                rO, rP,
                OperandDescriptor::of_columns(shared_address(shared.sV[value_ring.stage]), ValueTile::kBlockBytes));
            ptx::wgmma_commit_group();
        };
        // Leaves so many products in flight: none, or P·V of the tile before.
        const auto wait_qk = [&](auto in_flight) {
            ptx::wgmma_wait_group<in_flight.value>();
            ptx::written_by_wgmma(rS);
            key_ring.release_to_cluster(lane, cluster_size);
        };
        const auto wait_pv = [&] {
            ptx::wgmma_wait_group<0>();
            ptx::written_by_wgmma(rO);
        };

        // S of a tile that may be masked, or of the first, becomes rP[0]. Leaves no product in flight.
        const auto exact_softmax = [&](int32_t num_left) {
            if (num_left > tiles.num_full) mask_own_columns(rS, seen_by, tiles.tile(num_left) * kBlockN, lane);
            const auto max = maxima_of_lane(rS);
            const bool grows = softmax.is_outgrown_by(max);
            RowNumbers<1> factor{{{1.0f, 1.0f}}};
            if (grows) factor = softmax.follow(max);
            softmax.exponentiate(rS);
            wait_pv();
            if (grows) rescale(rO, factor);
#pragma unroll
            for (int k = 0; k < kTilesK; ++k) accumulators_to_a<kDataType>(rP[0][k], rS[0][2 * k], rS[0][2 * k + 1]);
        };
        // The same for a tile that all rows see. It looks for no maxima, predicted to save a tenth of the clocks: sums of P
        // tell where a reference is outgrown, and S is still there then.
        const auto full_softmax = [&](uint32_t (&rP)[kTilesK][4]) {
            auto sums = softmax.template exponentiate_to<kDataType>(rP, rS);
            wait_pv();
            if (softmax.is_outgrown_by_sums(sums)) {
                rescale(rO, softmax.follow(maxima_of_lane(rS)));
                sums = softmax.template exponentiate_to<kDataType>(rP, rS);
            }
            softmax.add(sums);
        };
        // What nobody may see through a mask: see device/nonfinite.cuh. All consumers look at the whole tile and come to
        // the same answer.
        const auto separate_nonfinite_values = [&](int32_t num_left) {
            if (num_left <= tiles.num_full) return;
            value_ring.wait_full();
            uint16_t* sV = shared.sV[value_ring.stage];
            if (!ptx::bar_red_or(kOneConsumer + warpgroup, kWarpgroupSize,
                                 tile_has_nonfinite<kDataType, ValueTile>(sV, threadIdx.x % kWarpgroupSize))) {
                return;
            }
            const int32_t first_key = tiles.tile(num_left) * kBlockN;
            const auto sees = [&](int, int half, int key) { return seen_by[half].has(first_key + key); };
            separate_nonfinite<kDataType>(rO, sV, SharedTile<ValueTile, kBlockN, Config::kConsumerThreads>{sV}, sees,
                                          lane, of_all);
            ptx::fence_proxy_async_shared();
            of_all();  // waits until wgmma can read V as it is now
        };
        // One tile of keys: its scores are computed beside P·V of the tile before.
        const auto full_step = [&](const uint32_t (&rP)[kTilesK][4], uint32_t (&rNextP)[kTilesK][4]) {
            start_qk();
            start_pv(rP);
            wait_qk(std::integral_constant<int, 1>{});
            full_softmax(rNextP);
            value_ring.release_to_cluster(lane, cluster_size);
        };

        int32_t num_left = tiles.num_tiles();
        if (num_left > 0) {
            query_ring.wait_full();
            if (sign != 1.0f) {  // scores grow with Q·Kᵀ then, whose maxima the softmax takes
                QueryTile::for_pairs_of(shared.sQ[warpgroup], threadIdx.x % kWarpgroupSize, kWarpgroupSize,
                                        [&](uint32_t& pair) { pair = multiply<kDataType>(pair, sign); });
                ptx::fence_proxy_async_shared();
                ptx::bar_sync(kOneConsumer + warpgroup, kWarpgroupSize);  // waits until Q is as it should be
            }
            start_qk();
            wait_qk(std::integral_constant<int, 0>{});
            exact_softmax(num_left);
            separate_nonfinite_values(num_left);
            // Masked tiles, and one more where the number of others is odd.
            for (--num_left; num_left > tiles.num_full || num_left % 2 != 0; --num_left) {
                start_qk();
                start_pv(rP[0]);
                wait_qk(std::integral_constant<int, 1>{});
                exact_softmax(num_left);
                value_ring.release_to_cluster(lane, cluster_size);
                separate_nonfinite_values(num_left);
            }
            for (; num_left > 0; num_left -= 2) {
                full_step(rP[0], rP[1]);
                full_step(rP[1], rP[0]);
            }
            query_ring.release(lane);
            start_pv(rP[0]);
            wait_pv();
            value_ring.release_to_cluster(lane, cluster_size);
        }

        // Epilogue.
        softmax.finish(rO);
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
    wait_for_cluster();  // waits until the other CTA's consumers have arrived at this one's barriers for the last time
}

template <int kHeadDim, int kValueDim, DataType kDataType>
void launch_attention_forward_sm90(LaunchedKernel& kernel, const AttentionForwardParams& params, Stream stream) {
    using Config = ForwardConfigSm90<kHeadDim, kValueDim>;
    const DeviceFacts facts = device_facts();
    const ForwardWorkSm90 work =
        forward_work_sm90(params, Config::kBlockM, Config::kTilesToShareUnderMask, facts.num_sms);
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    const auto map_of = [&](const HeadsView<const uint16_t>& view, int32_t total, int group, int box_rows) {
        return tensor_map(view, is_packed ? total : view.rows, group, box_rows, kDataType);
    };
    const int packed_heads = 1 << work.log2_packed, key_rows = Config::kBlockN / work.cluster_size();
    const AttentionForwardParamsSm90 all_params{
        params, work, map_of(params.query, params.packed.total_q, packed_heads, kWarpgroupM / packed_heads),
        map_of(params.key, params.packed.total_k, 1, key_rows),
        map_of(params.value, params.packed.total_k, 1, key_rows)};
    const int64_t num_clusters = std::min<int64_t>(work.num, std::max(facts.num_sms / work.cluster_size(), 1));
    const Launch launch{num_clusters * work.cluster_size(), Config::kNumThreads, sizeof(ForwardStorageSm90<Config>),
                        work.cluster_size()};
    kernel.launch(attention_forward_sm90<kHeadDim, kValueDim, kDataType>, launch, all_params, stream);
}

}  // namespace fastattn
