"""Defines the attention function, which turns the arguments of a transformers model into calls of fastattn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.checks import expect, shown
from fastattn.dispatch.device import facts
from fastattn.dispatch.support import FEATURE_OF_CACHE
from fastattn.errors import InputError
from fastattn.functional.attention import attention, attention_varlen
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from fastattn.functional.spread_attention import SpreadAttention, in_force
from fastattn.integrations.transformers.eight_bit_cache import attend_8bit
from fastattn.integrations.transformers.marks import Keys, Lengths, Offsets, Ranges, read

_REFUSED = {
    "output_attentions": 'attention weights are never formed; set attn_implementation="eager" to get them',
    "cache": 'continuous batching is not supported; set attn_implementation="sdpa" for it, or call generate()',
    "indices": 'the model selects keys by indices; set attn_implementation="eager"',
    "sinks": 'the model has sinks that differ between tokens; set attn_implementation="eager"',
    "head_mask": 'weights of heads are not supported; set attn_implementation="eager"',
}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attends for a layer of a model; it is registered as an ``AttentionInterface``.

    Args:
        query: ``[B, Hq, Sq, D]``.
        key, value: ``[B, Hkv, Sk, D]``, not repeated for grouped queries.
        attention_mask: a mark (marks.py), or a whole bool or additive mask ``[B or 1, Hq or 1, Sq or 1, Sk]``, or None.
            With None the layer itself decides whether it is causal, and the last query has the last key's position.
        sliding_window: how many keys a causal query sees, itself included.
        s_aux: ``[Hq]``: sinks, a logit in the softmax denominator of each head's rows.
        position_bias: ``[B or 1, Hq or 1, Sq, Sk]``: added to the scores. Differentiable.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: the offsets and longest lengths of packed sequences.
            They take precedence over ``attention_mask``.

    Returns:
        ``[B, Sq, Hq, Dv]``, and None for the attention weights.

    Raises:
        InputError: the model asks for something that is not supported; the message says what to do.
    """
    _refuse(module, others)
    options: dict[str, Any] = {
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "dropout_p": float(dropout),
        "scale": scaling,
        "deterministic": deterministic or None,
    }
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal_window = (sliding_window - 1 if sliding_window else -1, 0)
    if query.shape[0] != key.shape[0]:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)

    spread = in_force()
    if spread is not None:
        whole = attention_mask is None and not is_causal
        window = _spread_window(
            spread, query, key, attention_mask, causal_window, whole, (position_bias, cu_seq_lens_q, cu_seq_lens_k)
        )
        return spread(query, key, value, window=window, **options).transpose(1, 2).contiguous(), None

    mark = None if attention_mask is None else read(attention_mask)
    offsets = _offsets(query, key, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if offsets is None and isinstance(mark, Offsets):
        offsets, is_causal = (mark, mark), True
    if offsets is not None:
        if position_bias is not None:
            raise InputError(
                "position_bias: expected None for packed sequences, got a tensor; pad the sequences instead of packing "
                "them"
            )
        window = causal_window
        if not is_causal:
            window = (sliding_window - 1, sliding_window - 1) if sliding_window else (-1, -1)
        return _attend_packed(query, key, value, offsets, window, options), None

    if key.dtype in FEATURE_OF_CACHE:
        options = _options_of_cache(position_bias, options)
        out = attend_8bit(query, key, value, attention_mask, causal_window, **options)
    elif isinstance(mark, Lengths) and _kernel_reads_cache(query, key, value, position_bias, options):
        options = _options_of_cache(position_bias, options)
        out = attention_with_kv_cache(query, key, value, mark.lengths, causal=False, window=causal_window, **options)
    else:
        mask, window, key_ranges = attention_mask, (-1, -1), None
        if isinstance(mark, Lengths):
            mask = _cached(mark.lengths, key.shape[2], causal_window[0])
        elif isinstance(mark, Keys):
            key, value, mask = key[:, :, : mark.num_keys], value[:, :, : mark.num_keys], mark.present
            window = causal_window if mark.reach is None else (mark.reach, mark.reach)
        elif isinstance(mark, Ranges):
            key_ranges, mask = mark.key_ranges.clamp(max=key.shape[2]), None
        elif mask is None and is_causal:
            window = causal_window
        bias = _bias(mask, position_bias, query, key)
        out = attention(query, key, value, window=window, bias=bias, key_ranges=key_ranges, **options)
    return out.transpose(1, 2).contiguous(), None


def _spread_window(
    spread: SpreadAttention,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    causal_window: tuple[int, int],
    sees_all: bool,
    others: tuple[Tensor | None, ...],
) -> tuple[int, int]:
    """Returns the window over a sequence that is spread over ranks; raises if no window describes the mask."""
    mark = None if attention_mask is None else read(attention_mask)
    # Positions jump from one of a rank's parts to the next part. transformers treats the parts as packed sequences.
    is_one_sequence = (
        isinstance(mark, Offsets)
        and len(mark.cu_seqlens) - 1 <= spread.num_parts * query.shape[0]
        and mark.max_seqlen * spread.num_parts >= key.shape[2]
    )
    is_whole = isinstance(mark, Keys) and mark.present is None and mark.num_keys == key.shape[2]
    is_plain = attention_mask is None or is_one_sequence or is_whole
    if not is_plain or any(other is not None for other in others) or key.dtype != query.dtype:
        error = InputError(
            "attention_mask: expected none inside of fastattn.distributed.context_parallel, got padding, packed "
            "sequences, a bias or a cache; pass whole sequences of one length, and use_cache=False"
        )
        spread.refuse(error)
    if isinstance(mark, Keys) and mark.reach is not None:
        return (-1, -1) if mark.reach < 0 else (mark.reach, mark.reach)
    return (-1, -1) if sees_all else causal_window


def _refuse(module: nn.Module, others: dict[str, Any]) -> None:
    config = getattr(module, "config", None)
    if getattr(config, "output_attentions", False):
        raise InputError(f"output_attentions: expected False, got True in the config; {_REFUSED['output_attentions']}")
    for name, why in _REFUSED.items():
        came = others.get(name)
        if came is not None and came is not False:
            raise InputError(f"{name}: expected None from {type(module).__name__}, got {shown(came)}; {why}")


def _options_of_cache(position_bias: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options for attention over a cache; raises for options that it does not support."""
    if position_bias is not None:
        raise InputError(
            "position_bias: expected None over an 8-bit cache, got a tensor; make the Cache with dtype=None"
        )
    if options["dropout_p"] > 0:
        raise InputError(f"dropout: expected 0 over an 8-bit cache, got {options['dropout_p']}; call model.eval()")
    return {name: options[name] for name in ("softcap", "sinks", "scale")}


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Offsets, Offsets],
    window: tuple[int, int],
    options: dict[str, Any],
) -> Tensor:
    """Attends over packed sequences, after joining the rows of the batch; returns ``[B, Sq, Hq, Dv]``."""
    (cu_seqlens_q, longest_q), (cu_seqlens_k, longest_k) = offsets
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, window=window, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])).contiguous()


def _offsets(
    query: Tensor,
    key: Tensor,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | Tensor | None,
    max_length_k: int | Tensor | None,
) -> tuple[Offsets, Offsets] | None:
    """Returns the offsets of queries and keys, or None where the user did not pass them to the model."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return None
    return (
        Offsets(cu_seq_lens_q.to(torch.int32), _longest(max_length_q, query)),
        Offsets(cu_seq_lens_k.to(torch.int32), _longest(max_length_k, key)),
    )


def _longest(longest: int | Tensor | None, tensor: Tensor) -> int:
    """Returns the longest length, or the number of all rows of ``tensor [B, H, S, D]`` if the host cannot know it."""
    if longest is None or (isinstance(longest, Tensor) and torch.compiler.is_compiling()):
        return tensor.shape[0] * tensor.shape[2]
    return int(longest)


def _kernel_reads_cache(
    query: Tensor, key: Tensor, value: Tensor, position_bias: Tensor | None, options: dict[str, Any]
) -> bool:
    """Returns whether the decoding kernel can run. It supports no gradients, bias, dropout or padding of head dims."""
    tensors = (query, key, value, options["sinks"])
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return (
        not needs_grad
        and position_bias is None
        and options["dropout_p"] == 0
        and key.shape[-1] % 8 == value.shape[-1] % 8 == 0
        and facts(query.device) is not None
    )


def _cached(lengths: Tensor, num_keys: int, left: int) -> Tensor:
    """Returns the mask over a static cache of a query at the last of ``lengths [B]`` tokens: bool ``[B, 1, 1, Sk]``."""
    column = torch.arange(num_keys, device=lengths.device)
    is_there = column < lengths[:, None]
    if left >= 0:
        is_there = is_there & (column >= lengths[:, None] - 1 - left)
    return is_there[:, None, None, :]


def _bias(mask: Tensor | None, position_bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Combines mask and position bias into one bias, cut to the number of keys, in a dtype that attention takes."""
    mask, position_bias = (None if part is None else part[..., : key.shape[2]] for part in (mask, position_bias))
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f"attention_mask: expected a bool or floating mask [B, 1, Sq, Sk], got {mask.dtype}; if the mask is 1 "
            "where a query sees a key, pass attention_mask.bool()"
        )
    whole = (*query.shape[:3], key.shape[2])
    for name, part in (("attention_mask", mask), ("position_bias", position_bias)):
        if part is not None:
            fits = all(size in (1, most) for size, most in zip(part.shape[::-1], whole[::-1], strict=False))
            expect(fits, name, f"each dimension 1 or that of [B, H, Sq, Sk] = {list(whole)}", list(part.shape))
    bias = mask if position_bias is None else position_bias
    if mask is not None and position_bias is not None:
        is_bool = mask.dtype == torch.bool
        bias = position_bias.masked_fill(~mask, -math.inf) if is_bool else position_bias + mask
    if bias is not None and bias.dtype not in (torch.bool, torch.float32, query.dtype):
        bias = bias.to(query.dtype)
    return bias
