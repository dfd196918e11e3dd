// In which order the CTAs of an attention kernel take the tiles of query rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/params.h"

#ifdef __CUDACC__
#define FASTATTN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTATTN_HOST_DEVICE inline
#endif

namespace fastattn {

FASTATTN_HOST_DEVICE constexpr int32_t ceil_div(int32_t dividend, int32_t divisor) {
    return dividend / divisor + (dividend % divisor != 0);
}

struct QueryTile {
    int32_t batch, head, idx;
};

// CTAs start in the order of their index. Heads form groups whose keys and values fit in the L2 cache together; groups
// come one after the other. Within a group the last tiles of all heads come first: under a causal mask these are the
// longest, and what is left at the end, when SMs run out of work, is short.
FASTATTN_HOST_DEVICE QueryTile query_tile(uint32_t cta, const AttentionForwardParams& params, int32_t num_tiles) {
    const uint32_t heads = params.query.heads, group = params.heads_per_group;
    const uint32_t ctas_per_group = num_tiles * group;
    const uint32_t first_head = cta / ctas_per_group * group;  // counted over batch and heads
    const uint32_t heads_left = params.query.batch * heads - first_head;
    const uint32_t heads_here = heads_left < group ? heads_left : group;
    const uint32_t cta_in_group = cta % ctas_per_group;
    const uint32_t head = first_head + cta_in_group % heads_here;
    return {static_cast<int32_t>(head / heads), static_cast<int32_t>(head % heads),
            num_tiles - 1 - static_cast<int32_t>(cta_in_group / heads_here)};
}

// How many query heads, counted over batch and heads, may run side by side.
inline int32_t heads_per_group(const HeadsView<const uint16_t>& query, const HeadsView<const uint16_t>& key) {
    constexpr int64_t kCacheBytes = 16 << 20;  // fits in one of the two 20 MB partitions of an A100's L2
    const int64_t key_value_bytes = std::max<int64_t>(1, int64_t{4} * key.rows * key.head_dim);
    const int64_t key_heads = std::max<int64_t>(1, kCacheBytes / key_value_bytes);
    const int64_t all_heads = int64_t{query.batch} * query.heads;
    return static_cast<int32_t>(std::min(all_heads, key_heads * (query.heads / key.heads)));
}

}  // namespace fastattn
