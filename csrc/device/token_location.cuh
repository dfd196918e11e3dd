// Finds one token of a cache.
//
// There are two look-ups. Attention's (device/paged_rows.cuh) serves the tiles of one sequence: the table is
// contiguous, and a CTA finds the sequence's row of the table once. Decoding's (decode/cache_tokens.cuh) goes from one
// sequence to the next, also through contiguous caches and through tables with strides.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

// A token's block of the cache (a page, or a contiguous sequence), negative if it is absent, and its row in the block.
struct TokenLocation {
    int32_t block, row;

    FASTATTN_DEVICE bool is_present() const { return block >= 0; }
};

// Returns the location of token `key` of a sequence, which the page_idx-th page holds. `page` is the table's entry for
// that page, which may be anything: a token whose page does not exist is absent.
FASTATTN_DEVICE TokenLocation location_in_page(int32_t page, int32_t num_pages, int32_t key, int32_t page_idx,
                                               int32_t page_rows) {
    return {page < num_pages ? page : -1, key - page_idx * page_rows};
}

}  // namespace fastattn
