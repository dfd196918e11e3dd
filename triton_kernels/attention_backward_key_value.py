"""Computes dK and dV of attention: a CTA owns BLOCK_N keys of a KV head and walks over the query rows that see them.

    P^T  = exp(K Q^T - lse)       [BLOCK_N, BLOCK_M]
    dV  += dropout(P^T) dO
    dS^T = P^T (dropout(V dO^T) - delta)
    dK  += scale * dS^T Q

for every query head of the KV head in turn. So one CTA makes each sum, in a fixed order and without atomics, and keys
are not repeated for each query head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.triton_kernels.attention_common import (
    ADDITIVE_BIAS,
    INF,
    NO_BIAS,
    NOT_SPECIALIZED,
    DropoutInputs,
    ScoreInputs,
    dropout_keep,
    finish_rows,
    full_tile,
    load_rows,
    masked_tile,
    score_gradients,
    sequence_range,
    tile_range,
)
from fastattn.triton_kernels.attention_ranges import find_list


@triton.jit
def _key_value_tile(
    dk, dv, k, v, q_base, g_base, shift_base, log2_sum_base, delta_base, stride_qm, stride_gm, first_row, first_key,
    inputs, dropout,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the rows ``first_row`` … ``first_row + BLOCK_M - 1`` of one head to dK and dV.

    Everything is transposed, ``[BLOCK_N, BLOCK_M]``, so that P^T and dS^T are left operands. Keys past the end leave
    garbage in their own rows of dK and dV, which are never stored; rows past the end have P = 0.
    """
    q = load_rows(q_base, first_row, inputs.seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, WIDTH_QK, MASKED)
    grad = load_rows(g_base, first_row, inputs.seqlen_q, stride_gm, BLOCK_M, VALUE_DIM, WIDTH_V, MASKED)
    row = first_row + tl.arange(0, BLOCK_M)
    if MASKED:
        inside = row < inputs.seqlen_q
        shift = tl.load(shift_base + row, mask=inside, other=INF)
        delta = tl.load(delta_base + row, mask=inside, other=0.0)
    else:
        shift = tl.load(shift_base + row)
        delta = tl.load(delta_base + row)
    log2_sum = delta
    if BIAS == ADDITIVE_BIAS:
        log2_sum = tl.load(log2_sum_base + row, mask=row < inputs.seqlen_q, other=0.0)
    keep = True
    if DROPOUT:
        keep = tl.trans(dropout_keep(dropout, first_row, first_key, BLOCK_M, BLOCK_N, BIAS))

    products = tl.dot(k, tl.trans(q), input_precision="ieee")
    grad_products = tl.dot(v, tl.trans(grad), input_precision="ieee")
    p, _grad_bias, ds = score_gradients(
        products, grad_products, keep, shift[None, :], log2_sum[None, :], delta[None, :],
        row[None, :], (first_key + tl.arange(0, BLOCK_N))[:, None], inputs, dropout,
        LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, DROPOUT, MASKED,
    )  # fmt: skip
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_key_value_kernel(
    grad_out, query, key, value, row_shift, row_log2_sum, delta, grad_key, grad_value,
    bias, alibi_slopes, dropout_seed, ranges, tiles, cu_seqlens_q, cu_seqlens_k,
    stride_gb, stride_gh, stride_gm, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_lb, stride_lh, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slope_b,
    stride_ranges_b, stride_ranges_h, stride_tiles_b, stride_tiles_h, num_listed,
    num_heads, group_size, max_seqlen_q, max_seqlen_k, total_q, total_k,
    scale, window_left, window_right, softcap, dropout_threshold, dropout_factor,
    query_offset, dropout_row, dropout_key, dropout_head,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    PLACED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV of BLOCK_N keys. Grid: (key tiles * B * Hkv); causal masks make the first tiles take
    longest."""
    num_n_tiles = tl.cdiv(max_seqlen_k, BLOCK_N)
    num_kv_heads = num_heads // group_size
    first_key = (tl.program_id(0) % num_n_tiles) * BLOCK_N
    batch = (tl.program_id(0) // num_n_tiles // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) // num_n_tiles % num_kv_heads).to(tl.int64)
    begin_q, seqlen_q = sequence_range(cu_seqlens_q, batch, total_q, max_seqlen_q)
    begin_k, seqlen_k = sequence_range(cu_seqlens_k, batch, total_k, max_seqlen_k)
    if first_key >= seqlen_k:
        return
    begin_row, begin_key = tl.cast(begin_q, tl.int64), tl.cast(begin_k, tl.int64)
    last_key = tl.minimum(first_key + BLOCK_N, seqlen_k) - 1
    offset = query_offset if PLACED else seqlen_k - seqlen_q

    k_base = key + batch * stride_kb + kv_head * stride_kh + begin_key * stride_kn
    v_base = value + batch * stride_vb + kv_head * stride_vh + begin_key * stride_vn
    k = load_rows(k_base, first_key, seqlen_k, stride_kn, BLOCK_N, HEAD_DIM, WIDTH_QK)
    v = load_rows(v_base, first_key, seqlen_k, stride_vn, BLOCK_N, VALUE_DIM, WIDTH_V)
    dk = tl.zeros([BLOCK_N, WIDTH_QK], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    seed = 0
    if DROPOUT:
        seed = tl.load(dropout_seed)

    # The rows that see these keys follow from the same condition with the window's sides swapped (see `tile_range`).
    begin, full_begin, full_end, end = tile_range(
        first_key, last_key, -offset, window_right, window_left, seqlen_q, BLOCK_M, RIGHT, LEFT
    )
    num_complete = seqlen_q // BLOCK_M
    if RANGES > 0:  # the loop reads each head's own list
        begin = 0
        full_begin = 0
    for member in range(group_size):
        head = kv_head * group_size + member
        batch_head = (batch * num_heads + head).to(tl.int32)
        q_base = query + batch * stride_qb + head * stride_qh + begin_row * stride_qm
        g_base = grad_out + batch * stride_gb + head * stride_gh + begin_row * stride_gm
        rows_of_head = batch * stride_lb + head * stride_lh + begin_row
        shift_base, delta_base, log2_sum_base = row_shift + rows_of_head, delta + rows_of_head, row_log2_sum
        ranges_base = ranges
        listed = tiles
        bias_base = bias
        slope = 0.0
        if RANGES > 0:
            ranges_base = ranges + (batch * stride_ranges_b + head * stride_ranges_h + begin_row * (2 * RANGES))
            listed, full_end, end = find_list(
                tiles, batch, head, stride_tiles_b, stride_tiles_h, first_key // BLOCK_N, begin_k, num_listed,
                num_complete, cu_seqlens_k, BLOCK_N,
            )  # fmt: skip
        if BIAS != NO_BIAS:
            full_begin = end
            full_end = end
            bias_base = bias + batch * stride_bias_b + head * stride_bias_h
        if BIAS == ADDITIVE_BIAS:
            log2_sum_base = row_log2_sum + rows_of_head
        if ALIBI:
            slope = tl.load(alibi_slopes + batch * stride_slope_b + head)
        inputs = ScoreInputs(
            slope, ranges_base, bias_base, stride_bias_m, stride_bias_n, offset, seqlen_q, seqlen_k, window_left,
            window_right, scale, softcap,
        )  # fmt: skip
        dropout = DropoutInputs(
            seed, dropout_threshold, dropout_factor, dropout_head + batch_head, dropout_row, dropout_key
        )
        num_masked = full_begin - begin + end - full_end  # tiles on either side of the full ones
        for MASKED in tl.static_range(0 if BIAS == NO_BIAS else 1, 2):
            for step in range(0 if MASKED else full_begin, num_masked if MASKED else full_end):
                if MASKED:
                    tile = masked_tile(step, begin, full_begin, full_end, listed, RANGES)
                else:
                    tile = full_tile(step, num_complete, listed, RANGES)
                dk, dv = _key_value_tile(
                    dk, dv, k, v, q_base, g_base, shift_base, log2_sum_base, delta_base, stride_qm, stride_gm,
                    tile * BLOCK_M, first_key, inputs, dropout, HEAD_DIM, VALUE_DIM, WIDTH_QK, WIDTH_V,
                    BLOCK_M, BLOCK_N, LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, DROPOUT, MASKED,
                )  # fmt: skip

    if DROPOUT:
        dv *= dropout_factor
    dk_base = grad_key + batch * stride_dkb + kv_head * stride_dkh + begin_key * stride_dkn
    dv_base = grad_value + batch * stride_dvb + kv_head * stride_dvh + begin_key * stride_dvn
    finish_rows(dk_base, dk * scale, first_key, seqlen_k, stride_dkn, BLOCK_N, HEAD_DIM, WIDTH_QK, ADDS)
    finish_rows(dv_base, dv, first_key, seqlen_k, stride_dvn, BLOCK_N, VALUE_DIM, WIDTH_V, ADDS)
