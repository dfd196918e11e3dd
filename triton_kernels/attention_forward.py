"""Computes attention: O = softmax(mask(bias + softcap(scale * Q K^T))) V and the log-sum-exp of its rows, tile by tile.

One CTA owns BLOCK_M query rows of one head and walks over the key tiles that these rows see:

    S = Q K^T                     [BLOCK_M, BLOCK_N]
    m' = max(m, rowmax(S))        running maximum
    P = exp(S - m')
    l = l exp(m - m') + rowsum(P) running denominator
    O = O exp(m - m') + dropout(P) V
    O / l, lse = m + log(l)

Key tiles that no row sees are skipped; tiles whose keys all rows see go through a loop without masks.
Source: Dao, "FlashAttention-2", 2023, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.dispatch.device import kernel_facts
from fastattn.layout import contiguous, empty_like_heads
from fastattn.triton_kernels.attention_common import (
    ADDITIVE_BIAS,
    INF,
    LN_2,
    LOG2_E,
    NO_BIAS,
    NOT_SPECIALIZED,
    DropoutInputs,
    ScoreInputs,
    apply_bias,
    attention_scores,
    dropout_keep,
    full_tile,
    is_finite,
    load_rows,
    masked_tile,
    sequence_range,
    store_rows,
    visible_keys,
)
from fastattn.triton_kernels.attention_launch import (
    Scores,
    attention_constexprs,
    is_crowded,
    launch,
    lse_strides,
    strides,
)
from fastattn.triton_kernels.attention_pages import key_range, load_paged_rows, locate_keys
from fastattn.triton_kernels.attention_ranges import list_tiles, tiles_of_rows
from fastattn.triton_kernels.tiles import attention_forward_tile, ceil_div


@triton.jit
def _attend_tile(
    out, row_max, row_sum, spoiled, q, k_base, v_base, stride_kb, stride_kn, stride_vb, stride_vn,
    block_table, max_pages, num_pages, batch, first_row, first_key, inputs, dropout,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    MAX_LOGIT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes one step of the online softmax, over the keys ``first_key`` … ``first_key + BLOCK_N - 1``."""
    UNIT: tl.constexpr = LOG2_E if BIAS != ADDITIVE_BIAS else 1.0
    EXP2_FACTOR: tl.constexpr = 1.0 if BIAS != ADDITIVE_BIAS else LOG2_E
    if PAGE_SIZE > 0:
        page, page_row, exists = locate_keys(
            first_key, inputs.seqlen_k, block_table, max_pages, num_pages, batch, BLOCK_N, PAGE_SIZE
        )
        k = load_paged_rows(k_base, page, page_row, exists, stride_kb, stride_kn, HEAD_DIM, WIDTH_QK)
    else:
        k = load_rows(k_base, first_key, inputs.seqlen_k, stride_kn, BLOCK_N, HEAD_DIM, WIDTH_QK, MASKED)
    products = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32

    if MASKED or SOFTCAP or ALIBI:
        row = first_row + tl.arange(0, BLOCK_M)[:, None]
        column = first_key + tl.arange(0, BLOCK_N)[None, :]
        scores, _visible, _slope_of_cap = attention_scores(
            products, row, column, inputs, LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, MASKED
        )
        if PAGE_SIZE > 0:
            scores = tl.where(exists[None, :], scores, -INF)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == -INF, 0.0, new_max)  # a row that has seen nothing yet: exp(-inf - 0), not exp(NaN)
        p = tl.exp2((scores - shift[:, None]) * EXP2_FACTOR)
    else:
        # scale >= 0 here, so the maximum may be taken before scaling, and scale and shift are one FMA.
        new_max = tl.maximum(row_max, tl.max(products, 1) * (inputs.scale * UNIT))
        shift = new_max
        if MAX_LOGIT:  # the sink joins the maximum after the loop, so here the maximum may be -inf
            shift = tl.where(new_max == -INF, 0.0, new_max)
        p = tl.exp2(products * (inputs.scale * UNIT) - shift[:, None])

    rescale = tl.exp2((row_max - shift) * EXP2_FACTOR)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    out = out * rescale[:, None]
    if DROPOUT:
        p = tl.where(dropout_keep(dropout, first_row, first_key, BLOCK_M, BLOCK_N, BIAS), p, 0.0)

    if PAGE_SIZE > 0:
        v = load_paged_rows(v_base, page, page_row, exists, stride_vb, stride_vn, VALUE_DIM, WIDTH_V)
    else:
        v = load_rows(v_base, first_key, inputs.seqlen_k, stride_vn, BLOCK_N, VALUE_DIM, WIDTH_V, MASKED)
    if MASKED:
        # 0 * NaN is NaN: a value that a row does not see must not reach it through a probability of zero.
        finite = is_finite(v)
        spoiled = tl.maximum(spoiled, tl.max(1 - finite.to(tl.int32), 1))
        v = tl.where(finite, v, 0.0)
    out = tl.dot(p.to(v.dtype), v, out, input_precision="ieee")
    return out, new_max, row_sum, spoiled


# The keys per call of `_spoiled_values`: the fewest that a matrix instruction takes, so that it needs few registers.
SPOILED_KEYS = tl.constexpr(16)


@triton.jit
def _spoiled_values(
    count, v_base, stride_vb, stride_vn, block_table, max_pages, num_pages, batch, first_row, first_key,
    inputs, VALUE_DIM: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr, BIAS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Adds to ``count [BLOCK_M, WIDTH_V]``, for each row and dim, the number of keys among SPOILED_KEYS from
    ``first_key`` on that the row sees and whose value is not finite in that dim."""
    if PAGE_SIZE > 0:
        page, page_row, exists = locate_keys(
            first_key, inputs.seqlen_k, block_table, max_pages, num_pages, batch, SPOILED_KEYS, PAGE_SIZE
        )
        v = load_paged_rows(v_base, page, page_row, exists, stride_vb, stride_vn, VALUE_DIM, WIDTH_V)
    else:
        v = load_rows(v_base, first_key, inputs.seqlen_k, stride_vn, SPOILED_KEYS, VALUE_DIM, WIDTH_V)
    row = first_row + tl.arange(0, BLOCK_M)[:, None]
    column = first_key + tl.arange(0, SPOILED_KEYS)[None, :]
    visible = visible_keys(row, column, inputs, LEFT, RIGHT, RANGES) & (row < inputs.seqlen_q)
    if BIAS != NO_BIAS:
        _unused, visible = apply_bias(0.0, visible, row, column, inputs, BIAS)
    return tl.dot(visible.to(v.dtype), (1 - is_finite(v).to(tl.int32)).to(v.dtype), count, input_precision="ieee")


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_forward_kernel(
    query, key, value, output, lse, max_logits, bias, alibi_slopes, sinks, dropout_seed, ranges, tiles,
    cu_seqlens_q, cu_seqlens_k, block_table,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_lb, stride_lh,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slope_b,
    stride_ranges_b, stride_ranges_h, stride_tiles_b, stride_tiles_h, num_listed,
    num_heads, group_size, max_seqlen_q, max_seqlen_k, total_q, total_k, max_pages, num_pages,
    scale, window_left, window_right, softcap, dropout_threshold, dropout_factor,
    query_offset, dropout_row, dropout_key, dropout_head,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    PLACED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    SINKS: tl.constexpr, DROPOUT: tl.constexpr, PAGE_SIZE: tl.constexpr, NEGATE: tl.constexpr, MAX_LOGIT: tl.constexpr,
):  # fmt: skip
    """Computes attention of BLOCK_M rows. Grid: (query tiles * B * Hq); the tiles of a head are neighbours, so that
    they share its keys in L2."""
    UNIT: tl.constexpr = LOG2_E if BIAS != ADDITIVE_BIAS else 1.0
    NATURAL: tl.constexpr = LN_2 if BIAS != ADDITIVE_BIAS else 1.0  # one unit of a score in nats

    # The sequence, head and rows of this CTA. The last rows come first, because under a causal mask they take longest.
    num_m_tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    first_row = (num_m_tiles - 1 - tl.program_id(0) % num_m_tiles) * BLOCK_M
    batch_head = tl.program_id(0) // num_m_tiles
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    kv_head = head // group_size
    begin_q, seqlen_q = sequence_range(cu_seqlens_q, batch, total_q, max_seqlen_q)
    begin_k, seqlen_k = key_range(cu_seqlens_k, batch, total_k, max_seqlen_k, PAGE_SIZE > 0)
    if first_row >= seqlen_q:
        return
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    offset = query_offset if PLACED else seqlen_k - seqlen_q

    k_base = key + kv_head * stride_kh
    v_base = value + kv_head * stride_vh
    if PAGE_SIZE == 0:
        k_base += batch * stride_kb + tl.cast(begin_k, tl.int64) * stride_kn
        v_base += batch * stride_vb + tl.cast(begin_k, tl.int64) * stride_vn
    q_base = query + batch * stride_qb + head * stride_qh + tl.cast(begin_q, tl.int64) * stride_qm
    q = load_rows(q_base, first_row, seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, WIDTH_QK)
    if NEGATE:  # with a scale that is not negative, the loop may take the maximum before scaling
        q = -q  # NEGATE is a constexpr: after a branch on the scale, wgmma would read Q from registers at every step
        scale = -scale

    slope = 0.0
    seed = 0
    if RANGES > 0:
        ranges += batch * stride_ranges_b + head * stride_ranges_h + tl.cast(begin_q, tl.int64) * (2 * RANGES)
    if BIAS != NO_BIAS:
        bias += batch * stride_bias_b + head * stride_bias_h
    if ALIBI:
        slope = tl.load(alibi_slopes + batch * stride_slope_b + head)
    if DROPOUT:
        seed = tl.load(dropout_seed)
    inputs = ScoreInputs(
        slope, ranges, bias, stride_bias_m, stride_bias_n, offset, seqlen_q, seqlen_k, window_left, window_right,
        scale, softcap,
    )  # fmt: skip
    dropout = DropoutInputs(
        seed, dropout_threshold, dropout_factor, dropout_head + batch_head, dropout_row, dropout_key
    )
    row_max = tl.full([BLOCK_M], -INF, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and not MAX_LOGIT:  # a sink is like a key without a value that every row has seen already
        sink = tl.load(sinks + head) * UNIT
        row_max = tl.zeros([BLOCK_M], tl.float32) + sink
        row_sum += tl.where(sink == -INF, 0.0, 1.0)
    out = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)

    begin, full_begin, full_end, end, listed = tiles_of_rows(
        tiles, batch, head, stride_tiles_b, stride_tiles_h, num_listed, begin_q, cu_seqlens_q, first_row, last_row,
        offset, window_left, window_right, seqlen_k, BLOCK_M, BLOCK_N, LEFT, RIGHT, RANGES,
    )  # fmt: skip
    num_complete = seqlen_k // BLOCK_N
    ANY_MASKED: tl.constexpr = BIAS != NO_BIAS or PAGE_SIZE > 0  # any key may be masked
    if ANY_MASKED:
        full_begin = end
        full_end = end
    spoiled = tl.zeros([BLOCK_N], tl.int32)  # whether a masked tile had values that are not finite
    num_masked = full_begin - begin + end - full_end  # tiles on either side of the full ones
    for MASKED in tl.static_range(1 if ANY_MASKED else 0, 2):
        for step in range(0 if MASKED else full_begin, num_masked if MASKED else full_end):
            if MASKED:
                tile = masked_tile(step, begin, full_begin, full_end, listed, RANGES)
            else:
                tile = full_tile(step, num_complete, listed, RANGES)
            out, row_max, row_sum, spoiled = _attend_tile(
                out, row_max, row_sum, spoiled, q, k_base, v_base, stride_kb, stride_kn, stride_vb, stride_vn,
                block_table, max_pages, num_pages, batch, first_row, tile * BLOCK_N, inputs, dropout,
                HEAD_DIM, VALUE_DIM, WIDTH_QK, WIDTH_V,
                BLOCK_M, BLOCK_N, LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, DROPOUT, PAGE_SIZE, MAX_LOGIT, MASKED,
            )  # fmt: skip

    if MAX_LOGIT:
        in_sequence = first_row + tl.arange(0, BLOCK_M) < seqlen_q
        tl.atomic_max(max_logits + head, tl.max(tl.where(in_sequence, row_max * NATURAL, -INF), 0), sem="relaxed")
        if SINKS:  # only now: max_logits leaves sinks out
            sink = tl.load(sinks + head) * UNIT
            new_max = tl.maximum(row_max, sink)
            shift = tl.where(new_max == -INF, 0.0, new_max)
            rescale = tl.exp2((row_max - shift) * (LOG2_E / UNIT))
            row_sum = row_sum * rescale + tl.exp2((sink - shift) * (LOG2_E / UNIT))
            out = out * rescale[:, None]
            row_max = new_max

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row without keys: 0 / 1, and lse = -inf + log(1)
    factor = 1.0 / row_sum
    if DROPOUT:
        factor *= dropout_factor
    o_base = output + batch * stride_ob + head * stride_oh + tl.cast(begin_q, tl.int64) * stride_om
    store_rows(o_base, out * factor[:, None], first_row, seqlen_q, stride_om, BLOCK_M, VALUE_DIM, WIDTH_V)
    row = first_row + tl.arange(0, BLOCK_M)
    lse_base = lse + batch * stride_lb + head * stride_lh + begin_q
    tl.store(lse_base + row, row_max * NATURAL + tl.log(row_sum), mask=row < seqlen_q)

    # Masked tiles have left out values that are not finite. Write NaN where a row sees such a value, but only after
    # storing the output, so that the output's registers are free.
    if tl.max(spoiled, 0) > 0:
        count = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
        CALLS: tl.constexpr = BLOCK_N // SPOILED_KEYS  # for each tile
        for step in tl.range(num_masked * CALLS, num_stages=1):  # so rare that registers count for more than speed
            tile = masked_tile(step // CALLS, begin, full_begin, full_end, listed, RANGES)
            count = _spoiled_values(
                count, v_base, stride_vb, stride_vn, block_table, max_pages, num_pages, batch, first_row,
                tile * BLOCK_N + step % CALLS * SPOILED_KEYS, inputs,
                VALUE_DIM, WIDTH_V, BLOCK_M, LEFT, RIGHT, RANGES, BIAS, PAGE_SIZE,
            )  # fmt: skip
        tl.debug_barrier()  # orders the two stores to out, where one element may belong to different threads
        nan = tl.full([BLOCK_M, WIDTH_V], float("nan"), tl.float32)
        store_rows(o_base, nan, first_row, seqlen_q, stride_om, BLOCK_M, VALUE_DIM, WIDTH_V, where=count > 0)


def attention_forward(given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `attention_forward_kernel`; ``given`` holds the arguments of the op ``attention_forward`` by name
    (csrc/bindings.cpp), which the caller has checked.

    Dense tensors are query ``[B, Hq, Sq, D]``, key ``[B, Hkv, Sk, D]``, value ``[B, Hkv, Sk, Dv]``; packed ones are
    ``[total, H, D]`` with int32 ``cu_seqlens [B + 1]``. With int32 ``block_table [B, max_pages]`` key and value are
    pages, ``[num_pages, Hkv, page_size, D]``. bias is ``[B|1, Hq|1, Sq|1, Sk|1]`` bool or floating, alibi_slopes fp32
    ``[B|1, Hq]``, sinks fp32 ``[Hq]``; a negative window is unbounded. Returns (out in query's dtype, or fp32 with
    ``exact_out``, in query's order of dims; lse fp32 in nats ``[B, Hq, Sq]`` or ``[Hq, total_q]``; the largest scores
    fp32 ``[Hq]``, or ``[0]`` unless ``return_max_logit``). Programs never share the keys of a row, so results are
    always ``batch_invariant``.
    """
    query, key, value, block_table = given.query, given.key, given.value, given.block_table
    num_heads, head_dim, value_dim = query.shape[1], query.shape[-1], value.shape[-1]
    out_dtype = torch.float32 if given.exact_out else query.dtype
    if given.cu_seqlens_q is not None:
        out = query.new_zeros(query.shape[0], num_heads, value_dim, dtype=out_dtype)  # rows of no sequence stay 0
        lse = query.new_full((num_heads, query.shape[0]), -float("inf"), dtype=torch.float32)
    else:
        out = empty_like_heads(query, value_dim, out_dtype)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    max_logit = lse.new_full((num_heads if given.return_max_logit else 0,), -float("inf"))
    if lse.numel() == 0:
        return out, lse, max_logit
    scores = Scores(given)
    options = scores.options()
    crowded = is_crowded(options) or block_table is not None or options["ranges"] > 0
    tile = attention_forward_tile(kernel_facts(query.device).arch, head_dim, value_dim, crowded)
    arguments = {
        **scores.arguments(),
        "block_table": contiguous(block_table),
        "max_pages": 0 if block_table is None else block_table.shape[1],
        "num_pages": 0 if block_table is None else key.shape[0],
        "NEGATE": given.scale < 0,
        "PAGE_SIZE": 0 if block_table is None else max(1, key.shape[2]),
        "output": out,
        "lse": lse,
        "max_logits": max_logit if given.return_max_logit else None,
        "MAX_LOGIT": given.return_max_logit,
        **strides("o", out),
        **lse_strides(lse),
        **attention_constexprs(tile, head_dim, value_dim, **options),
    }
    num_programs = ceil_div(scores.longest[0], tile.block_m) * scores.batch * num_heads
    launch(attention_forward_kernel, num_programs, {**arguments, **list_tiles(arguments)})
    return out, lse, max_logit
