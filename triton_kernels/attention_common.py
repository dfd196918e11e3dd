"""Defines what the attention kernels share: the keys that a row sees, the scores, the probabilities that dropout
keeps.

Index tensors come already shaped: ``row`` and ``column`` broadcast against each other to the tile, so that the same
function serves S = Q K^T ``[BLOCK_M, BLOCK_N]`` and its transpose.

The constexpr ``BIAS`` chooses the unit of the scores. Without an additive bias, scores are base-2 logarithms: the scale
absorbs log2(e). With an additive bias, scores are natural logarithms, because a bias of finfo.min times log2(e) would
overflow to -inf and turn a number into a mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.triton_kernels.device_math import tanh

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))

# Values of the constexpr BIAS.
NO_BIAS, BOOL_BIAS, ADDITIVE_BIAS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# The numbers that change from call to call. Triton would compile again where one of them becomes 1 or a multiple of 16.
NOT_SPECIALIZED = [
    "num_heads", "num_batches", "num_splits", "num_listed", "num_range_heads", "max_seqlen_q", "max_seqlen_k",
    "total_q", "total_k", "max_pages", "num_pages", "window_left", "window_right",
    "query_offset", "dropout_threshold", "dropout_row", "dropout_key", "dropout_head",
    "stride_lb", "stride_lh", "stride_slope_b", "stride_ranges_b", "stride_ranges_h",
    "stride_states_b", "stride_states_h", "stride_tiles_b", "stride_tiles_h",
]  # fmt: skip


class ScoreInputs(NamedTuple):
    """Holds the numbers and pointers that turn products q.k into scores, for one head of one sequence."""

    slope: Any  # of ALiBi
    ranges: Any  # points to the ranges of the first row; None without ranges
    bias: Any  # points to the bias of the first row and key; None without a bias
    stride_bias_m: Any
    stride_bias_n: Any
    offset: Any  # query i is at key position i + offset
    seqlen_q: Any
    seqlen_k: Any
    window_left: Any
    window_right: Any
    scale: Any
    softcap: Any


class DropoutInputs(NamedTuple):
    """Holds the arguments of dropout for one head: see `dropout_keep`."""

    seed: Any
    threshold: Any
    factor: Any  # 1 / (1 - p): multiplies the probabilities that survive
    batch_head: Any  # batch * Hq + head
    row: Any  # the number of row 0 in the counters of dropout
    column: Any  # the number of key 0 in the counters


@triton.jit
def sequence_range(cu_seqlens, batch, total, max_seqlen):
    """Returns the first row and the length of sequence ``batch``, clamped so that no row out of range is ever read."""
    if cu_seqlens is None:
        begin = 0
        length = max_seqlen
    else:
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch), 0), total)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch + 1), begin), total)
        length = tl.minimum(end - begin, max_seqlen)
    return begin, length


@triton.jit
def locate_rows(base, first_row, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the indices of a tile's rows, the indices of its dims, and pointers to its elements ``[BLOCK, WIDTH]``.

    The launchers guarantee rows that are aligned to 16 bytes. Triton itself only sees whether a stride is a multiple of
    16 elements. Without ``tl.multiple_of`` it would load rows of 72 dims 2 bytes at a time.
    """
    VECTOR: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    tile = tl.multiple_of(base + tl.cast(first_row, tl.int64) * stride, 16)
    return row, column, tile + (tl.multiple_of(row.to(tl.int64) * stride, VECTOR)[:, None] + column[None, :])


@triton.jit
def load_rows(
    base, first_row, num_rows, stride, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr = True,
):  # fmt: skip
    """Loads rows ``first_row`` … ``first_row + BLOCK - 1``, ``[BLOCK, WIDTH]``; zeros from row ``num_rows`` and dim
    ``DIM`` on. If not ``MASKED``, all rows must exist."""
    row, column, pointers = locate_rows(base, first_row, stride, BLOCK, WIDTH)
    if MASKED:
        mask = (row < num_rows - first_row)[:, None]
        if DIM != WIDTH:
            mask = mask & (column < DIM)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)
    elif DIM != WIDTH:
        return tl.load(pointers, mask=(column < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(
    base, values, first_row, num_rows, stride, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, where=None
):
    """Stores rows, the inverse of `load_rows`, and rounds to the dtype of ``base``; only elements for which ``where``
    is true, if it is given."""
    row, column, pointers = locate_rows(base, first_row, stride, BLOCK, WIDTH)
    mask = (row < num_rows - first_row)[:, None] & (column < DIM)[None, :]
    if where is not None:
        mask = mask & where
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def finish_rows(
    base, values, first_row, num_rows, stride, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Stores rows like `store_rows`, or with ``ADDS`` adds to the stored fp32 numbers."""
    if ADDS:
        values += load_rows(base, first_row, num_rows, stride, BLOCK, DIM, WIDTH)
    store_rows(base, values, first_row, num_rows, stride, BLOCK, DIM, WIDTH)


@triton.jit
def tile_range(
    first, last, shift, window_left, window_right, length, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Returns which tiles of ``BLOCK`` columns the rows ``first`` … ``last`` see: ``begin``, ``full_begin``,
    ``full_end``, ``end``.

    Row i sees column j if i + shift - window_left <= j <= i + shift + window_right, and 0 <= j < length. Some row sees
    the tiles from ``begin`` to ``end``, and every row sees all of the tiles from ``full_begin`` to ``full_end``. The
    same condition, with shift negated and the window's sides swapped, says which rows see a column.
    """
    seen_begin = 0
    seen_end = length
    full_first = 0
    full_stop = length
    if LEFT:
        seen_begin = tl.maximum(first + shift - window_left, 0)
        full_first = tl.maximum(last + shift - window_left, 0)
    if RIGHT:
        seen_end = tl.maximum(tl.minimum(last + shift + window_right + 1, length), 0)
        full_stop = tl.maximum(tl.minimum(first + shift + window_right + 1, length), 0)
    end = (seen_end + BLOCK - 1) // BLOCK
    begin = tl.minimum(seen_begin // BLOCK, end)
    full_begin = tl.minimum(tl.maximum((full_first + BLOCK - 1) // BLOCK, begin), end)
    full_end = tl.minimum(tl.maximum(full_stop // BLOCK, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def full_tile(step, num_complete, listed, RANGES: tl.constexpr):
    """Returns the full tile of a step: ``step`` itself, or with ranges an entry of the tile list (`attention_ranges`),
    clamped because full tiles are read without masks."""
    if RANGES > 0:
        return tl.minimum(tl.load(listed + step), num_complete - 1)
    else:
        return step


@triton.jit
def masked_tile(step, begin, full_begin, full_end, listed, RANGES: tl.constexpr):
    """Returns the masked tile of a step: one before or after the full tiles. With ranges it is the entry ``step`` after
    the full tiles in the tile list."""
    if RANGES > 0:
        return tl.load(listed + (full_end - full_begin) + step)
    else:
        return begin + step + tl.where(begin + step < full_begin, 0, full_end - full_begin)


@triton.jit
def visible_keys(row, column, inputs, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr):
    """Returns where query ``row`` sees key ``column``: inside of its window and, if it has ranges, of one of its
    ``RANGES`` ranges."""
    visible = column < inputs.seqlen_k
    if RANGES > 0:
        own = inputs.ranges + row.to(tl.int64) * (2 * RANGES)
        in_range = column < 0
        for r in tl.static_range(RANGES):
            begin = tl.load(own + 2 * r, mask=row < inputs.seqlen_q, other=0)
            end = tl.load(own + 2 * r + 1, mask=row < inputs.seqlen_q, other=0)
            in_range = in_range | ((column >= begin) & (column < end))
        visible = visible & in_range
    if LEFT:
        visible = visible & (column >= row + inputs.offset - inputs.window_left)
    if RIGHT:
        visible = visible & (column <= row + inputs.offset + inputs.window_right)
    return visible


@triton.jit
def apply_bias(scores, visible, row, column, inputs, BIAS: tl.constexpr):
    """Returns the scores plus an additive bias, and ``visible`` without keys that a mask or a bias of -inf hides."""
    inside = (row < inputs.seqlen_q) & (column < inputs.seqlen_k)
    offsets = row.to(tl.int64) * inputs.stride_bias_m + column.to(tl.int64) * inputs.stride_bias_n
    bias = tl.load(inputs.bias + offsets, mask=inside, other=0)
    if BIAS == BOOL_BIAS:
        return scores, visible & (bias != 0)
    else:
        bias = bias.to(tl.float32)
        return scores + bias, visible & (bias != -INF)


@triton.jit
def attention_scores(
    products, row, column, inputs, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Computes the scores of one tile of q.k, and the factors that the gradient needs.

    Applies scale → softcap → bias or ALiBi → mask. Returns (scores in the unit that BIAS chooses, -inf where masked;
    which scores are visible, True unless MASKED; d score / d (scale * q.k), 1 unless SOFTCAP). A bias needs MASKED.
    """
    UNIT: tl.constexpr = LOG2_E if BIAS != ADDITIVE_BIAS else 1.0  # one nat in the unit of the scores
    if SOFTCAP:
        ratio = tanh(products * (inputs.scale / inputs.softcap))
        scores = ratio * (inputs.softcap * UNIT)
        slope_of_cap = 1.0 - ratio * ratio
    else:
        scores = products * (inputs.scale * UNIT)
        slope_of_cap = 1.0
    if ALIBI:
        distance = tl.abs(row + inputs.offset - column)
        scores -= (inputs.slope * UNIT) * distance.to(tl.float32)
    visible = True
    if MASKED:
        visible = visible_keys(row, column, inputs, LEFT, RIGHT, RANGES)
        if BIAS != NO_BIAS:
            scores, visible = apply_bias(scores, visible, row, column, inputs, BIAS)
        scores = tl.where(visible, scores, -INF)
    return scores, visible, slope_of_cap


@triton.jit
def score_gradients(
    products, grad_products, keep, shift, log2_sum, delta, row, column, inputs, dropout,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Computes the probabilities and score gradients of one tile from q.k and dO.v, or from their transposes.

    ``shift``, ``log2_sum`` and ``delta`` hold a value for each row, which `attention_backward_rows` has computed; their
    shape is that of ``row``. Returns three tiles: P, in which dropped elements are 0 and the others are not yet
    multiplied by dropout's factor; dS, which is the bias's gradient; and the gradient of ``scale * q.k``, which is dS
    times the derivative of softcap.
    """
    scores, visible, slope_of_cap = attention_scores(
        products, row, column, inputs, LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, MASKED
    )
    if BIAS == ADDITIVE_BIAS:
        p = tl.exp2((scores - shift) * LOG2_E - log2_sum)
    else:
        p = tl.exp2(scores - shift)
    dropped = p
    if DROPOUT:
        grad_products = tl.where(keep, grad_products * dropout.factor, 0.0)
        dropped = tl.where(keep, p, 0.0)
    grad_scores = p * (grad_products - delta)
    if MASKED:  # the products carry a NaN of a masked key or value to all rows, even past the end
        visible = visible & (row < inputs.seqlen_q)
        dropped = tl.where(visible, dropped, 0.0)
        grad_scores = tl.where(visible, grad_scores, 0.0)
    return dropped, grad_scores, grad_scores * slope_of_cap


@triton.jit
def dropout_keep(dropout, first_row, first_column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr):
    """Returns which probabilities of a tile survive dropout, ``[BLOCK_M, BLOCK_N]`` bool; ``first_column % 4 == 0``.

    Philox 4x32-10 (Salmon et al., SC 2011) draws the words: key = seed, counter = (column // 4, row, batch * Hq + head,
    0), word = column % 4. A word below ``threshold`` drops. One call gives the words of four columns.
    """
    row = dropout.row + first_row + tl.arange(0, BLOCK_M)[:, None]
    column_block = (dropout.column + first_column) // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    zero = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.int32)
    w0, w1, w2, w3 = tl.philox(dropout.seed, zero + column_block, zero + row, zero + dropout.batch_head, zero)
    limit = dropout.threshold.to(tl.uint32, bitcast=True)
    # The change of layout below goes through shared memory, where bytes take less space than words.
    b0, b1 = (w0 >= limit).to(tl.int8), (w1 >= limit).to(tl.int8)
    b2, b3 = (w2 >= limit).to(tl.int8), (w3 >= limit).to(tl.int8)
    if BIAS == BOOL_BIAS:
        # Avoid tl.interleave. After a load of bytes (the mask), it makes Triton (3.6, for one) give a thread of an
        # mma.sync eight adjacent numbers. A product over 16 keys or rows then counts half of the keys or rows twice and
        # the others never.
        word = tl.arange(0, 4)[None, None, :]
        kept = tl.where(word < 2, b0[:, :, None], b2[:, :, None])
        kept = tl.where(word % 2 == 0, kept, tl.where(word < 2, b1[:, :, None], b3[:, :, None]))
        return tl.reshape(kept, [BLOCK_M, BLOCK_N]) != 0
    even, odd = tl.interleave(b0, b2), tl.interleave(b1, b3)
    return tl.interleave(even, odd) != 0


@triton.jit
def is_finite(x):
    """Returns where x is finite; NaN compares false."""
    return tl.abs(x.to(tl.float32)) < INF
