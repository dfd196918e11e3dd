"""Computes ``flash_attn_with_kvcache`` with fastattn's kernels for caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.checks import (
    check_dtype,
    check_int,
    check_rank,
    check_shape,
    check_tensor,
    contents_are_checked,
    expect,
    numbers_below,
)
from fastattn.errors import InputError
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from fastattn.functional.kv_cache_checks import check_separate_caches
from fastattn.integrations.argument_names import errors_name
from fastattn.integrations.flash_attn.conventions import (
    OF_FLASH_ATTN,
    alibi_of_dense,
    bounds,
    to_flash_lse,
    without_idle_bounds,
)
from fastattn.integrations.flash_attn.keywords import DESCALES, read_keywords
from fastattn.rotary import rotary_at


@errors_name(**OF_FLASH_ATTN)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    **newer: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends ``k`` and ``v`` to a cache in place, then attends over it. It is not differentiable.

    Args:
        q: ``[B, Sq, H, D]``. With an fp8 cache it can also be fp8; it is then converted to bfloat16.
        k_cache, v_cache: ``[B, capacity, Hk, D]``, or with a ``block_table`` pages ``[num_pages, page_size, Hk, D]`` of
            any size. They have the dtype of ``q``, or ``torch.float8_e4m3fn``.
        k, v: new tokens, ``[B, S_new, Hk, D]``. Tokens in fp8 are stored unchanged.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``: they rotate the query and the new keys, new token ``j``
            by position ``cache_seqlens + j``.
        cache_seqlens: an int, or int32 ``[B]``: the number of tokens before this call; by default the cache is full.
        cache_batch_idx: int32 ``[B]``: the row of the cache that belongs to each sequence.
        cache_leftpad: int32 ``[B]``: the index in its cache row at which each sequence begins. Windows and ALiBi count
            from there, rotary positions from the beginning of the row.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence.
        num_splits: into how many splits the keys of a sequence are divided; 0 lets fastattn choose.
        s_aux: attention sinks, ``[H]``.
        q_descale, k_descale, v_descale: fp32 ``[B, Hk]``: the factors of each sequence and KV head by which fp8 numbers
            are multiplied, in ``q``, in ``k_cache`` and ``k``, and in ``v_cache`` and ``v``. None means 1.

    Returns:
        ``[B, Sq, H, Dv]``, in bfloat16 if ``q`` is fp8, and with ``return_softmax_lse`` the lse, fp32 ``[B, H, Sq]``.

    Raises:
        InputError, TypeError: an argument is wrong, as far as the host can tell.
    """
    served = ("sinks", "block_table", *DESCALES)
    keywords = read_keywords(flash_attn_with_kvcache, {"s_aux": s_aux, **newer}, served=served)
    if keywords.block_table is not None:
        block_table = keywords.block_table
    if (rotary_cos is not None or rotary_sin is not None) and k is None:
        raise InputError("rotary_cos: expected None without new keys, got a tensor; pass k and v, or rotate q yourself")
    if k is not None and cache_seqlens is None:
        raise InputError(
            "cache_seqlens: expected an int or a tensor if k is given, got None; pass how many tokens the cache holds"
        )
    for name, tensor, advice in (
        ("cache_batch_idx", cache_batch_idx, "pass block_table[cache_batch_idx] instead"),
        ("cache_leftpad", cache_leftpad, "paged sequences begin at their first page: store them without padding"),
    ):
        if tensor is not None and block_table is not None:
            raise InputError(f"{name}: expected None with a block_table, got a tensor; {advice}")
    cache_layout = "[B, capacity, Hk, D]" if block_table is None else "[num_pages, page_size, Hk, D]"
    for name, tensor, layout in (
        ("q", q, "[B, Sq, H, D]"),
        ("k_cache", k_cache, cache_layout),
        ("v_cache", v_cache, cache_layout),
    ):
        check_tensor(name, tensor)
        check_rank(name, tensor, layout)
    check_separate_caches(k_cache, v_cache, k, v)
    batch, num_queries = q.shape[:2]
    for name in DESCALES:
        _check_descale(name, getattr(keywords, name), q if name == "q_descale" else k_cache, (batch, k_cache.shape[2]))
    if q.dtype == k_cache.dtype == torch.float8_e4m3fn:
        q = q.to(torch.bfloat16)
    query = q.detach().transpose(1, 2)
    for descale in (keywords.q_descale, keywords.k_descale):  # scores are products of q and k: scale q by both
        query = _scaled(query, descale)
    key_pages, value_pages = (cache.detach().transpose(1, 2) for cache in (k_cache, v_cache))
    k_new, v_new = (
        None if new is None else _as_appended(name, new.detach(), getattr(keywords, f"{name}_descale"), query.dtype)
        for name, new in (("k", k), ("v", v))
    )
    num_new = 0 if k_new is None else k_new.shape[2]
    capacity = k_cache.shape[1] if block_table is None else k_cache.shape[1] * block_table.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        length = capacity if cache_seqlens is None else check_int("cache_seqlens", cache_seqlens)
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)

    if contents_are_checked(cache_seqlens, cache_batch_idx, cache_leftpad):
        _check_rows(k_cache, cache_seqlens, num_new, cache_batch_idx, cache_leftpad)
    new_place = cache_seqlens  # the index of the first new token in its cache row, and its rotary position
    if cache_leftpad is not None:  # each token becomes a page
        key_pages, value_pages = (_pages_of_a_token("k_cache", k_cache), _pages_of_a_token("v_cache", v_cache))
        block_table = _tokens_from(cache_leftpad, cache_batch_idx, capacity)
        cache_seqlens = cache_seqlens - cache_leftpad
    elif cache_batch_idx is not None:  # each row of the cache becomes a page
        block_table = cache_batch_idx.to(torch.int32)[:, None]

    window = bounds(window_size, causal)
    if rotary_cos is not None and rotary_sin is not None and k_new is not None:
        is_one_position = without_idle_bounds(window, capacity) == (-1, -1)
        if num_queries != num_new or (is_one_position and num_queries > 1) or cache_leftpad is not None:
            row = torch.arange(max(num_queries, num_new), device=q.device)
            position = new_place[:, None] + row
            first = position[:, :1].expand(-1, num_queries) if is_one_position else position[:, :num_queries]
            query = _rotated(query, rotary_cos, rotary_sin, first, rotary_interleaved)
            k_new = _rotated(k_new, rotary_cos, rotary_sin, position[:, :num_new], rotary_interleaved)
            rotary_cos = rotary_sin = None

    with torch.no_grad():
        out, lse = attention_with_kv_cache(
            query,
            key_pages,
            value_pages,
            cache_seqlens,
            k_new=k_new,
            v_new=v_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            block_table=block_table,
            causal=False,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=keywords.sinks,
            scale=softmax_scale,
            return_lse=True,
            num_splits=max(num_splits, 0),
        )
        out = _scaled(out, keywords.v_descale).transpose(1, 2).contiguous()
        if not return_softmax_lse:
            return out
        alibi = alibi_of_dense(alibi_slopes, window, num_queries, cache_seqlens + num_new, capacity)
        return out, to_flash_lse(lse, alibi)


def _check_descale(name: str, descale: Tensor | None, scaled: Tensor, shape: tuple[int, ...]) -> None:
    if descale is None:
        return
    check_tensor(name, descale)
    which = "q is" if name == "q_descale" else "k_cache and v_cache are"
    expect(scaled.dtype == torch.float8_e4m3fn, name, f"None, as {which} not fp8", "a tensor")
    check_dtype(name, descale, (torch.float32,))
    check_shape(name, descale, shape, "[B, Hk]")


def _scaled(x: Tensor, descale: Tensor | None) -> Tensor:
    """Returns ``x [B, H, S, D]`` times the ``descale [B, Hk]`` of each head's KV head."""
    if descale is None:
        return x
    heads, kv_heads = x.shape[1], descale.shape[1]
    expect(kv_heads > 0 and heads % kv_heads == 0, "q", f"a multiple of the {kv_heads} heads of k_cache", heads)
    of_heads = descale.repeat_interleave(heads // kv_heads, dim=1)
    return (x * of_heads[:, :, None, None]).to(x.dtype)


def _as_appended(name: str, new: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns new tokens as ``[B, Hk, S_new, D]`` in the query's dtype, which holds fp8 numbers exactly."""
    if new.dtype == torch.float8_e4m3fn:
        new = new.to(dtype)
    elif descale is not None:
        advice = f"divide by {name}_descale and cast with .to(torch.float8_e4m3fn)"
        raise InputError(f"{name}: expected float8_e4m3fn with {name}_descale, got {new.dtype}; {advice}")
    return new.transpose(1, 2)


def _check_rows(
    k_cache: Tensor, cache_seqlens: Tensor, num_new: int, batch_idx: Tensor | None, leftpad: Tensor | None
) -> None:
    """Checks ``cache_batch_idx`` and ``cache_leftpad`` before a block table replaces them, so that errors name them."""
    rows, capacity = k_cache.shape[:2]
    for sequence, row in enumerate([] if batch_idx is None else batch_idx.tolist()):
        expect(0 <= row < rows, "cache_batch_idx", numbers_below(rows, "rows"), f"{row} for sequence {sequence}")
    if leftpad is None:
        return
    for sequence, (first, length) in enumerate(zip(leftpad.tolist(), cache_seqlens.tolist(), strict=False)):
        where = f"for sequence {sequence}"
        expected = f"at least 0 and at most {length}, the tokens in the row"
        expect(0 <= first <= length, "cache_leftpad", expected, f"{first} {where}")
        room = f"at most {capacity - num_new}: a capacity of {capacity} less {num_new} new tokens"
        expect(length + num_new <= capacity, "cache_seqlens", room, f"{length} {where}; make the cache larger")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    if position.numel() and contents_are_checked(position):
        needed = int(position.max()) + 1
        expect(needed <= cos.shape[0], "rotary_cos", f"at least {needed} rows, one for each position", cos.shape[0])
    return rotary_at(x, cos, sin, position, interleaved)


def _pages_of_a_token(name: str, cache: Tensor) -> Tensor:
    """Returns ``[B, capacity, Hk, D]`` as pages of one token, ``[B * capacity, Hk, 1, D]``, without a copy."""
    if cache.stride(0) != cache.stride(1) * cache.shape[1]:
        raise InputError(
            f"{name}: expected a contiguous cache with cache_leftpad, got strides {cache.stride()}; make it with "
            "torch.zeros"
        )
    return cache.detach().flatten(0, 1).unsqueeze(2)


def _tokens_from(leftpad: Tensor, batch_idx: Tensor | None, capacity: int) -> Tensor:
    """Returns a block table of the pages of `_pages_of_a_token`, int32 ``[B, capacity]``; -1 beyond a cache row."""
    row = torch.arange(leftpad.shape[0], device=leftpad.device) if batch_idx is None else batch_idx
    token = leftpad[:, None] + torch.arange(capacity, device=leftpad.device)
    return torch.where(token < capacity, row[:, None] * capacity + token, -1).to(torch.int32)
