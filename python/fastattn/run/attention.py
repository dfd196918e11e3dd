"""Runs attention on the chosen backend: by the attention kernel, over padded head dims, or by the decoding kernel."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.call import AttentionCall, DecodeCall
from fastattn.dispatch.request import Choice
from fastattn.ops import attention as ops
from fastattn.ops.attention import AttentionBackward, Results
from fastattn.ops.decode import attention_split_keys

Call = TypeVar("Call", AttentionCall, DecodeCall)


def attention(choice: Choice, call: AttentionCall, needs_grad: bool) -> Results:
    """Runs a checked call and returns output, lse and largest scores.

    The slopes and sinks may have any float dtype, and the slopes any shape that ``fastattn.attention`` takes. With
    ``needs_grad``, output and lse are differentiable in query, key, value, bias, slopes and sinks.
    """
    value_dim = call.value.shape[-1]
    if choice.padded is not None:
        call = _padded(call, *choice.padded)
    call = with_exact_options(call)
    if needs_grad:
        out, lse, max_logit = ops.differentiable_attention(choice.backend, call)
    elif choice.op.name == "decode":
        out, lse = attention_split_keys(choice.backend, call)
        max_logit = lse.new_empty(0)
    else:
        out, lse, max_logit = ops.attention_forward(choice.backend, call)
    return (out if choice.padded is None else out[..., :value_dim]), lse, max_logit


def with_exact_options(call: Call) -> Call:
    """Returns the call with slopes and sinks as the operators take them: float32, the slopes ``[1 or B, Hq]``."""
    slopes, sinks = call.alibi_slopes, call.sinks
    if slopes is None and sinks is None:
        return call
    return call._replace(
        alibi_slopes=None if slopes is None else torch.atleast_2d(slopes.float()),
        sinks=None if sinks is None else sinks.float(),
    )


def attention_backward(choice: Choice, backward: AttentionBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, outside of autograd.

    ``out`` and ``lse`` may be those of a larger call, with more keys than this one, as in ring attention.
    """
    head_dim, value_dim = backward.call.query.shape[-1], backward.call.value.shape[-1]
    backward = _for_kernel(choice, backward)
    grad_query, grad_key, grad_value, *_ = ops.attention_backward(choice.backend, backward)
    ops.note_backward(choice.backend, backward)
    if choice.padded is None:
        return grad_query, grad_key, grad_value
    return grad_query[..., :head_dim], grad_key[..., :head_dim], grad_value[..., :value_dim]


def attention_backward_add(choice: Choice, sums: tuple[Tensor, Tensor, Tensor], backward: AttentionBackward) -> Tensor:
    """Adds the gradients of query, key and value to float32 ``sums``; returns the slopes' gradient, or an empty one."""
    backward = _for_kernel(choice, backward)
    grads: tuple[Tensor, ...] = sums
    if choice.padded is not None:
        grads = tuple(torch.zeros_like(tensor, dtype=torch.float32) for tensor in backward.call[:3])
    backward = backward._replace(grad_query=grads[0], grad_key=grads[1], grad_value=grads[2])
    grad_slopes: Tensor = ops.attention_backward_add(choice.backend, backward)
    ops.note_backward(choice.backend, backward)
    if choice.padded is not None:
        for total, grad in zip(sums, grads, strict=True):
            total += grad[..., : total.shape[-1]]
    return grad_slopes


def _for_kernel(choice: Choice, backward: AttentionBackward) -> AttentionBackward:
    """Returns the backward pass with options and padded head dims as the kernel takes them."""
    backward = backward._replace(call=with_exact_options(backward.call))
    if choice.padded is None:
        return backward
    _, value_dim = choice.padded
    return backward._replace(
        call=_padded(backward.call, *choice.padded),
        out=_pad(backward.out, value_dim),
        grad_out=_pad(backward.grad_out, value_dim),
    )


def _padded(call: AttentionCall, head_dim: int, value_dim: int) -> AttentionCall:
    return call._replace(
        query=_pad(call.query, head_dim), key=_pad(call.key, head_dim), value=_pad(call.value, value_dim)
    )


def _pad(tensor: Tensor, head_dim: int) -> Tensor:
    """Pads the last dimension of ``[B, H, S, D]`` or ``[total, H, D]`` with zeros and keeps the memory order."""
    padding = (0, head_dim - tensor.shape[-1])
    if padding[1] == 0:
        return tensor
    if tensor.dim() == 4 and tensor.stride(1) < tensor.stride(2):
        return F.pad(tensor.transpose(1, 2), padding).transpose(1, 2)
    return F.pad(tensor, padding)
