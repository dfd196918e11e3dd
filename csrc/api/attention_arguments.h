// Checks the tensors common to attention_forward and attention_backward, and makes the views of them that kernel
// parameters hold.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "api/checks.h"
#include "host/params.h"

namespace fastattn {

// The sizes of a call whose tensors have been checked. For packed sequences, rows and keys are bounds of all lengths.
struct AttentionSizes {
    DataType dtype;
    bool is_packed;
    int64_t batch, heads, rows, keys, head_dim, value_dim;

    // Returns the smallest head dim that a kernel for this call may have.
    int widest() const { return static_cast<int>(std::max(head_dim, value_dim)); }
    Sequences query_sequences() const { return {is_packed, batch, rows}; }
    Sequences key_sequences() const { return {is_packed, batch, keys}; }
};

inline void check_dense(const char* op, const Tensor& query, const Tensor& key, const Tensor& value) {
    check_rank(op, "query", query, 4);
    check_rank(op, "key", key, 4);
    check_rank(op, "value", value, 4);
    check_shape(op, "key", key, {query.size(0), key.size(1), key.size(2), query.size(3)});
    check_shape(op, "value", value, {key.size(0), key.size(1), key.size(2), value.size(3)});
}

// Checks packed tensors, [total, heads, head_dim].
inline void check_packed(const char* op, const Tensor& query, const Tensor& key, const Tensor& value) {
    check_rank(op, "query", query, 3);
    check_rank(op, "key", key, 3);
    check_rank(op, "value", value, 3);
    check_shape(op, "key", key, {key.size(0), key.size(1), query.size(2)});
    check_shape(op, "value", value, {key.size(0), key.size(1), value.size(2)});
}

// Checks a packed query [total, heads, head_dim], paged keys and values [num_pages, heads, page_size, head_dim], and
// int32 `block_table` [batch, max_pages].
inline void check_paged(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& block_table, int64_t batch) {
    check_rank(op, "query", query, 3);
    check_rank(op, "key", key, 4);
    check_rank(op, "value", value, 4);
    check_shape(op, "key", key, {key.size(0), key.size(1), key.size(2), query.size(2)});
    check_shape(op, "value", value, {key.size(0), key.size(1), key.size(2), value.size(3)});
    for (const auto& [name, pages] : {std::pair{"key", key}, {"value", value}}) {
        check(pages.numel() == 0 || is_aligned(pages), op, name, " is paged and never copied, so ", kAlignedRule);
    }
    check_rank(op, "block_table", block_table, 2);
    check_shape(op, "block_table", block_table, {batch, block_table.size(1)});
    check_int32(op, "block_table", block_table, query);
}

// Checks the offsets of packed sequences, int32 [batch + 1].
inline void check_offsets(const char* op, const Tensor& query, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k) {
    check_rank(op, "cu_seqlens_q", cu_seqlens_q, 1);
    check(cu_seqlens_q.size(0) > 0, op, "cu_seqlens_q must have batch + 1 elements, got 0");
    check_shape(op, "cu_seqlens_k", cu_seqlens_k, {cu_seqlens_q.size(0)});
    for (const auto& [name, tensor] : {std::pair{"cu_seqlens_q", cu_seqlens_q}, {"cu_seqlens_k", cu_seqlens_k}}) {
        check_int32(op, name, tensor, query);
    }
}

// Checks all tensors of a call and returns their sizes. largest_head_dim: the largest head dim of the op's kernels.
inline AttentionSizes check_attention(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                                      const std::optional<Tensor>& bias, const std::optional<Tensor>& cu_seqlens_q,
                                      const std::optional<Tensor>& cu_seqlens_k, int64_t max_seqlen_q,
                                      int64_t max_seqlen_k, int64_t largest_head_dim,
                                      const std::optional<Tensor>& block_table = std::nullopt) {
    const bool is_packed = cu_seqlens_q.has_value();
    check(is_packed == cu_seqlens_k.has_value(), op, "cu_seqlens_q and cu_seqlens_k must both be given, or neither");
    check(is_packed || !block_table, op, "block_table must be None unless cu_seqlens_q is given");
    if (is_packed) {
        check_offsets(op, query, *cu_seqlens_q, *cu_seqlens_k);
        if (block_table) {
            check_paged(op, query, key, value, *block_table, cu_seqlens_q->size(0) - 1);
        } else {
            check_packed(op, query, key, value);
        }
        check_absent(op, "bias", bias);
        check(max_seqlen_q >= 0, op, "max_seqlen_q must not be negative, got ", max_seqlen_q);
        check(max_seqlen_k >= 0, op, "max_seqlen_k must not be negative, got ", max_seqlen_k);
    } else {
        check_dense(op, query, key, value);
    }
    check_like(op, "key", key, query);
    check_like(op, "value", value, query);
    const int64_t heads = query.size(1), key_heads = key.size(1);
    check(key_heads > 0 ? heads % key_heads == 0 : heads == 0, op,
          "query must have a multiple of the heads of key (dim 1 of both), got ", heads, " and ", key_heads);
    const DataType dtype = data_type(op, "query", query);
    check_head_dim(op, "query", query, largest_head_dim);
    check_head_dim(op, "value", value, largest_head_dim);
    const int64_t head_dim = query.size(query.dim() - 1), value_dim = value.size(value.dim() - 1);
    if (!is_packed) {
        return {dtype, false, query.size(0), heads, query.size(2), key.size(2), head_dim, value_dim};
    }
    const int64_t all_keys = block_table ? block_table->size(1) * key.size(2) : key.size(0);
    const int64_t rows = std::min(max_seqlen_q, query.size(0)), keys = std::min(max_seqlen_k, all_keys);
    check(!block_table || keys < int64_t{1} << 30, op, "block_table must hold fewer than 2^30 keys of a sequence, got ",
          keys);
    return {dtype, true, cu_seqlens_q->size(0) - 1, heads, rows, keys, head_dim, value_dim};
}

// Returns the parameters of packed sequences. Makes both offset tensors contiguous in place. The parameters point into
// these tensors, which must therefore live until the kernel is launched.
inline PackedParams packed_params(const char* op, const Tensor& query, const Tensor& key,
                                  std::optional<Tensor>& cu_seqlens_q, std::optional<Tensor>& cu_seqlens_k) {
    if (!cu_seqlens_q) return {};
    cu_seqlens_q = torch::stable::contiguous(*cu_seqlens_q);
    cu_seqlens_k = torch::stable::contiguous(*cu_seqlens_k);
    return {static_cast<const int32_t*>(cu_seqlens_q->data_ptr()),
            static_cast<const int32_t*>(cu_seqlens_k->data_ptr()), to_int32(op, "query", query.size(0)),
            to_int32(op, "key", key.size(0))};
}

inline PageStrides page_strides(const char* op, const char* name, const Tensor& pages) {
    return {stride_in_chunks(op, name, pages, 0), stride_in_chunks(op, name, pages, 2)};
}

// Returns the parameters of pages. Makes `block_table` contiguous in place, because the parameters point into it.
inline PagedParams paged_params(const char* op, const Tensor& key, const Tensor& value,
                                std::optional<Tensor>& block_table) {
    block_table = torch::stable::contiguous(*block_table);
    const int32_t page_size = to_int32(op, "key", key.size(2));
    return {static_cast<const int32_t*>(block_table->data_ptr()),
            to_int32(op, "block_table", block_table->size(1)),
            page_size,
            Divisor::of(std::max(page_size, 1)),
            page_strides(op, "key", key),
            page_strides(op, "value", value)};
}

// Returns the view of int32 `key_ranges`, [batch or 1, heads or 1, rows, num, 2], or [heads or 1, rows, num, 2] for
// packed sequences. Makes the tensor contiguous in place, because the view points into it.
inline KeyRangesView key_ranges_view(const char* op, Tensor& key_ranges, const Tensor& query,
                                     const AttentionSizes& sizes) {
    const int64_t heads_dim = sizes.is_packed ? 0 : 1;
    check_rank(op, "key_ranges", key_ranges, heads_dim + 4);
    const int64_t heads = key_ranges.size(heads_dim), num = key_ranges.size(heads_dim + 2);
    const int64_t batch = sizes.is_packed ? sizes.batch : key_ranges.size(0);
    const int64_t expected_heads = heads == 1 ? 1 : sizes.heads, rows = query.size(sizes.is_packed ? 0 : 2);
    if (sizes.is_packed) {
        check_shape(op, "key_ranges", key_ranges, {expected_heads, rows, num, 2});
    } else {
        check_shape(op, "key_ranges", key_ranges, {batch == 1 ? 1 : sizes.batch, expected_heads, rows, num, 2});
    }
    check(num >= 1 && num <= kMostRanges, op, "key_ranges must have 1 to ", kMostRanges,
          " ranges for each row (dim -2), got ", num);
    check_int32(op, "key_ranges", key_ranges, query);
    key_ranges = torch::stable::contiguous(key_ranges);
    if (reinterpret_cast<uintptr_t>(key_ranges.data_ptr()) % sizeof(int64_t) != 0) {
        key_ranges = torch::stable::clone(key_ranges);  // kernels load a range, two int32, at once
    }
    const int64_t of_head = rows * num, of_batch = heads * of_head;
    return {static_cast<const int32_t*>(key_ranges.data_ptr()),
            to_int32(op, "key_ranges", batch),
            to_int32(op, "key_ranges", heads),
            static_cast<int32_t>(num),
            sizes.is_packed || batch == 1 ? 0 : of_batch,
            heads == 1 ? 0 : of_head};
}

// Allocates a tensor with the sizes of `like` except for the last, which is last_dim. A dense tensor keeps the memory
// order of heads and rows in `like`; a packed one is contiguous. The default dtype is that of `like`.
inline Tensor empty_like_heads(const Tensor& like, int64_t last_dim, std::optional<ScalarType> dtype = std::nullopt) {
    if (like.dim() == 3) return torch::stable::new_empty(like, {like.size(0), like.size(1), last_dim}, dtype);
    const int64_t batch = like.size(0), heads = like.size(1), rows = like.size(2);
    if (like.stride(1) >= like.stride(2)) return torch::stable::new_empty(like, {batch, heads, rows, last_dim}, dtype);
    return torch::stable::transpose(torch::stable::new_empty(like, {batch, rows, heads, last_dim}, dtype), 1, 2);
}

// Allocates one fp32 number for each row of query: [batch, heads, rows], or packed [heads, total].
inline Tensor empty_rows(const Tensor& query) {
    if (query.dim() == 3) return torch::stable::new_empty(query, {query.size(1), query.size(0)}, ScalarType::Float);
    return torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)}, ScalarType::Float);
}

// Returns the view of a contiguous tensor that has the shape of empty_rows(query), with the sizes of `query`.
inline RowsView rows_view(const Tensor& rows, const HeadsView<const uint16_t>& query) {
    const bool is_packed = rows.dim() == 2;
    return {static_cast<float*>(rows.data_ptr()), query.batch, query.heads, query.rows, is_packed ? 0 : rows.stride(0),
            rows.stride(is_packed ? 0 : 1)};
}

}  // namespace fastattn
