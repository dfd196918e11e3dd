"""Defines the operators over key-value caches: ``attention_decode`` appends to a cache in place and attends over it,
``attention_decode_out`` does the same and writes its output to a given tensor, ``append_to_cache`` writes tokens into
slots of a paged cache, ``dequantize_cache`` converts an 8-bit cache to 16-bit floats, and ``attention_split_keys``
decodes over given keys and values and writes nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.call import AppendCall, AttentionCall, DecodeCall
from fastattn.layout import empty_like_heads
from fastattn.ops.attention import HEADS_DIM
from fastattn.ops.flops import attention_flops
from fastattn.ops.registration import fold_into_heads, register, unfold_heads


class Dequantization(NamedTuple):
    """Holds a call of ``dequantize_cache``.

    Caches, scales, ``seqlens`` (int32 ``[B]``, on the device) and ``block_table`` are those of
    ``attention_with_kv_cache``. ``k_out`` and ``v_out`` are ``[B * max_pages, Hkv, rows, D]``, fp16 or bf16,
    contiguous. ``rows`` is the number of tokens in a page of the cache. A contiguous cache counts as one page per
    sequence (``max_pages = 1``). Page ``p`` of sequence ``b`` goes to block ``b * max_pages + p``. Rows that hold no
    token of a sequence stay as they were.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    seqlens: Tensor
    block_table: Tensor | None
    k_out: Tensor
    v_out: Tensor


def _results(query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    return empty_like_heads(query, value_dim), query.new_empty(query.shape[:3], dtype=torch.float32)


def _flops(given: Any) -> int:
    """Counts FLOPs as if every sequence filled its cache, because the lengths are on the device."""
    batch, heads, num_queries, head_dim = given.query
    blocks_per_sequence = 1 if given.block_table is None else given.block_table[1]
    capacity = blocks_per_sequence * given.k_cache[2]
    return attention_flops(batch * heads * num_queries * capacity, head_dim, given.v_cache[-1])


def _split_keys_flops(given: Any) -> int:
    batch, heads, num_queries, head_dim = given.query
    return attention_flops(batch * heads * num_queries * given.key[2], head_dim, given.value[-1])


def _vmap_split_keys(overload: torch._ops.OpOverload, given: Any, dims: Any, size: int) -> Any:
    """Maps the operator for ``torch.vmap``: folds the mapped dimension of each tensor into its heads, runs the
    operator once, and unfolds the heads of the results."""
    folded = {
        name: fold_into_heads(getattr(given, name), getattr(dims, name), size, HEADS_DIM[name])
        for name in HEADS_DIM.keys() & given._fields
    }
    out, lse = overload(*given._replace(**folded))
    return (unfold_heads(out, size, HEADS_DIM["out"]), unfold_heads(lse, size, HEADS_DIM["lse"])), (0, 0)


# ``attention_decode`` and ``attention_split_keys`` return output and lse. ``attention_decode_out`` returns the lse.
# ``append_to_cache`` and ``dequantize_cache`` return nothing. No operator of this file is differentiable.
attention_decode = register(
    "attention_decode",
    DecodeCall,
    triton_module="decode",
    fake=lambda given: _results(given.query, given.v_cache.shape[-1]),
    flops=_flops,
)
attention_decode_out = register(
    "attention_decode_out",
    DecodeCall,
    triton_module="decode",
    fake=lambda given: _results(given.query, given.v_cache.shape[-1])[1],
    flops=_flops,
)
attention_split_keys = register(
    "attention_split_keys",
    AttentionCall,
    triton_module="decode",
    fake=lambda given: _results(given.query, given.value.shape[-1]),
    flops=_split_keys_flops,
    vmap=_vmap_split_keys,
)
append_to_cache = register("append_to_cache", AppendCall, triton_module="decode_append")
dequantize_cache = register("dequantize_cache", Dequantization, triton_module="decode_dequantize")
