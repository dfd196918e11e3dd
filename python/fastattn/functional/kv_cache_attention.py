"""Flash-decoding: attention over a key-value cache, which it first appends to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import reference
from fastattn.checks import (
    FLOATING,
    check_bool,
    check_dtype,
    check_int,
    check_number,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    device_checks_are_on,
    expect,
)
from fastattn.dispatch.choose import Call, choose, only_torch_handles
from fastattn.dispatch.plans import Plans
from fastattn.errors import InputError
from fastattn.functional.attention import (
    UNBOUNDED,
    check_pages,
    check_sinks,
    check_slopes,
    check_uncopied,
    check_window,
    default_scale,
)
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.ops import operators as ops


class _Tensors(NamedTuple):
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    k_new: Tensor | None
    v_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    block_table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class _Options(NamedTuple):
    rotary_interleaved: bool
    causal: bool
    window: Any
    softcap: float
    scale: float | None
    return_lse: bool
    num_splits: int
    batch_invariant: bool


class _Plan(NamedTuple):
    """What one signature of arguments comes to: checked once, then kept."""

    call: Call
    scale: float
    window: tuple[int, int]


# Queries of a sequence. More fill tiles of the attention kernel: a prediction.
_MOST_DECODED = 64
_NEEDED = ("query", "k_cache", "v_cache", "cache_seqlens")


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends ``k_new`` and ``v_new`` to a cache in place, then attends over it: one step of generation.

    Each sequence's cache is split among many CTAs, whose results are merged (Dao et al., "Flash-Decoding for
    long-context inference", 2023). A prompt, of more than 64 queries over a cache that is not int8, is attended to by
    the kernel of ``attention_varlen`` behind an append, unless ``num_splits`` is given. Inference only. Lengths and
    tables stay on the device and are not read back, so that the call works in CUDA graphs; ``cache_seqlens`` is not
    advanced.

    Args:
        query: ``[B, Hq, Sq, D]``. Query ``i`` stands at position ``total - Sq + i``, where total counts the append.
        k_cache, v_cache: ``[B, Hkv, capacity, D]`` and ``[B, Hkv, capacity, Dv]``, or with a ``block_table`` pages,
            ``[num_pages, Hkv, page_size, D]``. Of the query's dtype, or int8 with scales. Written in place, hence never
            copied: on a GPU the last dim must be contiguous, and the base and the strides multiples of 16 bytes.
        cache_seqlens: int32 ``[B]``, the tokens of each sequence before this call.
        k_new, v_new: ``[B, Hkv, S_new, D]`` and ``[B, Hkv, S_new, Dv]``: token ``j`` goes to ``cache_seqlens + j``.
            Tokens beyond the capacity are dropped.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``: rotates the query and ``k_new`` (RoPE) by their
            positions; what is already in the cache was rotated when it came.
        rotary_interleaved: RoPE pairs dims ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim / 2)``.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence, in order. Where an entry names no page, its
            tokens are absent.
        k_scale, v_scale: float32, the caches' shape without the last dim: a token's head is ``int8 * scale``.
        causal, window, softcap, alibi_slopes, sinks, scale: as in ``fastattn.attention``.
        return_lse: also return the natural log of each row's softmax denominator.
        num_splits: into how many parts a sequence is split; 0 chooses by the shapes and the size of the GPU.
        batch_invariant: a sequence's result has the same bits whatever else is in the batch.

    Returns:
        ``[B, Hq, Sq, Dv]``, and with ``return_lse`` the lse, ``[B, Hq, Sq]``.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong; with ``FASTATTN_CHECK=1`` also lengths,
            tables and scales that are. The cache is then as it was.
    """
    tensors = _Tensors(
        query,
        k_cache,
        v_cache,
        cache_seqlens,
        k_new,
        v_new,
        rotary_cos,
        rotary_sin,
        block_table,
        k_scale,
        v_scale,
        alibi_slopes,
        sinks,
    )
    check_tensor("query", query)
    cast = autocast_dtype(query.device.type)
    if cast is not None:
        check_tensor("k_new", k_new, optional=True)
        check_tensor("v_new", v_new, optional=True)
        query = autocast_to(cast, query)
        k_new = None if k_new is None else autocast_to(cast, k_new)
        v_new = None if v_new is None else autocast_to(cast, v_new)
        tensors = tensors._replace(query=query, k_new=k_new, v_new=v_new)
    options = _Options(rotary_interleaved, causal, window, softcap, scale, return_lse, num_splits, batch_invariant)
    plan = _plans.get(tensors, options)
    if device_checks_are_on():
        _check_device_memory(tensors)

    choice = choose(plan.call)
    if choice.backend == "torch":
        with without_autocast(query.device.type):
            out, lse = reference.attention_with_kv_cache(
                *tensors[:4],
                k_new=k_new,
                v_new=v_new,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                rotary_interleaved=rotary_interleaved,
                block_table=block_table,
                k_scale=k_scale,
                v_scale=v_scale,
                causal=False,  # the window says it
                window=plan.window,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                scale=plan.scale,
            )
    else:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_uncopied(name, cache, "it is written in place")
        tensors = tensors._replace(
            alibi_slopes=None if alibi_slopes is None else torch.atleast_2d(alibi_slopes.float()),
            sinks=None if sinks is None else sinks.float(),
        )
        run = _prefill if choice.prefills else _decode
        out, lse = run(choice.backend, tensors, options, plan)
    return (out, lse) if return_lse else out


def _decode(backend: str, t: _Tensors, options: _Options, plan: _Plan) -> tuple[Tensor, Tensor]:
    return ops.attention_decode(
        backend,
        *t[:8],
        options.rotary_interleaved,
        *t[8:],
        plan.scale,
        *plan.window,
        float(options.softcap),
        options.num_splits,
        options.batch_invariant,
    )


def _prefill(backend: str, t: _Tensors, options: _Options, plan: _Plan) -> tuple[Tensor, Tensor]:
    """The same for many queries, a prompt: the append is a launch of its own, and the attention kernel follows.

    The decoding kernel would read all keys once for every 16 rows of queries; the attention kernel does for every 128.
    """
    if t.k_new is not None:
        _decode(backend, t._replace(query=t.query[:, :, :0]), options, plan)
    (batch, heads, num_queries, head_dim), device = t.query.shape, t.query.device
    table = t.block_table
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    capacity = table.shape[1] * t.k_cache.shape[2]
    num_new = 0 if t.k_new is None else t.k_new.shape[2]
    total = (t.cache_seqlens.clamp(0, capacity) + num_new).clamp(max=capacity)
    query = t.query
    if t.rotary_cos is not None and t.rotary_sin is not None:
        position = (total - num_queries)[:, None] + torch.arange(num_queries, device=device)
        position = position.clamp(0, t.rotary_cos.shape[0] - 1)
        query = reference.rotary(query, t.rotary_cos[position], t.rotary_sin[position], options.rotary_interleaved)
    packed_out, packed_lse = ops.attention(
        backend,
        query.transpose(1, 2).reshape(batch * num_queries, heads, head_dim),
        t.k_cache,
        t.v_cache,
        None,
        t.alibi_slopes,
        t.sinks,
        None,
        torch.arange(batch + 1, dtype=torch.int32, device=device) * num_queries,
        F.pad(total.cumsum(0, dtype=torch.int32), (1, 0)),
        num_queries,
        capacity,
        plan.scale,
        *plan.window,
        False,
        float(options.softcap),
        0.0,
        table,
        needs_grad=False,
        deterministic=True,
    )
    out = packed_out.view(batch, num_queries, heads, -1).transpose(1, 2)
    return out, packed_lse.view(heads, batch, num_queries).transpose(0, 1)


def _refuse_gradients(tensors: _Tensors) -> None:
    for name, tensor in zip(_Tensors._fields, tensors, strict=True):
        if tensor is not None and tensor.requires_grad:
            raise InputError(
                f"{name}: expected a tensor that needs no gradient, since attention over a cache is for inference only "
                "(use torch.no_grad(), or fastattn.attention to train), got one with requires_grad=True"
            )


def _check_and_plan(t: _Tensors, options: _Options) -> _Plan:
    for name, tensor in zip(_Tensors._fields, t, strict=True):
        check_tensor(name, tensor, optional=name not in _NEEDED)
    if torch.is_grad_enabled():
        _refuse_gradients(t)
    check_dtype("query", t.query, FLOATING)
    check_rank("query", t.query, "[B, Hq, Sq, D]")
    batch, heads, num_queries, head_dim = t.query.shape
    for name, tensor in zip(_Tensors._fields, t, strict=True):
        if tensor is not None:
            check_same_device(name, tensor, t.query.device)
    check_shape("cache_seqlens", t.cache_seqlens, (batch,), "[B]")
    check_dtype("cache_seqlens", t.cache_seqlens, (torch.int32,))
    features = _check_caches(t) | _check_append(t) | _check_rotary(t)

    left, right = check_window(options.window)
    check_bool("rotary_interleaved", options.rotary_interleaved)
    check_bool("causal", options.causal)
    check_bool("return_lse", options.return_lse)
    check_bool("batch_invariant", options.batch_invariant)
    check_int("num_splits", options.num_splits, minimum=0)
    check_number("softcap", options.softcap, low=0.0)
    if options.scale is not None:
        check_number("scale", options.scale)
    if options.causal:
        right = 0
        if num_queries > 1:
            features.add("causal")
    if left >= 0 or (right >= 0 and not options.causal):
        features.add("window")
    if options.softcap > 0:
        features.add("softcap")
    if t.alibi_slopes is not None:
        check_slopes(t.alibi_slopes, t.query.device, batch, heads)
        features.add("alibi")
    if t.sinks is not None:
        check_sinks(t.sinks, t.query.device, heads)
        features.add("sinks")
    kv_heads, capacity = t.k_cache.shape[1:3]
    if t.block_table is not None:
        capacity *= t.block_table.shape[1]
    if heads != kv_heads:
        features.add("gqa")
    if t.v_cache.shape[-1] != head_dim:
        features.add("value dim")
    call = Call(
        "decode",
        t.query.device,
        t.query.dtype,
        head_dim,
        t.v_cache.shape[-1],
        frozenset(features),
        (
            num_queries * (heads // kv_heads if kv_heads else 1),
            t.k_cache.element_size(),
            0 if t.block_table is None else t.k_cache.shape[2],
        ),
        only_torch_handles(*t),
        may_prefill=num_queries > _MOST_DECODED and options.num_splits == 0 and 0 < batch * capacity < 2**31,
    )
    scale = default_scale(head_dim) if options.scale is None else float(options.scale)
    return _Plan(call, scale, (left, right))


_plans = Plans(_check_and_plan)


def _check_caches(t: _Tensors) -> set[str]:
    batch, heads, _, head_dim = t.query.shape
    layout = "[B, Hkv, capacity, {}]" if t.block_table is None else "[num_pages, Hkv, page_size, {}]"
    check_rank("k_cache", t.k_cache, layout.format("D"))
    check_rank("v_cache", t.v_cache, layout.format("Dv"))
    expect(t.k_cache.shape[-1] == head_dim, "k_cache", f"the query's head dim {head_dim}", t.k_cache.shape[-1])
    like = list(t.k_cache.shape[:-1])
    expect(
        t.v_cache.shape[:-1] == t.k_cache.shape[:-1], "v_cache", f"k_cache's shape but for Dv, {like}", t.v_cache.shape
    )
    kv_heads = t.k_cache.shape[1]
    fits = heads % kv_heads == 0 if kv_heads else heads == 0
    expect(fits, "query", f"a multiple of the {kv_heads} KV heads", f"{heads} heads")

    features = set()
    if t.block_table is None:
        expect(t.k_cache.shape[0] == batch, "k_cache", f"the query's batch size {batch}", t.k_cache.shape[0])
    else:
        features.add("paged")
        check_rank("block_table", t.block_table, "[B, max_pages]")
        check_dtype("block_table", t.block_table, (torch.int32,))
        expect(
            t.block_table.shape[0] == batch, "block_table", f"{batch} rows [B, max_pages]", list(t.block_table.shape)
        )
    is_int8 = t.k_cache.dtype == torch.int8
    check_dtype("k_cache", t.k_cache, (t.query.dtype, torch.int8))
    check_dtype("v_cache", t.v_cache, (t.k_cache.dtype,))
    for name, scale, cache in (("k_scale", t.k_scale, t.k_cache), ("v_scale", t.v_scale, t.v_cache)):
        if not is_int8:
            expect(scale is None, name, f"None beside a cache of {cache.dtype}", "a tensor")
            continue
        features.add("int8 cache")
        if scale is None:
            raise InputError(f"{name}: expected a float32 tensor beside an int8 cache, got None")
        check_dtype(name, scale, (torch.float32,))
        check_shape(name, scale, cache.shape[:-1], "of the cache without its last dim")
    return features


def _check_append(t: _Tensors) -> set[str]:
    if t.k_new is None and t.v_new is None:
        return set()
    for name, tensor, other in (("k_new", t.k_new, "v_new"), ("v_new", t.v_new, "k_new")):
        expect(tensor is not None, name, f"a tensor, as {other} is one", None)
    assert t.k_new is not None
    assert t.v_new is not None
    check_rank("k_new", t.k_new, "[B, Hkv, S_new, D]")
    batch, kv_heads, num_new = t.query.shape[0], t.k_cache.shape[1], t.k_new.shape[2]
    check_shape("k_new", t.k_new, (batch, kv_heads, num_new, t.k_cache.shape[3]), "[B, Hkv, S_new, D]")
    check_shape("v_new", t.v_new, (batch, kv_heads, num_new, t.v_cache.shape[3]), "[B, Hkv, S_new, Dv]")
    check_dtype("k_new", t.k_new, (t.query.dtype,))
    check_dtype("v_new", t.v_new, (t.query.dtype,))
    return {"append"}


def _check_rotary(t: _Tensors) -> set[str]:
    if t.rotary_cos is None and t.rotary_sin is None:
        return set()
    for name, tensor, other in (
        ("rotary_cos", t.rotary_cos, "rotary_sin"),
        ("rotary_sin", t.rotary_sin, "rotary_cos"),
    ):
        expect(tensor is not None, name, f"a tensor, as {other} is one", None)
    assert t.rotary_cos is not None
    assert t.rotary_sin is not None
    check_rank("rotary_cos", t.rotary_cos, "[positions, rotary_dim / 2]")
    check_dtype("rotary_cos", t.rotary_cos, FLOATING)
    check_dtype("rotary_sin", t.rotary_sin, (t.rotary_cos.dtype,))
    check_shape("rotary_sin", t.rotary_sin, t.rotary_cos.shape, "of rotary_cos")
    positions, half = t.rotary_cos.shape
    expect(positions >= 1, "rotary_cos", "at least one position", 0)
    head_dim = t.query.shape[-1]
    expect(2 * half <= head_dim, "rotary_cos", f"rotary_dim / 2 <= {head_dim // 2}, half the head dim", half)
    return {"rotary"}


def _check_device_memory(t: _Tensors) -> None:
    """Reads lengths, table and scales back: only with ``FASTATTN_CHECK=1``."""
    num_new = 0 if t.k_new is None else t.k_new.shape[2]
    lengths: list[int] = t.cache_seqlens.tolist()
    block_rows = t.k_cache.shape[2]
    capacity = block_rows if t.block_table is None else block_rows * t.block_table.shape[1]
    for sequence, length in enumerate(lengths):
        where = f"{length} for sequence {sequence}"
        expect(length >= 0, "cache_seqlens", "lengths of at least 0", where)
        room = f"at most {capacity - num_new}: a capacity of {capacity} less {num_new} new tokens"
        expect(length + num_new <= capacity, "cache_seqlens", room, where)
        if t.rotary_cos is not None and num_new + length:
            positions = t.rotary_cos.shape[0]
            expect(length + num_new <= positions, "rotary_cos", f"{length + num_new} positions", positions)
    column = torch.arange(capacity, device=t.query.device)
    if t.block_table is not None:
        check_pages(t.block_table, t.cache_seqlens + num_new, t.k_cache.shape[0], block_rows)
    is_old = (column < t.cache_seqlens[:, None])[:, None]
    for name, scale in (("k_scale", t.k_scale), ("v_scale", t.v_scale)):
        if scale is None or capacity == 0 or scale.numel() == 0:
            continue
        if t.block_table is not None:
            pages = t.block_table.clamp(0, scale.shape[0] - 1).long()
            scale = scale[pages].transpose(1, 2).flatten(2, 3)
        expect(bool((scale.isfinite() | ~is_old).all()), name, "finite scales of the cached tokens", "NaN or infinity")
