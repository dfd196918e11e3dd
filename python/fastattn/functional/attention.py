"""Attention with every option, over dense and over packed sequences."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from fastattn import reference, run
from fastattn.checks import (
    check_bool,
    check_tensor,
    device_checks_are_on,
    expect,
    is_distributed,
)
from fastattn.dispatch.choose import choose
from fastattn.dispatch.recording import note
from fastattn.functional import nested
from fastattn.functional.attention_checks import (
    UNBOUNDED,
    CheckedCall,
    Options,
    Tensors,
    check_call,
    check_offsets,
    check_pages,
    check_uncopied,
)
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.functional.checked_once import CheckedOnce
from fastattn.functional.distributed_tensors import attend_over_distributed
from fastattn.functional.dropout_seed import draw_seed, seed_tensor
from fastattn.functional.torch_sdpa import attend, attend_packed, can_express_now
from fastattn.ops.attention import AttentionArguments


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    softcap: float = ...,
    bias: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    softcap: float = ...,
    bias: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    softcap: float = ...,
    bias: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    scale: float | None = ...,
    return_lse: bool = ...,
    deterministic: bool | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(mask(bias + softcap(scale * Q K^T))) V``, tiled (Dao, "FlashAttention-2", 2023).

    Args:
        query: ``[B, Hq, Sq, D]``; key: ``[B, Hkv, Sk, D]``; value: ``[B, Hkv, Sk, Dv]``; one floating dtype. Query head
            ``h`` reads KV head ``h // (Hq // Hkv)``.
        causal: query ``i``, at position ``i + Sk - Sq``, sees the keys up to its own position.
        window: ``(left, right)``: how many keys before and after its position a query sees; -1 is unbounded.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)``.
        bias: ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``: added to the scores, or bool with True = attend. Differentiable.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``: ``-slope * |position - key|`` is added (Press et al., "Train short, test
            long", 2022).
        sinks: ``[Hq]``: one more logit in every row's denominator, without a value. Differentiable.
        dropout_p: the probability with which dropout zeroes an attention weight; dropout_seed: an int or an int64
            tensor of one element on the device, by default drawn from torch's generator.
        scale: by default ``1 / sqrt(D)``.
        return_lse: also return the natural log of each row's softmax denominator, differentiable.
        deterministic: whether gradients have the same bits every time; by default what
            ``torch.use_deterministic_algorithms`` says.

    Returns:
        ``[B, Hq, Sq, Dv]``, and with ``return_lse`` the lse, ``[B, Hq, Sq]``, float32 (float64 for float64 inputs). A
        row that sees no key has output 0, lse -inf (or its sink) and gradient 0.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong.
    """
    tensors = (query, key, value, bias, alibi_slopes, sinks, None, None, None)
    options = Options(0, 0, causal, window, softcap, dropout_p, scale)
    if type(query) is Tensor and not query.is_nested:
        return _attend(tensors, options, dropout_seed, deterministic, return_lse)
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
    block_table: Tensor | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    batch_invariant: bool = ...,
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
    block_table: Tensor | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    batch_invariant: bool = ...,
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
    block_table: Tensor | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    scale: float | None = ...,
    return_lse: bool = ...,
    deterministic: bool | None = ...,
    batch_invariant: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    deterministic: bool | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` over sequences of different lengths, packed one after the other without padding.

    With a ``block_table`` the keys and values lie in the pages of a cache: prompts are taken in chunk by chunk, ragged,
    while every chunk attends to all that its sequence has in the cache (``PagedKVCache`` has an example).

    Args:
        query: ``[total_q, Hq, D]``; key: ``[total_k, Hkv, D]``; value: ``[total_k, Hkv, Dv]``. With a ``block_table``
            key and value are pages, ``[num_pages, Hkv, page_size, D]`` and ``[num_pages, Hkv, page_size, Dv]``. They
            are never copied: on a GPU the last dim must be contiguous, and the base and the strides multiples of 16
            bytes.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` on the device: sequence ``b`` is the rows from ``cu_seqlens[b]``
            up to ``cu_seqlens[b + 1]``. They are not read back; where they are wrong, rows count as absent.
            ``FASTATTN_CHECK=1`` reads them and raises. Of keys in pages, ``cu_seqlens_k`` gives the number alone.
        max_seqlen_q, max_seqlen_k: the longest lengths; what a sequence has beyond them is absent.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence, in order; key ``j`` is row ``j % page_size``
            of page ``block_table[b, j // page_size]``. Where an entry names no page, its keys are absent. Gradients
            over pages are PyTorch's, through a copy of all that the table names.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``. The other options are those of ``attention``.
        batch_invariant: a sequence's results have the same bits whatever else is in the batch. By default a GPU that a
            batch does not fill shares out the keys of long sequences, as all lengths together have it.

    Returns:
        ``[total_q, Hq, Dv]``, and with ``return_lse`` the lse, ``[Hq, total_q]``.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong.
    """
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    check_tensor("block_table", block_table, optional=True)
    tensors = (query, key, value, None, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table)
    options = Options(max_seqlen_q, max_seqlen_k, causal, window, softcap, dropout_p, scale)
    batch_invariant = check_bool("batch_invariant", batch_invariant)

    def attend(local: Tensors) -> Tensor | tuple[Tensor, Tensor]:
        return _attend(local, options, dropout_seed, deterministic, return_lse, batch_invariant)

    if type(query) is not Tensor and is_distributed(query):
        return attend_over_distributed(tensors, dropout_p, dropout_seed, attend)
    return attend(tensors)


def _attend_over_wrapped(
    tensors: Tensors,
    options: Options,
    dropout_seed: int | Tensor | None,
    deterministic: bool | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """A query that may be nested, or a DTensor."""
    query, key, value, bias, alibi_slopes, sinks, *_ = tensors
    check_tensor("query", query)
    if is_distributed(query):
        return attend_over_distributed(
            tensors,
            options.dropout_p,
            dropout_seed,
            lambda local: _attend(local, options, dropout_seed, deterministic, return_lse),
        )
    if not query.is_nested:
        return _attend(tensors, options, dropout_seed, deterministic, return_lse)
    if query.layout != torch.jagged:
        without_options = Options(0, 0, False, (UNBOUNDED, UNBOUNDED), 0.0, 0.0, options.scale)
        is_plain = tensors[3:6] == (None, None, None) and options == without_options and not return_lse
        return nested.attend_strided(query, key, value, is_plain, options.scale)
    packed = nested.unpack(query, key, value, bias)
    result = _attend(
        (*packed[:3], None, alibi_slopes, sinks, packed.cu_seqlens_q, packed.cu_seqlens_k, None),
        options._replace(max_seqlen_q=packed.max_seqlen_q, max_seqlen_k=packed.max_seqlen_k),
        dropout_seed,
        deterministic,
        return_lse,
    )
    if isinstance(result, Tensor):
        return packed.like_query(result)
    out, lse = result
    return packed.like_query(out), packed.like_query(lse.transpose(0, 1))


def _attend(
    tensors: Tensors,
    options: Options,
    dropout_seed: int | Tensor | None,
    deterministic: bool | None,
    return_lse: bool,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table = tensors
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    return_lse = check_bool("return_lse", return_lse)
    if deterministic is not None:
        deterministic = check_bool("deterministic", deterministic)
    cast = autocast_dtype(query.device.type)
    if cast is not None:
        query = autocast_to(cast, query)
        if block_table is None:  # pages are what they are
            key, value = autocast_to(cast, key), autocast_to(cast, value)
        if isinstance(bias, Tensor) and bias.dtype != torch.float32:  # float32 goes with every query: it stays exact
            bias = autocast_to(cast, bias)
        tensors = (query, key, value, bias, *tensors[4:])

    checked = _checked_calls.get(tensors, options)
    if cu_seqlens_q is not None and device_checks_are_on():
        assert cu_seqlens_k is not None
        check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], checked.max_seqlens[0])
        check_offsets(
            "cu_seqlens_k", cu_seqlens_k, None if block_table is not None else key.shape[0], checked.max_seqlens[1]
        )
        if block_table is not None:
            lengths, capacity = cu_seqlens_k.diff(), block_table.shape[1] * key.shape[2]
            longest = max(lengths.tolist(), default=0)
            expect(longest <= capacity, "block_table", f"room for the {longest} keys of a sequence", f"{capacity}")
            check_pages(block_table, lengths, key.shape[0], key.shape[2])
    seed = None
    if checked.dropout_p > 0 and dropout_seed is not None:
        seed = seed_tensor(dropout_seed, query.device)

    choice = choose(checked.call)
    if checked.dropout_p > 0 and seed is None:  # after the choice: explain must leave the generator alone
        seed = draw_seed(query.device)
    if choice.backend == "torch":
        with without_autocast(query.device.type):
            out, lse = _in_pytorch(tensors, checked, seed, return_lse, deterministic)
    else:
        if block_table is not None:
            for name, pages in (("key", key), ("value", value)):
                check_uncopied(name, pages, "pages are never copied")
        out, lse = run.attention(
            choice,
            AttentionArguments(
                query,
                key,
                value,
                bias,
                None if alibi_slopes is None else torch.atleast_2d(alibi_slopes.detach().float()),
                None if sinks is None else sinks.float(),
                seed,
                cu_seqlens_q,
                cu_seqlens_k,
                *checked.max_seqlens,
                checked.scale,
                *checked.window,
                False,
                checked.softcap,
                checked.dropout_p,
                block_table,
                batch_invariant,
            ),
            checked.needs_grad,
            is_deterministic(deterministic),
        )
    note(checked.call.op, choice.backend, choice.kernel)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


_checked_calls = CheckedOnce(check_call)


def _in_pytorch(
    tensors: Tensors, checked: CheckedCall, seed: Tensor | None, return_lse: bool, deterministic: bool | None
) -> tuple[Tensor, Tensor | None]:
    """Through PyTorch's own attention where that can express the call, else the reference; without lse from the
    former."""
    query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table = tensors
    max_seqlens = checked.max_seqlens
    if checked.torch_can and not return_lse and can_express_now(checked.call, deterministic):
        common = checked.window, checked.scale, "gqa" in checked.call.features
        if cu_seqlens_q is None:
            return attend(query, key, value, bias, *common), None
        out = attend_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlens, *common)
        if out is not None:
            return out, None
    options: dict[str, Any] = {
        "window": checked.window,
        "softcap": checked.softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "dropout_p": checked.dropout_p,
        "dropout_seed": seed,
        "scale": checked.scale,
    }
    if cu_seqlens_q is None:
        return reference.attention(query, key, value, bias=bias, **options)
    return reference.attention_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_k, *max_seqlens, block_table=block_table, **options
    )


def is_deterministic(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
