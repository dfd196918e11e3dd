"""The mathematics of every operation, in plain PyTorch.

This is the oracle of the tests (in float64) and what runs where no kernel does. It materialises the scores, so it needs
O(Sq * Sk) memory. Shapes and meanings are those of the public functions of the same names; every function takes any
floating dtype up to float64 and computes in at least float32 unless ``compute_dtype`` says otherwise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.activations import ACTIVATIONS

INF = math.inf
MASK32 = 0xFFFFFFFF


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).

    All tensors hold 32-bit words in int64 and broadcast; the four words of the result do too.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the low 64 bits, which int64 wraps to
        high0, high1 = (product0 >> 32) & MASK32, (product1 >> 32) & MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & MASK32, high0 ^ c3 ^ k1, product0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def dropout_keep(
    seed: int | Tensor, p: float, batch: int, heads: int, rows: int, columns: int, device: torch.device
) -> Tensor:
    """Which probabilities dropout keeps: bool ``[batch, heads, rows, columns]``."""
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device).reshape(())
    head = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    row = torch.arange(rows, device=device).view(1, 1, rows, 1)
    block = torch.arange((columns + 3) // 4, device=device).view(1, 1, 1, -1)
    words = philox_4x32((block, row, head, torch.zeros_like(block)), (seed & MASK32, (seed >> 32) & MASK32))
    word = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :columns]
    return word >= int(p * 2**32)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    position: Tensor,
    alibi_position: Tensor,
    key_is_present: Tensor | None,
    window: tuple[int | None, int | None],
    softcap: float,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    scale: float | None,
    compute_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The formula. ``position``, ``alibi_position``: where each query stands among the keys, int64 ``[B or 1, Sq]``."""
    dtype = compute_dtype or torch.promote_types(query.dtype, torch.float32)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, num_queries, head_dim = query.shape
    kv_heads, num_keys = key.shape[1:3]
    group = heads // kv_heads if kv_heads else 1
    scale = scale if scale is not None else (1 / math.sqrt(head_dim) if head_dim else 1.0)
    column = torch.arange(num_keys, device=query.device)

    # Which keys each query sees: bool, [B or 1, Hq or 1, Sq, Sk]; None if all see all.
    masks = []
    if window[0] is not None:
        masks.append(column >= (position - window[0])[:, None, :, None])
    if window[1] is not None:
        masks.append(column <= (position + window[1])[:, None, :, None])
    if key_is_present is not None:
        masks.append(key_is_present[:, None, None, :])
    if bias is not None:
        masks.append(bias if bias.dtype == torch.bool else bias != -INF)
    visible = None
    for mask in masks:
        visible = mask if visible is None else visible & mask

    k = key.to(dtype).repeat_interleave(group, dim=1)
    v = value.to(dtype).repeat_interleave(group, dim=1)
    spoiled_keys = spoiled_values = None
    if visible is not None:  # keep NaN away from products with the zero probabilities of masked keys
        spoiled_keys = ~k.detach().isfinite().all(-1)
        spoiled_values = ~v.detach().isfinite()
        k = k.masked_fill(spoiled_keys[..., None], 0.0)
        v = v.masked_fill(spoiled_values, 0.0)

    scores = (query.to(dtype) * scale) @ k.transpose(-2, -1)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (alibi_position[:, None, :, None] - column).abs().to(dtype)
        scores = scores - torch.atleast_2d(alibi_slopes.to(dtype))[:, :, None, None] * distance
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias.to(dtype)
    if visible is not None and spoiled_keys is not None:
        spoiled = torch.where(spoiled_keys[..., None, :], math.nan, 0.0).to(dtype)
        scores = (scores + spoiled).masked_fill(~visible, -INF)  # added, so that the NaN reaches the gradients too
    if sinks is not None:
        sink = sinks.to(dtype).view(1, heads, 1, 1).expand(batch, heads, num_queries, 1)
        scores = torch.cat([scores, sink], dim=-1)

    sees_nothing = (scores == -INF).all(-1, keepdim=True)
    finite_scores = scores.masked_fill(sees_nothing, 0.0)
    # Not exp(scores - lse): beside scores of finfo.min, the log of their number is lost in the lse.
    probabilities = finite_scores.softmax(-1)[..., :num_keys].masked_fill(sees_nothing, 0.0)
    if visible is not None:
        probabilities = probabilities.masked_fill(~visible, 0.0)
    # Relative to it, for the same reason: the gradient of logsumexp is exp(scores - lse).
    level = finite_scores.detach().logsumexp(-1, keepdim=True)
    level = level.masked_fill(~level.isfinite(), 0.0)
    lse = (level + (finite_scores - level).logsumexp(-1, keepdim=True)).masked_fill(sees_nothing, -INF)
    if dropout_p > 0:
        assert dropout_seed is not None
        keep = dropout_keep(dropout_seed, dropout_p, batch, heads, num_queries, num_keys, query.device)
        probabilities = probabilities * keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    out = probabilities @ v
    if visible is not None and spoiled_values is not None:
        sees_spoiled = visible.to(dtype).expand(scores.shape[:-1] + (num_keys,)) @ spoiled_values.to(dtype) > 0
        out = out + torch.where(sees_spoiled, math.nan, 0.0).to(dtype) * probabilities.sum(-1, keepdim=True)
    return out.to(query.dtype), lse.squeeze(-1).to(lse_dtype)


def _bounds(causal: bool, window: tuple[int, int]) -> tuple[int | None, int | None]:
    left, right = (None if side < 0 else side for side in window)
    return left, 0 if causal else right


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    top_left: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * Q K^T + bias) V`` and its log-sum-exp, ``([B, Hq, Sq, Dv], [B, Hq, Sq])``.

    ``top_left`` aligns causal and window masks to the first key instead of the last. ``compute_dtype`` is the dtype of
    every intermediate: the tests set it to a 16-bit dtype to see what a composite in that dtype loses.
    """
    row = torch.arange(query.shape[2], device=query.device)[None]
    bottom_right = row + (key.shape[2] - query.shape[2])
    return _attend(
        query,
        key,
        value,
        position=row if top_left else bottom_right,
        alibi_position=bottom_right,
        key_is_present=None,
        window=_bounds(causal, window),
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        scale=scale,
        compute_dtype=compute_dtype,
    )


def _packed_rows(cu_seqlens: Tensor, total: int, max_seqlen: int) -> tuple[Tensor, Tensor]:
    """Where row ``i`` of sequence ``b`` lies in the packed tensor, ``[B, max_seqlen]``; ``total`` if nowhere."""
    cu_seqlens = cu_seqlens.to(torch.int64)
    begin = cu_seqlens[:-1].clamp(0, total)
    length = (torch.maximum(cu_seqlens[1:].clamp(max=total), begin) - begin).clamp(max=max_seqlen)
    row = torch.arange(max_seqlen, device=cu_seqlens.device)
    return torch.where(row < length[:, None], begin[:, None] + row, total), length


def _pad(packed: Tensor, rows: Tensor) -> Tensor:
    """``[total, H, D]`` to ``[B, H, max_seqlen, D]``, with zeros where a sequence has no row."""
    return F.pad(packed, (0, 0, 0, 0, 0, 1))[rows].transpose(1, 2)


def _present_pages(block_table: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """The table with its entries clamped to pages that exist, int64, and which of them did, both ``[B, max_pages]``."""
    table = block_table.to(torch.int64)
    return table.clamp(0, max(num_pages - 1, 0)), (table >= 0) & (table < num_pages)


def _gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Pages ``[num_pages, H, page_size, …]`` of a table ``[B, max_pages]``, ``[B, H, max_pages * page_size, …]``."""
    if pages.shape[0] == 0:
        return pages.new_zeros(table.shape[0], pages.shape[1], table.shape[1] * pages.shape[2], *pages.shape[3:])
    return pages[table].transpose(1, 2).flatten(2, 3)


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
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Packed sequences: pads them, attends, packs the result again. ``([total_q, Hq, Dv], [Hq, total_q])``."""
    rows_q, length_q = _packed_rows(cu_seqlens_q, query.shape[0], min(max_seqlen_q, query.shape[0]))
    if block_table is None:
        rows_k, length_k = _packed_rows(cu_seqlens_k, key.shape[0], min(max_seqlen_k, key.shape[0]))
        keys, values = _pad(key, rows_k), _pad(value, rows_k)
        key_is_present = torch.arange(rows_k.shape[1], device=query.device) < length_k[:, None]
    else:
        table, page_is_present = _present_pages(block_table, key.shape[0])
        longest = min(max_seqlen_k, table.shape[1] * key.shape[2])
        length_k = cu_seqlens_k.to(torch.int64).diff().clamp(0, longest)
        keys, values = (_gather_pages(pages, table)[:, :, :longest] for pages in (key, value))
        key_is_present = page_is_present.repeat_interleave(key.shape[2], dim=1)[:, :longest]
        key_is_present = key_is_present & (torch.arange(longest, device=query.device) < length_k[:, None])
    position = torch.arange(rows_q.shape[1], device=query.device) + (length_k - length_q)[:, None]
    out, lse = _attend(
        _pad(query, rows_q),
        keys,
        values,
        position=position,
        alibi_position=position,
        key_is_present=key_is_present,
        window=_bounds(causal, window),
        softcap=softcap,
        bias=None,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        scale=scale,
        compute_dtype=compute_dtype,
    )
    total, heads = query.shape[:2]
    rows = rows_q.flatten()
    packed_out = out.new_zeros(total + 1, heads, out.shape[-1]).index_copy(0, rows, out.transpose(1, 2).flatten(0, 1))
    packed_lse = lse.new_full((total + 1, heads), -INF).index_copy(0, rows, lse.transpose(1, 2).flatten(0, 1))
    return packed_out[:total], packed_lse[:total].transpose(0, 1).contiguous()


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` dims of ``x [B, H, S, D]`` by angles with ``cos``, ``sin`` ``[B, S,
    rotary_dim / 2]``.

    Su et al., "RoFormer" (2021), section 3.4.2. Pairs are ``(2i, 2i + 1)`` if interleaved, else ``(i, i + rotary_dim /
    2)``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    cos, sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    turning, passing = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.split(half, dim=-1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    turned_dims = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([turned_dims.to(x.dtype), passing], dim=-1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with a scale per row: ``x [..., D]`` to int8 ``[..., D]`` and scales ``[...]``, 1 for zeros."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.shape[-1] == 0:
        return x.to(torch.int8), x.new_ones(x.shape[:-1], dtype=dtype)
    scale = x.detach().to(dtype).abs().amax(-1) / 127
    scale = torch.where(scale == 0, 1.0, scale)  # of zeros, or so small that the division underflows
    return (x.to(dtype) / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def _append(cache: Tensor, new: Tensor, slots: Tensor, block_rows: int) -> None:
    """Write ``new [B, Hkv, S_new, …]`` into ``cache [X, Hkv, block_rows, …]`` at the flat ``slots [B, S_new]``.

    A slot past the end drops its token.
    """
    num_slots = cache.shape[0] * block_rows
    token = torch.arange(slots.numel(), device=cache.device)
    writer = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=cache.device).scatter(0, slots.flatten(), token)
    writer = writer[:num_slots].view(cache.shape[0], block_rows)
    is_written = (writer >= 0)[:, None, :].view(cache.shape[0], 1, block_rows, *[1] * (cache.dim() - 3))
    rows = new.transpose(1, 2).flatten(0, 1)[writer.clamp(min=0)].transpose(1, 2)
    cache.copy_(torch.where(is_written, rows.to(cache.dtype), cache))


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
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Appends to the cache in place, then attends over it. ``([B, Hq, Sq, Dv], [B, Hq, Sq])``."""
    batch, _, num_queries, _ = query.shape
    block_rows = k_cache.shape[2]
    device = query.device
    if block_table is None:
        block_table = torch.arange(batch, device=device)[:, None]
    num_blocks = k_cache.shape[0]
    table, block_is_present = _present_pages(block_table, num_blocks)
    capacity = table.shape[1] * block_rows

    num_new = 0 if k_new is None else k_new.shape[2]
    before = cache_seqlens.to(torch.int64).clamp(min=0)
    total = (before + num_new).clamp(max=capacity)
    position = (total - num_queries)[:, None] + torch.arange(num_queries, device=device)

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        assert rotary_cos is not None and rotary_sin is not None
        positions = positions.clamp(0, rotary_cos.shape[0] - 1)
        return rotary_cos[positions], rotary_sin[positions]

    if rotary_cos is not None:
        query = rotary(query, *angles(position), rotary_interleaved)
    if k_new is not None and v_new is not None and num_new and capacity:
        new_position = before[:, None] + torch.arange(num_new, device=device)
        if rotary_cos is not None:
            k_new = rotary(k_new, *angles(new_position), rotary_interleaved)
        block = (new_position // block_rows).clamp(max=table.shape[1] - 1)
        slot = table.gather(1, block) * block_rows + new_position % block_rows
        fits = (new_position < capacity) & block_is_present.gather(1, block)
        slot = torch.where(fits, slot, num_blocks * block_rows)
        for cache, new, scales in ((k_cache, k_new, k_scale), (v_cache, v_new, v_scale)):
            if scales is not None:
                new, new_scales = quantize_rows(new)
                _append(scales, new_scales, slot, block_rows)
            _append(cache, new, slot, block_rows)

    def read(cache: Tensor, scales: Tensor | None) -> Tensor:
        rows = _gather_pages(cache, table)
        return rows if scales is None else rows.to(scales.dtype) * _gather_pages(scales, table)[..., None]

    column = torch.arange(capacity, device=device)
    key_is_present = (column < total[:, None]) & block_is_present.repeat_interleave(block_rows, dim=1)
    return _attend(
        query,
        read(k_cache, k_scale),
        read(v_cache, v_scale),
        position=position,
        alibi_position=position,
        key_is_present=key_is_present,
        window=_bounds(causal, window),
        softcap=softcap,
        bias=None,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=0.0,
        dropout_seed=None,
        scale=scale,
        compute_dtype=compute_dtype,
    )


def quantize_int8(weight: Tensor, granularity: str | int = "channel") -> tuple[Tensor, Tensor]:
    """Symmetric int8, round to nearest even: ``weight [N, K]`` to int8 ``[N, K]`` and fp32 scales.

    Scales are ``[1, 1]`` for ``"tensor"``, ``[N, 1]`` for ``"channel"``, ``[N, K / group]`` for a group along K.
    """
    rows, columns = weight.shape
    if granularity == "tensor":
        quantized, scale = quantize_rows(weight.reshape(1, -1))
        return quantized.view(rows, columns), scale.to(torch.float32).view(1, 1)
    group = columns if granularity == "channel" else int(granularity)
    quantized, scale = quantize_rows(weight.reshape(rows, columns // group if group else 1, group))
    return quantized.view(rows, columns), scale.to(torch.float32)


def dequantize_int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 ``[N, K]`` and its scales to ``[N, K]`` in ``dtype``."""
    compute = torch.promote_types(dtype, torch.float32)
    if weight.numel() == 0:
        return weight.to(dtype)
    rows, columns = weight.shape
    groups = scale.shape[1]
    grouped = weight.to(compute).view(rows, groups, columns // groups) * scale.to(compute)[..., None]
    return grouped.view(rows, columns).to(dtype)


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    activations: str = "16bit",
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """``act(x @ dequantize(weight)^T + bias) + residual``: ``x [..., K]`` to ``[..., N]``, or ``[..., N / 2]``
    with ``"swiglu"``.

    ``activations="int8"`` first rounds each row of ``x`` to symmetric int8 (its gradient passes straight through).
    """
    dtype = compute_dtype or torch.promote_types(x.dtype, torch.float32)
    inputs = x.to(dtype)
    if activations == "int8":
        quantized, row_scale = quantize_rows(x)
        rounded = (quantized.to(row_scale.dtype) * row_scale[..., None]).to(dtype)
        inputs = inputs + (rounded - inputs).detach()
    y = inputs @ dequantize_int8(weight, scale, dtype).transpose(0, 1)
    if bias is not None:
        y = y + bias.to(dtype)
    y = ACTIVATIONS[activation](y)
    if residual is not None:
        y = y + residual.to(dtype)
    return y.to(x.dtype)
