"""Translates flash-attn's conventions to fastattn's and back: windows, the lse, unused rows, S_dmask."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import reference
from fastattn.checks import contents_are_checked
from fastattn.errors import InputError
from fastattn.functional.attention_backward import Packed
from fastattn.reference.dropout import dropout_keep

_ROUNDED_TO = 128  # the rows and columns of S_dmask are padded to multiples of this number

# The name of an argument in fastattn's errors → its name in flash-attn's functions.
OF_FLASH_ATTN = {
    "query": "q",
    "key": "k",
    "value": "v",
    "k_new": "k",
    "v_new": "v",
    "scale": "softmax_scale",
    "sinks": "s_aux",
    "window": "window_size",
}


def bounds(window_size: Any, causal: bool) -> tuple[int, int]:
    """Returns ``window_size`` as two ints. A side can be an element of a tensor, or None for -1 (FlashAttention-4).

    With ``causal``, the right side becomes 0.
    """
    try:
        left, right = (_bound(side) for side in window_size)
    except (TypeError, ValueError):
        advice = ""
        if type(window_size) is int and window_size > 0:
            advice = f"; ({window_size - 1}, 0) lets a query see {window_size} keys up to its own"
        came = f"{window_size!r}{advice}"
        raise InputError(f"window_size: expected (left, right), two integers, got {came}") from None
    return left, 0 if causal else right


def _bound(side: Any) -> int:
    if side is None:
        return -1
    if not isinstance(side, (int, torch.SymInt)):
        side = operator.index(side)
    return -1 if side < 0 else side


def without_idle_bounds(window: tuple[int, int], most_keys: int) -> tuple[int, int]:
    """Returns the window with -1 for a side that hides none of ``most_keys`` keys, as in flash-attn."""
    left, right = (-1 if side >= most_keys else side for side in window)
    return left, right


def alibi_of_dense(
    slopes: Tensor | None, window: tuple[int, int], num_queries: int, num_keys: int | Tensor, most_keys: int
) -> Tensor | None:
    """Returns ``-slope * position``, ``[B or 1, H, Sq]``, if flash-attn leaves it out of the lse of a dense call, or
    None. ``num_keys`` is an int, or a tensor ``[B]``."""
    if slopes is None or not _adds_columns(window, most_keys):
        return None
    row = torch.arange(num_queries, device=slopes.device)
    if isinstance(num_keys, Tensor):
        num_keys = num_keys[:, None, None]
    return -torch.atleast_2d(slopes).float()[..., None] * (row + num_keys - num_queries)


def alibi_of_packed(slopes: Tensor | None, window: tuple[int, int], total_q: int, packed: Packed) -> Tensor | None:
    """Returns the same term, ``[H, total_q]``, for packed sequences."""
    if slopes is None or not _adds_columns(window, packed.max_seqlen_k):
        return None
    sequence, row = rows_of(packed.cu_seqlens_q, total_q)
    lengths_q, lengths_k = (offsets.diff()[sequence] for offsets in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    batch = packed.cu_seqlens_q.shape[0] - 1
    slopes = torch.atleast_2d(slopes).float().expand(batch, -1)[sequence].transpose(0, 1)
    return -slopes * (row + lengths_k - lengths_q)


def _adds_columns(window: tuple[int, int], most_keys: int) -> bool:
    """Returns whether flash-attn adds ``slope * column`` to the scores instead of ``-slope * distance``.

    It does so under a causal mask without a left window.
    """
    return most_keys > 0 and without_idle_bounds(window, most_keys) == (-1, 0)


def to_flash_lse(lse: Tensor, alibi: Tensor | None) -> Tensor:
    if alibi is not None:
        lse = lse - alibi
    return lse.masked_fill(lse == -math.inf, math.inf)


def from_flash_lse(lse: Tensor, alibi: Tensor | None) -> Tensor:
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    return lse if alibi is None else lse + alibi


# --- packed sequences with unused rows ------------------------------------------------------------------------------


def rows_of(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Returns each packed row's sequence and position in it; rows beyond all sequences continue the last one."""
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return sequence, row - cu_seqlens[sequence]


def offsets_of(lengths: Tensor) -> Tensor:
    """Returns the offsets, int32 ``[B + 1]``, of packed sequences with these ``lengths [B]``."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def used_keys(
    key: Tensor, value: Tensor, cu_seqlens: Any, seqused: Tensor | None, block_table: Tensor | None
) -> tuple[Tensor, Tensor, Any]:
    """Returns keys, values and their offsets as ``attention_varlen`` takes them.

    The given keys and values are packed, or with a ``block_table`` pages ``[num_pages, page_size, H, D]``. ``seqused``,
    int32 ``[B]``, is the number of keys used at the beginning of each sequence. ``cu_seqlens`` is ignored if both
    ``block_table`` and ``seqused`` are given.
    """
    if block_table is not None:
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        cu_seqlens = cu_seqlens if seqused is None else offsets_of(seqused)
    elif seqused is not None:
        order, cu_seqlens, _ = used_first(cu_seqlens, seqused, key.shape[0])
        key, value = key[order], value[order]
    return key, value, cu_seqlens


def used_first(cu_seqlens: Tensor, used: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packs the first ``used [B]`` rows of each sequence.

    Returns:
        the order in which to take the rows, the new offsets, and a mask of the used rows. The order ends with the
        unused rows. If the call will check the offsets, the order leaves out the unused rows, because the check expects
        offsets that end at the last row.
    """
    sequence, row = rows_of(cu_seqlens, total)
    lengths = torch.minimum(cu_seqlens.diff(), used.to(torch.int32)).clamp(min=0)
    is_used = row < lengths[sequence]
    order = (~is_used).to(torch.int8).argsort(stable=True)
    offsets = offsets_of(lengths)
    if contents_are_checked(offsets):
        order = order[: int(offsets[-1])]
    return order, offsets, is_used


# --- dropout --------------------------------------------------------------------------------------------------------


def signed_exponentials(
    query: Tensor, key: Tensor, packed: Packed | None, *, dropout_p: float, dropout_seed: Tensor, **options: Any
) -> Tensor:
    """Returns ``S_dmask``: ``exp(score - largest score of the row)``, negative where dropout removes the weight.

    flash-attn's kernel subtracts the largest score so far, which is the largest score of the whole row if one block
    holds all keys. The result holds all pairs of a query and a key, and is meant for tests. ``query``, ``key`` and
    ``options`` are as for ``fastattn.attention`` and ``attention_varlen``. Sinks are left out, because they are no
    scores.
    """
    with torch.no_grad():
        if packed is None:
            one_hot = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
            probabilities, _ = reference.attention(query, key, one_hot, exact_out=True, **options)
        else:
            _, row = rows_of(packed.cu_seqlens_k, key.shape[0])
            one_hot = F.one_hot(row.clamp(max=packed.max_seqlen_k - 1), packed.max_seqlen_k).to(key.dtype)
            rows, _ = reference.attention_varlen(
                query, key, one_hot[:, None].expand(-1, key.shape[1], -1), *packed, exact_out=True, **options
            )
            sequence, row = rows_of(packed.cu_seqlens_q, query.shape[0])
            batch = packed.cu_seqlens_q.shape[0] - 1
            longest = packed.max_seqlen_q
            padded = rows.new_zeros(batch, longest + 1, *rows.shape[1:])  # one row more, for rows of no sequence
            padded = padded.index_put((sequence, row.clamp(max=longest)), rows)
            probabilities = padded[:, :longest].transpose(1, 2)
        batch, heads, num_queries, num_keys = probabilities.shape
        largest = probabilities.amax(-1, keepdim=True) if num_keys else probabilities.new_zeros(())
        sees_no_key = largest == 0
        exponentials = (probabilities / largest.masked_fill(sees_no_key, 1.0)).to(query.dtype)
        kept = dropout_keep(dropout_seed, dropout_p, batch, heads, num_queries, num_keys, exponentials.device)
        signed = torch.where(kept, exponentials, -exponentials)
        rounding = [-size % _ROUNDED_TO for size in signed.shape[2:]]
        return F.pad(signed, (0, rounding[1], 0, rounding[0]))
