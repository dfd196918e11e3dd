"""Defines the replacement for ``torch.nn.functional.scaled_dot_product_attention``.

In the following cases, torch's results depend on the device or on torch's version. Our GPU kernels do this:

- ``attn_mask`` together with ``is_causal=True``: both apply.
- values with fewer or more rows than keys: the call goes to PyTorch.
- a row that sees no key: output and gradients are 0.
- a key or value that is masked out: it has no influence, even if it is NaN.
- dropout: the pattern is ours (``fastattn.attention`` says how it is drawn); the seed comes from torch's generator.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Never

from fastattn.call import AttentionCall
from fastattn.checks import is_distributed, needs_gradient, refuse_keywords, shown
from fastattn.dispatch.choose import choose, is_watched
from fastattn.dispatch.device import facts
from fastattn.dispatch.reasons import only_torch_handles
from fastattn.dispatch.recording import note
from fastattn.dispatch.request import Request
from fastattn.errors import InputError
from fastattn.functional import nested
from fastattn.functional.attention import Prepared, carry_out
from fastattn.functional.attention_checks import check_once, default_scale
from fastattn.functional.autocast import autocast_dtype, autocast_to
from fastattn.functional.checked_once import CheckedOnce
from fastattn.functional.distributed_tensors import DENSE, are_split_alike, attend_locally, dims_of_mask
from fastattn.functional.spread_attention import in_force
from fastattn.functional.torch_sdpa import torch_sdpa
from fastattn.ops.describe import AttentionDetails, request_for_attention


class _SdpaCall(NamedTuple):
    """Holds a call of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    def in_torch(self) -> Tensor:
        return torch_sdpa(*self[:6], scale=self.scale, enable_gqa=self.enable_gqa)


class _Facts(NamedTuple):
    """Holds the description of a call, and the sizes with which its tensors are reshaped to ``[B, H, S, D]``. ``batch``
    is the broadcast shape of the dimensions before the heads."""

    request: Request
    batch: tuple[int, ...] = ()
    heads: int = 0
    kv_heads: int = 0


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Never,
) -> Tensor:
    """Computes ``softmax(scale * Q K^T + attn_mask) V`` with the signature, results, gradients and errors of
    ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: ``[..., Hq, L, E]``; key: ``[..., H, S, E]``; value: ``[..., H, S, Ev]``. Leading dimensions broadcast
            and are optional.
        attn_mask: broadcasts to ``[..., Hq, L, S]``: bool with True = attend, or added to the scores.
        dropout_p: the probability with which an attention weight is zeroed (also outside training, as in torch).
        is_causal: query ``i`` sees keys ``0 … i`` (aligned to the top left, as in torch).
        scale: by default ``1 / sqrt(E)``.
        enable_gqa: lets key and value have fewer heads than the query. Each KV head serves the same number of
            consecutive query heads.

    Returns:
        ``[..., Hq, L, Ev]`` in the query's dtype.

    Raises:
        RuntimeError: torch rejects the arguments; the message is torch's.
    """
    if unknown:
        refuse_keywords(scaled_dot_product_attention, unknown)
    call = _SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not isinstance(query, Tensor):  # torch.fx traces the call, or torch raises
        return call.in_torch()
    if (spread := in_force()) is not None:
        return spread.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    device = query.device
    if facts(device) is None and not is_watched():
        return call.in_torch()
    if type(query) is not Tensor:
        result = (_over_distributed if is_distributed(query) else _over_jagged)(call)
        if result is not None:
            return result
    given, cast = call, autocast_dtype(device.type)
    if cast is not None:
        query, key, value = (autocast_to(cast, tensor) for tensor in (query, key, value))
        attn_mask = autocast_to(cast, attn_mask)
        call = call._replace(query=query, key=key, value=value, attn_mask=attn_mask)
    call, (request, batch, heads, kv_heads) = _check_once(call)
    choice = choose(request)
    if choice.backend == "torch":
        result = given.in_torch()
        note(request.op.name, choice.backend, choice.kernel)
        return result
    attention = AttentionCall(
        _to_heads(query, batch, heads),
        _to_heads(key, batch, kv_heads),
        _to_heads(value, batch, kv_heads),
        None if attn_mask is None else _mask_to_heads(attn_mask, batch),
        window=(-1, 0 if is_causal else -1),
        dropout_p=call.dropout_p,
        scale=call.scale,
        first_row=0 if is_causal else None,
    )
    out = carry_out(Prepared(attention, request, choice))
    assert isinstance(out, Tensor)
    if query.dim() == 4 and len(batch) == 1:
        return out
    rank = max(query.dim(), key.dim(), value.dim())
    return out.reshape((*batch, heads, *out.shape[-2:])[-rank:])


def _over_distributed(call: _SdpaCall) -> Tensor | None:
    """Runs the call on this rank's own shards of batch or heads. Returns None for calls that torch must handle.

    Torch must handle calls with dropout, because DTensor has its own random generator, and calls over tensors that
    torch's context parallelism has sharded.
    """
    mask = call.attn_mask
    mask_sizes = mask.shape if isinstance(mask, Tensor) else ()
    if call.dropout_p or not are_split_alike(*call[:3], mask_sizes, call.enable_gqa):
        return None

    def attend(local: tuple[Any, ...]) -> Tensor:
        q, k, v, own_mask = local
        scale, enable_gqa = call.scale, call.enable_gqa
        return scaled_dot_product_attention(q, k, v, own_mask, 0.0, call.is_causal, scale=scale, enable_gqa=enable_gqa)

    return attend_locally(call[:4], (DENSE, DENSE, DENSE, dims_of_mask(mask_sizes)), (DENSE,), True, attend)


def _over_jagged(call: _SdpaCall) -> Tensor | None:
    """Runs jagged ``[B, H, j, D]`` as packed sequences; returns None for calls that torch must handle."""
    query, is_causal = call.query, call.is_causal
    if query.layout != torch.jagged or call.attn_mask is not None:
        return None
    if torch.compiler.is_compiling():  # a traced jagged tensor has no lengths as numbers
        return None
    cast = autocast_dtype(query.device.type)
    given = AttentionCall(*call[:3], causal=is_causal, dropout_p=call.dropout_p, scale=call.scale)
    try:
        packed = nested.unpack(given)
        attention = packed.call
        if cast is not None:
            attention = attention.with_tensors(tuple(autocast_to(cast, rows) for rows in attention[:3]))
        attention, request = check_once(attention)
    except (InputError, TypeError):
        return None
    if attention.query.shape[1] != attention.key.shape[1] and not call.enable_gqa:
        return None
    # torch aligns a causal mask to the top left, but kernels over packed sequences align it to the bottom right
    if is_causal and attention.cu_seqlens_q is not attention.cu_seqlens_k:
        return None
    choice = choose(request)
    if choice.backend != "torch":
        out = carry_out(Prepared(attention, request, choice))
        assert isinstance(out, Tensor)
        return packed.like_query(out)
    result = call.in_torch()
    note(request.op.name, choice.backend, choice.kernel)
    return result


def _check(call: _SdpaCall) -> tuple[_SdpaCall, _Facts]:
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    only_torch = only_torch_handles(query, key, value, attn_mask) or _reason_for_torch(call)
    if only_torch is not None:
        return call, _Facts(request_for_attention(query, query, only_torch=only_torch))
    batch, heads, kv_heads = _leading_dims(query, key, value, enable_gqa)
    needs_grad = torch.is_grad_enabled() and any(map(needs_gradient, call[:4]))
    uses = {
        "causal": is_causal,
        "gqa": heads != kv_heads,
        "value dim": value.shape[-1] != query.shape[-1],
        "dropout": dropout_p > 0,
        "gradients": needs_grad,
        "mask": attn_mask is not None and attn_mask.dtype == torch.bool,
        "bias": attn_mask is not None and attn_mask.dtype != torch.bool,
        "bias gradients": needs_grad and needs_gradient(attn_mask),
    }
    # The decoding kernel aligns a causal mask to the bottom right, torch to the top left.
    may_decode = not is_causal and not torch._C._are_functorch_transforms_active()
    details = AttentionDetails(math.prod(batch), heads, kv_heads, query.shape[-2], key.shape[-2], may_decode)
    scale = default_scale(query.shape[-1]) if scale is None else float(scale)
    checked = call._replace(dropout_p=float(dropout_p), scale=scale)
    return checked, _Facts(request_for_attention(query, value, uses, details), batch, heads, kv_heads)


_check_once = CheckedOnce(_check, _SdpaCall, first_option="dropout_p")


def _reason_for_torch(call: _SdpaCall) -> str | None:
    """Returns why only torch can run the call, or raise torch's error for it. Returns None for other calls."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    for name, tensor in zip(call._fields, tensors, strict=False):
        if not isinstance(tensor, Tensor):
            return f"{name}: expected a tensor, got {shown(tensor)}."
    for name, number in (("dropout_p", dropout_p), ("scale", 1.0 if scale is None else scale)):
        if not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
            return f"{name}: expected a number, got {shown(number)}."
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            return f"{name}: expected True or False, got {shown(flag)}."
    if min(t.dim() for t in (query, key, value)) < (3 if enable_gqa else 2):
        return f"query, key and value need the dimensions [..., H, L, E]: {_shapes(call)}."
    if any(t.device != query.device for t in tensors):
        return f"the tensors are on several devices, {', '.join(str(t.device) for t in tensors)}; move them to one."
    if any(t.dtype != query.dtype for t in (key, value)):
        return f"query, key and value differ in dtype, {query.dtype}, {key.dtype}, {value.dtype}; cast them to one."
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return f"query and key need the same last dimension, key and value the same length: {_shapes(call)}."
    if not 0.0 <= dropout_p <= 1.0:
        return f"dropout_p: expected a probability from 0 to 1, got {dropout_p}."
    if scale is not None and not math.isfinite(scale):
        return f"scale: expected a finite number, got {scale}."
    try:
        batch, heads, _ = _leading_dims(query, key, value, enable_gqa)
    except (RuntimeError, ValueError):
        if enable_gqa:
            return f"the heads of key and value must divide the query's, and the batch broadcast: {_shapes(call)}."
        return f"batch and heads must broadcast: {_shapes(call)}; for fewer KV heads pass enable_gqa=True."
    if attn_mask is not None:
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return f"attn_mask: expected torch.bool or {query.dtype}, got {attn_mask.dtype}; cast it."
        full = (*batch, heads, query.shape[-2], key.shape[-2])
        pairs = zip(attn_mask.shape[::-1], full[::-1], strict=False)
        if not 2 <= attn_mask.dim() <= len(full) or any(own not in (1, whole) for own, whole in pairs):
            return f"attn_mask: expected a shape that broadcasts to {list(full)}, got {list(attn_mask.shape)}."
    return None


def _shapes(call: _SdpaCall) -> str:
    return f"query {list(call.query.shape)}, key {list(call.key.shape)}, value {list(call.value.shape)}"


def _leading_dims(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[tuple[int, ...], int, int]:
    """Returns the broadcast batch dims (at least one), the query heads, and the KV heads that the kernel gets."""
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    query_heads, key_heads, value_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
    if not enable_gqa:
        (heads,) = torch.broadcast_shapes((query_heads,), (key_heads,), (value_heads,))
        # One KV head that broadcasts to many query heads needs no copy, because kernels have grouped-query attention.
        kv_heads = key_heads if key_heads == value_heads and key_heads in (1, heads) and heads else heads
    else:
        heads = query_heads
        if min(key_heads, value_heads) == 0 or heads % key_heads or heads % value_heads:
            raise ValueError("KV heads do not divide the query heads")
        more, fewer = max(key_heads, value_heads), min(key_heads, value_heads)
        kv_heads = more if more % fewer == 0 else heads
    return tuple(batch) or (1,), heads, kv_heads


def _to_heads(tensor: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    """Returns a tensor ``[..., h, S, D]`` as ``[B, heads, S, D]``: a view if possible."""
    if tensor.dim() == 4 and tensor.shape[0] == batch[0] and len(batch) == 1 and tensor.shape[1] == heads:
        return tensor
    tensor = tensor if tensor.dim() > 2 else tensor.unsqueeze(0)
    if tensor.shape[-3] not in (1, heads):  # key and value with different head counts
        tensor = tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3)
    return tensor.expand(*batch, heads, *tensor.shape[-2:]).reshape(math.prod(batch), heads, *tensor.shape[-2:])


def _mask_to_heads(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Returns a mask ``[..., L or 1, S or 1]`` as ``[B or 1, Hq or 1, L or 1, S or 1]``."""
    mask = mask.reshape((1,) * (len(batch) + 3 - mask.dim()) + tuple(mask.shape))
    if len(batch) == 1:
        return mask
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])
