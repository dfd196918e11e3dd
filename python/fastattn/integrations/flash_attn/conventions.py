"""flash-attn's conventions as fastattn's, and back: windows, the lse, rows that are not used, S_dmask."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import reference
from fastattn.errors import InputError
from fastattn.functional.attention_backward import Packed
from fastattn.reference.dropout import dropout_keep

_ROUNDED_TO = 128


def bounds(window_size: Any, causal: bool) -> tuple[int, int]:
    """``(left, right)``; FlashAttention-4 writes None for -1."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InputError(f"window_size: expected (left, right), got {window_size!r}")
    left, right = (-1 if side is None or side < 0 else side for side in window_size)
    return left, 0 if causal else right


def without_idle_bounds(window: tuple[int, int], most_keys: int) -> tuple[int, int]:
    """-1 for a side that hides no key, as flash-attn has it."""
    left, right = (-1 if side >= most_keys else side for side in window)
    return left, right


class Alibi(NamedTuple):
    """What flash-attn leaves out of the scores under a causal mask, and hence of its lse: ``-slope * position``."""

    slopes: Tensor
    position: Tensor

    def left_out(self) -> Tensor:
        """``[B or 1, H, Sq]``, or ``[H, total_q]``."""
        return -self.slopes * self.position


def alibi_of_dense(
    slopes: Tensor | None, window: tuple[int, int], num_queries: int, num_keys: int | Tensor, most_keys: int
) -> Alibi | None:
    """``num_keys``: an int, or ``[B]``."""
    if slopes is None or not _adds_columns(window, most_keys):
        return None
    row = torch.arange(num_queries, device=slopes.device)
    if isinstance(num_keys, Tensor):
        num_keys = num_keys[:, None, None]
    return Alibi(torch.atleast_2d(slopes).float()[..., None], row + num_keys - num_queries)


def alibi_of_packed(slopes: Tensor | None, window: tuple[int, int], total_q: int, packed: Packed) -> Alibi | None:
    if slopes is None or not _adds_columns(window, packed.max_seqlen_k):
        return None
    sequence, row = rows_of(packed.cu_seqlens_q, total_q)
    lengths_q, lengths_k = (offsets.diff()[sequence] for offsets in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    batch = packed.cu_seqlens_q.shape[0] - 1
    slopes = torch.atleast_2d(slopes).float().expand(batch, -1)[sequence].transpose(0, 1)
    return Alibi(slopes, row + lengths_k - lengths_q)


def _adds_columns(window: tuple[int, int], most_keys: int) -> bool:
    """Whether flash-attn adds ``slope * column`` instead of ``-slope * distance``: under a causal mask alone."""
    return most_keys > 0 and without_idle_bounds(window, most_keys) == (-1, 0)


def to_flash_lse(lse: Tensor, alibi: Alibi | None) -> Tensor:
    if alibi is not None:
        lse = lse - alibi.left_out()
    return lse.masked_fill(lse == -math.inf, math.inf)


def from_flash_lse(lse: Tensor, alibi: Alibi | None) -> Tensor:
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    return lse if alibi is None else lse + alibi.left_out()


# --- packed sequences of which not all rows are used ----------------------------------------------------------------


def rows_of(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The sequence of each packed row, and the row's place in it; rows of none count on in the last."""
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return sequence, row - cu_seqlens[sequence]


def used_first(cu_seqlens: Tensor, used: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packs the first ``used [B]`` rows of each sequence.

    Returns:
        the order in which the rows are to be taken, their new offsets, and which of the rows are used.
    """
    sequence, row = rows_of(cu_seqlens, total)
    lengths = torch.minimum(cu_seqlens.diff(), used.to(torch.int32)).clamp(min=0)
    is_used = row < lengths[sequence]
    order = (~is_used).to(torch.int8).argsort(stable=True)
    return order, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), is_used


# --- dropout --------------------------------------------------------------------------------------------------------


def signed_probabilities(
    query: Tensor,
    key: Tensor,
    seed: Tensor,
    packed: Packed | None,
    **options: Any,
) -> Tensor:
    """``S_dmask``: the softmax's result, with a minus sign where dropout hit. Dense over all pairs: for tests.

    ``query``, ``key``: as ``fastattn.attention`` and ``attention_varlen`` take them. ``options``: theirs.
    """
    dropout_p = options.pop("dropout_p")
    with torch.no_grad():
        if packed is None:
            one_hot = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
            probabilities, _ = reference.attention(query, key, one_hot, **options)
        else:
            _, row = rows_of(packed.cu_seqlens_k, key.shape[0])
            one_hot = F.one_hot(row.clamp(max=packed.max_seqlen_k - 1), packed.max_seqlen_k).to(key.dtype)
            of_rows, _ = reference.attention_varlen(
                query, key, one_hot[:, None].expand(-1, key.shape[1], -1), *packed, **options
            )
            sequence, row = rows_of(packed.cu_seqlens_q, query.shape[0])
            batch = packed.cu_seqlens_q.shape[0] - 1
            padded = of_rows.new_zeros(batch, packed.max_seqlen_q, *of_rows.shape[1:])
            probabilities = padded.index_put((sequence, row), of_rows).transpose(1, 2)
        batch, heads, num_queries, num_keys = probabilities.shape
        kept = dropout_keep(seed, dropout_p, batch, heads, num_queries, num_keys, probabilities.device)
        signed = torch.where(kept, probabilities, -probabilities)
        rounding = [-size % _ROUNDED_TO for size in signed.shape[2:]]
        return F.pad(signed, (0, rounding[1], 0, rounding[0]))
