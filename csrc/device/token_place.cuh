// Where one token of a cache lies.
//
// Two look-ups find it. Attention's (device/paged_rows.cuh) goes through the pages of one sequence, whose table is
// contiguous and whose row of the table a CTA finds once. Decoding's (decode/cache_tokens.cuh) also knows contiguous
// caches and tables with strides, and a warp goes from one sequence to the next.
#pragma once

#include <cstdint>

namespace fastattn {

// Its block of the cache (a page, or a contiguous sequence), negative if the token is absent, and its row there.
struct TokenPlace {
    int32_t block, row;

    __device__ __forceinline__ bool is_present() const { return block >= 0; }
};

// `page` is what the table holds, which may be anything: a token whose page does not exist is absent.
__device__ __forceinline__ TokenPlace place_in_page(int32_t page, int32_t num_pages, int32_t row) {
    return {page < num_pages ? page : -1, row};
}

}  // namespace fastattn
