// The order in which the CTAs of an attention kernel take work tiles: tiles of query rows, or of keys in the backward
// pass.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/min_max.h"
#include "host/params.h"

namespace fastattn {

struct WorkTile {
    int32_t batch, head, position;
};

// Returns the work tile of a CTA; CTAs start in the order of their index. Heads form groups whose data fit in the L2
// cache together, and groups come one after the other. Within a group, the first tiles of all heads come before all
// second tiles, and so on. Callers put long tiles first, so that short ones are left when SMs run out of work.
FASTATTN_HOST_DEVICE WorkTile work_tile(uint32_t cta, uint32_t batch, uint32_t heads, uint32_t heads_per_group,
                                        uint32_t num_tiles) {
    const uint32_t ctas_per_group = num_tiles * heads_per_group;
    const uint32_t first_head = cta / ctas_per_group * heads_per_group;  // counted over batch and heads
    const uint32_t heads_left = batch * heads - first_head;
    const uint32_t heads_here = heads_left < heads_per_group ? heads_left : heads_per_group;
    const uint32_t cta_in_group = cta % ctas_per_group;
    const uint32_t head = first_head + cta_in_group % heads_here;
    return {static_cast<int32_t>(head / heads), static_cast<int32_t>(head % heads),
            static_cast<int32_t>(cta_in_group / heads_here)};
}

// Returns whether persistent CTAs should claim the forward pass's work tiles from a counter. Claiming pays if there are
// more work tiles than CTAs, and CTAs do not advance alike: a mask or packing makes the tiles' lengths differ, or the
// call is a block of a larger one, beside which a transfer between GPUs may hold some SMs. With packed sequences, at
// least half of the counted tiles must exist, because claiming a tile that does not exist takes a trip to L2 too.
inline bool claiming_pays(const AttentionForwardParams& params, int32_t block_m, int64_t num_ctas) {
    const int64_t heads = int64_t{params.query.heads} * params.query.batch;
    const int64_t num_tiles = heads * ceil_div(params.query.rows, block_m);
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    const int64_t num_real = is_packed ? int64_t{params.packed.total_q} / block_m * params.query.heads : num_tiles;
    const ScoreParams& scores = params.scores;
    const bool is_masked = scores.has_window() || scores.ranges.data != nullptr;
    const bool is_block = scores.query_offset != ScoreParams::kLastRowAtLastKey;
    return num_tiles > num_ctas && num_tiles <= 2 * num_real && (is_masked || is_packed || is_block);
}

// Returns how many bytes of data a group of heads may read repeatedly from L2. The L2 cache of an A100 or an H100 has
// two partitions, and each partition holds the data that its SMs read. So data that all SMs read fills both partitions,
// and only half of the cache's bytes count. A fifth of this half is left for data that passes through: 16 MB of 40
// remain.
inline int64_t l2_budget(int64_t l2_bytes) {
    return l2_bytes * 2 / 5;
}

// Returns how many query heads a group has, counted over batch and heads.
inline int32_t heads_per_group(const HeadsView<const uint16_t>& query, const HeadsView<const uint16_t>& key,
                               int64_t l2_bytes) {
    const int64_t key_value_bytes = std::max<int64_t>(1, int64_t{4} * key.rows * key.head_dim);
    const int64_t key_heads = std::max<int64_t>(1, l2_budget(l2_bytes) / key_value_bytes);
    const int64_t all_heads = int64_t{query.batch} * query.heads;
    return static_cast<int32_t>(std::min(all_heads, key_heads * (query.heads / key.heads)));
}

// Returns how many key heads a group has in the backward pass, where a tile of keys goes through Q, dO and the sums of
// dQ.
inline int32_t key_heads_per_group(const HeadsView<const uint16_t>& query, const HeadsView<const uint16_t>& key,
                                   int64_t l2_bytes) {
    const int64_t group_size = query.heads / std::max(key.heads, 1);
    const int64_t walked_bytes = std::max<int64_t>(1, int64_t{8} * query.rows * query.head_dim * group_size);
    const int64_t all_heads = int64_t{key.batch} * key.heads;
    return static_cast<int32_t>(std::max<int64_t>(1, std::min<int64_t>(l2_budget(l2_bytes) / walked_bytes, all_heads)));
}

// With ordered addition, at least this many CTAs work on one head, each a step behind the one before, so that a byte
// from HBM serves all of them. Fewer CTAs work on a head if L2 holds the data of all heads of the group. (With 128
// dims, 132 CTAs read and add about 6 TB/s, more than HBM delivers.)
inline constexpr int32_t kCtasOfOrderedHead = 4;

// Returns how many key heads form a group (work_tile()) if num_sms persistent CTAs claim tiles of block_n keys. Without
// ordered addition, a group has about two tiles for each CTA, or more if L2 holds more heads. All long tiles of a group
// come first, so that only short tiles are left when CTAs run out of work. With ordered addition, a group has a head
// for every kCtasOfOrderedHead CTAs, or more heads if L2 holds them, because CTAs wait less for each other if they work
// on more heads.
inline int32_t claimed_key_heads_per_group(const HeadsView<const uint16_t>& query, const HeadsView<const uint16_t>& key,
                                           int64_t l2_bytes, int32_t block_n, int32_t num_sms, bool is_ordered) {
    const int64_t all_heads = int64_t{key.batch} * key.heads;
    const int64_t at_a_time =
        is_ordered ? num_sms / kCtasOfOrderedHead : 2 * int64_t{num_sms} / std::max(ceil_div(key.rows, block_n), 1);
    return static_cast<int32_t>(
        std::min(all_heads, std::max<int64_t>(at_a_time, key_heads_per_group(query, key, l2_bytes))));
}

}  // namespace fastattn
