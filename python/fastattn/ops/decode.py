"""The operators of flash-decoding: ``attention_decode`` appends to a key-value cache in place and attends over it,
``attention_decode_out`` does the same and writes its output to a given tensor, and ``attention_split_keys`` attends
over given keys and values and writes nothing."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.layout import empty_like_heads
from fastattn.ops.attention import HEADS_DIM
from fastattn.ops.flops import attention_flops
from fastattn.ops.registration import call, fold_into_heads, register, unfold_heads


class DecodeArguments(NamedTuple):
    """The arguments of ``attention_decode``, which are like those of ``attention_with_kv_cache``.

    ``alibi_slopes`` and ``sinks`` are float32, the slopes ``[1 or B, Hq]``. A window of -1 is unbounded. ``tree_mask``
    is ``[B, Sq, Sq]``.
    """

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    scale: float = 1.0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    num_splits: int = 0
    batch_invariant: bool = False
    tree_mask: Tensor | None = None


# The arguments of ``attention_decode_out`` are the same, followed by the tensor for the output.
DecodeOutArguments = namedtuple("DecodeOutArguments", (*DecodeArguments._fields, "out"))  # type: ignore[misc]


class SplitKeysArguments(NamedTuple):
    """The arguments of ``attention_split_keys``: ``query [B, Hq, Sq, D]``, ``key [B, Hkv, Sk, D]``, values, options."""

    query: Tensor
    key: Tensor
    value: Tensor
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    scale: float = 1.0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0


def attention_split_keys(backend: str, arguments: SplitKeysArguments) -> tuple[Tensor, Tensor]:
    """Returns output and lse, not differentiable."""
    results: tuple[Tensor, Tensor] = call(backend, "attention_split_keys", arguments)
    return results


def attention_decode(backend: str, arguments: DecodeArguments) -> tuple[Tensor, Tensor]:
    """Appends to the caches in place; returns output and lse, not differentiable."""
    results: tuple[Tensor, Tensor] = call(backend, "attention_decode", arguments)
    return results


def attention_decode_out(backend: str, arguments: DecodeArguments, out: Tensor) -> Tensor:
    """Appends to the caches in place, writes the output to ``out``, and returns the lse."""
    lse: Tensor = call(backend, "attention_decode_out", (*arguments, out))
    return lse


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    given = DecodeArguments(*args)
    lse = given.query.new_empty(given.query.shape[:3], dtype=torch.float32)
    return empty_like_heads(given.query, given.v_cache.shape[-1]), lse


def _flops(*args: Any, **kwargs: Any) -> int:
    """Counts as if every sequence filled its cache, as the lengths are on the device."""
    given: Any = DecodeArguments(*args, **kwargs)
    batch, heads, num_queries, head_dim = given.query
    blocks_per_sequence = 1 if given.block_table is None else given.block_table[1]
    capacity = blocks_per_sequence * given.k_cache[2]
    return attention_flops(batch * heads * num_queries * capacity, head_dim, given.v_cache[-1])


def _fake_out(*args: Any) -> Tensor:
    return _fake(*args[:-1])[1]


def _flops_out(*args: Any, out: Any = None, **kwargs: Any) -> int:
    return _flops(*args[: len(DecodeArguments._fields)], **kwargs)


def _fake_split_keys(*args: Any) -> tuple[Tensor, Tensor]:
    given = SplitKeysArguments(*args)
    return _fake(given.query, given.key, given.value, None)


def _split_keys_flops(*args: Any, **kwargs: Any) -> int:
    given: Any = SplitKeysArguments(*args, **kwargs)
    batch, heads, num_queries, head_dim = given.query
    return attention_flops(batch * heads * num_queries * given.key[2], head_dim, given.value[-1])


register("attention_decode", arguments=DecodeArguments, triton_module="decode", fake=_fake, flops=_flops)
register(
    "attention_decode_out",
    arguments=DecodeOutArguments,
    triton_module="decode",
    fake=_fake_out,
    flops=_flops_out,
)


def _vmap_split_keys(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Makes a rule by which the mapped dimension joins the heads, as in ``attention_forward``."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        given, size = SplitKeysArguments(*args), info.batch_size
        dims: Any = SplitKeysArguments(*in_dims)  # type: ignore[arg-type]
        folded = {
            name: fold_into_heads(getattr(given, name), getattr(dims, name), size, HEADS_DIM[name])
            for name in HEADS_DIM.keys() & given._fields
        }
        out, lse = overload(*given._replace(**folded))  # type: ignore[arg-type]
        return (unfold_heads(out, size, HEADS_DIM["out"]), unfold_heads(lse, size, HEADS_DIM["lse"])), (0, 0)

    return rule


register(
    "attention_split_keys",
    arguments=SplitKeysArguments,
    triton_module="decode",
    fake=_fake_split_keys,
    flops=_split_keys_flops,
    vmap=_vmap_split_keys,
)
