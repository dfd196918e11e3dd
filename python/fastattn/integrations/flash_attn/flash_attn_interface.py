"""Defines flash-attn's functions, with its names and order of arguments; the package's docstring lists conventions.

In all of them ``dropout_p`` is the probability with which an attention weight becomes 0, ``softmax_scale`` is
``1 / sqrt(D)`` by default, ``window_size`` counts the keys before and after a query, ``softcap`` bounds the scores if
positive, ``alibi_slopes`` are float32 ``[H]`` or ``[B, H]``, and ``deterministic`` asks for gradients that have the
same bits every time. ``s_aux [H]`` are attention sinks, which transformers only passes to a function with a parameter
of this name. The functions return the output, and with ``return_attn_probs`` also the lse, float32 ``[B, H, Sq]`` or
``[H, total_q]``, and S_dmask. A wrong argument raises ``fastattn.InputError``, and a keyword that flash-attn does not
have raises ``TypeError``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

from fastattn.checks import check_rank, check_tensor, expect
from fastattn.functional.attention_backward import Packed
from fastattn.integrations.argument_names import errors_name
from fastattn.integrations.flash_attn.calls import Options, forward_dense, forward_packed
from fastattn.integrations.flash_attn.conventions import OF_FLASH_ATTN
from fastattn.integrations.flash_attn.keywords import read_keywords
from fastattn.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from fastattn.integrations.flash_attn.private_pairs import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Returned: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor]

_LONGEST_ROW = 2**31 - 1


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Returns the number of keys in a block of S_dmask, for code that needs it: here one block has all keys."""
    return _LONGEST_ROW


@errors_name(**OF_FLASH_ATTN)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    **newer: Any,
) -> Returned:
    """Attends with ``q [B, Sq, H, D]``, ``k [B, Sk, Hk, D]``, ``v [B, Sk, Hk, Dv]``; returns ``[B, Sq, H, Dv]``."""
    sinks = read_keywords(flash_attn_func, {"s_aux": s_aux, **newer}, served=("sinks",)).sinks
    options = Options.of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, sinks)
    results = forward_dense(q, k, v, options, return_lse=return_attn_probs, return_softmax=return_attn_probs)
    return results[:3] if return_attn_probs else results.out


@errors_name(k="kv", v="kv")
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Runs `flash_attn_func` on ``kv [B, Sk, 2, Hk, D]``."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = _parts("kv", kv, "[B, Sk, 2, Hk, D]")
    return flash_attn_func(q, k, v, *options)


@errors_name(q="qkv", k="qkv", v="qkv")
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Runs `flash_attn_func` on ``qkv [B, S, 3, H, D]``."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _parts("qkv", qkv, "[B, S, 3, H, D]")
    return flash_attn_func(q, k, v, *options)


@errors_name(**OF_FLASH_ATTN)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    **newer: Any,
) -> Returned:
    """Attends over packed sequences: ``q [total_q, H, D]``, ``k [total_k, Hk, D]``, ``v [total_k, Hk, Dv]``; returns
    ``[total_q, H, Dv]``.

    With a ``block_table``, int32 ``[B, max_pages]``, k and v are pages ``[num_pages, page_size, Hk, D]``. ``seqused_q``
    and ``seqused_k``, int32 ``[B]``, say how many rows of each sequence are used; unused query rows have output 0.
    """
    served = ("sinks", "seqused_q", "seqused_k", "block_table")
    keywords = read_keywords(flash_attn_varlen_func, {"s_aux": s_aux, **newer}, served=served)
    results = forward_packed(
        q,
        k,
        v,
        Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        Options.of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, keywords.sinks),
        return_lse=return_attn_probs,
        return_softmax=return_attn_probs,
        block_table=block_table if keywords.block_table is None else keywords.block_table,
        seqused_q=keywords.seqused_q,
        seqused_k=keywords.seqused_k,
    )
    return results[:3] if return_attn_probs else results.out


@errors_name(k="kv", v="kv")
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Runs `flash_attn_varlen_func` on ``kv [total_k, 2, Hk, D]``."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = _parts("kv", kv, "[total_k, 2, Hk, D]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


@errors_name(q="qkv", k="qkv", v="qkv", cu_seqlens_q="cu_seqlens", max_seqlen_q="max_seqlen")
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Runs `flash_attn_varlen_func` on ``qkv [total, 3, H, D]``."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _parts("qkv", qkv, "[total, 3, H, D]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def _parts(name: str, packed: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Returns the parts of ``packed`` along the dim that ``layout`` gives as a number, such as 3."""
    check_tensor(name, packed)
    check_rank(name, packed, layout)
    sizes = layout.strip("[]").split(", ")
    dim = next(dim for dim, size in enumerate(sizes) if size.isdigit())
    expect(packed.shape[dim] == int(sizes[dim]), name, f"shape {layout}", list(packed.shape))
    return packed.unbind(dim)
