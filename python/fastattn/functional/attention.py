"""Attention with every option, over dense and over packed sequences."""

from __future__ import annotations

from typing import Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Never, Unpack  # torch brings it

from fastattn.checks import MOST_HEADS, check_bool, check_tensor, is_distributed, refuse_keywords
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.functional import nested
from fastattn.functional.attend import attend
from fastattn.functional.attention_checks import UNBOUNDED, Options, Tensors
from fastattn.functional.distributed_tensors import attend_over_distributed

_has_warned_of_layout = False


class _Options(TypedDict, total=False):
    """The options that do not change the type of the result."""

    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    scale: float | None
    deterministic: bool | None


class _DenseOptions(_Options, total=False):
    bias: Tensor | None


class _PackedOptions(_Options, total=False):
    block_table: Tensor | None
    batch_invariant: bool


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_DenseOptions],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_DenseOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[_DenseOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[_DenseOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[_DenseOptions],
) -> Tensor | tuple[Tensor, ...]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, ``softmax(mask(bias + softcap(scale * Q K^T))) V``, tiled (Dao, "FlashAttention-2", 2023).

    Args:
        query: ``[B, Hq, Sq, D]``; key: ``[B, Hkv, Sk, D]``; value: ``[B, Hkv, Sk, Dv]``; one floating dtype. Query head
            ``h`` reads KV head ``h // (Hq // Hkv)``.
        causal: query ``i``, at position ``i + Sk - Sq``, sees the keys up to its own position.
        window: ``(left, right)``: how many keys before and after its position a query sees; -1 is unbounded.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)``.
        bias: ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``: added to the scores, or bool with True = attend. Differentiable.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``: ``-slope * |position - key|`` is added (Press et al., "Train short, test
            long", 2022). Differentiable.
        sinks: ``[Hq]``: one more logit in every row's denominator, without a value. Differentiable.
        dropout_p: the probability with which dropout zeroes an attention weight.
        dropout_seed: an int or an int64 tensor of one element on the device; by default it is drawn from torch's
            generator.
        scale: by default ``1 / sqrt(D)``.
        return_lse: also return the natural log of each row's softmax denominator, differentiable.
        return_max_logit: also return the largest score of each head over all rows of the batch, after scale, softcap,
            bias and mask, without sinks, as QK-clip needs it (Kimi K2, 2025, section 2.1). NaN is ignored. The call may
            then run on another kernel, or with other tiles.
        deterministic: whether gradients have the same bits every time; by default as
            ``torch.use_deterministic_algorithms`` says.

    Returns:
        ``[B, Hq, Sq, Dv]``, then with ``return_lse`` the lse, ``[B, Hq, Sq]``, then with ``return_max_logit`` the
        largest scores, ``[Hq]``, both float32 (float64 for float64 inputs). A row that sees no key has output 0, lse
        -inf (or its sink) and gradient 0; a head of such rows has the largest score -inf.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong.
    """
    if unknown:
        refuse_keywords(attention, unknown)
    tensors = (query, key, value, bias, alibi_slopes, sinks, None, None, None)
    options = Options(0, 0, causal, window, softcap, dropout_p, scale, return_max_logit)
    if type(query) is Tensor and not query.is_nested:
        result = attend(tensors, options, dropout_seed, deterministic, return_lse)
        if causal and not torch.compiler.is_compiling() and query.shape[2] > key.shape[2]:
            _warn_where_heads_seem_to_be_queries(query, key)
        return result
    return _attend_over_wrapped(tensors, options, dropout_seed, deterministic, return_lse)


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_PackedOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_PackedOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[_PackedOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[_PackedOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[_PackedOptions],
) -> Tensor | tuple[Tensor, ...]: ...


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """``attention`` over sequences of different lengths, packed one after the other without padding.

    With a ``block_table`` the keys and values lie in the pages of a cache. Prompts can then be processed in chunks of
    any length, where every chunk attends to all tokens of its sequence in the cache (``PagedKVCache`` has an example).

    Args:
        query: ``[total_q, Hq, D]``; key: ``[total_k, Hkv, D]``; value: ``[total_k, Hkv, Dv]``. With a ``block_table``
            key and value are pages, ``[num_pages, Hkv, page_size, D]`` and ``[num_pages, Hkv, page_size, Dv]``. They
            are never copied: on a GPU the last dim must be contiguous, and the base and the strides multiples of 16
            bytes.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` on the device: sequence ``b`` is the rows from ``cu_seqlens[b]``
            up to ``cu_seqlens[b + 1]``. On a GPU they are not read back: rows behind wrong offsets count as absent, and
            only ``FASTATTN_CHECK=1`` reads the offsets and raises. On a CPU wrong offsets always raise. For keys in
            pages, ``cu_seqlens_k`` only gives the number of keys of each sequence.
        max_seqlen_q, max_seqlen_k: the longest lengths; rows of a sequence beyond them count as absent.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence, in order; key ``j`` is row ``j % page_size``
            of page ``block_table[b, j // page_size]``. Where an entry names no page, its keys are absent. PyTorch
            computes gradients over pages, through a copy of all pages that the table names.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``. The other options are those of ``attention``.
        batch_invariant: a sequence's results have the same bits whatever else is in the batch. By default, if a batch
            does not fill the GPU, the keys of long sequences are shared out, which depends on all lengths together.

    Returns:
        ``[total_q, Hq, Dv]``, then with ``return_lse`` the lse, ``[Hq, total_q]``, and with ``return_max_logit`` the
        largest scores, ``[Hq]``.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong.
    """
    if unknown:
        refuse_keywords(attention_varlen, unknown)
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    check_tensor("block_table", block_table, optional=True)
    tensors = (query, key, value, None, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table)
    options = Options(max_seqlen_q, max_seqlen_k, causal, window, softcap, dropout_p, scale, return_max_logit)
    batch_invariant = check_bool("batch_invariant", batch_invariant)

    def attend_to(local: Tensors) -> Tensor | tuple[Tensor, ...]:
        return attend(local, options, dropout_seed, deterministic, return_lse, batch_invariant)

    if type(query) is not Tensor and is_distributed(query):
        return attend_over_distributed(tensors, options, dropout_seed, return_lse, attend_to)
    return attend_to(tensors)


def _warn_where_heads_seem_to_be_queries(query: Tensor, key: Tensor) -> None:
    """Warns once where the tensors look like ``[B, S, Hq, D]`` and ``[B, S, Hkv, D]``, whose heads a causal mask would
    cut as if they were tokens.

    Such tensors have as many "heads" on both sides, and a whole number of "queries" for each "key". A tensor that was
    transposed on purpose, as by the flash-attn integration, has the strides of these dims the other way round.
    """
    global _has_warned_of_layout
    (_, query_heads, queries, _), (_, key_heads, keys, _) = query.shape, key.shape
    are_like_heads = query_heads == key_heads and 0 < keys < queries <= MOST_HEADS and queries % keys == 0
    if _has_warned_of_layout or not are_like_heads or query.stride(1) < query.stride(2):
        return
    _has_warned_of_layout = True
    warn_at_users_line(
        f"attention: with causal=True, {queries} queries and {keys} keys, the first {queries - keys} rows see no key "
        "and are zero. The layout is [B, H, S, D]; pass x.transpose(1, 2) of tensors that are [B, S, H, D].",
        UserWarning,
    )


def _attend_over_wrapped(
    tensors: Tensors,
    options: Options,
    dropout_seed: int | Tensor | None,
    deterministic: bool | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, ...]:
    """Attends with a query that may be nested, a DTensor, or another subclass of Tensor."""
    query, key, value, bias, alibi_slopes, sinks, *_ = tensors
    check_tensor("query", query)
    if is_distributed(query):
        return attend_over_distributed(
            tensors,
            options,
            dropout_seed,
            return_lse,
            lambda local: attend(local, options, dropout_seed, deterministic, return_lse),
        )
    if not query.is_nested:
        return attend(tensors, options, dropout_seed, deterministic, return_lse)
    if query.layout != torch.jagged:
        without_options = Options(0, 0, False, (UNBOUNDED, UNBOUNDED), 0.0, 0.0, options.scale)
        is_plain = tensors[3:6] == (None, None, None) and options == without_options and not return_lse
        return nested.attend_strided(query, key, value, is_plain, options.scale)
    packed = nested.unpack(query, key, value, bias)
    result = attend(
        (*packed[:3], None, alibi_slopes, sinks, packed.cu_seqlens_q, packed.cu_seqlens_k, None),
        options._replace(max_seqlen_q=packed.max_seqlen_q, max_seqlen_k=packed.max_seqlen_k),
        dropout_seed,
        deterministic,
        return_lse,
    )
    if isinstance(result, Tensor):
        return packed.like_query(result)
    out, *others = result
    if return_lse:
        others[0] = packed.like_query(others[0].transpose(0, 1))
    return packed.like_query(out), *others
