"""Computes attention over a key-value cache, after appending new tokens to it (flash-decoding)."""

from __future__ import annotations

from typing import Generic, TypeVar, overload

from torch import Tensor
from typing_extensions import Never, TypedDict, Unpack  # torch needs it; typing's TypedDict is generic from 3.11 on

from fastattn import reference, run
from fastattn.call import UNBOUNDED, DecodeCall, on_record
from fastattn.checks import check_tensor, contents_are_checked, device_checks_are_on, refuse_keywords
from fastattn.dispatch.choose import choose
from fastattn.dispatch.recording import note
from fastattn.functional import cache_on_cpu
from fastattn.functional.attention import No, Yes
from fastattn.functional.attention_checks import check_uncopied
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.functional.kv_cache_checks import (
    check_contents,
    check_once,
    check_out_memory,
    check_scales,
    check_separate_caches,
)

_Lse = TypeVar("_Lse")


class AttendOptions(TypedDict, total=False):
    """Lists the options of ``attention_with_kv_cache`` that a model sets. A ``StepCache`` sets the other options."""

    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    scale: float | None
    num_splits: int
    batch_invariant: bool
    tree_mask: Tensor | None


class _Options(AttendOptions, Generic[_Lse], total=False):
    k_new: Tensor | None
    v_new: Tensor | None
    block_table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    out: Tensor | None
    return_lse: _Lse


@overload
def attention_with_kv_cache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, **options: Unpack[_Options[No]]
) -> Tensor: ...
@overload
def attention_with_kv_cache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, **options: Unpack[_Options[Yes]]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kv_cache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, **options: Unpack[_Options[bool]]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_with_kv_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends ``k_new`` and ``v_new`` to a cache in place, then computes attention over the cache: one decoding step.

    Each sequence's cache is split among many CTAs, whose results are merged (Dao et al., "Flash-Decoding for
    long-context inference", 2023). For many queries, the kernel of ``attention_varlen`` attends after the append,
    unless ``num_splits`` or ``tree_mask`` is given (docs/concepts.md). The call is for inference only. It does not
    change ``cache_seqlens``. The host does not read lengths or tables from the device, so the call works in CUDA
    graphs.

    Args:
        query: ``[B, Hq, Sq, D]``. Query ``i`` has position ``total - Sq + i``, where total counts the new tokens too.
        k_cache, v_cache: ``[B, Hkv, capacity, D]`` and ``[B, Hkv, capacity, Dv]``, or with a ``block_table`` pages,
            ``[num_pages, Hkv, page_size, D]`` and ``[num_pages, Hkv, page_size, Dv]``. They have the query's dtype, or
            int8 or fp8 (``torch.float8_e4m3fn``) with scales. The kernel writes into them and never copies them. So on
            a GPU, the last dim must be contiguous, and the base and the strides must be multiples of 16 bytes.
        cache_seqlens: int32 ``[B]``, the number of tokens of each sequence before this call.
        k_new, v_new: ``[B, Hkv, S_new, D]`` and ``[B, Hkv, S_new, Dv]``: token ``j`` goes to position ``cache_seqlens +
            j``. Tokens beyond the capacity are dropped on a GPU; where lengths are checked (see Raises), they raise an
            error.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``: rotate the query and ``k_new`` by their positions
            (RoPE). Keys in the cache were rotated when they were appended.
        rotary_interleaved: RoPE pairs dims ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim / 2)``.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence, in order. If an entry is not the number of a
            page, its tokens are absent.
        k_scale, v_scale: the scales of an 8-bit cache, float32, of the caches' shape without the last dim. The append
            computes a scale for each head of a token. A cached number times its scale is the key or value. An fp8 cache
            also takes fixed scales for all tokens, ``[Hkv]``, ``[1]`` or ``[]``, by which the append divides; None
            means 1. Rounding is as in ``append_to_cache``.
        causal, window, softcap, alibi_slopes, sinks, scale: as in ``fastattn.attention``.
        return_lse: also return the natural log of each row's softmax denominator, the lse.
        num_splits: the number of splits of each sequence; 0 chooses the number by the shapes and the GPU's number of
            SMs. With another number, splits do not depend on other sequences, so ``batch_invariant`` has no effect.
        batch_invariant: a sequence's result has the same bits whatever else is in the batch.
        tree_mask: bool ``[B, Sq, Sq]``, or ``[1, Sq, Sq]`` or ``[Sq, Sq]`` for all sequences alike, instead of
            ``causal``. The last Sq tokens are a tree that speculative decoding proposes: query ``i`` sees all earlier
            tokens, and token ``j`` of the tree if ``tree_mask[b, i, j]``. A token's position is its depth in the tree,
            not its index in the cache. So ``rotary_cos``, ``window`` and ``alibi_slopes`` raise an error: rotate
            ``query`` and ``k_new`` before the call.
        out: ``[B, Hq, Sq, Dv]`` in the query's dtype, which receives the result. ``out`` must not share memory with the
            other arguments, and its last dim must be contiguous. On a GPU, its base and strides must be multiples of 16
            bytes. The decoding kernel writes into ``out``; results of other kernels are copied into ``out``.

    Returns:
        The output, ``[B, Hq, Sq, Dv]``, which is ``out`` if ``out`` is given; or with ``return_lse`` a tuple of the
        output and the lse, ``[B, Hq, Sq]``.

    Raises:
        InputError, TypeError: the host can see that an argument is wrong. The cache is then unchanged. The values of
            lengths and tables are checked on a CPU. With ``FASTATTN_CHECK=1``, they are checked on a GPU too, and so
            are scales.
    """
    if unknown:
        refuse_keywords(attention_with_kv_cache, unknown)
    check_tensor("query", query)
    cast = autocast_dtype(query.device.type)
    if cast is not None:
        query = autocast_to(cast, query)
        k_new, v_new = (autocast_to(cast, tensor) for tensor in (k_new, v_new))
    given = DecodeCall(
        query,
        k_cache,
        v_cache,
        cache_seqlens,
        k_new=k_new,
        v_new=v_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        block_table=block_table,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        tree_mask=tree_mask,
        out=out,
        rotary_interleaved=rotary_interleaved,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        return_lse=return_lse,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
    )
    call, request = check_once(given)
    check_separate_caches(call.k_cache, call.v_cache, call.k_new, call.v_new)
    check_out_memory(call)
    if contents_are_checked(cache_seqlens, block_table):
        check_contents(call)
        if device_checks_are_on():
            check_scales(call)

    choice = choose(request)
    if choice.backend == "torch":
        with without_autocast(query.device.type):
            result, lse = cache_on_cpu.attention_with_kv_cache(call) or _attend_by_reference(call)
        if out is not None:
            result = out.copy_(result)
    else:
        check_uncopied("it is written in place", k_cache=k_cache, v_cache=v_cache)
        if out is not None:
            check_uncopied("the kernel writes there", out=out)
        result, lse = run.kv_cache_attention(choice, call)
    note(request.op.name, choice.backend, choice.kernel)
    return (result, lse) if call.return_lse else result


_attend_by_reference = on_record(reference.attention_with_kv_cache, DecodeCall)
