// The rows of a tile are queries times the heads of a group: row = query * group + head in group. What a lane needs to
// know of its two rows, to make scores of Q·Kᵀ.
#pragma once

#include <cstdint>

#include "decode/key_bits.cuh"
#include "decode/split_plan.h"
#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "device/softcap.cuh"
#include "device/softmax.cuh"

namespace fastattn {

struct QueryRow {
    int32_t query, head;

    __device__ __forceinline__ QueryRow(const DecodeParams& params, int32_t kv_head, int32_t row)
        : query(row / max(params.group, 1)), head(kv_head * params.group + row % max(params.group, 1)) {}
};

// What the rows of a tile have in common: in shared memory, since registers are scarce.
struct CommonMask {
    KeyRange all;  // keys that every row sees, of those that exist
    int32_t tree;  // the first key that a tree mask tells of
    int32_t batch;
};

// Of one warp, which has 16 rows of a tile.
struct PackedRows {
    const DecodeParams& decode;
    const ScoreParams& params;
    int32_t position[2];  // of the lane's upper and lower row
    KeyRange sees[2];     // empty for rows that do not exist; a tree mask hides some of them
    float slope[2];
    KeyRange some;  // keys that some row of the tile sees, of those that exist
    const CommonMask& common;

    // The tile has tile_rows rows from first_row on; the warp's are those from first_of_warp on. Thread 0 writes `common`.
    __device__ __forceinline__ PackedRows(const DecodeParams& decode, const CachedSequence& tokens, int32_t batch,
                                          int32_t kv_head, int32_t first_row, int32_t tile_rows, int32_t first_of_warp,
                                          CommonMask& common, int lane)
        : decode(decode), params(decode.scores), common(common) {
        const int32_t num_queries = decode.sequence.num_queries, num_rows = num_queries * decode.group;
        const Window window{tokens.total, tokens.total - num_queries, params.window_left, params.window_right};
        const int32_t last_row = min(first_row + tile_rows, num_rows) - 1;
        for_own_rows<1>(lane, [&](int, int half, int row_of_warp) {
            const int32_t row = first_of_warp + row_of_warp;
            const QueryRow own(decode, kv_head, row);
            const bool exists = row <= last_row;
            position[half] = own.query + window.offset;
            sees[half] = exists ? window.keys_of(own.query) : KeyRange{0, 0};
            slope[half] = 0;
            if (exists && params.alibi_slopes != nullptr) {
                slope[half] = params.alibi_slopes[batch * params.alibi_batch_stride + own.head];
            }
        });
        const KeyRange first = window.keys_of(QueryRow(decode, kv_head, first_row).query);
        const KeyRange last = window.keys_of(QueryRow(decode, kv_head, last_row).query);
        some = {first.begin, max(last.end, first.begin)};
        if (threadIdx.x == 0) {
            const int32_t end = decode.tree_mask.data != nullptr ? min(first.end, window.offset) : first.end;
            common = {{last.begin, end}, window.offset, batch};
        }
        if (num_rows == 0) some = {tokens.total, tokens.total};
    }

    // Those of kKeys keys that the lane's upper and lower row see. `present`: those that are there. All lanes of the warp
    // call it.
    template <int kKeys>
    __device__ __forceinline__ uint2 seen(uint32_t present, int32_t first_key, int lane) const {
        const auto of_row = [&](int half) {
            uint32_t keys = present & keys_between<kKeys>(sees[half].begin - first_key, sees[half].end - first_key);
            if (decode.tree_mask.data != nullptr) keys &= seen_in_tree<kKeys>(half, keys, first_key, lane);
            return keys;
        };
        return {of_row(0), of_row(1)};
    }

    // Whether rows differ in what they see of `num_keys` keys.
    __device__ __forceinline__ bool differ(int32_t first_key, int32_t end_key) const {
        return first_key < common.all.begin || end_key > common.all.end;
    }

    // Whether every row sees each of kKeys keys.
    template <int kKeys>
    __device__ __forceinline__ bool see_all(uint32_t present, int32_t first_key) const {
        return present == kAllKeys<kKeys> && !differ(first_key, first_key + kKeys);
    }

    // Turns Q·Kᵀ, each row times its factor, into scores in nats, -inf where a row does not see a key.
    template <int kTilesN>
    __device__ __forceinline__ void to_scores(float (&rS)[1][kTilesN][4], const float (&factor)[2], uint32_t present,
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
            for_each(rS, [&](int n, int e, float s) {
                const int32_t key = first_key + n * kMmaN + column + e % 2;
                return s - slope[e / 2] * static_cast<float>(abs(position[e / 2] - key));
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
    // Those of `keys` that the tree mask lets the row see. Of the lanes that share a row each asks about some of them.
    template <int kKeys>
    __device__ __forceinline__ uint32_t seen_in_tree(int half, uint32_t keys, int32_t first_key, int lane) const {
        const TreeMaskView& mask = decode.tree_mask;
        const int32_t query = position[half] - common.tree;
        const uint8_t* row = mask.data + common.batch * mask.batch_stride + query * mask.query_stride;
        uint32_t found = 0;
#pragma unroll 1
        for (int key = lane % kLanesPerRow; key < kKeys; key += kLanesPerRow) {
            const int32_t token = first_key + key - common.tree;
            const bool is_asked = (keys >> key & 1) != 0;
            if (is_asked && (token < 0 || __ldg(row + token * mask.token_stride) != 0)) found |= 1u << key;
        }
#pragma unroll
        for (int distance = 1; distance < kLanesPerRow; distance *= 2) {
            found |= __shfl_xor_sync(0xffffffff, found, distance);
        }
        return found;
    }

    template <int kTilesN, typename Function>
    __device__ __forceinline__ static void for_each(float (&rS)[1][kTilesN][4], Function&& function) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) rS[0][n][e] = function(n, e, rS[0][n][e]);
        }
    }
};

}  // namespace fastattn
