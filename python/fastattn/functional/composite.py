"""Computes attention for calls that no kernel runs: with PyTorch's own attention, with PyTorch's other operators, or
with the reference.

``attend`` composes attention of PyTorch's operators on a CPU. It supports what PyTorch's own attention lacks: softcap,
ALiBi, sinks and the lse. It is faster than the reference, because it does not expand KV heads, computes only one
softmax, and handles NaN only if there is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastattn import reference
from fastattn.call import AttentionCall, on_record
from fastattn.checks import is_readable
from fastattn.dispatch.request import Request
from fastattn.functional import torch_sdpa
from fastattn.functional.torch_sdpa import band, is_known_finite


def attend(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Returns output and lse of a dense call, ``([B, Hq, Sq, Dv], [B, Hq, Sq])``, or None if a tensor is empty, or if
    the host cannot read its values (see ``is_readable``). All operations are differentiable."""
    query, key, value, bias, alibi_slopes, sinks = call[:6]
    softcap, scale = call.softcap, call.scale
    assert scale is not None
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_keys = key.shape[1:3]
    if not is_readable(query, key, value, bias, alibi_slopes, sinks):
        return None
    if 0 in (*query.shape, *key.shape, *value.shape):
        return None
    visible = band(num_queries, num_keys, *call.window, query.device)
    nonfinite_keys = nonfinite_values = None
    if (visible is not None or bias is not None) and not is_known_finite(key, value):
        # The product of a NaN and a zero weight is NaN, but a masked NaN must not have any influence. So replace NaN
        # and infinity by zeros before the products, and set what sees them to NaN after the products.
        nonfinite_keys, nonfinite_values = ~key.isfinite().all(-1, keepdim=True), ~value.isfinite()
        key, value = key.masked_fill(nonfinite_keys, 0.0), value.masked_fill(nonfinite_values, 0.0)

    dtype = torch.promote_types(query.dtype, torch.float32)
    by_kv_head = (kv_heads, heads // kv_heads)

    def like_scores(tensor: Tensor) -> Tensor:
        """Returns ``[B or 1, Hq or 1, …]`` in a shape that broadcasts to the scores ``[B, Hkv, group, …]``."""
        return tensor.unsqueeze(2) if tensor.shape[1] == 1 else tensor.unflatten(1, by_kv_head)

    # The query heads of a KV head are rows of one product. Only `scores` refers to the product, so it is changed in
    # place where autograd allows that.
    rows = (query.to(dtype) * (scale / softcap if softcap > 0 else scale)).reshape(batch, kv_heads, -1, key.shape[-1])
    scores = (rows @ key.to(dtype).transpose(-2, -1)).unflatten(2, (-1, num_queries))
    if softcap > 0:
        scores = scores.tanh_()
        scores = scores * softcap if scores.requires_grad else scores.mul_(softcap)
    if alibi_slopes is not None:
        position = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
        distance = (position - torch.arange(num_keys, device=query.device)).abs().to(dtype)
        scores = scores - like_scores(torch.atleast_2d(alibi_slopes.to(dtype))[..., None, None]) * distance
    if nonfinite_keys is not None:
        scores = scores + torch.where(nonfinite_keys.transpose(-2, -1), math.nan, 0.0).to(dtype)[:, :, None]
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + like_scores(bias.to(dtype))
        if nonfinite_keys is not None:  # NaN + -inf is NaN, so mask such scores explicitly
            scores = scores.masked_fill(like_scores(bias == -math.inf), -math.inf)
    elif bias is not None:
        scores = scores.masked_fill(~like_scores(bias), -math.inf)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, :, None], -math.inf)

    seen = None
    if nonfinite_values is not None:
        seen = (scores != -math.inf).to(dtype).flatten(2, 3) @ nonfinite_values.to(dtype) > 0

    # Weights are relative to ``level``, the largest score. Output and lse do not depend on ``level``, so it needs no
    # gradient.
    level = scores.detach().amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.to(dtype).view(1, *by_kv_head, 1, 1)
    if sink is not None:
        level = torch.maximum(level, sink.detach())
    level = level.masked_fill(~level.isfinite(), 0.0)
    weights = (scores - level if scores.requires_grad else scores.sub_(level)).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - level).exp()
    sees_nothing = total == 0
    total = total.masked_fill(sees_nothing, 1.0)
    sums = weights.flatten(2, 3) @ value.to(dtype)
    if seen is not None:  # multiply by the weights, so that their gradients are NaN too
        sums = sums + torch.where(seen, math.nan, 0.0).to(dtype) * weights.sum(-1).flatten(2, 3)[..., None]
    sums = sums.unflatten(2, (-1, num_queries))
    out = (sums / total).flatten(1, 2).to(query.dtype)
    lse = (level + total.log()).masked_fill(sees_nothing, -math.inf)
    return out, lse.squeeze(-1).flatten(1, 2)


_COMPOSED = torch_sdpa.IN_TORCH | {"softcap", "alibi", "slope gradients", "sinks"}
_attend_by_sdpa = on_record(torch_sdpa.attend, AttentionCall)
_attend_by_reference = on_record(reference.attention, AttentionCall)
_attend_packed_by_reference = on_record(reference.attention_varlen, AttentionCall)


def _with_mask(call: AttentionCall, request: Request) -> tuple[AttentionCall, Request]:
    """Returns a dense call and its request with a mask or bias instead of the ranges of keys."""
    assert call.key_ranges is not None
    visible, bias = reference.mask_of_ranges(call.key_ranges, call.key.shape[2]), call.bias
    if bias is not None:
        visible = bias & visible if bias.dtype == torch.bool else bias.masked_fill(~visible, -math.inf)
    features = request.features - {"key ranges"} | ({"mask"} if visible.dtype == torch.bool else set())
    return call._replace(bias=visible, key_ranges=None), request._replace(features=features)


def attend_in_pytorch(call: AttentionCall, request: Request) -> tuple[Tensor, ...]:
    """Returns output, lse and, with ``return_max_logit``, the largest scores. Without ``return_lse``, the lse can be
    empty.

    Runs PyTorch's own attention if that supports the call, otherwise ``attend`` if that does, otherwise the reference.
    """
    if call.key_ranges is not None and not call.is_packed:
        call, request = _with_mask(call, request)
    assert call.scale is not None
    num_keys = call.key.shape[0 if call.is_packed else 2]
    torch_can = not call.return_lse and torch_sdpa.can_express(request, num_keys, call.scale, call.bias)
    if torch_can and torch_sdpa.can_express_now(request, call.deterministic):
        out = torch_sdpa.attend_packed(call, _attend_by_sdpa) if call.is_packed else _attend_by_sdpa(call)
        if out is not None:
            return out, out.new_empty(0)
    if request.features <= _COMPOSED:
        slopes = call.alibi_slopes
        if not call.is_packed:
            composed = attend(call)
            if composed is not None:
                return composed
        elif (
            not call.return_lse and (slopes is None or slopes.dim() == 1) and call.query.numel() and call.value.numel()
        ):
            # `attend_packed` passes only readable tensors, for which `attend` never returns None.
            out = torch_sdpa.attend_packed(call, lambda some: attend(some)[0])  # type: ignore[index]
            if out is not None:
                return out, out.new_empty(0)
    return _attend_packed_by_reference(call) if call.is_packed else _attend_by_reference(call)
