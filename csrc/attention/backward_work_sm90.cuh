// The backward kernel for Hopper: its config, shared memory, and the warps that bring and take away. See
// backward_key_value_sm90.cuh for how these work together.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward.h"
#include "attention/query_gradient.h"
#include "attention/row_shares.h"
#include "attention/tile_order.h"
#include "attention/tiles_sm90.h"
#include "device/bias_tile.cuh"
#include "device/fragment.cuh"
#include "device/ptx/atom.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/ld_acquire.cuh"
#include "device/ptx/red.cuh"
#include "device/ptx/st_shared.cuh"
#include "device/ring.cuh"
#include "device/scores.cuh"
#include "device/sequence.cuh"
#include "device/store_rows.cuh"
#include "device/tile_copy.cuh"
#include "device/tma_tile.cuh"
#include "device/transposed_scores.cuh"
#include "device/warpgroup_gemm.cuh"
#include "host/tensor_map.h"

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
    static constexpr int kKeyOwners = Tile::kNumConsumers;  // each has so many of the tile's keys for itself:
    static constexpr int kConsumerKeys = Tile::kKeyBlocks * kWarpgroupM;
    using RowTile = TmaTile<Tile::kBlockM, kHeadDim>;  // of Q and dO
    using GradOutTile = RowTile;
    using KeyTile = TmaTile<Tile::kBlockN, kHeadDim, kQueryPartDims>;  // a part of dQ takes a block of K
    using ValueTile = TmaTile<Tile::kBlockN, kHeadDim>;
    using Terms =
        std::conditional_t<kOptions, TransposedOptionsTerms<Tile::kBlockM>, TransposedRowTerms<Tile::kBlockM>>;
    static_assert(sizeof(Terms) == Tile::kBlockM * RowTermsView::numbers_per_row(kOptions) * sizeof(float));

    // dQ of a step: a consumer computes 64 rows by 64 dims. Where these are all dims, it does so from its own keys. Else it does so
    // from the keys of all consumers, which exchange dS, and has 64 dims of dQ.
    static constexpr int kQueryParts = KeyTile::kNumBlocks;
    static constexpr bool kShareGradients = kQueryParts > 1;
    static_assert(!kShareGradients || kQueryParts == Tile::kNumConsumers, "each consumer has a part of dQ");
    static constexpr int kExchanges = kShareGradients ? 1 : Tile::kNumConsumers;
    static constexpr int kExchangedKeys = Tile::kBlockN / kExchanges;
    static constexpr int kWarpsOfExchange = 4 * Tile::kNumConsumers / kExchanges;
    using ScoreTile = TmaTile<kExchangedKeys, Tile::kBlockM>;  // of dSᵀ

    // dK and dV of a tile that CTAs share: all parts, and in which order a consumer passes its own: by blocks of keys.
    static constexpr int kKeyParts = 2 * Tile::kBlockN / kQueryPartRows * kQueryParts;
    static constexpr int kKeyPartsOfConsumer = kKeyParts / Tile::kNumConsumers;
    __device__ __forceinline__ static constexpr int key_part(int consumer, int i) {
        const int block = consumer * Tile::kKeyBlocks + i / (2 * kQueryParts);
        const int which = i / kQueryParts % 2;  // dK, dV
        return (which * (Tile::kBlockN / kQueryPartRows) + block) * kQueryParts + i % kQueryParts;
    }
    static_assert(kKeyParts * kQueryPartElements == key_tile_elements(Tile::kBlockN, kHeadDim), "as the host counts");
    static_assert(kKeyPartsOfConsumer / Tile::kKeyBlocks % 2 == 0, "see BackwardConsumerSm90::store_part");

    static_assert(kQueryParts * kQueryPartElements == query_tile_elements(/*in_parts=*/true, Tile::kBlockM, kHeadDim),
                  "the host counts as the kernel does");
    static_assert(Tile::kBlockM == kQueryPartRows, "one m64n64 of dQ");
    static_assert(Tile::kBlockM <= kMostRowsInBlock, "see backward_rows_sm80.cuh");
    static_assert(Tile::kNumConsumers <= kMostConsumersOfTile, "as the host counts");
    static constexpr int kStartRegisters = 65536 / kNumThreads / 8 * 8;
    static_assert(Tile::kConsumerRegisters * Tile::kNumConsumers + Tile::kProducerRegisters <=
                      kStartRegisters * (Tile::kNumConsumers + 1),
                  "warpgroups exchange the registers that the CTA has");
};

// A tile of keys of one head, the query rows that see any of them, and a CTA's share of these.
template <typename Config>
struct KeysOfWork {
    int32_t batch, head;          // of K and V
    int32_t first_key, num_keys;  // in the sequence: of the tile, and in all
    int32_t sequence_begin;       // in K and V
    Sequence rows;
    Window window;
    int32_t begin_tile, end_tile;  // tiles of rows
    int32_t first_sums_tile;       // of the sequence, in dQ's sums
    int32_t share, num_shares;
    uint32_t shared_tile;               // in the sums of dK and dV
    int32_t begin_head, num_heads;      // query heads of this share
    int32_t begin_row_tile, num_steps;  // where it begins, and how many steps it has
    // Tiles of which every row that exists sees all keys of a consumer; the last range: of all consumers.
    int32_t begin_full[Config::kKeyOwners + 1], end_full[Config::kKeyOwners + 1];

    // False: there are no such keys, or fewer shares.
    __device__ __forceinline__ bool find(const AttentionBackwardParams& params, const RowShare& item,
                                         const HeadTile& place) {
        constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kConsumerKeys = Config::kConsumerKeys;
        const bool is_packed = params.packed.cu_seqlens_q != nullptr;
        const Sequence keys =
            sequence_of(params.packed.cu_seqlens_k, place.batch, params.packed.total_k, params.key.rows);
        batch = place.batch, head = place.head;
        first_key = place.position * kBlockN, num_keys = keys.length;
        if (first_key >= num_keys) return false;
        sequence_begin = keys.begin;
        rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        window = window_of(params.scores, rows.length, num_keys);
        const RowRange sees_first = window.rows_of(first_key, rows.length);
        const RowRange sees_last = window.rows_of(min(first_key + kBlockN, num_keys) - 1, rows.length);
        begin_tile = sees_first.begin / kBlockM;
        end_tile = max(ceil_div(sees_last.end, kBlockM), begin_tile);

        const int32_t seen_by = end_tile - begin_tile, group_size = params.query.heads / params.key.heads;
        const RowParts parts(params.shares, item.tile, group_size, seen_by);
        share = item.share, num_shares = parts.num();
        if (share >= num_shares) return false;
        shared_tile = item.tile - params.shares.first_tile;
        const int32_t rows_before = begin_of_part(seen_by, share % parts.of_rows, parts.of_rows);
        num_heads = group_size / parts.of_heads;
        begin_head = head * group_size + share / parts.of_rows * num_heads;
        begin_row_tile = end_tile - 1 - rows_before;
        num_steps = (begin_of_part(seen_by, share % parts.of_rows + 1, parts.of_rows) - rows_before) * num_heads;
#pragma unroll 1
        for (int i = 0; i <= Config::kKeyOwners; ++i) {
            const bool of_all = i == Config::kKeyOwners;
            const int32_t begin_key = first_key + (of_all ? 0 : i * kConsumerKeys);
            const int32_t end_key = begin_key + (of_all ? kBlockN : kConsumerKeys);
            const RowRange sees_begin = window.rows_of(begin_key, rows.length);
            begin_full[i] = ceil_div(window.rows_of(end_key - 1, rows.length).begin, kBlockM);
            end_full[i] = end_key > num_keys ? 0 : sees_begin.end == rows.length ? end_tile : sees_begin.end / kBlockM;
        }
        first_sums_tile = first_query_tile(batch, params.query.rows, is_packed, rows.begin, kBlockM);
        return true;
    }

    __device__ __forceinline__ bool is_shared() const { return num_shares > 1; }

    __device__ __forceinline__ bool are_all_full() const {
        return warp_uniform(begin_full[Config::kKeyOwners] <= begin_tile && end_full[Config::kKeyOwners] >= end_tile) !=
               0;
    }

    // Calls function(head, row_tile) for each step, in the order in which consumers take them: from the last rows on, so that
    // CTAs of neighbouring keys stand at the same rows under a causal mask, and of each tile of rows all query heads.
    template <typename Function>
    __device__ __forceinline__ void for_steps(Function&& function) const {
        int32_t query_head = begin_head, row_tile = begin_row_tile;
        for (int32_t left = num_steps; left > 0; --left) {
            function(query_head, row_tile);
            if (++query_head == begin_head + num_heads) {
                query_head = begin_head;
                --row_tile;
            }
        }
    }
};

inline constexpr int kExchangeStages = 2;  // of dS: with two, no barrier says that it has been read

template <typename Config>
struct alignas(1024) BackwardStorageSm90 {
    uint16_t sK[Config::KeyTile::kElements];
    uint16_t sV[Config::ValueTile::kElements];
    uint16_t sFiniteK[Config::KeyTile::kElements];  // where K is not: K with zeros instead
    uint16_t sQ[Config::kStages][Config::RowTile::kElements];
    uint16_t sdO[Config::kStages][Config::RowTile::kElements];
    uint16_t sdS[Config::kExchanges][kExchangeStages][Config::ScoreTile::kElements];  // dSᵀ
    float sPart[Config::kNumConsumers][kQueryPartElements];                           // of dQ, dK or dV
    typename Config::Terms terms[Config::kStages];
    float slopes[Config::kStages];  // of ALiBi, of the rows' heads; with options
    int64_t dropout_seed;
    RingBarriers<2> work;
    RingBarriers<1> keys;
    RingBarriers<Config::kStages> rows;  // Q, dO and terms
    RingBarriers<1> part[Config::kNumConsumers];
    uint64_t gradients_stored[Config::kExchanges][kExchangeStages];  // dS, of two steps in turn
    uint64_t landed;               // rows that the producer looks at before it passes them on
    KeysOfWork<Config> places[2];  // of the ring `work`
    bool is_last[2];               // there is no more
};

// Named barriers; 0 is that of __syncthreads().
enum BackwardBarrierSm90 : int { kAllBackwardConsumers = 1 };

template <typename Config>
__device__ __forceinline__ void init_barriers(BackwardStorageSm90<Config>& shared) {
    constexpr int kConsumerWarps = 4 * Config::kNumConsumers;
    shared.work.init(kConsumerWarps + 1 + Config::kNumConsumers);
    shared.keys.init(kConsumerWarps);
    shared.rows.init(kConsumerWarps);
    for (RingBarriers<1>& part : shared.part) {
        ptx::mbarrier_init(shared_address(&part.full[0]), 4);
        ptx::mbarrier_init(shared_address(&part.empty[0]), 1);
    }
    for (auto& barriers : shared.gradients_stored) {
        for (uint64_t& barrier : barriers) ptx::mbarrier_init(shared_address(&barrier), Config::kWarpsOfExchange);
    }
    ptx::mbarrier_init(shared_address(&shared.landed), 1);
    ptx::fence_mbarrier_init();
}

// In which order tiles of keys are claimed. Those of packed sequences are counted: sequence after sequence, without any that
// do not exist. All lanes of a warp.
struct KeyTileOrder {
    uint32_t upto = 0;  // tiles of the sequences that this lane counts, and of the lanes before

    __device__ __forceinline__ static uint32_t num_tiles(const AttentionBackwardParams& params, int32_t batch,
                                                         int32_t block_n) {
        const Sequence keys = sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
        return ceil_div(keys.length, block_n) * params.key.heads;
    }

    __device__ __forceinline__ static int32_t sequences_per_lane(const AttentionBackwardParams& params) {
        return ceil_div(params.key.batch, kWarpSize);
    }

    __device__ __forceinline__ KeyTileOrder(const AttentionBackwardParams& params, int32_t block_n, int lane) {
        if (params.packed.cu_seqlens_k == nullptr) return;
        const int32_t per_lane = sequences_per_lane(params);
        const int32_t end = min((lane + 1) * per_lane, params.key.batch);
        constexpr uint32_t kMost = 0x7fffffff;  // sequences that overlap may have more
        for (int32_t batch = lane * per_lane; batch < end; ++batch) {
            upto = min(upto + num_tiles(params, batch, block_n), kMost);
        }
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            const uint32_t before = __shfl_up_sync(0xffffffff, upto, distance);
            if (lane >= distance) upto = min(upto + before, kMost);
        }
    }

    // False: there are fewer. Sequences that overlap may have more than there is workspace for: those are left out.
    __device__ __forceinline__ bool find(HeadTile& place, const AttentionBackwardParams& params, uint32_t tile,
                                         int32_t block_n) const {
        const HeadsView<const uint16_t>& key = params.key;
        if (tile >= num_key_tiles(params, block_n)) return false;
        if (params.packed.cu_seqlens_k == nullptr) {
            place = head_tile(tile, key.batch, key.heads, params.heads_per_group, ceil_div(key.rows, block_n));
            return true;
        }
        const int lanes_before = __popc(__ballot_sync(0xffffffff, upto <= tile));
        const uint32_t before = __shfl_sync(0xffffffff, upto, max(lanes_before - 1, 0));
        if (lanes_before == kWarpSize) return false;
        uint32_t in_sequence = tile - (lanes_before == 0 ? 0 : before);
        int32_t batch = lanes_before * sequences_per_lane(params);
        uint32_t of_sequence;
        for (; in_sequence >= (of_sequence = num_tiles(params, batch, block_n)); ++batch) in_sequence -= of_sequence;
        place = head_tile(in_sequence, 1, key.heads, min(params.heads_per_group, key.heads), of_sequence / key.heads);
        place.batch = batch;
        return true;
    }
};

// The work of one warp, as it has been claimed: calls take(keys) for each tile of keys.
template <typename Config, typename Take>
__device__ __forceinline__ void for_work(BackwardStorageSm90<Config>& shared, int lane, Take&& take) {
    for (Ring<2> ring(shared.work);;) {
        ring.wait_full();
        if (warp_uniform(shared.is_last[ring.stage]) != 0) return;
        take(shared.places[ring.stage]);
        __syncwarp();  // waits until every lane has read it
        ring.release(lane);
    }
}

// The warp that claims shares of tiles of keys, and tells all others of them.
template <typename Config>
__device__ __forceinline__ void claim(BackwardStorageSm90<Config>& shared, const AttentionBackwardParams& params,
                                      int lane) {
    const KeyTileOrder order(params, Config::kBlockN, lane);
    for (Ring<2> ring(shared.work);; ring.advance()) {
        if (lane == 0) ring.wait_empty();
        bool is_last, exists;
        do {
            const uint32_t claimed = lane == 0 ? atomicAdd(params.num_claimed, 1) : 0;
            const RowShare item = nth_share(params.shares, __shfl_sync(0xffffffff, claimed, 0));
            HeadTile place;
            is_last = !order.find(place, params, item.tile, Config::kBlockN);
            const bool finds = lane == 0 && !is_last && shared.places[ring.stage].find(params, item, place);
            exists = __any_sync(0xffffffff, finds);
        } while (!is_last && !exists);
        if (lane == 0) {
            shared.is_last[ring.stage] = is_last;
            ring.arrive_full();
        }
        if (is_last) return;
    }
}

// The warp that copies what these need.
template <typename Config>
__device__ __forceinline__ void produce(BackwardStorageSm90<Config>& shared,
                                        const AttentionBackwardParamsSm90& all_params, int lane) {
    using RowTile = typename Config::RowTile;
    using GradOutTile = typename Config::GradOutTile;
    using KeyTile = typename Config::KeyTile;
    using ValueTile = typename Config::ValueTile;
    using Terms = typename Config::Terms;
    constexpr int kBlockM = Config::kBlockM;
    const AttentionBackwardParams& params = all_params.attention;
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    Ring<1> key_ring(shared.keys);
    Ring<Config::kStages> row_ring(shared.rows);
    uint32_t times_landed = 0;
    for_work(shared, lane, [&](const KeysOfWork<Config>& keys) {
        if (lane == 0) {
            const uint32_t barrier = key_ring.acquire(KeyTile::kBytes + ValueTile::kBytes);
            const int32_t first_key = keys.sequence_begin + keys.first_key;
            KeyTile::load(shared_address(shared.sK), all_params.key, keys.batch, keys.head, first_key, barrier);
            ValueTile::load(shared_address(shared.sV), all_params.value, keys.batch, keys.head, first_key, barrier);
        }
        key_ring.advance();
        keys.for_steps([&](int32_t head, int32_t row_tile) {
            const int stage = row_ring.stage;
            const int32_t first_row = row_tile * kBlockM, num_rows = keys.rows.length - first_row;
            // Behind the end of a packed sequence stands the next one's data, NaN possibly.
            const bool has_others = is_packed && num_rows < kBlockM;
            constexpr uint32_t kBytes = RowTile::kBytes + GradOutTile::kBytes + sizeof(Terms);
            if (lane == 0) {
                row_ring.wait_empty();
                const uint32_t barrier = has_others ? shared_address(&shared.landed) : row_ring.full_barrier();
                if constexpr (Config::kOptions) {  // here it is waited for ahead of time
                    shared.slopes[stage] = HeadScores::slope_of(params.scores, keys.batch, head);
                }
                ptx::mbarrier_arrive_expect_tx(barrier, kBytes);
                const int32_t first = keys.rows.begin + first_row;
                RowTile::load(shared_address(shared.sQ[stage]), all_params.query, keys.batch, head, first, barrier);
                GradOutTile::load(shared_address(shared.sdO[stage]), all_params.grad_out, keys.batch, head, first,
                                  barrier);
                const int64_t block = int64_t{keys.first_sums_tile + row_tile} * params.query.heads + head;
                ptx::cp_async_bulk_shared_global(shared_address(&shared.terms[stage]),
                                                 params.row_terms.data + block * (sizeof(Terms) / sizeof(float)),
                                                 sizeof(Terms), barrier);
            }
            if constexpr (Config::kOptions) {
                prefetch_bias(params.scores.bias, keys.batch, head, first_row, min(num_rows, kBlockM), keys.first_key,
                              min(keys.num_keys - keys.first_key, Config::kBlockN), lane);
            }
            if (has_others) {
                __syncwarp();  // the barrier knows of its bytes
                ptx::mbarrier_wait_parity(shared_address(&shared.landed), times_landed++ % 2);
                RowTile::zero_rows(shared.sQ[stage], num_rows, lane, kWarpSize);
                GradOutTile::zero_rows(shared.sdO[stage], num_rows, lane, kWarpSize);
                ptx::fence_proxy_async_shared();
                __syncwarp();  // waits until every lane has written its zeros
                if (lane == 0) row_ring.arrive_full();
            }
            row_ring.advance();
        });
    });
}

// One thread adds a part to sums in global memory, and waits until it has been read.
__device__ __forceinline__ void start_to_add(float* sums, const float* sPart) {
    ptx::cp_reduce_async_bulk_add_f32(sums, shared_address(sPart), kQueryPartElements * sizeof(float));
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read();
}

// What this thread adds comes after what so many others have added before.
__device__ __forceinline__ void wait_for_turn(const int32_t* turn, int32_t num_before) {
    while (ptx::ld_acquire_s32(turn) < num_before) {
    }
    ptx::fence_proxy_async();
}

// After all that this thread has added.
__device__ __forceinline__ void pass_turn_on(int32_t* turn) {
    ptx::cp_async_bulk_wait_group();
    ptx::fence_proxy_async();
    ptx::red_release_add_s32(turn, 1);
}

// A warp's 16 rows of a part, from 8 * kFirstTile columns of an accumulator on; zeros where it has none. sPart: its address.
template <int kFirstTile, int kNumTiles>
__device__ __forceinline__ void store_rows_of_part(uint32_t sPart, const float (&rC)[1][kNumTiles][4], int warp,
                                                   int lane) {
    sPart += accumulator_column(lane) * sizeof(float);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp * kMmaM + accumulator_row(lane) + 8 * half;
#pragma unroll
        for (int block = 0; block < kQueryPartDims / kMmaN; ++block) {
            const bool exists = kFirstTile + block < kNumTiles;
            const auto& tile = rC[0][exists ? kFirstTile + block : kNumTiles - 1];
            ptx::st_shared_v2_f32(sPart + query_part_offset(row, block) * sizeof(float), exists ? tile[2 * half] : 0.0f,
                                  exists ? tile[2 * half + 1] : 0.0f);
        }
    }
}

// Writes dK or dV of a warp's 16 keys, from first_key of the tile on, times factor; or adds them to `sums`.
template <DataType kDataType, typename Config, int kTilesD>
__device__ __forceinline__ void store_key_rows(const HeadsView<uint16_t>& view, const HeadsView<float>& sums,
                                               const KeysOfWork<Config>& keys, float (&rC)[1][kTilesD][4],
                                               int first_key, int lane, float factor) {
#pragma unroll
    for (auto& tile : rC[0]) {
#pragma unroll
        for (float& number : tile) number *= factor;
    }
    const int32_t own_key = keys.first_key + first_key;
    if (sums.data == nullptr) {
        store_accumulators<kDataType>(rC, lane, view.head_dim, [&](int key) -> uint16_t* {
            if (own_key + key >= keys.num_keys) return nullptr;
            return row_pointer(view, keys.batch, keys.head, keys.sequence_begin + own_key + key);
        });
        return;
    }
    for_own_rows<1>(lane, [&](int, int half, int key) {
        if (own_key + key >= keys.num_keys) return;
        float* gRow = row_pointer(sums, keys.batch, keys.head, keys.sequence_begin + own_key + key);
        store_exact(gRow, rC[0], half, lane, view.head_dim, AddPair{});
    });
}

// A warp that adds a consumer's parts of dQ to the sums, and those of dK and dV where CTAs share a tile
// of keys. Where turns count, those of the first keys and of the first shares are added first; a CTA only ever waits for
// CTAs that have claimed theirs before, and for itself.
template <typename Config>
__device__ __forceinline__ void add_parts(BackwardStorageSm90<Config>& shared, const AttentionBackwardParams& params,
                                          int consumer, int lane) {
    constexpr int kParts = Config::kQueryParts;
    // Consumers have a part of dQ each, or add to the same one after the other.
    const int part = Config::kShareGradients ? consumer : 0, others_before = Config::kShareGradients ? 0 : consumer;
    const bool in_order = params.turns != nullptr;
    Ring<1> ring(shared.part[consumer]);
    const auto add = [&](float* sums) {
        start_to_add(sums, shared.sPart[consumer]);
        ring.release_by_thread();
    };
    for_work(shared, lane, [&](const KeysOfWork<Config>& keys) {
        if (lane != 0) return;
        const int32_t tile = keys.first_key / Config::kBlockN;
        keys.for_steps([&](int32_t head, int32_t row_tile) {
            const int64_t sums_tile = int64_t{keys.first_sums_tile + row_tile} * params.query.heads + head;
            ring.wait_full();
            if (in_order) {
                const int32_t first_tile = keys.window.keys_of(row_tile * Config::kBlockM).begin / Config::kBlockN;
                wait_for_turn(params.turns + sums_tile, (tile - first_tile) * Config::kNumConsumers + others_before);
            }
            add(params.query_sums + (sums_tile * kParts + part) * kQueryPartElements);
            if (in_order) pass_turn_on(params.turns + sums_tile);
        });
        if (!keys.is_shared()) return;
        int32_t* turn = params.key_turns + int64_t{keys.shared_tile} * Config::kNumConsumers + consumer;
        for (int i = 0; i < Config::kKeyPartsOfConsumer; ++i) {
            ring.wait_full();
            if (in_order && i == 0) wait_for_turn(turn, keys.share);
            const int64_t key_part = Config::key_part(consumer, i);
            add(params.key_sums + (keys.shared_tile * int64_t{Config::kKeyParts} + key_part) * kQueryPartElements);
        }
        if (in_order) pass_turn_on(turn);
    });
    if (lane == 0) ptx::cp_async_bulk_wait_group();  // shared memory lives until the copies are over
}

}  // namespace fastattn
