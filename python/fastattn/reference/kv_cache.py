"""Computes attention over a key-value cache, after appending new tokens to it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.quantization import FP8, QUANTIZE_ROWS, are_given, as_numbers, to_fp8
from fastattn.reference.formula import attend, bounds
from fastattn.reference.pages import gather_pages, present_pages
from fastattn.rotary import rotary_at


def _append(cache: Tensor, new: Tensor, rows: Tensor, block_rows: int) -> None:
    """Writes ``new [B, Hkv, S_new, …]`` into ``cache [blocks, Hkv, block_rows, …]`` at the flat ``rows [B, S_new]``.

    A token whose row is past the end is dropped.
    """
    num_rows = cache.shape[0] * block_rows
    token = torch.arange(rows.numel(), device=cache.device)
    writer = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=cache.device).scatter(0, rows.flatten(), token)
    writer = writer[:num_rows].view(cache.shape[0], block_rows)
    is_written = (writer >= 0)[:, None, :].view(cache.shape[0], 1, block_rows, *[1] * (cache.dim() - 3))
    written = new.transpose(1, 2).flatten(0, 1)[writer.clamp(min=0)].transpose(1, 2)
    cache.copy_(torch.where(is_written, written.to(cache.dtype), cache))


def _store(cache: Tensor, scales: Tensor | None, new: Tensor, rows: Tensor, block_rows: int) -> None:
    """Writes ``new`` in the cache's dtype. Computes and writes scales unless the scales are fixed."""
    if cache.dtype == FP8 and are_given(scales):
        new = to_fp8(new, scales if scales is None else _by_head(scales))
    elif scales is not None:
        new, new_scales = QUANTIZE_ROWS[cache.dtype](new)
        _append(scales, new_scales, rows, block_rows)
    _append(as_numbers(cache), as_numbers(new), rows, block_rows)


def _read(cache: Tensor, scales: Tensor | None, table: Tensor) -> Tensor:
    """Returns the dequantised keys or values of the pages in ``table``."""
    tokens = gather_pages(as_numbers(cache), table).view(cache.dtype)
    if cache.dtype == FP8:
        tokens = tokens.to(torch.float32)
    if scales is None:
        return tokens
    token_scales = _by_head(scales) if are_given(scales) else gather_pages(scales, table)[..., None]
    return tokens.to(scales.dtype) * token_scales


def _by_head(scales: Tensor) -> Tensor:
    """Returns scales ``[Hkv]``, ``[1]`` or ``[]`` in a shape that broadcasts to ``[B, Hkv, …, D]``."""
    return scales.reshape(-1, 1, 1)


def append_to_cache(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes token ``i`` to slot ``slot_mapping[i]`` of the caches in place, unless that slot does not exist."""
    num_pages, _, page_size, _ = k_cache.shape
    num_slots = num_pages * page_size
    if slot_mapping.numel() == 0 or num_slots == 0:
        return
    slot = slot_mapping.to(torch.int64)[None]
    slot = torch.where((slot >= 0) & (slot < num_slots), slot, num_slots)
    for cache, new, scales in ((k_cache, k_new, k_scale), (v_cache, v_new, v_scale)):
        _store(cache, scales, new.transpose(0, 1)[None], slot, page_size)


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
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    tree_mask: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Appends to the cache in place, attends, and returns output ``[B, Hq, Sq, Dv]`` and lse ``[B, Hq, Sq]``."""
    batch, _, num_queries, _ = query.shape
    block_rows = k_cache.shape[2]
    device = query.device
    if block_table is None:
        block_table = torch.arange(batch, device=device)[:, None]
    num_blocks = k_cache.shape[0]
    table, block_is_present = present_pages(block_table, num_blocks)
    capacity = table.shape[1] * block_rows

    num_new = 0 if k_new is None else k_new.shape[2]
    before = cache_seqlens.to(torch.int64).clamp(min=0)
    total = (before + num_new).clamp(max=capacity)
    position = (total - num_queries)[:, None] + torch.arange(num_queries, device=device)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        if rotary_cos is None or rotary_sin is None:
            return x
        return rotary_at(x, rotary_cos, rotary_sin, positions, rotary_interleaved)

    query = rotated(query, position)
    if k_new is not None and v_new is not None and num_new and capacity:
        new_position = before[:, None] + torch.arange(num_new, device=device)
        k_new = rotated(k_new, new_position)
        block = (new_position // block_rows).clamp(max=table.shape[1] - 1)
        row = table.gather(1, block) * block_rows + new_position % block_rows
        fits = (new_position < capacity) & block_is_present.gather(1, block)
        row = torch.where(fits, row, num_blocks * block_rows)
        for cache, new, scales in ((k_cache, k_new, k_scale), (v_cache, v_new, v_scale)):
            _store(cache, scales, new, row, block_rows)

    column = torch.arange(capacity, device=device)
    key_is_present = (column < total[:, None]) & block_is_present.repeat_interleave(block_rows, dim=1)
    out, lse = attend(
        query,
        _read(k_cache, k_scale, table),
        _read(v_cache, v_scale, table),
        position=position,
        key_is_present=key_is_present,
        window=bounds(causal and tree_mask is None, window),
        softcap=softcap,
        bias=None if tree_mask is None else tree_of_keys(tree_mask, column - (total - num_queries)[:, None]),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        scale=scale,
        compute_dtype=compute_dtype,
    )
    return out, lse


def tree_of_keys(tree_mask: Tensor, token: Tensor) -> Tensor:
    """Returns ``tree_mask [1 or B, Sq, Sq]`` or ``[Sq, Sq]`` as a mask over all keys, bool ``[B, 1, Sq, Sk]``.

    ``token [B, Sk]`` is each key's index among the last ``Sq`` tokens. The index of an earlier key is negative.
    """
    num_queries = tree_mask.shape[-1]
    is_before = (token < 0)[:, None, :]
    if num_queries == 0:
        return is_before[:, None, :0]
    node = token.clamp(0, num_queries - 1)[:, None, :].expand(-1, num_queries, -1)
    return (is_before | tree_mask.expand(len(token), num_queries, -1).gather(2, node))[:, None]
