"""Computes attention over dense and over packed sequences."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.reference.formula import attend, bounds
from fastattn.reference.pages import gather_pages, present_pages


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    first_row: int | None = None,
    first_key: int = 0,
    first_head: int = 0,
    compute_dtype: torch.dtype | None = None,
    return_max_logit: bool = False,
    exact_out: bool = False,
) -> tuple[Tensor, ...]:
    """Returns ``softmax(scale * Q K^T + bias) V`` and its log-sum-exp, ``([B, Hq, Sq, Dv], [B, Hq, Sq])``; with
    ``return_max_logit`` also each head's largest unmasked score, ``[Hq]``.

    ``first_row``, ``first_key`` and ``first_head`` are the positions of the first row, key and head in the larger call
    that contains this block. If ``first_row`` is None, the last row has the last key's position. ``compute_dtype`` is
    the dtype of every intermediate: tests set it to a 16-bit dtype to measure the error of PyTorch operators in that
    dtype. With ``exact_out``, the output has the dtype of the intermediates.
    """
    offset = key.shape[2] - query.shape[2] if first_row is None else first_row - first_key
    return attend(
        query,
        key,
        value,
        position=torch.arange(query.shape[2], device=query.device)[None] + offset,
        key_ranges=key_ranges,
        window=bounds(causal, window),
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        dropout_origin=(first_row or 0, first_key, first_head),
        scale=scale,
        compute_dtype=compute_dtype,
        return_max_logit=return_max_logit,
        exact_out=exact_out,
    )


def _packed_rows(cu_seqlens: Tensor, total: int, max_seqlen: int) -> tuple[Tensor, Tensor]:
    """Returns the packed indices of each sequence's rows, ``[B, max_seqlen]``, and the lengths, ``[B]``. The index of
    an absent row is ``total``."""
    cu_seqlens = cu_seqlens.to(torch.int64)
    begin = cu_seqlens[:-1].clamp(0, total)
    length = (torch.maximum(cu_seqlens[1:].clamp(max=total), begin) - begin).clamp(max=max_seqlen)
    row = torch.arange(max_seqlen, device=cu_seqlens.device)
    return torch.where(row < length[:, None], begin[:, None] + row, total), length


def _pad(packed: Tensor, rows: Tensor) -> Tensor:
    """Unpacks ``[total, H, D]`` to ``[B, H, max_seqlen, D]``, with zeros for absent rows."""
    return F.pad(packed, (0, 0, 0, 0, 0, 1))[rows].transpose(1, 2)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: Tensor | None = None,
    key_ranges: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    first_row: int | None = None,
    first_key: int = 0,
    first_head: int = 0,
    compute_dtype: torch.dtype | None = None,
    return_max_logit: bool = False,
    exact_out: bool = False,
) -> tuple[Tensor, ...]:
    """Computes attention over packed sequences by padding them; returns ``([total_q, Hq, Dv], [Hq, total_q])``, and
    with ``return_max_logit`` the largest scores, ``[Hq]``. Positions count within each sequence."""
    rows_q, length_q = _packed_rows(cu_seqlens_q, query.shape[0], min(max_seqlen_q, query.shape[0]))
    if block_table is None:
        rows_k, length_k = _packed_rows(cu_seqlens_k, key.shape[0], min(max_seqlen_k, key.shape[0]))
        keys, values = _pad(key, rows_k), _pad(value, rows_k)
        key_is_present = torch.arange(rows_k.shape[1], device=query.device) < length_k[:, None]
    else:
        table, page_is_present = present_pages(block_table, key.shape[0])
        longest = min(max_seqlen_k, table.shape[1] * key.shape[2])
        length_k = cu_seqlens_k.to(torch.int64).diff().clamp(0, longest)
        keys, values = (gather_pages(pages, table)[:, :, :longest] for pages in (key, value))
        key_is_present = page_is_present.repeat_interleave(key.shape[2], dim=1)[:, :longest]
        key_is_present = key_is_present & (torch.arange(longest, device=query.device) < length_k[:, None])
    offset = (length_k - length_q)[:, None] if first_row is None else first_row - first_key
    position = torch.arange(rows_q.shape[1], device=query.device)[None] + offset
    out, lse, *max_logit = attend(
        _pad(query, rows_q),
        keys,
        values,
        position=position,
        key_is_present=key_is_present,
        key_ranges=None if key_ranges is None else F.pad(key_ranges, (0, 0, 0, 0, 0, 1))[:, rows_q].transpose(0, 1),
        window=bounds(causal, window),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        dropout_origin=(first_row or 0, first_key, first_head),
        scale=scale,
        compute_dtype=compute_dtype,
        row_is_present=torch.arange(rows_q.shape[1], device=query.device) < length_q[:, None],
        return_max_logit=return_max_logit,
        exact_out=exact_out,
    )
    total, heads = query.shape[:2]
    rows = rows_q.flatten()
    packed_out = out.new_zeros(total + 1, heads, out.shape[-1]).index_copy(0, rows, out.transpose(1, 2).flatten(0, 1))
    packed_lse = lse.new_full((total + 1, heads), -math.inf).index_copy(0, rows, lse.transpose(1, 2).flatten(0, 1))
    return packed_out[:total], packed_lse[:total].transpose(0, 1).contiguous(), *max_logit
