// Loads keys and values into a ring. A warp looks up the locations of a step's keys, starts to copy the keys, and later
// starts to copy their values. New tokens are read from k_new and v_new instead of the cache, and appended to the
// cache.
#pragma once

#include <cstdint>

#include "decode/cache_tokens.cuh"
#include "decode/new_tokens.cuh"
#include "device/ptx/cp_async.cuh"

namespace fastattn {

// The keys [begin_key, end_key) of one head of one sequence, which a CTA takes.
struct HeadKeys {
    int32_t batch, kv_head;
    int32_t begin_key, end_key;
    int32_t first_new;  // the first new key
    bool stores_new;    // whether this CTA appends the new tokens to the cache
};

// A ring of K and V in shared memory, with the scales and the presence of its keys.
template <typename Config>
struct alignas(128) KeyRing {
    char data[Config::kRingBytes];                                         // stages of K and V alternate, swizzled
    uint32_t present[Config::kStages];                                     // one bit for each key
    float scales[Config::k8Bit ? Config::kStages : 1][2][Config::kWarpN];  // of K and of V
    // The keys that the group of warps takes. In shared memory because registers are scarce. The warp that loads reads
    // all of it; all warps read end_key, where their loop ends.
    HeadKeys head;

    FASTATTN_DEVICE char* keys(int stage) { return data + 2 * stage * Config::kStageBytes; }
    FASTATTN_DEVICE char* values(int stage) { return data + (2 * stage + 1) * Config::kStageBytes; }
    FASTATTN_DEVICE float* key_scales(int stage) { return scales[Config::k8Bit ? stage : 0][0]; }
    FASTATTN_DEVICE float* value_scales(int stage) { return scales[Config::k8Bit ? stage : 0][1]; }
};

// Loads the keys and values of a group of warps, step by step. A step has kWarpN keys of one head, and starts kBlockN
// keys after the previous step.
template <typename Config, DataType kDataType>
class RingLoader {
  public:
    FASTATTN_DEVICE RingLoader(const DecodeParams& params, KeyRing<Config>& ring, int lane)
        : params_(params),
          ring_(ring),
          lane_(lane),
          are_adjacent_(params.layout.block_table == nullptr || params.layout.block_rows % kAdjacentKeys == 0) {}

    // Prepares the first step, whose keys start at first_key.
    FASTATTN_DEVICE void begin(const HeadKeys& head, int32_t first_key) {
        if (lane_ == 0) ring_.head = head;
        __syncwarp();  // waits until all lanes can read the head
        next_page_ = page_of(first_key);
    }

    // Starts to load K of the step whose keys start at first_key. Also looks up the page of the next step, so that the
    // next call does not wait for the block table.
    FASTATTN_DEVICE void load_keys(int stage, int32_t first_key) {
        if (first_key < ring_.head.end_key) {
            const int32_t page = next_page_;
            next_page_ = page_of(first_key + Config::kBlockN);
            tokens_ = tokens_in(page, first_key);
            if (lane_ == 0) ring_.present[stage] = tokens_.present;
            const Head cache(params_.k_cache, ring_.head.kv_head);
            load_tile(cache, params_.k_new, &params_.rotary, ring_.keys(stage), ring_.key_scales(stage), first_key);
        }
        ptx::cp_async_commit_group();
    }

    // Starts to load V of the step for which load_keys() was called last.
    FASTATTN_DEVICE void load_values(int stage, int32_t first_key) {
        if (first_key < ring_.head.end_key) {
            const Head cache(params_.v_cache, ring_.head.kv_head);
            load_tile(cache, params_.v_new, /*rotary=*/nullptr, ring_.values(stage), ring_.value_scales(stage),
                      first_key);
        }
        ptx::cp_async_commit_group();
    }

  private:
    static constexpr int kWarpN = Config::kWarpN;
    using Head = CacheHead<Config::kFormat>;

    // The keys of a step: the location of the key that this lane looks up, one bit for each key that exists, and one
    // for each that is new.
    struct Tokens {
        TokenLocation location;
        uint32_t present, new_keys;
    };

    // Returns the key that this lane looks up: the lane's own key or, if kAdjacentKeys keys are always adjacent, the
    // first of the kAdjacentKeys keys around it.
    FASTATTN_DEVICE int32_t own_key(int32_t first_key) const {
        const int key = lane_ % kWarpN;
        return first_key + (are_adjacent_ ? key / kAdjacentKeys * kAdjacentKeys : key);
    }

    // Returns the block table's entry for own_key(first_key), -1 if the step does not need it.
    FASTATTN_DEVICE int32_t page_of(int32_t first_key) const {
        const int32_t key = own_key(first_key);
        const bool is_wanted = key < ring_.head.end_key && (are_adjacent_ || key >= ring_.head.begin_key);
        return params_.layout.block_table != nullptr && is_wanted ? page_in_table(params_.layout, ring_.head.batch, key)
                                                                  : -1;
    }

    FASTATTN_DEVICE Tokens tokens_in(int32_t page, int32_t first_key) const {
        const HeadKeys& head = ring_.head;
        const TokenLocation location = location_of(params_.layout, head.batch, own_key(first_key), page);
        const uint32_t wanted = keys_between<kWarpN>(head.begin_key - first_key, head.end_key - first_key);
        const uint32_t present = __ballot_sync(0xffffffff, location.is_present()) & wanted;
        return {location, present, present & keys_between<kWarpN>(head.first_new - first_key, kWarpN)};
    }

    FASTATTN_DEVICE void load_tile(const Head& cache_head, const HeadsView<const uint16_t>& new_tokens,
                                   const RotaryParams* rotary, char* sTile, float* sScales, int32_t first_key) const {
        const auto [location, present, new_keys] = tokens_;
        const WarpTile<Config::kCacheDim, kWarpN, /*kWholeChunks=*/!Config::k8Bit> tile(sTile, lane_);
        const CacheView& cache = cache_head.cache;
        const int row_bytes = cache.head_dim * Config::kElementBytes;
        const bool is_present = (present >> lane_ % kWarpN & 1) != 0;
        const TokenLocation own{location.block, location.row + (are_adjacent_ ? lane_ % kAdjacentKeys : 0)};
        if (are_adjacent_ && present == kAllKeys<kWarpN> && new_keys == 0) {
            tile.load_adjacent(cache_head.row(location), cache.row_chunks, row_bytes);
        } else {
            tile.load_rows(is_present ? cache_head.row(own) : nullptr, row_bytes, new_keys);
        }
        float* gScale = nullptr;
        if constexpr (Config::k8Bit) {
            if (cache_head.has_unit_scales()) {
                // quantise_new_tokens() below stores the scales of new tokens.
                if (lane_ < kWarpN && (new_keys >> lane_ & 1) == 0) sScales[lane_] = 1.0f;
            } else {
                if (is_present) gScale = cache_head.scale(own);
                load_scales<kWarpN>(sScales, gScale, new_keys, lane_);
            }
        }
        if (new_keys == 0) return;
        const HeadKeys& head = ring_.head;
        const uint16_t* gNew = row_pointer(new_tokens, head.batch, head.kv_head, first_key - head.first_new);
        char* gRow = head.stores_new && is_present ? cache_head.row(own) : nullptr;
        if constexpr (Config::k8Bit) {
            quantise_new_tokens<Config::kFormat, kDataType, Config::kHeadDim, kWarpN>(
                sTile, sScales, gNew, new_tokens.row_stride, cache.head_dim, new_keys, rotary, first_key, gRow, gScale,
                cache_head, lane_);
        } else {
            load_new_tokens<kDataType>(tile, gNew, new_tokens.row_stride, cache.head_dim, new_keys, rotary, first_key,
                                       gRow);
        }
    }

    const DecodeParams& params_;
    KeyRing<Config>& ring_;
    const int lane_;
    const bool are_adjacent_;  // whether kAdjacentKeys keys are always in one block, in order
    Tokens tokens_{};          // of the step that is being loaded
    int32_t next_page_ = -1;   // the next step's entry of the block table
};

}  // namespace fastattn
