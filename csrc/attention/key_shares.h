// Which keys a CTA takes where whole tiles of query rows would leave CTAs idle: 17 to 512 queries over a long cache, or
// packed sequences of unlike lengths.
//
// A piece is what a CTA takes at a time otherwise: a tile of rows. (On Hopper it is that of a cluster, which stands for
// "CTA" in this file.) Its steps are the tiles of keys that its rows see. The steps of all pieces form a line: by
// sequence, then by rows, then by head. CTA c takes steps [c * share, (c + 1) * share), which may be the end of one
// piece, whole ones, and the beginning of another; so the work of CTAs differs by no more than a step. On sm_80, where a
// CTA ends with one piece, it takes all of it or one of its equal parts. What a CTA makes of a piece that it shares with
// others is a part, merged with theirs as device/merge_parts.cuh says.
//
// Each CTA computes this for itself, from the lengths in device memory: it holds in the replay of a CUDA graph too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/part_tree.h"
#include "host/host_device.h"
#include "host/params.h"
#ifdef __CUDACC__
#include "attention/key_tiles.cuh"
#include "device/fragment.cuh"
#endif

namespace fastattn {

// In steps: what it takes to merge a tile's parts. Shares are not smaller than this, and a cut has to save more. A
// prediction, from bytes and the bandwidth of an SM of an H100: not measured.
inline constexpr int32_t kCostOfMerge = 4;
// Dealt whole, so many pieces for each CTA are balanced, and keep keys in the L2 cache that a line would not.
inline constexpr uint32_t kPiecesOfCutCta = 2;
// Sequences times tiles of rows that CTAs count through: of so many, a lane counts 32.
inline constexpr uint32_t kMostEntries = 1024;
// Of the workspace, for each CTA that runs at a time. A CTA that stays needs 2 (see part_tree.h: it has one part of
// each tile). One that ends with a part needs 1, and up to three times as many are launched.
inline constexpr int32_t kMostSlotsPerCta = 1 + kPiecesOfCutCta;

// The most steps that a tile of block_m rows has, as far as the host knows.
inline int64_t most_steps(const AttentionForwardParams& params, int32_t block_m, int32_t block_n) {
    const int64_t of_all_keys = ceil_div(params.key.rows, block_n);
    const int64_t left = params.scores.window_left, right = params.scores.window_right;
    if (left < 0 || right < 0) return of_all_keys;
    return std::min(of_all_keys, (left + right + block_m) / block_n + 2);
}

// Whether CTAs may find that cutting pieces pays: the host knows no lengths of packed sequences, but that their tiles
// are at least as many as all rows together fill. num_entries: pieces, where those of heads side by side count as one.
// num_ctas, and what is a piece, are those of one kernel.
inline bool cuts_may_pay(const AttentionForwardParams& params, int32_t block_m, int32_t block_n, int64_t num_pieces,
                         int64_t num_entries, int64_t num_ctas) {
    if (most_steps(params, block_m, block_n) <= kCostOfMerge) return false;
    const int64_t most_pieces = kPiecesOfCutCta * num_ctas;
    if (params.packed.cu_seqlens_q == nullptr) return num_pieces <= most_pieces;
    const int64_t group = params.query.heads / params.key.heads;
    const int64_t filled = params.packed.total_q * group / block_m * params.key.heads;
    return num_entries <= kMostEntries && filled <= most_pieces;
}

// Rows of the workspace that a launch of num_ctas CTAs may need, each of value_dim values and two sums; 0: none. It
// counts no more pieces for each CTA than a kernel does: heads packed into rows make the fewest, and where a piece is
// that of two CTAs, these count as one. Shares are not shorter than kCostOfMerge steps, so that few steps have few parts.
inline int64_t rows_of_parts(const AttentionForwardParams& params, int32_t block_m, int32_t block_n, int64_t num_ctas) {
    const int64_t group = params.query.heads / params.key.heads;
    const int64_t packed_tiles = (params.query.rows * group + block_m - 1) / block_m;
    const int64_t entries = std::min<int64_t>(packed_tiles, ceil_div(params.query.rows, block_m)) * params.query.batch;
    if (!cuts_may_pay(params, block_m, block_n, packed_tiles * params.query.batch * params.key.heads, entries / 2,
                      num_ctas)) {
        return 0;
    }
    const int64_t tiles = int64_t{ceil_div(params.query.rows, block_m)} * params.query.heads * params.query.batch;
    const int64_t shares = (tiles * most_steps(params, block_m, block_n) + kCostOfMerge - 1) / kCostOfMerge;
    // Where tiles fill the GPU, CTAs may come in pairs, which number their CTAs otherwise.
    const int64_t ctas_with_parts = tiles >= num_ctas ? num_ctas : std::min(num_ctas, shares);
    return ctas_with_parts * kMostSlotsPerCta * block_m;
}

// What a CTA takes. It is in shared memory, where every warp finds it.
struct KeyShare {
    bool is_cut;     // else pieces are dealt whole
    uint32_t piece;  // the share begins in this one, at this step
    int32_t step;
    int32_t count;    // steps, of this CTA
    int32_t per_cta;  // and of all
};

// What a CTA takes where it has a single piece or a part of one.
struct KeyPortion {
    int32_t is_cut, exists;  // not bool: the struct is copied as a whole, and has no bytes that nobody writes
    uint32_t piece;
    int32_t part, num_parts;
};

#ifdef __CUDACC__
// Counts something of all entries: each lane of a warp that of neighbours. An entry is `heads` pieces side by side,
// which have as many steps each.
struct EntryScan {
    uint32_t first, end;  // of this lane
    int64_t own, upto;    // of this lane, and of all up to this lane
    int64_t all;

    template <typename CountOf>
    __device__ __forceinline__ EntryScan(uint32_t num_entries, int lane, CountOf&& count_of) : own(0) {
        const uint32_t per_lane = (num_entries + kWarpSize - 1) / kWarpSize;
        first = min(lane * per_lane, num_entries);
        end = min(first + per_lane, num_entries);
        for (uint32_t entry = first; entry < end; ++entry) own += count_of(entry);
        upto = own;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            const int64_t before = __shfl_up_sync(0xffffffff, upto, distance);
            if (lane >= distance) upto += before;
        }
        all = __shfl_sync(0xffffffff, upto, kWarpSize - 1);
    }

    // The entry that has number `index` of what is counted, 0 <= index < all, and how many it has before that.
    struct Place {
        uint32_t entry;
        int64_t before;
    };

    template <typename CountOf>
    __device__ __forceinline__ Place find(int64_t index, CountOf&& count_of) const {
        Place place{first, index - (upto - own)};
        const bool is_owner = place.before >= 0 && index < upto;
        if (is_owner) {
            for (int64_t count; place.before >= (count = count_of(place.entry)); ++place.entry) place.before -= count;
        }
        const int owner = __ffs(__ballot_sync(0xffffffff, is_owner)) - 1;
        return {__shfl_sync(0xffffffff, place.entry, owner), __shfl_sync(0xffffffff, place.before, owner)};
    }
};

template <typename StepsOf>
__device__ __forceinline__ uint32_t num_pieces_of(const EntryScan& scan, uint32_t heads, StepsOf&& steps_of) {
    uint32_t num_pieces = 0;
    for (uint32_t entry = scan.first; entry < scan.end; ++entry) num_pieces += steps_of(entry) > 0 ? heads : 0;
    return __reduce_add_sync(0xffffffff, num_pieces);
}

// One warp. steps_of(entry): of each of its pieces, 0 where there are no rows; a piece of rows that see no key has one
// step, because some CTA has to say so. Steps for each CTA if pieces are cut, or 0 where that does not pay.
template <typename StepsOf>
__device__ __forceinline__ int32_t steps_per_cta(const EntryScan& steps, uint32_t heads, uint32_t num_ctas,
                                                 StepsOf&& steps_of) {
    const uint32_t num_pieces = num_pieces_of(steps, heads, steps_of);
    int32_t longest = 0;
    for (uint32_t entry = steps.first; entry < steps.end; ++entry) longest = max(longest, steps_of(entry));
    longest = __reduce_max_sync(0xffffffff, longest);
    if (num_pieces == 0 || num_pieces > kPiecesOfCutCta * num_ctas) return 0;
    // The CTA with the most steps, if pieces are cut and if they are not.
    const int64_t most_cut = max((steps.all + num_ctas - 1) / num_ctas, int64_t{kCostOfMerge});
    const int64_t rounds = (num_pieces + num_ctas - 1) / num_ctas;
    const int64_t most_whole = max(int64_t{longest}, rounds * steps.all / num_pieces);
    return most_cut + kCostOfMerge < most_whole ? static_cast<int32_t>(most_cut) : 0;
}

// One warp, for a CTA that stays on its SM and takes one piece after the other.
template <typename StepsOf>
__device__ __forceinline__ KeyShare key_share(uint32_t num_entries, uint32_t heads, uint32_t cta, uint32_t num_ctas,
                                              int lane, StepsOf&& steps_of) {
    const auto steps_of_entry = [&](uint32_t entry) { return int64_t{steps_of(entry)} * heads; };
    const EntryScan steps(num_entries, lane, steps_of_entry);
    KeyShare share{};
    share.per_cta = steps_per_cta(steps, heads, num_ctas, steps_of);
    share.is_cut = share.per_cta > 0;
    const int64_t begin = int64_t{cta} * share.per_cta;
    if (!share.is_cut || begin >= steps.all) return share;
    share.count = static_cast<int32_t>(min(int64_t{share.per_cta}, steps.all - begin));
    const auto [entry, before] = steps.find(begin, steps_of_entry);
    const int32_t of_piece = steps_of(entry);
    share.piece = entry * heads + static_cast<uint32_t>(before / of_piece);
    share.step = static_cast<int32_t>(before % of_piece);
    return share;
}

// One warp, for a CTA that ends with what it has, which is a part of one piece, or all of it. Pieces have as many parts
// as their share of the steps is of num_ctas, rounded down: so these run at a time, but for pieces that are too short
// for a share.
template <typename StepsOf>
__device__ __forceinline__ KeyPortion key_portion(uint32_t num_entries, uint32_t heads, uint32_t cta, uint32_t num_ctas,
                                                  int lane, StepsOf&& steps_of) {
    const EntryScan steps(num_entries, lane, [&](uint32_t entry) { return int64_t{steps_of(entry)} * heads; });
    if (steps_per_cta(steps, heads, num_ctas, steps_of) == 0) return {false, cta < num_entries * heads, cta, 0, 1};
    const auto parts_of_piece = [&](uint32_t entry) {
        const int32_t of_piece = steps_of(entry);
        const auto proportional = static_cast<int32_t>(int64_t{of_piece} * num_ctas / steps.all);
        return of_piece == 0 ? 0 : max(min(proportional, of_piece / kCostOfMerge), 1);
    };
    const auto parts_of_entry = [&](uint32_t entry) { return int64_t{parts_of_piece(entry)} * heads; };
    const EntryScan parts(num_entries, lane, parts_of_entry);
    if (parts.all == num_pieces_of(steps, heads, steps_of)) return {false, cta < num_entries * heads, cta, 0, 1};
    if (cta >= parts.all) return {};
    const auto [entry, before] = parts.find(cta, parts_of_entry);
    const int32_t num_parts = parts_of_piece(entry), of_entry = static_cast<int32_t>(before);
    return {true, true, entry * heads + of_entry / num_parts, of_entry % num_parts, num_parts};
}

// Of a portion, where all rows see num_tiles tiles of keys.
__device__ __forceinline__ Steps steps_of(const KeyPortion& portion, int32_t num_tiles) {
    const auto left_before = [&](int32_t part) {
        return num_tiles - static_cast<int32_t>(int64_t{num_tiles} * part / portion.num_parts);
    };
    return {left_before(portion.part), left_before(portion.part + 1)};
}

// Goes through the pieces of one CTA, or of a cluster.
struct PieceWalk {
    uint32_t place;      // the piece, or where pieces are dealt whole, how many there were before
    int32_t step, left;  // where they are cut: the next step of the piece, and how many are left of the share

    __device__ __forceinline__ explicit PieceWalk(const KeyShare& share)
        : place(share.piece), step(share.step), left(share.count) {}

    // num_tiles: of keys, in this piece.
    __device__ __forceinline__ Steps steps(bool is_cut, int32_t num_tiles) const {
        if (!is_cut) return {num_tiles, 0};
        const int32_t begin = max(num_tiles - step, 0);
        return {begin, max(begin - left, 0)};
    }

    __device__ __forceinline__ void advance(bool is_cut, bool has_rows, int32_t num_tiles) {
        if (!is_cut) {
            ++place;
            return;
        }
        const int32_t of_piece = has_rows ? max(num_tiles, 1) : 0, taken = min(of_piece - step, left);
        left -= taken;
        step += taken;
        if (step == of_piece) {
            step = 0;
            ++place;
        }
    }

    // Of this piece, as CTA `cta` of the line sees it. Where the piece begins and ends, counted from the CTA's own
    // share.
    __device__ __forceinline__ TileParts parts(const KeyShare& share, uint32_t cta, int32_t num_tiles) const {
        const int32_t first = share.count - left - step, last = first + max(num_tiles, 1) - 1;
        const int32_t ctas_before = first < 0 ? ceil_div(-first, share.per_cta) : 0;
        return {ctas_before + last / share.per_cta + 1, static_cast<int32_t>(cta) - ctas_before, 1};
    }
};
#endif

}  // namespace fastattn
