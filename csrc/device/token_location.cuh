// Locates one token in a cache of keys and values.
//
// Two look-ups use this file. The look-up of attention (device/paged_rows.cuh) serves the tiles of one sequence: the
// block table is contiguous, and a CTA finds the sequence's row of the table once. The look-up of decoding
// (decode/cache_tokens.cuh) goes from one sequence to the next, and also through contiguous caches and through tables
// with strides.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

// A token's block of the cache and its row in this block. A block is a page or, in a contiguous cache, a sequence.
// `block` is negative if the token is absent.
struct TokenLocation {
    int32_t block, row;

    FASTATTN_DEVICE bool is_present() const { return block >= 0; }
};

// Returns the location of token `key` of a sequence, which is in the sequence's page_idx-th page. `page` is the block
// table's entry for this page, and may be any number: if no such page exists, the token is absent.
FASTATTN_DEVICE TokenLocation location_in_page(int32_t page, int32_t num_pages, int32_t key, int32_t page_idx,
                                               int32_t page_rows) {
    return {page < num_pages ? page : -1, key - page_idx * page_rows};
}

}  // namespace fastattn
