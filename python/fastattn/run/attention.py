"""Runs attention as the choice says: by its own kernel, over padded head dims, or by the decoding kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.dispatch.call import Choice
from fastattn.ops.attention import (
    AttentionArguments,
    AttentionBackwardArguments,
    Results,
    add_attention_gradients,
    attention_backward_of_block,
    attention_forward,
    differentiable_attention,
)
from fastattn.ops.decode import SplitKeysArguments, attention_split_keys


def attention(choice: Choice, arguments: AttentionArguments, needs_grad: bool, deterministic: bool) -> Results:
    """Returns output, lse and largest scores.

    With ``needs_grad`` the first two are differentiable in query, key, value, bias, slopes and sinks.
    ``deterministic`` says whether the gradients must have the same bits every time.
    """
    value_dim = arguments.value.shape[-1]
    if choice.padded is not None:
        arguments = _padded(arguments, *choice.padded)
    if needs_grad:
        out, lse, max_logit = differentiable_attention(choice.backend, arguments, deterministic)
    elif choice.decodes:
        out, lse = attention_split_keys(choice.backend, _of_split_keys(arguments))
        max_logit = lse.new_empty(0)
    else:
        out, lse, max_logit = attention_forward(choice.backend, arguments)
    return (out if choice.padded is None else out[..., :value_dim]), lse, max_logit


def attention_backward(choice: Choice, arguments: AttentionBackwardArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, not differentiable; ``out`` and ``lse`` may be over more keys."""
    if choice.padded is None:
        return attention_backward_of_block(choice.backend, arguments)
    grads = attention_backward_of_block(choice.backend, _padded_backward(arguments, *choice.padded))
    grad_query, grad_key, grad_value = (
        grad[..., : tensor.shape[-1]]
        for grad, tensor in zip(grads, (arguments.query, arguments.key, arguments.value), strict=True)
    )
    return grad_query, grad_key, grad_value


def attention_backward_add(
    choice: Choice, sums: tuple[Tensor, Tensor, Tensor], arguments: AttentionBackwardArguments
) -> Tensor:
    """Adds the gradients of query, key and value to float32 ``sums``; returns that of the slopes, or an empty one."""
    if choice.padded is None:
        return add_attention_gradients(choice.backend, sums, arguments)
    padded = _padded_backward(arguments, *choice.padded)
    parts = [torch.zeros_like(t, dtype=torch.float32) for t in (padded.query, padded.key, padded.value)]
    grad_slopes = add_attention_gradients(choice.backend, tuple(parts), padded)
    for total, part in zip(sums, parts, strict=True):
        total += part[..., : total.shape[-1]]
    return grad_slopes


def _padded_backward(
    arguments: AttentionBackwardArguments, head_dim: int, value_dim: int
) -> AttentionBackwardArguments:
    return arguments._replace(
        query=_pad(arguments.query, head_dim),
        key=_pad(arguments.key, head_dim),
        value=_pad(arguments.value, value_dim),
        out=_pad(arguments.out, value_dim),
        grad_out=_pad(arguments.grad_out, value_dim),
    )


def _padded(arguments: AttentionArguments, head_dim: int, value_dim: int) -> AttentionArguments:
    return arguments._replace(
        query=_pad(arguments.query, head_dim),
        key=_pad(arguments.key, head_dim),
        value=_pad(arguments.value, value_dim),
    )


def _pad(tensor: Tensor, head_dim: int) -> Tensor:
    """Pads the last dimension of ``[B, H, S, D]`` or ``[total, H, D]`` with zeros and keeps the order in memory."""
    padding = (0, head_dim - tensor.shape[-1])
    if padding[1] == 0:
        return tensor
    if tensor.dim() == 4 and tensor.stride(1) < tensor.stride(2):
        return F.pad(tensor.transpose(1, 2), padding).transpose(1, 2)
    return F.pad(tensor, padding)


def _of_split_keys(arguments: AttentionArguments) -> SplitKeysArguments:
    return SplitKeysArguments(*(getattr(arguments, name) for name in SplitKeysArguments._fields))
