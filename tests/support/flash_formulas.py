"""Computes what flash-attn's functions compute, as formulas, in the dtype of their inputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def scores_of(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Returns scores ``[B, H, Sq, Sk]`` of ``q [B, Sq, H, D]`` and ``k [B, Sk, Hk, D]``, -inf where a key is masked."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    left, right = window_size
    right = 0 if causal else right
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    column = torch.arange(num_keys)
    position = torch.arange(num_queries)[:, None] + num_keys - num_queries
    if alibi_slopes is not None:
        slopes = torch.atleast_2d(alibi_slopes)[:, :, None, None].to(q.dtype)
        is_causal_alone = right == 0 and left < 0
        scores = scores + slopes * (column if is_causal_alone else -(position - column).abs())
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if left >= 0:
        hidden |= column < position - left
    if right >= 0:
        hidden |= column > position + right
    return scores.masked_fill(hidden, -math.inf)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, learnable_sink: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Returns output ``[B, Sq, H, Dv]`` and lse ``[B, H, Sq]``; a row without keys has output 0 and lse +inf."""
    scores = scores_of(q, k, **options)
    logits = scores
    if learnable_sink is not None:
        sink = learnable_sink.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, sink], dim=-1)
    is_empty = (logits == -math.inf).all(-1)
    logits = logits.masked_fill(is_empty[..., None], 0.0)
    weights = logits.softmax(-1)[..., : scores.shape[-1]].masked_fill(scores == -math.inf, 0.0)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), logits.logsumexp(-1).masked_fill(is_empty, math.inf)


def packed_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_k: list[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """Returns `flash_attention` of each sequence: ``[total_q, H, Dv]``, ``[H, total_q]``. Slopes may be ``[B, H]``."""
    slopes = options.pop("alibi_slopes", None)
    outs, lses = [], []
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    for sequence, (part_q, part_k, part_v) in enumerate(parts):
        own = None if slopes is None else slopes[sequence] if slopes.dim() == 2 else slopes
        out, lse = flash_attention(part_q[None], part_k[None], part_v[None], alibi_slopes=own, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates token ``(b, s)`` of ``x [B, S, H, D]`` by the angles of ``positions[b, s]``."""
    cos, sin = cos[positions][:, :, None], sin[positions][:, :, None]
    half = cos.shape[-1]
    first = x[..., : 2 * half : 2] if interleaved else x[..., :half]
    second = x[..., 1 : 2 * half : 2] if interleaved else x[..., half : 2 * half]
    result = x.clone()
    turned = first * cos - second * sin, second * cos + first * sin
    result[..., : 2 * half : 2 if interleaved else 1][..., :half] = turned[0]
    if interleaved:
        result[..., 1 : 2 * half : 2] = turned[1]
    else:
        result[..., half : 2 * half] = turned[1]
    return result


def offsets(lengths: list[int]) -> Tensor:
    """Returns the cumulative lengths, int32 ``[B + 1]``."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
