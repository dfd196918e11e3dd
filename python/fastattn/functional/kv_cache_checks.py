"""Checks the arguments of ``attention_with_kv_cache`` and ``append_to_cache``, and describes the call for the choice of
a backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.call import UNBOUNDED, AppendCall, DecodeCall
from fastattn.checks import (
    FLOATING,
    check_bool,
    check_dtype,
    check_head_counts,
    check_int,
    check_number,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    expect,
    needs_gradient,
    refuse_wrapped,
)
from fastattn.dispatch.request import Request
from fastattn.dispatch.support import FEATURE_OF_CACHE
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.errors import InputError
from fastattn.functional.attention_checks import (
    check_pages,
    check_sinks,
    check_slopes,
    check_window,
    default_scale,
)
from fastattn.functional.checked_once import CheckedOnce
from fastattn.ops.describe import describe_append, describe_decode
from fastattn.quantization import FP8, are_given


def _check_tensors(named: dict[str, Any], needed: tuple[str, ...]) -> None:
    """Checks that every argument is a plain tensor that needs no gradient, or None if its name is not in ``needed``."""
    for name, tensor in named.items():
        check_tensor(name, tensor, optional=name not in needed)
        refuse_wrapped(name, tensor)
    for name, tensor in named.items():
        if torch.is_grad_enabled() and needs_gradient(tensor):
            raise InputError(
                f"{name}: expected a tensor that needs no gradient, since caches are for inference only, got one with "
                "requires_grad=True; call it under torch.no_grad(), or train with fastattn.attention"
            )


def check_call(call: DecodeCall) -> tuple[DecodeCall, Request]:
    """Returns the call with checked options, and its description. Raises if the host can see that an argument is
    wrong."""
    query = call.query
    named = dict(zip(call._fields, call.tensors, strict=False))
    _check_tensors(named, call._fields[:4])
    check_dtype("query", query, FLOATING)
    check_rank("query", query, "[B, Hq, Sq, D]")
    batch, heads, num_queries, head_dim = query.shape
    for name, tensor in named.items():
        if tensor is not None:
            check_same_device(name, tensor, query.device)
    advice = f"; for equal lengths pass cache_seqlens.repeat({batch})" if call.cache_seqlens.dim() == 0 else ""
    check_shape("cache_seqlens", call.cache_seqlens, (batch,), "[B]", advice)
    check_dtype("cache_seqlens", call.cache_seqlens, (torch.int32,))
    _check_caches(call)
    _check_append(call)
    check_rotary(call.rotary_cos, call.rotary_sin, head_dim)
    left, right = check_window(call.window)
    causal = check_bool("causal", call.causal)
    checked = call._replace(
        rotary_interleaved=check_bool("rotary_interleaved", call.rotary_interleaved),
        softcap=float(check_number("softcap", call.softcap, low=0.0)),
        scale=default_scale(head_dim) if call.scale is None else float(check_number("scale", call.scale)),
        return_lse=check_bool("return_lse", call.return_lse),
        num_splits=check_int("num_splits", call.num_splits, minimum=0),
        batch_invariant=check_bool("batch_invariant", call.batch_invariant),
    )
    if call.tree_mask is not None:
        _check_tree(call, (left, right))
        causal = False
    if call.alibi_slopes is not None:
        check_slopes(call.alibi_slopes, query.device, batch, heads)
    if call.sinks is not None:
        check_sinks(call.sinks, query.device, heads)
    if call.out is not None:
        check_shape("out", call.out, (batch, heads, num_queries, call.v_cache.shape[-1]), "[B, Hq, Sq, Dv]")
        check_dtype("out", call.out, (query.dtype,), "; make it with the query's dtype")
    checked = checked._replace(causal=False, window=(left, 0 if causal else right))
    return checked, describe_decode(checked)


check_once = CheckedOnce(check_call, DecodeCall, first_option="rotary_interleaved")


def _check_caches(t: DecodeCall) -> None:
    batch, _, _, head_dim = t.query.shape
    layout = "[B, Hkv, capacity, {}]" if t.block_table is None else "[num_pages, Hkv, page_size, {}]"
    check_rank("k_cache", t.k_cache, layout.format("D"))
    check_rank("v_cache", t.v_cache, layout.format("Dv"))
    wanted = f"{layout.format('D')} with the query's D = {head_dim}"
    expect(t.k_cache.shape[-1] == head_dim, "k_cache", wanted, list(t.k_cache.shape))
    like_keys, came = list(t.k_cache.shape[:-1]), list(t.v_cache.shape)
    expect(came[:-1] == like_keys, "v_cache", f"{layout.format('Dv')} with k_cache's {like_keys} before Dv", came)
    check_head_counts(t.query, t.k_cache, "k_cache", ("[B, Hq, Sq, D]", layout.format("D")))

    if t.block_table is None:
        wanted = f"{layout.format('D')} with the query's batch size {batch}"
        expect(t.k_cache.shape[0] == batch, "k_cache", wanted, list(t.k_cache.shape))
    else:
        check_rank("block_table", t.block_table, "[B, max_pages]")
        check_dtype("block_table", t.block_table, (torch.int32,))
        rows = t.block_table.shape[0]
        wanted = f"[B, max_pages] with the query's batch size {batch}"
        expect(rows == batch, "block_table", wanted, list(t.block_table.shape))
    _check_storage(t, t.query.dtype)


def _check_storage(t: DecodeCall | AppendCall, dtype: torch.dtype) -> None:
    """Checks the dtypes of caches that take tokens of ``dtype``, and the dtypes and shapes of their scales."""
    given = t._fields[0]
    expected = f"{dtype} like the query and new tokens, torch.int8 or {FP8}"
    cast = f"cast {given} to it, or " if t.k_cache.dtype in FLOATING else ""
    came = f"{t.k_cache.dtype}; {cast}make the caches with dtype={dtype}"
    expect(t.k_cache.dtype in (dtype, torch.int8, FP8), "k_cache", expected, came)
    check_dtype("v_cache", t.v_cache, (t.k_cache.dtype,), "; make both caches with the same dtype")
    for name, scale, cache in (("k_scale", t.k_scale, t.k_cache), ("v_scale", t.v_scale, t.v_cache)):
        if cache.dtype not in FEATURE_OF_CACHE:
            expect(scale is None, name, f"None with a cache of {cache.dtype}, which has no scales", "a tensor")
            continue
        if scale is None:
            if cache.dtype == torch.int8:
                wanted = f"a float32 tensor {list(cache.shape[:-1])}, the scales of an int8 cache"
                raise InputError(f'{name}: expected {wanted}, got None; KVCache(quantized="int8") keeps them')
            continue
        check_dtype(name, scale, (torch.float32,))
        if cache.dtype == torch.int8 or not are_given(scale):
            check_shape(name, scale, cache.shape[:-1], "of the cache without its last dim")
        elif scale.numel() != 1:
            layout = "of one scale ([] or [1]), of the cache without its last dim, or [Hkv]"
            check_shape(name, scale, cache.shape[1:2], layout)


def _check_append(t: DecodeCall) -> None:
    if t.k_new is None and t.v_new is None:
        return
    for name, tensor, other in (("k_new", t.k_new, "v_new"), ("v_new", t.v_new, "k_new")):
        expect(tensor is not None, name, f"a tensor, as {other} is one", "None; pass both or none")
    assert t.k_new is not None
    assert t.v_new is not None
    check_rank("k_new", t.k_new, "[B, Hkv, S_new, D]")
    batch, kv_heads, num_new = t.query.shape[0], t.k_cache.shape[1], t.k_new.shape[2]
    swap = "; if heads come after rows, pass k_new.transpose(1, 2), v_new.transpose(1, 2) and so on"
    advice = swap if num_new == kv_heads else ""
    check_shape("k_new", t.k_new, (batch, kv_heads, num_new, t.k_cache.shape[3]), "[B, Hkv, S_new, D]", advice)
    check_shape("v_new", t.v_new, (batch, kv_heads, num_new, t.v_cache.shape[3]), "[B, Hkv, S_new, Dv]", advice)
    check_dtype("k_new", t.k_new, (t.query.dtype,))
    check_dtype("v_new", t.v_new, (t.query.dtype,))


def check_rotary(cos: Tensor | None, sin: Tensor | None, head_dim: int) -> None:
    """Checks the cosines and sines that rotate a query of ``head_dim`` dims. Both or neither can be None."""
    if cos is None and sin is None:
        return
    check_tensor("rotary_cos", cos, optional=True)
    check_tensor("rotary_sin", sin, optional=True)
    for name, tensor, other in (("rotary_cos", cos, "rotary_sin"), ("rotary_sin", sin, "rotary_cos")):
        expect(tensor is not None, name, f"a tensor, as {other} is one", "None; pass both or none")
    assert cos is not None and sin is not None
    check_rank("rotary_cos", cos, "[positions, rotary_dim / 2]")
    check_dtype("rotary_cos", cos, FLOATING)
    check_dtype("rotary_sin", sin, (cos.dtype,))
    check_shape("rotary_sin", sin, cos.shape, "of rotary_cos")
    positions, half = cos.shape
    expect(positions >= 1, "rotary_cos", "at least one position", 0)
    advice = f"; if both halves repeat the same angles, pass cos[:, :{half // 2}] and sin[:, :{half // 2}]"
    came = f"{half}{advice if half == head_dim else ''}"
    expect(2 * half <= head_dim, "rotary_cos", f"rotary_dim / 2 <= {head_dim // 2}, half the head dim", came)


def _check_tree(t: DecodeCall, window: tuple[int, int]) -> None:
    """Checks the tree mask. Raises for options that take a token's index as its position, because in a tree its
    position is its depth."""
    assert t.tree_mask is not None
    batch, _, num_queries, _ = t.query.shape
    check_dtype("tree_mask", t.tree_mask, (torch.bool,))
    tree, shape = list(t.tree_mask.shape), [num_queries, num_queries]
    words = f"shape [B, Sq, Sq] = {[batch, *shape]}, [1, Sq, Sq] or [Sq, Sq]"
    expect(tree in ([batch, *shape], [1, *shape], shape), "tree_mask", words, tree)
    beside = "with a tree_mask, because a token's position in a tree is its depth, not its index"
    expect(t.rotary_cos is None, "rotary_cos", f"None {beside}: rotate query and k_new before the call", "a tensor")
    expect(t.alibi_slopes is None, "alibi_slopes", f"None {beside}", "a tensor")
    expect(window == (UNBOUNDED, UNBOUNDED), "window", f"{(UNBOUNDED, UNBOUNDED)} {beside}", window)


def check_append(t: AppendCall) -> tuple[AppendCall, Request]:
    """Returns a checked call of ``append_to_cache``, and its description."""
    _check_tensors(t._asdict(), t._fields[:5])
    check_dtype("k_new", t.k_new, FLOATING)
    for name, tensor in zip(t._fields, t, strict=True):
        if tensor is not None:
            check_same_device(name, tensor, t.k_new.device)
    check_rank("k_new", t.k_new, "[tokens, Hkv, D]")
    check_rank("v_new", t.v_new, "[tokens, Hkv, Dv]")
    check_dtype("v_new", t.v_new, (t.k_new.dtype,))
    tokens, kv_heads, head_dim = t.k_new.shape
    value_dim = t.v_new.shape[-1]
    check_shape("v_new", t.v_new, (tokens, kv_heads, value_dim), "[tokens, Hkv, Dv]")
    check_rank("k_cache", t.k_cache, "[num_pages, Hkv, page_size, D]")
    num_pages, _, page_size, _ = t.k_cache.shape
    for name, cache, dim in (("k_cache", t.k_cache, head_dim), ("v_cache", t.v_cache, value_dim)):
        layout = "[num_pages, Hkv, page_size, " + ("D]" if name == "k_cache" else "Dv]")
        check_shape(name, cache, (num_pages, kv_heads, page_size, dim), layout)
    check_dtype("slot_mapping", t.slot_mapping, (torch.int64, torch.int32))
    check_shape("slot_mapping", t.slot_mapping, (tokens,), "[tokens]")
    _check_storage(t, t.k_new.dtype)
    return t, describe_append(t)


check_append_once = CheckedOnce(check_append, AppendCall)


def check_slots(t: AppendCall) -> None:
    """Checks that slots exist and differ. Reads the slots' values: call it only with ``FASTATTN_CHECK=1``."""
    num_slots = t.k_cache.shape[0] * t.k_cache.shape[2]
    token_of: dict[int, int] = {}
    for token, slot in enumerate(t.slot_mapping.tolist()):
        expect(slot < num_slots, "slot_mapping", f"slots below {num_slots}", f"{slot} for token {token}")
        other = token_of.setdefault(slot, token)
        came = f"{slot} for tokens {other} and {token}; a slot of -1 drops a token"
        expect(slot < 0 or other == token, "slot_mapping", "another slot for each token", came)


def check_separate_caches(k_cache: Tensor, v_cache: Tensor, k_new: Tensor | None, v_new: Tensor | None) -> None:
    """Checks that new keys and new values are not stored in one tensor. Runs in every call, because `check_once` does
    not know which memory a tensor has. Call it with the user's own tensors: views of one tensor are not recognised."""
    if v_cache is k_cache and v_new is not k_new:
        raise InputError(
            "v_cache: expected memory of its own, as new keys and values are both stored, got k_cache itself"
        )


def check_out_memory(t: DecodeCall) -> None:
    """Checks the strides and the memory of ``out``. Runs in every call, like `check_separate_caches`."""
    out = t.out
    if out is None:
        return
    contiguous = out.shape[-1] <= 1 or out.stride(-1) == 1
    expect(contiguous, "out", "a contiguous last dimension, as torch.empty makes it", f"strides {out.stride()}")
    extent = 1  # elements of memory that the dimensions so far span
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and out.numel() > 0:
            came = f"strides {out.stride()}, as expand() returns; pass out.contiguous()"
            expect(stride >= extent, "out", "separate memory for each element", came)
            extent += stride * (size - 1)
    if torch.compiler.is_compiling() or type(out) is not Tensor or out.numel() == 0:
        return  # a traced, fake or empty tensor has no address
    begin, end = _addresses(out)
    for name, tensor in zip(t._fields, t[:14], strict=False):
        if tensor is None or tensor.numel() == 0:
            continue
        first, last = _addresses(tensor)
        apart = end <= first or last <= begin
        came = f"memory among the elements of {name}; make it with torch.empty"
        expect(apart, "out", "memory of its own, apart from all other arguments", came)


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first byte, and the address after its last byte."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def check_contents(t: DecodeCall) -> None:
    """Checks the values of the lengths and of the block table. Call it only if `contents_are_checked`."""
    num_queries, num_new, capacity = t.query.shape[2], t.num_new, t.capacity
    has_room = num_new <= capacity or t.query.shape[0] == 0
    expect(has_room, "k_cache", f"a capacity of at least {num_new}, the tokens of k_new", capacity)
    for sequence, length in enumerate(t.cache_seqlens.tolist()):
        where = f"{length} for sequence {sequence}"
        expect(length >= 0, "cache_seqlens", "lengths of at least 0", where)
        room = f"at most {capacity - num_new}: a capacity of {capacity} less {num_new} new tokens"
        advice = "; pass the lengths before the append, or a larger cache" if num_new else ""
        expect(length + num_new <= capacity, "cache_seqlens", room, where + advice)
        right = UNBOUNDED if t.tree_mask is not None else t.window[1]  # 0 under a causal mask
        if num_new < num_queries and 0 < length + num_new < num_queries - right and right != UNBOUNDED:
            missed = f"{num_queries} queries, but sequence {sequence} has {length + num_new} tokens with the new ones"
            blind = f"so its first {num_queries - right - length - num_new} rows see no key and are zero"
            warn_at_users_line(
                f"attention_with_kv_cache: {missed}, {blind}; pass k_new and v_new for all of them.", UserWarning
            )
        if t.rotary_cos is not None and num_new + length:
            positions = t.rotary_cos.shape[0]
            wanted = f"at least {length + num_new} rows, one for each position"
            expect(length + num_new <= positions, "rotary_cos", wanted, positions)
    if t.block_table is not None:
        check_pages(t.block_table, t.cache_seqlens + num_new, t.k_cache.shape[0], t.k_cache.shape[2])


def check_scales(t: DecodeCall) -> None:
    """Checks that the scales of cached tokens are finite. Reads all scales: call it only with ``FASTATTN_CHECK=1``."""
    capacity = t.capacity
    is_old = (torch.arange(capacity, device=t.query.device) < t.cache_seqlens[:, None])[:, None]
    for name, scale in (("k_scale", t.k_scale), ("v_scale", t.v_scale)):
        if scale is None or capacity == 0 or scale.numel() == 0:
            continue
        if are_given(scale):
            expect(bool(scale.isfinite().all()), name, "finite scales", "NaN or infinity; pass None for scales of 1")
            continue
        if t.block_table is not None:
            pages = t.block_table.clamp(0, scale.shape[0] - 1).long()
            scale = scale[pages].transpose(1, 2).flatten(2, 3)
        wrong = ~scale.isfinite() & is_old
        if bool(wrong.any()):
            sequence, head, token = wrong.nonzero()[0].tolist()
            which = f"the scale of token {token} of sequence {sequence}, head {head}"
            came = f"{float(scale[sequence, head, token])} as {which}: the appended key or value was not finite"
            expect(False, name, "finite scales of the cached tokens", came)
