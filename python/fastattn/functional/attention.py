"""Computes attention over dense sequences (``attention``) and over packed sequences (``attention_varlen``)."""

from __future__ import annotations

from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Never, TypedDict, Unpack  # torch needs it; typing's TypedDict is generic from 3.11 on

from fastattn import run
from fastattn.call import UNBOUNDED, AttentionCall
from fastattn.checks import MOST_HEADS, check_tensor, contents_are_checked, expect, is_distributed, refuse_keywords
from fastattn.dispatch.choose import choose
from fastattn.dispatch.recording import note
from fastattn.dispatch.request import Choice, Request
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.functional import composite, nested
from fastattn.functional.attention_checks import (
    check_offsets,
    check_once,
    check_pages,
    check_ranges,
    check_uncopied,
)
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.functional.distributed_tensors import attend_over_distributed
from fastattn.functional.dropout_seed import draw_seed, seed_tensor

_has_warned_of_layout = False
_has_warned_of_mask = False

Yes: TypeAlias = Literal[True]
No: TypeAlias = Literal[False]
_Lse = TypeVar("_Lse")
_MaxLogit = TypeVar("_MaxLogit")


class AttentionOptions(TypedDict, total=False):
    """Lists the options of ``attention`` that do not change the type of its result."""

    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    scale: float | None
    deterministic: bool | None


class _Options(AttentionOptions, Generic[_Lse, _MaxLogit], total=False):
    """Adds the two options that change the result's type, by which a type checker chooses an overload."""

    return_lse: _Lse
    return_max_logit: _MaxLogit


class _Dense(_Options[_Lse, _MaxLogit], total=False):
    bias: Tensor | None
    key_ranges: Tensor | None


class _Packed(_Options[_Lse, _MaxLogit], total=False):
    block_table: Tensor | None
    key_ranges: Tensor | None
    batch_invariant: bool


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[_Dense[No, No]]) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[_Dense[Yes, No]]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[_Dense[No, Yes]]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[_Dense[Yes, Yes]]
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[_Dense[bool, bool]]
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
    key_ranges: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Computes attention, ``softmax(mask(bias + softcap(scale * Q K^T))) V``, in tiles (Dao, "FlashAttention-2", 2023).

    Kernels run float16 and bfloat16 with head dims up to 256, and Triton's without gradients up to 512. Head dims are
    padded to a multiple of 8. PyTorch runs float32, float64 and larger head dims.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 256, 64) for _ in range(3))  # [B, H, S, D]
        >>> fastattn.attention(query, key, value, causal=True, window=(127, 0)).shape  # each query sees 128 keys
        torch.Size([2, 8, 256, 64])

    Args:
        query: ``[B, Hq, Sq, D]``; key: ``[B, Hkv, Sk, D]``; value: ``[B, Hkv, Sk, Dv]``; all of one floating dtype.
            Query head ``h`` reads KV head ``h // (Hq // Hkv)``. If your tensors are ``[B, S, H, D]``, pass
            ``x.transpose(1, 2)``. Swapped heads and rows usually raise no error, because the shapes are valid too.
        causal: query ``i``, at position ``i + Sk - Sq``, sees the keys up to its own position.
        window: ``(left, right)``: how many keys a query sees before and after its own position; -1 means all.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)``.
        bias: ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``: added to the scores, or bool with True = attend. Differentiable.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``: ``-slope * |position - key|`` is added to the scores (Press et al.,
            "Train short, test long", 2022). Differentiable.
        sinks: ``[Hq]``: a logit per head that is added to every row's softmax denominator but has no value.
            Differentiable.
        key_ranges: int32 ``[B or 1, Hq or 1, Sq, R, 2]``, R up to 4: each query sees only keys in its ranges ``[begin,
            end)``, and of these only keys that the other options do not mask. ``fastattn.masks`` makes ranges; a range
            with ``begin == end`` is empty. Kernels skip tiles outside of the ranges, except the kernel for the gradient
            of a bias. On a CPU, and with ``FASTATTN_CHECK=1``, ranges that overlap or end beyond the last key raise
            ``InputError``.
        dropout_p: the probability with which dropout zeroes an attention weight.
        dropout_seed: an int or an int64 tensor of one element on the device; by default, a seed from torch's generator.
        scale: by default ``1 / sqrt(D)``.
        return_lse: also return the natural log of each row's softmax denominator, the lse. Differentiable.
        return_max_logit: also return the largest score of each head over all rows of the batch, after scale, softcap,
            bias and mask, without sinks, as QK-clip needs it (Kimi K2, 2025, section 2.1). NaN is ignored. This option
            can change the kernel or the tiles that run.
        deterministic: whether gradients have the same bits in every run, by default as set by
            ``torch.use_deterministic_algorithms``.

    Returns:
        The output, ``[B, Hq, Sq, Dv]``, or a tuple of the output, with ``return_lse`` the lse ``[B, Hq, Sq]``, and with
        ``return_max_logit`` the largest scores ``[Hq]``. The lse and the largest scores are float32, or float64 for
        float64 inputs. A row that sees no key has output 0, gradient 0, and lse -inf or, if there are sinks, its head's
        sink. If no row of a head sees a key, the head's largest score is -inf.

    Raises:
        InputError, TypeError: the host can see that an argument is wrong.
    """
    if unknown:
        refuse_keywords(attention, unknown)
    call = AttentionCall(
        query,
        key,
        value,
        bias,
        alibi_slopes,
        sinks,
        key_ranges=key_ranges,
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        deterministic=deterministic,
        dropout_seed=dropout_seed,
    )
    if type(query) is Tensor and not query.is_nested:
        result = attend(call)
        if causal and not torch.compiler.is_compiling() and query.shape[2] > key.shape[2]:
            _warn_where_heads_seem_to_be_queries(query, key)
        return result
    return _attend_over_wrapped(call)


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Unpack[_Packed[No, No]],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Unpack[_Packed[Yes, No]],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Unpack[_Packed[No, Yes]],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Unpack[_Packed[Yes, Yes]],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Unpack[_Packed[bool, bool]],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


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
    key_ranges: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Computes ``attention`` over sequences of different lengths, packed one after the other without padding.

    With a ``block_table``, the keys and values are in pages of a cache. Prompts can then be processed in chunks of any
    length, where every chunk attends to all tokens of its sequence in the cache (``PagedKVCache`` has an example).

    Args:
        query: ``[total_q, Hq, D]``; key: ``[total_k, Hkv, D]``; value: ``[total_k, Hkv, Dv]``. With a ``block_table``
            key and value are pages, ``[num_pages, Hkv, page_size, D]`` and ``[num_pages, Hkv, page_size, Dv]``. Pages
            are never copied. So on a GPU, their last dim must be contiguous, and their base and strides must be
            multiples of 16 bytes.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` on the device: sequence ``b`` is the rows from ``cu_seqlens[b]``
            up to ``cu_seqlens[b + 1]``. The host does not read offsets on a GPU: rows outside of the tensor count as
            absent, and wrong offsets raise only with ``FASTATTN_CHECK=1``. On a CPU, wrong offsets always raise. Rows
            that belong to no sequence have output 0. For keys in pages, only the differences of ``cu_seqlens_k``
            matter, the numbers of keys.
        max_seqlen_q, max_seqlen_k: the largest numbers of queries and of keys of any sequence. Rows of a sequence
            beyond these numbers count as absent.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence, in order; key ``j`` is row ``j % page_size``
            of page ``block_table[b, j // page_size]``. If an entry is not the number of a page, its keys are absent. If
            gradients are needed, PyTorch runs the call over a copy of all pages that the table names.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``. The other options are those of ``attention``.
        key_ranges: int32 ``[Hq or 1, total_q, R, 2]``; positions of keys count from the first key of the query's
            sequence.
        batch_invariant: a sequence's results have the same bits whatever else is in the batch. By default, if a batch
            does not fill the GPU, the keys of long sequences are split among CTAs, and the splits depend on the lengths
            of all sequences.

    Returns:
        The output, ``[total_q, Hq, Dv]``, or a tuple of the output, with ``return_lse`` the lse ``[Hq, total_q]``, and
        with ``return_max_logit`` the largest scores ``[Hq]``.

    Raises:
        InputError, TypeError: the host can see that an argument is wrong.
    """
    if unknown:
        refuse_keywords(attention_varlen, unknown)
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    check_tensor("block_table", block_table, optional=True)
    call = AttentionCall(
        query,
        key,
        value,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        key_ranges=key_ranges,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        dropout_seed=dropout_seed,
    )
    if type(query) is not Tensor and is_distributed(query):
        return attend_over_distributed(call, attend)
    return attend(call)


def _warn_where_heads_seem_to_be_queries(query: Tensor, key: Tensor) -> None:
    """Warns once if the tensors look like ``[B, S, Hq, D]`` and ``[B, S, Hkv, D]``, because a causal mask then hides
    heads as if heads were tokens.

    If such tensors are read as ``[B, H, S, D]``, query and key have the same number of heads, and the number of queries
    is a multiple of the number of keys. A tensor whose head stride is smaller than its row stride is not warned about,
    because it was transposed on purpose.
    """
    global _has_warned_of_layout
    (_, query_heads, queries, _), (_, key_heads, keys, _) = query.shape, key.shape
    are_like_heads = query_heads == key_heads and 0 < keys < queries <= MOST_HEADS and queries % keys == 0
    if _has_warned_of_layout or not are_like_heads or query.stride(1) < query.stride(2):
        return
    _has_warned_of_layout = True
    warn_at_users_line(
        f"attention: with causal=True, {queries} queries and {keys} keys, the first {queries - keys} rows see no key "
        "and are zero. The layout is [B, H, S, D]: if yours is [B, S, H, D], pass x.transpose(1, 2) of each tensor.",
        UserWarning,
    )


def _warn_where_a_bias_seems_to_be_a_mask(bias: Tensor) -> None:
    """Warns once if ``bias`` has one head and holds only 0 and 1, like a mask of floats. Reads the bias's values."""
    global _has_warned_of_mask
    if _has_warned_of_mask or not bias.is_floating_point() or bias.shape[1] != 1 or bias.numel() == 0:
        return
    bias = bias.detach()
    first_row = bias[0, 0, 0]  # usually enough to return, without reading the whole bias
    if not ((first_row == 0) | (first_row == 1)).all():
        return
    if bias.amin() != 0 or bias.amax() != 1 or not ((bias == 0) | (bias == 1)).all():
        return
    _has_warned_of_mask = True
    warn_at_users_line(
        f"attention: the bias {list(bias.shape)} holds only 0.0 and 1.0, which are added to the scores and mask "
        "nothing; if it is a mask that is 1 where a query sees a key, pass bias=mask.bool().",
        UserWarning,
    )


def _attend_over_wrapped(call: AttentionCall) -> Tensor | tuple[Tensor, ...]:
    """Runs a call whose query may be nested, a DTensor, or another subclass of Tensor."""
    query = call.query
    check_tensor("query", query)
    if is_distributed(query):
        return attend_over_distributed(call, attend)
    if not query.is_nested:
        return attend(call)
    return nested.attend_jagged(call, attend) if query.layout == torch.jagged else nested.attend_strided(call)


# --- carrying out one call --------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """Holds a checked call and the backend that was chosen for it, before anything runs."""

    call: AttentionCall
    request: Request
    choice: Choice


def attend(call: AttentionCall) -> Tensor | tuple[Tensor, ...]:
    """Checks and runs a call, and returns what ``attention`` or ``attention_varlen`` returns for it."""
    return carry_out(prepare(call))


def prepare(call: AttentionCall) -> Prepared:
    """Checks a call and chooses a backend for it."""
    query, key, value, bias = call[:4]
    if not type(query) is type(key) is type(value) is Tensor:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, tensor)
    cast = autocast_dtype(query.device.type)
    if cast is not None:
        if call.block_table is None:  # pages keep their dtype, because they are never copied
            key, value = autocast_to(cast, key), autocast_to(cast, value)
        if isinstance(bias, Tensor) and bias.dtype != torch.float32:  # a float32 bias suits every query dtype
            bias = autocast_to(cast, bias)
        call = call.with_tensors((autocast_to(cast, query), key, value, bias))
    call, request = check_once(call)
    if call.cu_seqlens_q is not None and contents_are_checked(call.cu_seqlens_q, call.cu_seqlens_k, call.block_table):
        _check_contents(call)
    if bias is not None and contents_are_checked(bias):
        _warn_where_a_bias_seems_to_be_a_mask(bias)
    if call.key_ranges is not None and contents_are_checked(call.key_ranges, call.cu_seqlens_q, call.cu_seqlens_k):
        _check_ranges(call)
    if call.dropout_seed is not None:
        seed = seed_tensor(call.dropout_seed, query.device) if call.dropout_p > 0 else None
        call = call._replace(dropout_seed=seed)
    return Prepared(call, request, choose(request))


def _check_contents(call: AttentionCall) -> None:
    """Checks the values of the offsets and of the block table of packed sequences."""
    query, key, table = call.query, call.key, call.block_table
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    check_offsets("cu_seqlens_q", call.cu_seqlens_q, query, call.max_seqlen_q)
    check_offsets("cu_seqlens_k", call.cu_seqlens_k, None if table is not None else key, call.max_seqlen_k)
    if table is not None:
        lengths, capacity = call.cu_seqlens_k.diff(), table.shape[1] * key.shape[2]
        longest = max(lengths.tolist(), default=0)
        expected = f"pages for the {longest} keys of the longest sequence"
        expect(longest <= capacity, "block_table", expected, f"{table.shape[1]} pages of {key.shape[2]} for each")
        check_pages(table, lengths, key.shape[0], key.shape[2])


def _check_ranges(call: AttentionCall) -> None:
    """Checks the values of the ranges of keys. Rows that belong to no sequence are allowed any ranges of keys."""
    assert call.key_ranges is not None
    if torch._C._are_functorch_transforms_active():
        return  # tensors under torch.func cannot be read
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        check_ranges(call.key_ranges, call.key.shape[2])
        return
    offsets, num_rows = call.cu_seqlens_q.long(), call.query.shape[0]
    counts = torch.cat([offsets[:1], offsets.diff(), num_rows - offsets[-1:]])
    lengths = torch.nn.functional.pad(call.cu_seqlens_k.diff(), (1, 1), value=torch.iinfo(torch.int32).max)
    check_ranges(call.key_ranges, lengths.repeat_interleave(counts))


def carry_out(prepared: Prepared) -> Tensor | tuple[Tensor, ...]:
    """Runs a prepared call and returns what ``attention`` or ``attention_varlen`` returns for it."""
    call, request, choice = prepared
    if call.dropout_p > 0 and call.dropout_seed is None:  # not earlier: explain() must not advance the generator
        call = call._replace(dropout_seed=draw_seed(call.query.device))
    if choice.backend == "torch":
        with without_autocast(call.query.device.type):
            out, lse, *others = composite.attend_in_pytorch(call, request)
    else:
        if call.block_table is not None:
            check_uncopied("pages are never copied", key=call.key, value=call.value)
        out, lse, *others = run.attention(choice, call, "gradients" in request.features)
    note(request.op.name, choice.backend, choice.kernel)
    results = (out, *([lse] if call.return_lse else []), *(others if call.return_max_logit else []))
    return results if len(results) > 1 else out
