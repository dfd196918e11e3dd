// The rows of a tile, and their scores from Q·Kᵀ. A KV head has one row for each pair of a query (a token) and a query
// head that reads the KV head. group is the number of these heads: row = query * group + head in group.
#pragma once

#include <cstdint>

#include "decode/key_bits.cuh"
#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "device/softcap.cuh"
#include "device/softmax.cuh"
#include "scheduler/decode_splits.h"

namespace fastattn {

struct QueryRow {
    int32_t query, head;

    FASTATTN_DEVICE QueryRow(const DecodeParams& params, int32_t kv_head, int32_t row)
        : query(params.by_group.quotient(row)), head(kv_head * params.group + row - query * params.group) {}
};

struct alignas(16) RowFacts {
    KeyRange sees;  // empty for rows that do not exist; a tree mask may hide some of these keys
    int32_t position;
    float slope;
};

// The facts of a tile's rows, kept in shared memory, because registers are scarce and few steps need them.
template <int kRows>
struct TileMask {
    RowFacts rows[kRows];
    KeyRange all;  // existing keys that every row sees
    int32_t tree;  // the first key of the tree mask
    int32_t batch;
};

// The 16 rows of a tile that a warp computes.
template <int kRows>
struct PackedRows {
    const DecodeParams& decode;
    const ScoreParams& params;
    const TileMask<kRows>& mask;
    const RowFacts* upper;  // the lane's upper row; its lower row is kLowerRow rows further
    KeyRange some;          // existing keys that some row of the tile sees

    // first_row: the tile's first row among the KV head's rows. first_of_warp: the warp's first row in the tile. Called
    // by all threads of the CTA. `mask` is complete after the next barrier.
    FASTATTN_DEVICE PackedRows(const DecodeParams& decode, const CachedSequence& tokens, int32_t batch, int32_t kv_head,
                               int32_t first_row, int first_of_warp, TileMask<kRows>& mask, int lane)
        : decode(decode), params(decode.scores), mask(mask), upper(mask.rows + first_of_warp + lane / kLanesPerRow) {
        const int32_t num_queries = decode.sequence.num_queries, num_rows = num_queries * decode.group;
        const Window window = window_of(params, num_queries, tokens.total);
        const int32_t last_row = min(first_row + kRows, num_rows) - 1;
        if (threadIdx.x < kRows) {
            const int32_t row = first_row + static_cast<int32_t>(threadIdx.x);
            const QueryRow own(decode, kv_head, row);
            RowFacts facts{{0, 0}, own.query + window.offset, 0.0f};
            if (row <= last_row) {
                facts.sees = window.keys_of(own.query);
                if (params.alibi_slopes != nullptr) {
                    facts.slope = params.alibi_slopes[batch * params.alibi_batch_stride + own.head];
                }
            }
            mask.rows[threadIdx.x] = facts;
        }
        const KeyRange first = window.keys_of(QueryRow(decode, kv_head, first_row).query);
        const KeyRange last = window.keys_of(QueryRow(decode, kv_head, max(last_row, 0)).query);
        some = {first.begin, max(last.end, first.begin)};
        if (threadIdx.x == 0) {
            const int32_t end = decode.tree_mask.data != nullptr ? min(first.end, window.offset) : first.end;
            mask.all = {last.begin, end};
            mask.tree = window.offset;
            mask.batch = batch;
        }
        if (num_rows == 0) some = {tokens.total, tokens.total};
    }

    // Returns which of kKeys keys the lane's upper row (x) and lower row (y) see, as one bit for each key. `present`:
    // the keys that exist. Called by all lanes of the warp.
    template <int kKeys>
    FASTATTN_DEVICE uint2 seen(uint32_t present, int32_t first_key, int lane) const {
        uint32_t seen[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const KeyRange sees = upper[half * kLowerRow].sees;
            seen[half] = present & keys_between<kKeys>(sees.begin - first_key, sees.end - first_key);
        }
        if (decode.tree_mask.data != nullptr) {
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {  // swaps the rows twice: registers have no index
                const uint32_t own = seen_in_tree<kKeys>(half, seen[0], first_key, lane);
                seen[0] = seen[1];
                seen[1] = own;
            }
        }
        return {seen[0], seen[1]};
    }

    // Returns whether some row may not see all of the keys [first_key, end_key).
    FASTATTN_DEVICE bool differ(int32_t first_key, int32_t end_key) const {
        return first_key < mask.all.begin || end_key > mask.all.end;
    }

    // Returns whether all kKeys keys exist, and every row sees them.
    template <int kKeys>
    FASTATTN_DEVICE bool see_all(uint32_t present, int32_t first_key) const {
        return present == kAllKeys<kKeys> && !differ(first_key, first_key + kKeys);
    }

    // Turns Q·Kᵀ, each row times its factor, into scores in nats, -inf where a row does not see a key.
    template <int kTilesN>
    FASTATTN_DEVICE void to_masked_scores(float (&rS)[1][kTilesN][4], const float (&factor)[2], uint32_t present,
                                          int32_t first_key, int lane) const {
        const float softcap = params.softcap;
        if (softcap > 0) {
            const float scale[2] = {params.scale_over_softcap * factor[0], params.scale_over_softcap * factor[1]};
            for_each(rS, [&](int, int e, float s) { return softcap * tanh_of(s * scale[e / 2]); });
        } else {
            const float scale[2] = {params.scale * factor[0], params.scale * factor[1]};
            for_each(rS, [&](int, int e, float s) { return s * scale[e / 2]; });
        }
        const int column = accumulator_column(lane);
        if (params.alibi_slopes != nullptr) {
            const RowFacts facts[2] = {upper[0], upper[kLowerRow]};
            for_each(rS, [&](int n, int e, float s) {
                const int32_t key = first_key + n * kMmaN + column + e % 2;
                return s - facts[e / 2].slope * static_cast<float>(abs(facts[e / 2].position - key));
            });
        }
        constexpr int kKeys = kTilesN * kMmaN;
        if (see_all<kKeys>(present, first_key)) return;
        const uint2 keys = seen<kKeys>(present, first_key, lane);
        const uint32_t bits[2] = {keys.x >> column, keys.y >> column};
        for_each(
            rS, [&](int n, int e, float s) { return (bits[e / 2] & 1u << (n * kMmaN + e % 2)) != 0 ? s : -kInfinity; });
    }

  private:
    static constexpr int kLowerRow = kMmaM / 2;

    // Returns which of `keys` the tree mask lets the row see. The lanes of a row read alternate bytes of the mask.
    template <int kKeys>
    FASTATTN_DEVICE uint32_t seen_in_tree(int half, uint32_t keys, int32_t first_key, int lane) const {
        const TreeMaskView& tree = decode.tree_mask;
        const int32_t query = upper[half * kLowerRow].position - mask.tree;
        const uint8_t* row = tree.data + mask.batch * tree.batch_stride + query * tree.query_stride;
        uint32_t found = 0;
#pragma unroll 1
        for (int key = lane % kLanesPerRow; key < kKeys; key += kLanesPerRow) {
            const int32_t token = first_key + key - mask.tree;
            const bool is_asked = (keys >> key & 1) != 0;
            if (is_asked && (token < 0 || row[token * tree.token_stride] != 0)) found |= 1u << key;
        }
#pragma unroll
        for (int distance = 1; distance < kLanesPerRow; distance *= 2) {
            found |= __shfl_xor_sync(0xffffffff, found, distance);
        }
        return found;
    }

    template <int kTilesN, typename Function>
    FASTATTN_DEVICE static void for_each(float (&rS)[1][kTilesN][4], Function&& function) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) rS[0][n][e] = function(n, e, rS[0][n][e]);
        }
    }
};

}  // namespace fastattn
