"""Computes torch's CUDA attention operators (flash, memory-efficient, cuDNN) with a few matmuls: the CPU lacks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Returns scores ``[B, H, Sq, Sk]`` in float32; KV heads are repeated where there are fewer."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * query.float() @ _for_each_query_head(key, query).transpose(-1, -2)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores if bias is None else scores + bias.float()


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.float().repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the output, in the query's order of dims in memory, and the lse ``[B, H, Sq]`` in float32."""
    scores = _scores(query, key, bias, is_causal, scale)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).nan_to_num(0.0)  # not exp(scores - lse): finfo.min + log(keys) rounds to finfo.min
    out = (weights @ _for_each_query_head(value, query)).to(query.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key, value and scores."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    rows = query.shape[-2]
    weights = (_scores(query, key, bias, is_causal, scale) - lse[..., :rows, None]).exp().nan_to_num(0.0)
    grad_weights = grad.float() @ _for_each_query_head(value, query).transpose(-1, -2)
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta)
    grad_query = factor * grad_scores @ _for_each_query_head(key, query)

    def of_kv_heads(wide: Tensor, like: Tensor) -> Tensor:
        return wide.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)

    grad_key = of_kv_heads(factor * grad_scores.transpose(-1, -2) @ query.float(), key)
    grad_value = of_kv_heads(weights.transpose(-1, -2) @ grad.float(), value)
    return grad_query.to(query.dtype), grad_key, grad_value, grad_scores


def _check(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError("torch's own attention on the emulated device has no dropout")


def _state() -> tuple[Tensor, Tensor]:
    return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, debug: bool = False, *, scale=None
) -> Any:  # type: ignore[no-untyped-def]
    _check(p)
    out, lse = forward(q, k, v, None, causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], torch.zeros(2, dtype=torch.uint64), _state()[1], q.new_empty(0)


def _flash_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, causal, seed, offset, *, scale=None
) -> Any:
    return backward(grad, q, k, v, out, lse, None, causal, scale)[:3]


def _efficient(q, k, v, bias, compute_lse, p=0.0, causal=False, *, scale=None) -> Any:  # type: ignore[no-untyped-def]
    _check(p)
    out, lse = forward(q, k, v, bias, causal, scale)
    return out, lse, *_state()


def _efficient_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, bias, out, lse, seed, offset, p, wanted, causal=False, *, scale=None
) -> Any:
    *grads, of_scores = backward(grad, q, k, v, out, lse, bias, causal, scale)
    of_bias = of_scores.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and wanted[3] else None
    return *grads, of_bias


def _cudnn(q, k, v, bias, compute_lse, p=0.0, causal=False, debug=False, *, scale=None) -> Any:  # type: ignore[no-untyped-def]
    _check(p)
    out, lse = forward(q, k, v, bias, causal, scale)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *_state(), q.new_empty(0)


def _cudnn_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale=None
) -> Any:
    return backward(grad, q, k, v, out, lse.squeeze(-1), bias, causal, scale)[:3]


# Names as in aten.
OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
