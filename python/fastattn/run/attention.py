"""Attention as the choice says: by its own kernel, over padded head dims, or by the decoding kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import ops
from fastattn.dispatch.call import Choice
from fastattn.layout import readable
from fastattn.ops.attention import AttentionArguments
from fastattn.ops.decode import DecodeArguments


def attention(
    choice: Choice, arguments: AttentionArguments, *, needs_grad: bool, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse; with ``needs_grad`` differentiable in query, key, value, bias, sinks and through the lse.

    ``deterministic``: whether the gradients are to have the same bits every time.
    """
    if choice.padded is None:
        return _attend(choice, arguments, needs_grad, deterministic)
    head_dim, value_dim = choice.padded
    padded = arguments._replace(
        query=_padded(arguments.query, head_dim),
        key=_padded(arguments.key, head_dim),
        value=_padded(arguments.value, value_dim),
    )
    out, lse = _attend(choice, padded, needs_grad, deterministic)
    return out[..., : arguments.value.shape[-1]], lse


def _attend(
    choice: Choice, arguments: AttentionArguments, needs_grad: bool, deterministic: bool
) -> tuple[Tensor, Tensor]:
    if needs_grad:
        return ops.attention.differentiable_attention(choice.backend, arguments, deterministic)
    if choice.decodes:
        return ops.decode.attention_decode(choice.backend, _as_decoding(arguments))
    return ops.attention.attention(choice.backend, arguments)


def _as_decoding(arguments: AttentionArguments) -> DecodeArguments:
    """The same, keys and values being a cache that is full."""
    key, value = readable(arguments.key), readable(arguments.value)
    return DecodeArguments(
        arguments.query,
        key,
        value,
        torch.full((key.shape[0],), key.shape[2], dtype=torch.int32, device=key.device),
        alibi_slopes=arguments.alibi_slopes,
        sinks=arguments.sinks,
        scale=arguments.scale,
        window_left=arguments.window_left,
        window_right=arguments.window_right,
        softcap=arguments.softcap,
    )


def _padded(tensor: Tensor, head_dim: int) -> Tensor:
    """``[B, H, S, D]`` or ``[total, H, D]`` with zeros behind its last dimension, in the same order in memory."""
    padding = (0, head_dim - tensor.shape[-1])
    if padding[1] == 0:
        return tensor
    if tensor.dim() == 4 and tensor.stride(1) < tensor.stride(2):
        return F.pad(tensor.transpose(1, 2), padding).transpose(1, 2)
    return F.pad(tensor, padding)
