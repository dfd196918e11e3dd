"""Computes the formula of attention over dense tensors, with every option."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.reference.dropout import dropout_keep


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    position: Tensor,
    key_is_present: Tensor | None = None,
    window: tuple[int | None, int | None],
    softcap: float,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    compute_dtype: torch.dtype | None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_origin: tuple[int, int, int] = (0, 0, 0),
    key_ranges: Tensor | None = None,
    row_is_present: Tensor | None = None,
    return_max_logit: bool = False,
    exact_out: bool = False,
) -> tuple[Tensor, ...]:
    """Returns output and lse, and with ``return_max_logit`` the largest score of each head.

    ``position`` is each query's index among the keys, int64 ``[B or 1, Sq]``. ``key_ranges`` are ``[B or 1, Hq or 1,
    Sq, R, 2]``. ``row_is_present``, bool ``[B, Sq]``, says which queries count for the largest score.
    """
    dtype = compute_dtype or torch.promote_types(query.dtype, torch.float32)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, num_queries, head_dim = query.shape
    kv_heads, num_keys = key.shape[1:3]
    group = heads // kv_heads if kv_heads else 1
    scale = scale if scale is not None else (1 / math.sqrt(head_dim) if head_dim else 1.0)
    column = torch.arange(num_keys, device=query.device)

    # visible[b, h, i, j] says whether query i sees key j, bool [B or 1, Hq or 1, Sq, Sk]. None means all keys.
    masks = []
    if window[0] is not None:
        masks.append(column >= (position - window[0])[:, None, :, None])
    if window[1] is not None:
        masks.append(column <= (position + window[1])[:, None, :, None])
    if key_is_present is not None:
        masks.append(key_is_present[:, None, None, :])
    if key_ranges is not None:
        masks.append(mask_of_ranges(key_ranges, num_keys))
    if bias is not None:
        masks.append(bias if bias.dtype == torch.bool else bias != -math.inf)
    visible = None
    for mask in masks:
        visible = mask if visible is None else visible & mask

    k = key.to(dtype).repeat_interleave(group, dim=1)
    v = value.to(dtype).repeat_interleave(group, dim=1)
    nonfinite_keys = nonfinite_values = None
    if visible is not None:  # replace masked NaNs: NaN times a probability of 0 is NaN
        nonfinite_keys = ~k.detach().isfinite().all(-1)
        nonfinite_values = ~v.detach().isfinite()
        k = k.masked_fill(nonfinite_keys[..., None], 0.0)
        v = v.masked_fill(nonfinite_values, 0.0)

    scores = (query.to(dtype) * scale) @ k.transpose(-2, -1)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (position[:, None, :, None] - column).abs().to(dtype)
        scores = scores - torch.atleast_2d(alibi_slopes.to(dtype))[:, :, None, None] * distance
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias.to(dtype)
    if visible is not None and nonfinite_keys is not None:
        nonfinite = torch.where(nonfinite_keys[..., None, :], math.nan, 0.0).to(dtype)
        scores = (scores + nonfinite).masked_fill(~visible, -math.inf)  # add: gradients become NaN too
    max_logit = _largest_of_heads(scores.detach(), row_is_present) if return_max_logit else None
    if sinks is not None:
        sink = sinks.to(dtype).view(1, heads, 1, 1).expand(batch, heads, num_queries, 1)
        scores = torch.cat([scores, sink], dim=-1)

    sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
    finite_scores = scores.masked_fill(sees_nothing, 0.0)
    # Use softmax, not exp(scores - lse): if all scores are finfo.min, the lse loses the log of the number of keys.
    probabilities = finite_scores.softmax(-1)[..., :num_keys].masked_fill(sees_nothing, 0.0)
    if visible is not None:
        probabilities = probabilities.masked_fill(~visible, 0.0)
    # The gradient of logsumexp is exp(scores - lse), wrong for the same reason. So compute the lse relative to
    # ``level``.
    level = finite_scores.detach().logsumexp(-1, keepdim=True)
    level = level.masked_fill(~level.isfinite(), 0.0)
    lse = (level + (finite_scores - level).logsumexp(-1, keepdim=True)).masked_fill(sees_nothing, -math.inf)
    if dropout_p > 0:
        assert dropout_seed is not None
        sizes = batch, heads, num_queries, num_keys
        keep = dropout_keep(dropout_seed, dropout_p, *sizes, query.device, dropout_origin)
        probabilities = probabilities * keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    out = probabilities @ v
    if visible is not None and nonfinite_values is not None:
        sees_nonfinite = visible.to(dtype).expand(scores.shape[:-1] + (num_keys,)) @ nonfinite_values.to(dtype) > 0
        out = out + torch.where(sees_nonfinite, math.nan, 0.0).to(dtype) * probabilities.sum(-1, keepdim=True)
    results = out if exact_out else out.to(query.dtype), lse.squeeze(-1).to(lse_dtype)
    return results if max_logit is None else (*results, max_logit.to(lse_dtype))


def _largest_of_heads(scores: Tensor, row_is_present: Tensor | None) -> Tensor:
    """Returns the largest of ``scores [B, Hq, Sq, Sk]`` for each head, ``[Hq]``. Ignores NaN; -inf if there is no
    score."""
    if scores.shape[-1] == 0:
        return scores.new_full((scores.shape[1],), -math.inf)
    row_maxima = scores.masked_fill(scores.isnan(), -math.inf).amax(-1)
    if row_is_present is not None:
        row_maxima = row_maxima.masked_fill(~row_is_present[:, None], -math.inf)
    return F.pad(row_maxima.transpose(0, 1).flatten(1), (0, 1), value=-math.inf).amax(1)


def mask_of_ranges(key_ranges: Tensor, num_keys: int) -> Tensor:
    """Returns which keys the ranges ``[…, Sq, R, 2]`` let each query see, bool ``[…, Sq, Sk]``."""
    key = torch.arange(num_keys, device=key_ranges.device)
    begin, end = key_ranges.unsqueeze(-1).unbind(-2)
    return ((begin <= key) & (key < end)).any(-2)


def bounds(causal: bool, window: tuple[int, int]) -> tuple[int | None, int | None]:
    """Returns how many keys before and after its position a query sees; None is unbounded."""
    left, right = (None if side < 0 else side for side in window)
    return left, 0 if causal else right
