"""Runs ``attention_with_kv_cache`` and ``append_to_cache`` on a CPU, over the cached tokens only.

The reference does not read lengths, so it processes the whole capacity of the caches. This module reads the lengths,
writes only the new tokens, and attends over slices of the caches. A sequence's slice runs from the first token in the
window of any query to the last token, so that a single query needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from fastattn.call import AppendCall, AttentionCall, DecodeCall
from fastattn.checks import is_readable
from fastattn.functional import composite, torch_sdpa
from fastattn.quantization import FP8, QUANTIZE_ROWS, are_given, as_numbers, to_fp8
from fastattn.reference.kv_cache import tree_of_keys
from fastattn.rotary import rotary_at


def attention_with_kv_cache(call: DecodeCall) -> tuple[Tensor, Tensor] | None:
    """Returns output and lse of a checked call, or None if the host cannot read the lengths or if a tensor is empty.

    The lse has no elements without ``return_lse``.
    """
    if not is_readable(*call.tensors) or 0 in (*call.query.shape, *call.k_cache.shape, *call.v_cache.shape):
        return None
    query, (batch, heads, num_queries, _) = call.query, call.query.shape
    before = [max(length, 0) for length in call.cache_seqlens.tolist()]
    totals = [min(length + call.num_new, call.capacity) for length in before]

    if call.rotary_cos is not None:
        query = _rotated(call, query, [total - num_queries for total in totals])
    if call.k_new is not None and call.v_new is not None and call.num_new:
        k_new = call.k_new if call.rotary_cos is None else _rotated(call, call.k_new, before)
        _append(call._replace(k_new=k_new), before)

    out = query.new_zeros(batch, heads, num_queries, call.v_cache.shape[-1])
    lse = query.new_full(
        (batch, heads, num_queries) if call.return_lse else (0,),
        -torch.inf,
        dtype=torch.promote_types(query.dtype, torch.float32),
    )
    if call.return_lse and call.sinks is not None:
        lse.copy_(call.sinks[:, None])
    left, _ = call.window
    for run in _runs(totals, each_alone=call.batch_invariant):
        total = totals[run.start]
        tokens = slice(max(0, total - num_queries - left) if left >= 0 else 0, total)
        if tokens.start < total:
            found, its_lse = _attend(call, query[run], run, tokens)
            out[run] = found
            if call.return_lse:
                lse[run] = its_lse
    return out, lse


def append_to_cache(call: AppendCall) -> bool:
    """Writes the tokens that have a slot and returns True. Returns False if the host cannot read the slots."""
    if not is_readable(*call) or 0 in call.k_cache.shape[:3]:
        return False
    num_slots = call.k_cache.shape[0] * call.k_cache.shape[2]
    token = ((call.slot_mapping >= 0) & (call.slot_mapping < num_slots)).nonzero().flatten()
    slot = call.slot_mapping[token].long()
    page, row = slot // call.k_cache.shape[2], slot % call.k_cache.shape[2]
    _write(call.k_cache, call.k_scale, call.k_new[token], page, row)
    _write(call.v_cache, call.v_scale, call.v_new[token], page, row)
    return True


def _rotated(call: DecodeCall, x: Tensor, first: list[int]) -> Tensor:
    """Returns ``x [B, H, S, D]`` rotated by RoPE, where the positions of sequence ``b`` start at ``first[b]``."""
    assert call.rotary_cos is not None and call.rotary_sin is not None
    position = torch.tensor(first, device=x.device)[:, None] + torch.arange(x.shape[2], device=x.device)
    return rotary_at(x, call.rotary_cos, call.rotary_sin, position, call.rotary_interleaved)


def _append(call: DecodeCall, before: list[int]) -> None:
    """Writes the new tokens after the cached tokens. Drops a token beyond the capacity or without a page."""
    assert call.k_new is not None and call.v_new is not None
    block_rows = call.k_cache.shape[2]
    device = call.k_cache.device
    position = torch.tensor(before, device=device)[:, None] + torch.arange(call.k_new.shape[2], device=device)
    block = (position // block_rows).clamp(max=call.capacity // block_rows - 1)
    if call.block_table is None:
        page = torch.arange(len(before), device=device)[:, None].expand_as(position)
        fits = position < call.capacity
    else:
        page = call.block_table.gather(1, block).long()
        fits = (position < call.capacity) & (page >= 0) & (page < call.k_cache.shape[0])
    sequence, token = fits.nonzero(as_tuple=True)
    slot = page[sequence, token], position[sequence, token] % block_rows
    _write(call.k_cache, call.k_scale, call.k_new.transpose(1, 2)[sequence, token], *slot)
    _write(call.v_cache, call.v_scale, call.v_new.transpose(1, 2)[sequence, token], *slot)


def _write(cache: Tensor, scales: Tensor | None, new: Tensor, page: Tensor, row: Tensor) -> None:
    """Writes ``new [tokens, Hkv, D]`` to ``cache[page, :, row]`` in the cache's dtype, with computed or fixed
    scales."""
    if cache.dtype == FP8 and are_given(scales):
        new = to_fp8(new, None if scales is None else scales.reshape(-1, 1))
    elif scales is not None:
        new, new_scales = QUANTIZE_ROWS[cache.dtype](new)
        scales[page, :, row] = new_scales.to(scales.dtype)
    as_numbers(cache)[page, :, row] = as_numbers(new)


def _runs(totals: list[int], each_alone: bool) -> Iterator[slice]:
    """Yields slices of consecutive sequences with equal numbers of tokens, or slices of one if ``each_alone``."""
    begin = 0
    for _, run in groupby(enumerate(totals), key=lambda item: item if each_alone else item[1]):
        end = begin + len(list(run))
        yield slice(begin, end)
        begin = end


def _attend(call: DecodeCall, query: Tensor, run: slice, tokens: slice) -> tuple[Tensor, Tensor]:
    """Returns output and lse of the sequences ``run``, whose queries see only the cached ``tokens``.

    Without ``return_lse``, the second result is a tensor to be ignored.
    """
    num_queries, scale = query.shape[2], call.scale
    assert scale is not None
    key = _read(call, call.k_cache, call.k_scale, run, tokens)
    value = _read(call, call.v_cache, call.v_scale, run, tokens)
    left, right = call.window
    if tokens.stop - 1 - left <= tokens.start:  # the last query sees all, so every query does
        left = -1
    if right >= num_queries - 1:
        right = -1
    mask = _mask(call, run, tokens, num_queries)
    slopes = call.alibi_slopes
    if slopes is not None and slopes.dim() == 2 and len(slopes) == len(call.query):
        slopes = slopes[run]

    dtype = torch.promote_types(query.dtype, key.dtype)  # 8-bit keys are now float32
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    is_plain = not call.return_lse and call.softcap == 0 and slopes is None and call.sinks is None and scale > 0
    if is_plain and value.shape[-1] == key.shape[-1]:  # if Dv != D, PyTorch copies KV heads for each query head
        if mask is not None or (left, right) != (-1, -1):
            return torch_sdpa.attend(query, key, value, mask, (left, right), scale), query
        # PyTorch's kernel can lose a NaN score. Set keys that cause one to zero here, and set the result to NaN below.
        nonfinite = None if torch_sdpa.is_known_finite(key) else ~key.isfinite().all(-1, keepdim=True)
        if nonfinite is not None:
            key = key.masked_fill(nonfinite, 0.0)
        # The query heads of a KV head become rows of one product, which loads the keys once.
        out = torch_sdpa.torch_sdpa(query.unflatten(1, (key.shape[1], -1)).flatten(2, 3), key, value, scale=scale)
        if nonfinite is not None:
            out = out.masked_fill(nonfinite.any(2, keepdim=True), torch.nan)
        return out.reshape(query.shape), query
    dense = AttentionCall(query, key, value, mask, slopes, call.sinks)
    found = composite.attend(dense._replace(window=(left, right), softcap=call.softcap, scale=scale))
    assert found is not None, "the lengths were readable"
    return found


def _mask(call: DecodeCall, run: slice, tokens: slice, num_queries: int) -> Tensor | None:
    """Returns a mask for absent pages and the tree but not the window, bool ``[B, 1, Sq or 1, tokens]``, or None."""
    mask = None
    if call.block_table is not None:
        table = call.block_table[run, _pages(call, tokens)]
        exists = (table >= 0) & (table < len(call.k_cache))
        if not bool(exists.all()):
            mask = _tokens_of(exists.repeat_interleave(call.k_cache.shape[2], dim=1), 1, call, tokens)[:, None, None]
    if call.tree_mask is not None:
        token = torch.arange(tokens.start, tokens.stop, device=call.query.device) - (tokens.stop - num_queries)
        tree = call.tree_mask if call.tree_mask.dim() == 2 or len(call.tree_mask) == 1 else call.tree_mask[run]
        in_tree = tree_of_keys(tree, token.expand(run.stop - run.start, -1))
        mask = in_tree if mask is None else in_tree & mask
    return mask


def _read(call: DecodeCall, cache: Tensor, scales: Tensor | None, run: slice, tokens: slice) -> Tensor:
    """Returns the keys or values of ``tokens``, ``[B, Hkv, tokens, D]``: a copy if paged or 8-bit, otherwise a view."""

    def rows(stored: Tensor) -> Tensor:
        if call.block_table is None:
            return stored[run, :, tokens]
        table = call.block_table[run, _pages(call, tokens)].clamp(0, len(stored) - 1)
        pages = stored.index_select(0, table.flatten()).unflatten(0, table.shape)
        return _tokens_of(pages.transpose(1, 2).flatten(2, 3), 2, call, tokens)

    found = rows(as_numbers(cache)).view(cache.dtype)
    if cache.dtype == FP8:
        found = _from_fp8(found)
    if scales is None:
        return found
    return found.to(scales.dtype) * (scales.reshape(-1, 1, 1) if are_given(scales) else rows(scales)[..., None])


def _from_fp8(x: Tensor) -> Tensor:
    """Returns fp8 numbers as float32, ten times as fast as PyTorch's own conversion.

    fp8 has a sign bit, four exponent bits and three mantissa bits. The shift moves the last seven bits to just below
    the top exponent bit of a float16, where they represent the number divided by 2 ** 8. NaN becomes 480, which is not
    an fp8 number, so 480 is replaced by NaN at the end.
    """
    bits = (x.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~(1 << 14))
    numbers = bits.view(torch.float16).to(torch.float32).mul_(2**8)
    low, high = torch.aminmax(numbers)
    if high.item() >= 480 or low.item() <= -480:
        numbers.masked_fill_(numbers.abs() >= 480, torch.nan)
    return numbers


def _pages(call: DecodeCall, tokens: slice) -> slice:
    """Returns the columns of the block table that name the pages of ``tokens``."""
    page_size = call.k_cache.shape[2]
    return slice(tokens.start // page_size, -(-tokens.stop // page_size))


def _tokens_of(rows: Tensor, dim: int, call: DecodeCall, tokens: slice) -> Tensor:
    """Returns the rows of ``tokens``; ``rows`` are all rows of the pages in `_pages`."""
    return rows.narrow(dim, tokens.start % call.k_cache.shape[2], tokens.stop - tokens.start)
