"""Computes the gradient of attention's bias: dbias = sum of dS over all scores that read one element of the bias.

One CTA owns BLOCK_M x BLOCK_N elements of the bias (fewer where a dimension of the bias is 1) and recomputes dS for
every batch, head, query tile and key tile that reads these elements, in a fixed order. So the kernel needs no atomics,
and no copy of dS that is larger than the bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.triton_kernels.attention_common import (
    ADDITIVE_BIAS,
    INF,
    NOT_SPECIALIZED,
    DropoutInputs,
    ScoreInputs,
    dropout_keep,
    load_rows,
    score_gradients,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_bias_kernel(
    grad_out, query, key, value, row_shift, row_log2_sum, delta, grad_bias, bias, alibi_slopes, dropout_seed, ranges,
    stride_gb, stride_gh, stride_gm, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_lb, stride_lh,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    stride_dbias_b, stride_dbias_h, stride_dbias_m, stride_dbias_n, stride_slope_b,
    stride_ranges_b, stride_ranges_h,
    num_batches, num_heads, group_size, max_seqlen_q, max_seqlen_k,
    scale, window_left, window_right, softcap, dropout_threshold, dropout_factor,
    query_offset, dropout_row, dropout_key, dropout_head,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    PLACED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    SUM_BATCHES: tl.constexpr, SUM_HEADS: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes grad_bias of dense tensors. Grid: (key tiles * query tiles * heads * batches of the bias), where a
    factor is 1 if the bias has size 1 in that dimension, over which the CTA then sums."""
    tl.static_assert(BIAS == ADDITIVE_BIAS)
    num_m_tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    num_n_tiles = tl.cdiv(max_seqlen_k, BLOCK_N)
    # This CTA's first key tile, query tile, head and batch, and how many of each it sums over.
    owned = tl.program_id(0)
    own_n, sum_n = (0, num_n_tiles) if SUM_COLUMNS else (owned % num_n_tiles, 1)
    owned = owned if SUM_COLUMNS else owned // num_n_tiles
    own_m, sum_m = (0, num_m_tiles) if SUM_ROWS else (owned % num_m_tiles, 1)
    owned = owned if SUM_ROWS else owned // num_m_tiles
    own_head, sum_heads = (0, num_heads) if SUM_HEADS else (owned % num_heads, 1)
    own_batch, sum_batches = (0, num_batches) if SUM_BATCHES else (owned if SUM_HEADS else owned // num_heads, 1)
    offset = query_offset if PLACED else max_seqlen_k - max_seqlen_q
    seed = 0
    if DROPOUT:
        seed = tl.load(dropout_seed)

    grad = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(sum_n * sum_m * sum_heads * sum_batches):
        first_key = (own_n + step % sum_n) * BLOCK_N
        first_row = (own_m + step // sum_n % sum_m) * BLOCK_M
        head = tl.cast(own_head + step // sum_n // sum_m % sum_heads, tl.int64)
        batch = tl.cast(own_batch + step // sum_n // sum_m // sum_heads, tl.int64)
        batch_head = (batch * num_heads + head).to(tl.int32)
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_key + tl.arange(0, BLOCK_N)

        q_base = query + batch * stride_qb + head * stride_qh
        g_base = grad_out + batch * stride_gb + head * stride_gh
        k_base = key + batch * stride_kb + head // group_size * stride_kh
        v_base = value + batch * stride_vb + head // group_size * stride_vh
        q = load_rows(q_base, first_row, max_seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, WIDTH_QK)
        k = load_rows(k_base, first_key, max_seqlen_k, stride_kn, BLOCK_N, HEAD_DIM, WIDTH_QK)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        g = load_rows(g_base, first_row, max_seqlen_q, stride_gm, BLOCK_M, VALUE_DIM, WIDTH_V)
        v = load_rows(v_base, first_key, max_seqlen_k, stride_vn, BLOCK_N, VALUE_DIM, WIDTH_V)
        grad_products = tl.dot(g, tl.trans(v), input_precision="ieee")

        position = batch * stride_lb + head * stride_lh + row
        shift = tl.load(row_shift + position, mask=row < max_seqlen_q, other=INF)
        log2_sum = tl.load(row_log2_sum + position, mask=row < max_seqlen_q, other=0.0)
        delta_tile = tl.load(delta + position, mask=row < max_seqlen_q, other=0.0)
        ranges_base = ranges
        if RANGES > 0:
            ranges_base = ranges + (batch * stride_ranges_b + head * stride_ranges_h)
        slope = 0.0
        if ALIBI:
            slope = tl.load(alibi_slopes + batch * stride_slope_b + head)
        inputs = ScoreInputs(
            slope, ranges_base, bias + batch * stride_bias_b + head * stride_bias_h, stride_bias_m, stride_bias_n,
            offset, max_seqlen_q, max_seqlen_k, window_left, window_right, scale, softcap,
        )  # fmt: skip
        dropout = DropoutInputs(
            seed, dropout_threshold, dropout_factor, dropout_head + batch_head, dropout_row, dropout_key
        )
        keep = True
        if DROPOUT:
            keep = dropout_keep(dropout, first_row, first_key, BLOCK_M, BLOCK_N, BIAS)
        _p, ds, _grad_products = score_gradients(
            products, grad_products, keep, shift[:, None], log2_sum[:, None], delta_tile[:, None],
            row[:, None], column[None, :], inputs, dropout,
            LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, DROPOUT, MASKED=True,
        )  # fmt: skip
        grad += ds

    base = grad_bias + tl.cast(own_batch, tl.int64) * stride_dbias_b + tl.cast(own_head, tl.int64) * stride_dbias_h
    row = (own_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    column = (own_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if SUM_ROWS:
        grad = tl.sum(grad, 0)[None, :]
        row = tl.zeros([1, 1], tl.int32)
    if SUM_COLUMNS:
        grad = tl.sum(grad, 1)[:, None]
        column = tl.zeros([1, 1], tl.int32)
    inside = (row < max_seqlen_q) & (column < max_seqlen_k)
    tl.store(base + row.to(tl.int64) * stride_dbias_m + column.to(tl.int64) * stride_dbias_n, grad, mask=inside)
