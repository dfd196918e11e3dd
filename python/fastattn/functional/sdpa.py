"""The drop-in for ``torch.nn.functional.scaled_dot_product_attention``.

Where torch's own devices or versions differ from each other, our GPU kernels do this:

- ``attn_mask`` together with ``is_causal=True``: both apply.
- values with fewer or more rows than keys: the call goes to PyTorch, whatever that does.
- a row that sees no key: output and gradients are 0.
- keys and values that are masked out have no influence even if they are NaN.
- dropout: the pattern is ours (``fastattn.attention`` says how it is drawn); the seed comes from torch's generator.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fastattn import run
from fastattn.checks import is_distributed, needs_gradient
from fastattn.dispatch.call import Call
from fastattn.dispatch.choose import choose, is_watched
from fastattn.dispatch.device import facts
from fastattn.dispatch.reasons import only_torch_handles
from fastattn.dispatch.recording import note
from fastattn.errors import InputError
from fastattn.functional import nested
from fastattn.functional.attention_checks import Options, check_call, default_scale
from fastattn.functional.autocast import autocast_dtype, autocast_to
from fastattn.functional.checked_once import CheckedOnce
from fastattn.functional.distributed_tensors import DENSE, are_split_alike, attend_locally, dims_of_mask
from fastattn.functional.dropout_seed import draw_seed
from fastattn.functional.spread_attention import in_force
from fastattn.functional.torch_sdpa import torch_sdpa
from fastattn.ops.attention import AttentionArguments


class _CheckedCall(NamedTuple):
    """The checked call, with the sizes to make ``[B, H, S, D]`` of its arguments; ``batch`` is the broadcast shape of
    the dimensions before the heads."""

    call: Call
    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    scale: float
    needs_grad: bool


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
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with the same signature, results, gradients and errors.

    Args:
        query: ``[..., Hq, L, E]``; key: ``[..., H, S, E]``; value: ``[..., H, S, Ev]``. Leading dimensions broadcast;
            none is needed.
        attn_mask: broadcasts to ``[..., Hq, L, S]``: bool with True = attend, or added to the scores.
        dropout_p: the probability with which an attention weight is zeroed (also outside training, as in torch).
        is_causal: query ``i`` sees keys ``0 … i`` (aligned to the top left, as torch's is).
        scale: by default ``1 / sqrt(E)``.
        enable_gqa: the heads of key and value may be fewer, each serving as many consecutive query heads.

    Returns:
        ``[..., Hq, L, Ev]`` in the query's dtype.

    Raises:
        RuntimeError: torch rejects the arguments; the message is torch's.
    """
    if not isinstance(query, Tensor):  # torch.fx traces it, or else torch says what is wrong with it
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if (spread := in_force()) is not None:
        return spread.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    device = query.device
    if facts(device) is None and not is_watched():
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if type(query) is not Tensor:
        over_parts = _over_distributed if is_distributed(query) else _over_jagged
        result = over_parts((query, key, value, attn_mask), (dropout_p, is_causal, scale, enable_gqa))
        if result is not None:
            return result
    original = (query, key, value, attn_mask)
    cast = autocast_dtype(device.type)
    if cast is not None:
        query, key, value = (autocast_to(cast, t) for t in (query, key, value))
        attn_mask = None if attn_mask is None else autocast_to(cast, attn_mask)
    options = (dropout_p, is_causal, scale, enable_gqa)
    checked = _checked_calls.get((query, key, value, attn_mask), options)
    choice = choose(checked.call)
    if choice.backend == "torch":
        result = torch_sdpa(*original, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        note(checked.call.op, choice.backend, choice.kernel)
        return result
    out, _, _ = run.attention(
        choice,
        AttentionArguments(
            _to_heads(query, checked.batch, checked.heads),
            _to_heads(key, checked.batch, checked.kv_heads),
            _to_heads(value, checked.batch, checked.kv_heads),
            None if attn_mask is None else _mask_to_heads(attn_mask, checked.batch),
            dropout_seed=draw_seed(device) if dropout_p > 0 else None,
            scale=checked.scale,
            window_right=0 if is_causal else -1,
            first_row=0 if is_causal else None,
            dropout_p=float(dropout_p),
        ),
        checked.needs_grad,
        torch.are_deterministic_algorithms_enabled(),
    )
    note(checked.call.op, choice.backend, choice.kernel)
    if query.dim() == 4 and len(checked.batch) == 1:
        return out
    rank = max(query.dim(), key.dim(), value.dim())
    return out.reshape((*checked.batch, checked.heads, *out.shape[-2:])[-rank:])


_Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]  # query, key, value, attn_mask
_Options: TypeAlias = tuple[float, bool, float | None, bool]  # dropout_p, is_causal, scale, enable_gqa


def _over_distributed(tensors: _Tensors, options: _Options) -> Tensor | None:
    """Attends on each rank by itself, over DTensor that are split by batch entries and heads; returns None for calls
    that torch must handle.

    These are calls with dropout, as DTensor has a generator of its own, and with tensors that torch's context parallel
    has split.
    """
    query, key, value, attn_mask = tensors
    dropout_p, is_causal, scale, enable_gqa = options
    mask_sizes = attn_mask.shape if isinstance(attn_mask, Tensor) else ()
    if dropout_p or not are_split_alike(query, key, value, mask_sizes, enable_gqa):
        return None
    mask_dims = dims_of_mask(mask_sizes)

    def attend(local: tuple[Any, ...]) -> Tensor:
        q, k, v, mask = local
        return scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attend_locally(tensors, (DENSE, DENSE, DENSE, mask_dims), (DENSE,), True, attend)


def _over_jagged(tensors: _Tensors, options: _Options) -> Tensor | None:
    """Attends over jagged ``[B, H, j, D]`` as packed sequences; returns None for calls that torch must handle."""
    query, key, value, attn_mask = tensors
    dropout_p, is_causal, scale, enable_gqa = options
    if query.layout != torch.jagged or attn_mask is not None:
        return None
    if torch.compiler.is_compiling():  # our operators need lengths as numbers, which a traced jagged tensor lacks
        return None
    cast = autocast_dtype(query.device.type)
    try:
        packed = nested.unpack(query, key, value, None)
        q, k, v = packed[:3] if cast is None else (autocast_to(cast, rows) for rows in packed[:3])
        offsets = packed.cu_seqlens_q, packed.cu_seqlens_k
        checked = _checked_jagged_calls.get(
            (q, k, v, None, None, None, *offsets, None),
            Options(packed.max_seqlen_q, packed.max_seqlen_k, is_causal, (-1, -1), 0.0, dropout_p, scale),
        )
    except (InputError, TypeError):
        return None
    if q.shape[1] != k.shape[1] and not enable_gqa:
        return None
    if is_causal and offsets[0] is not offsets[1]:  # torch aligns to the top left, kernels over packed sequences do not
        return None
    choice = choose(checked.call)
    if choice.backend == "torch":
        result: Tensor = torch_sdpa(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    else:
        arguments = AttentionArguments(
            q,
            k,
            v,
            dropout_seed=draw_seed(q.device) if dropout_p > 0 else None,
            cu_seqlens_q=offsets[0],
            cu_seqlens_k=offsets[1],
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_k=packed.max_seqlen_k,
            scale=checked.scale,
            window_right=checked.window[1],
            dropout_p=checked.dropout_p,
        )
        out, _, _ = run.attention(choice, arguments, checked.needs_grad, torch.are_deterministic_algorithms_enabled())
        result = packed.like_query(out)
    note(checked.call.op, choice.backend, choice.kernel)
    return result


def _check_call(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> _CheckedCall:
    query, key, value, attn_mask = tensors
    dropout_p, is_causal, scale, enable_gqa = options
    only_torch = only_torch_handles(query, key, value, attn_mask) or _reason_for_torch(
        query, key, value, attn_mask, *options
    )
    if only_torch is not None:
        call = Call("attention", query.device, query.dtype, 0, 0, frozenset(), (), only_torch)
        return _CheckedCall(call, (), 0, 0, 0.0, False)
    batch, heads, kv_heads = _leading_dims(query, key, value, enable_gqa)
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    needs_grad = torch.is_grad_enabled() and any(map(needs_gradient, tensors))
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
    sizes = (math.prod(batch), heads, kv_heads, query.shape[-2], key.shape[-2])
    features = frozenset(feature for feature, used in uses.items() if used)
    call = Call(
        "attention",
        query.device,
        query.dtype,
        query.shape[-1],
        value.shape[-1],
        features,
        sizes,
        may_decode=not is_causal,  # aligned to the top left, few queries see few keys
    )
    resolved_scale = default_scale(query.shape[-1]) if scale is None else float(scale)
    return _CheckedCall(call, batch, heads, kv_heads, resolved_scale, needs_grad)


_checked_calls = CheckedOnce(_check_call)
_checked_jagged_calls = CheckedOnce(check_call)


def _reason_for_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Returns why only torch's function can say what these arguments mean (or what is wrong with them), or None."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    numbers = (dropout_p,) if scale is None else (dropout_p, scale)
    if not (
        all(isinstance(t, Tensor) for t in tensors)
        and all(isinstance(n, (int, float, torch.SymInt, torch.SymFloat)) for n in numbers)
        and isinstance(is_causal, bool)
        and isinstance(enable_gqa, bool)
    ):
        return "an argument has the wrong type; torch decides."
    if min(t.dim() for t in (query, key, value)) < (3 if enable_gqa else 2):
        return "query, key and value have too few dimensions; torch raises."
    if any(t.device != query.device for t in tensors) or any(t.dtype != query.dtype for t in (key, value)):
        return "devices or dtypes of the arguments differ; torch decides."
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return "query and key differ in their last dimension, or key and value in their length; torch decides."
    if not 0.0 <= dropout_p <= 1.0 or (scale is not None and not math.isfinite(scale)):
        return "dropout_p is not a probability or scale is not finite; torch decides."
    try:
        batch, heads, _ = _leading_dims(query, key, value, enable_gqa)
    except (RuntimeError, ValueError):
        return "the leading dimensions of query, key and value do not broadcast; torch raises."
    if attn_mask is not None:
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return f"attn_mask is {attn_mask.dtype}; torch raises."
        full = (*batch, heads, query.shape[-2], key.shape[-2])
        offset = len(full) - attn_mask.dim()
        if (
            attn_mask.dim() < 2
            or offset < 0
            or any(s not in (1, f) for s, f in zip(attn_mask.shape, full[max(offset, 0) :], strict=False))
        ):
            return "attn_mask does not broadcast to the scores; torch decides."
    return None


def _leading_dims(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[tuple[int, ...], int, int]:
    """Returns the broadcast batch dimensions (at least one), the query heads, and the KV heads that the kernel sees."""
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    query_heads, key_heads, value_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
    if not enable_gqa:
        (heads,) = torch.broadcast_shapes((query_heads,), (key_heads,), (value_heads,))
        # One KV head that broadcasts to many query heads needs no copy: it is a case of grouped-query attention.
        kv_heads = key_heads if key_heads == value_heads and key_heads in (1, heads) and heads else heads
    else:
        heads = query_heads
        if min(key_heads, value_heads) == 0 or heads % key_heads or heads % value_heads:
            raise ValueError("KV heads do not divide the query heads")
        more, fewer = max(key_heads, value_heads), min(key_heads, value_heads)
        kv_heads = more if more % fewer == 0 else heads
    return tuple(batch) or (1,), heads, kv_heads


def _to_heads(tensor: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    """Returns ``[..., h, S, D]`` as ``[B, heads, S, D]``: a view wherever one exists."""
    if tensor.dim() == 4 and tensor.shape[0] == batch[0] and len(batch) == 1 and tensor.shape[1] == heads:
        return tensor
    tensor = tensor if tensor.dim() > 2 else tensor.unsqueeze(0)
    if tensor.shape[-3] not in (1, heads):  # key and value with different head counts
        tensor = tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3)
    return tensor.expand(*batch, heads, *tensor.shape[-2:]).reshape(math.prod(batch), heads, *tensor.shape[-2:])


def _mask_to_heads(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Returns ``[..., L, S]`` as ``[B or 1, Hq or 1, L or 1, S or 1]``."""
    mask = mask.reshape((1,) * (len(batch) + 3 - mask.dim()) + tuple(mask.shape))
    if len(batch) == 1:
        return mask
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])
