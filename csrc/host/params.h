// The parameters of kernels: plain structs, with shape and strides of every pointer. Strides count elements.
#pragma once

#include <cstdint>

#include "host/divisor.h"
#include "host/host_device.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace fastattn {

using Stream = CUstream_st*;

enum class DataType { kFloat16, kBFloat16 };

inline const char* to_string(DataType dtype) {
    return dtype == DataType::kFloat16 ? "float16" : "bfloat16";
}

// [batch, heads, rows, head_dim] of 16-bit elements. The last dim is contiguous; the base and every other dim's stride
// are multiples of 16 bytes, so that rows can be copied 16 bytes at a time. Rows do not overlap. All heads, or all of
// the batch, may share memory, with a stride of 0.
template <typename Element>
struct HeadsView {
    Element* data;
    int32_t batch, heads, rows, head_dim;
    int64_t batch_stride, head_stride, row_stride;
};

// [batch, heads, rows] fp32, the last dim contiguous: one number for each row of a HeadsView.
struct RowsView {
    float* data;
    int32_t batch, heads, rows;
    int64_t batch_stride, head_stride;
};

// A bias, which is added to scores: [batch, heads, rows, keys], with a stride of 0 in broadcast dims. A kBool bias says
// which keys a row may see.
struct BiasView {
    enum class Kind : int32_t { kNone, kBool, kFloat16, kBFloat16, kFloat32 };
    const void* data;
    Kind kind;
    int64_t batch_stride, head_stride, row_stride, key_stride;
    bool in_pairs;  // the elements of keys 2i and 2i + 1 are adjacent, and aligned to the size of both

    FASTATTN_HOST_DEVICE int64_t element_bytes() const {
        return kind == Kind::kBool ? 1 : kind == Kind::kFloat32 ? 4 : 2;
    }
};

// Packed sequences. With them, the batch of views is the number of sequences, the views' batch stride is 0, and their
// number of rows is an upper bound of all lengths. Kernels do not trust the numbers in cu_seqlens: see
// device/sequence.cuh.
struct PackedParams {
    const int32_t* cu_seqlens_q;  // [batch + 1], or null: dense
    const int32_t* cu_seqlens_k;
    int32_t total_q, total_k;
};

// Strides of pages, and of rows in a page, in chunks of 16 bytes. They have 32 bits, so that an address takes only two
// products.
struct PageStrides {
    uint32_t page, row;
};

// Packed queries over keys in pages. With pages, the batch of the views of keys and values is the number of pages, and
// their number of rows is an upper bound of all lengths. The lengths are differences of cu_seqlens_k. Kernels trust
// neither the lengths nor the block table: see device/paged_rows.cuh.
struct PagedParams {
    const int32_t* block_table;  // [batch, max_pages]; null where keys are not in pages, or there are no pages
    int32_t max_pages, page_size;
    Divisor by_page_size;
    PageStrides key, value;
};

// The workspace of partials. values: [slots, rows of a tile, Dv]. sums: the maximum and the sum of each row, [slots,
// rows of a tile, 2]; see scheduler/partial_tree.h. arrivals: kCombineRounds counters for each CTA; see
// scheduler/arrivals.cuh. All are null where no tile can be split.
struct PartialWorkspace {
    float *values, *sums;
    uint64_t* arrivals;
    uint64_t launch_id;
};

// Ranges of keys, [batch, heads, rows, num, 2] of int32, aligned to 8 bytes: a row sees only the keys of its ranges
// [begin, end). Strides count ranges, and are 0 in broadcast dims. The rows of packed sequences follow each other, and
// the batch stride is then 0. Kernels do not trust the numbers.
inline constexpr int32_t kMostRanges = 4, kMostRowsWithRanges = 192;
struct KeyRangesView {
    const int32_t* data;  // null: rows see all keys
    int32_t batch, heads, num;
    int64_t batch_stride, head_stride;
};

// Returns the index of the first tile of sequence `batch`, which starts at row `begin`, among the tiles of all packed
// sequences. With the batch size and the total number of rows as arguments, returns the number of all tiles. Each
// sequence gets a spare tile, so that its tiles suffice for any length. So the index does not depend on the lengths of
// the sequences before, only on their sum.
template <typename Number>
FASTATTN_HOST_DEVICE constexpr Number first_packed_tile(Number batch, Number begin, int32_t block_m) {
    return begin / block_m + batch;
}

// Which tiles of keys each tile of rows sees through its ranges, as `pitch` entries. The kernel that writes the entries
// defines their format (attention/key_ranges_sm80.cuh, attention/backward_ranges_sm80.cuh). Strides count entries.
struct SeenTiles {
    int32_t* data;
    int32_t block_m, block_n, num_key_tiles, pitch;
    bool is_packed;
    int64_t batch_stride, head_stride;

    // Returns the pitch for attention/backward_ranges_sm80.cuh: two words for every 32 tiles of keys, and two more.
    static int32_t pitch_of_bits(int32_t num_key_tiles) { return 2 * (num_key_tiles / 32 + 1); }

    // Returns the first entry of a tile of rows. `tile` is the tile's number in its sequence, which starts at first_row
    // of the packed tensor.
    FASTATTN_HOST_DEVICE int32_t* of(int32_t batch, int32_t head, int32_t tile, int32_t first_row) const {
        const int64_t idx = tile + (is_packed ? first_packed_tile(batch, first_row, block_m) : 0);
        return data + batch * batch_stride + head * head_stride + idx * pitch;
    }
};

// The position of this call's first row, key and head in a larger call, if this call computes a block of it. Dropout
// depends on positions in the larger call.
struct DropoutOrigin {
    uint32_t row, key, head;  // key % 4 == 0
};

// The parameters that turn Q·Kᵀ into scores and mask them.
struct ScoreParams {
    static constexpr int32_t kUnbounded = INT32_MAX, kLastRowAtLastKey = INT32_MIN;
    float scale;    // of Q·Kᵀ, of any sign
    float softcap;  // 0: none
    float scale_over_softcap;
    // How many keys a row sees before and after its position; kUnbounded: all. A causal mask is window_right = 0.
    int32_t window_left, window_right;
    // Row i has the position of key i + query_offset. kLastRowAtLastKey: the last row has the position of the last key.
    int32_t query_offset = kLastRowAtLastKey;
    BiasView bias;
    KeyRangesView ranges;
    const float* alibi_slopes;  // [batch, heads], or null
    int64_t alibi_batch_stride;
    const float* sinks;           // [heads], or null
    const int64_t* dropout_seed;  // [1], or null: no dropout
    uint32_t dropout_threshold;   // a probability is dropped if its word is below
    float dropout_factor = 1.0f;  // of the probabilities that are kept; 1 without dropout
    DropoutOrigin dropout_origin;
    // A score is outer_scale * tanh(scale_over_softcap * q·k) with a softcap, and outer_scale * q·k without one.
    float outer_scale;

    bool has_window() const { return window_left != kUnbounded || window_right != kUnbounded; }
};

// The parameters of attention/forward_*.cuh. Kernels without options only scale scores and mask them by a window. The
// head dims of queries and of values may differ, and be smaller than the kernel's.
struct AttentionForwardParams {
    HeadsView<const uint16_t> query;  // [B, Hq, Sq, D]
    HeadsView<const uint16_t> key;    // [B, Hkv, Sk, D]
    HeadsView<const uint16_t> value;  // [B, Hkv, Sk, Dv]
    HeadsView<uint16_t> out;          // [B, Hq, Sq, Dv]
    HeadsView<float> exact_out;       // out in fp32; written instead of out where data is not null
    RowsView lse;                     // [B, Hq, Sq], natural logarithm
    float* max_logits;                // [Hq], -inf before the launch; null where the largest scores are not wanted
    PackedParams packed;
    ScoreParams scores;
    float scale_log2;         // |scores.scale| * log2(e), or 1 where the scale is 0
    int32_t heads_per_group;  // heads whose tiles are scheduled together, see scheduler/work_tile.h
    PagedParams paged;        // for the kernels that take pages
    SeenTiles seen_tiles;     // with scores.ranges
    // partials is null where no tile is split. resident_ctas: how many CTAs run at a time. See scheduler/key_splits.h.
    PartialWorkspace partials;
    int32_t resident_ctas;
    // The counter of work tiles that Hopper's kernels have claimed (scheduler/arrivals.cuh). Null: cluster c of n takes
    // work tiles c, c + n, c + 2n and so on.
    uint64_t* claimed;
    uint64_t launch_id;
};

// The gradient of a bias: [batch, heads, rows, keys] fp32. Sizes are the bias's own, 1 in broadcast dims.
struct BiasGradientView {
    float* data;
    int32_t batch, heads, rows, keys;
    int64_t batch_stride, head_stride, row_stride, key_stride;
};

// The gradient of ALiBi slopes: [batch, heads] fp32, contiguous. The batch is 1 where slopes were broadcast over it.
struct SlopesGradientView {
    float* data;
    int32_t batch;
};

// The terms of query rows for Hopper's backward kernels, in blocks of block_m rows of a head. Blocks have the order of
// the tiles of dQ's sums (attention/query_sums.h). A block has shift * log2(e) of all its rows, then -delta of all.
// With options it has shift itself, then -delta, then log2_sum. Rows that do not exist have shift +inf and delta 0.
struct RowTermsView {
    float* data;  // null: the kernels need none
    int32_t block_m;
    bool with_options;

    FASTATTN_HOST_DEVICE static constexpr int32_t numbers_per_row(bool with_options) { return with_options ? 3 : 2; }
};
inline constexpr int kMostRowsInBlock = 128;

inline constexpr int kSlopesBlockM = 64;

// How tiles of keys are split, from first_tile on: into over_heads splits of the query heads, times up to over_rows
// splits of the query rows. See scheduler/row_splits.h.
struct RowSplits {
    uint32_t first_tile;
    int32_t over_heads, over_rows;
};

// `floats` numbers, a multiple of four, aligned to 128 bytes.
struct WorkspaceMemory {
    float* data;
    int64_t floats;
};

// The parameters of attention/backward_*.cuh. A backward pass runs kernels in this order: `ranges`, where there are
// ranges of keys; `rows`, `key_value`, `query`; and `bias`, `sinks`, `slopes` and `slope_sums`, where their gradients
// are wanted. Packed sequences are as in AttentionForwardParams.
struct AttentionBackwardParams {
    HeadsView<const uint16_t> query, key, value, out, grad_out;
    HeadsView<uint16_t> grad_query, grad_key, grad_value;
    HeadsView<float> sum_query, sum_key, sum_value;  // where data is not null, gradients are added here instead
    RowsView lse;                                    // of the forward pass
    RowsView grad_lse;                               // data is null where lse has no gradient
    // Workspace: one number for each query row, laid out like lse. A probability is exp(score - shift) / 2^log2_sum;
    // shift is +inf where a row sees nothing.
    RowsView shift, delta;  // delta = rowsum(dO * O) - dlse
    RowsView log2_sum;      // data is null unless the bias is additive: see backward_rows_sm80.cuh
    // Holds query_sums, key_sums and all counters. The kernel `rows` zeroes it for key_value.
    WorkspaceMemory to_zero;
    float* query_sums;  // sums of dQ: see attention/query_sums.h
    // semaphores: one for each tile of rows of a head (scheduler/semaphore.cuh); null: dQ is added up in any order.
    // num_claimed: how many work tiles (tiles of keys, or splits of them) CTAs have claimed. Hopper's kernels always
    // use it, others only with semaphores.
    int32_t *semaphores, *num_claimed;
    RowTermsView row_terms;  // only Hopper's kernels use the fields from here to `packed`
    // Sums of dK and dV of split tiles (attention/query_sums.h), and their semaphores.
    RowSplits row_splits;
    float* key_sums;
    int32_t* key_semaphores;
    PackedParams packed;
    ScoreParams scores;
    SeenTiles seen_tiles;            // with scores.ranges
    BiasGradientView grad_bias;      // data is null where it is not wanted
    SlopesGradientView grad_slopes;  // likewise
    // Workspace of grad_slopes, [tiles of kSlopesBlockM rows, heads], numbered as in attention/query_sums.h.
    float* slope_sums;
    float* grad_sinks;        // [heads], or null
    int32_t heads_per_group;  // key heads whose tiles are scheduled together, see scheduler/work_tile.h
};

}  // namespace fastattn
