"""Attends over the 8-bit cache of cache.py, with a kernel that takes lengths and pages but no masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.errors import InputError
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from fastattn.integrations.transformers.cache import scale_of
from fastattn.integrations.transformers.marks import Keys, Lengths, read


def attend_8bit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    causal_window: tuple[int, int],
    **options: Any,
) -> Tensor:
    """Returns ``[B, Hq, Sq, Dv]`` for ``key`` and ``value`` int8 or fp8 ``[B, Hkv, capacity, D]``, with scales.

    If a mask hides keys, each token becomes a page, and the block table lists the visible tokens in order. Windows stay
    right if the hidden keys are padding on the left, because distances between visible keys and queries do not change.
    """
    batch, _, capacity, _ = key.shape
    mark = None if attention_mask is None else read(attention_mask)
    present, count, window = None, capacity, causal_window
    if isinstance(mark, Keys) and mark.reach is None:
        present, count = mark.present, mark.num_keys
    elif attention_mask is not None and mark is None and attention_mask.dtype == torch.bool and query.shape[2] == 1:
        present, window = attention_mask[..., :capacity], (-1, -1)
    elif attention_mask is not None and not isinstance(mark, Lengths):
        raise InputError(
            "attention_mask: expected one that only hides padding and later tokens, as several queries attend over an "
            f"8-bit cache, got another mask {list(attention_mask.shape)}; make the cache as Cache(..., dtype=None)"
        )
    if present is not None and present.shape[1] != 1:
        raise InputError(
            "attention_mask: expected the same mask for all heads over an 8-bit cache, [B, 1, Sq, Sk], got one for "
            f"each of {present.shape[1]} heads; make the cache as Cache(..., dtype=None)"
        )
    k_scale, v_scale = scale_of(key), scale_of(value)
    if attention_mask is not None and present is not None:
        options["block_table"], lengths = _pages_of(attention_mask, present[:, 0, 0].expand(batch, -1), capacity)
        key, value, k_scale, v_scale = (
            tensor.transpose(1, 2).flatten(0, 1).unsqueeze(2) for tensor in (key, value, k_scale, v_scale)
        )
    elif isinstance(mark, Lengths):
        lengths = mark.lengths
    else:
        lengths = torch.full((batch,), count, dtype=torch.int32, device=query.device)
    return attention_with_kv_cache(
        query, key, value, lengths, k_scale=k_scale, v_scale=v_scale, causal=False, window=window, **options
    )


def _pages_of(mask: Tensor, is_there: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns the block table, int32 ``[B, keys]``, of the tokens in ``is_there [B, keys]``, and their counts ``[B]``.

    Every layer gets the same mask, so the first layer's result is kept as an attribute of the mask. It is valid until
    the mask changes.
    """
    # Inference tensors have no version. In a graph, a replay must compute the pages again from the mask.
    may_keep = not torch.compiler.is_compiling() and not mask.is_inference()
    may_keep = may_keep and not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    if may_keep:
        version, *found = getattr(mask, "fastattn_pages", (None,))
        if version == mask._version:
            return found[0], found[1]
    count = is_there.cumsum(1)
    token = torch.arange(is_there.shape[1], device=mask.device)
    rows = torch.arange(is_there.shape[0], device=mask.device)[:, None] * capacity
    table = torch.full((is_there.shape[0], is_there.shape[1] + 1), -1, dtype=torch.int64, device=mask.device)
    table = table.scatter(1, torch.where(is_there, count - 1, is_there.shape[1]), rows + token)
    pages, lengths = table[:, :-1].to(torch.int32).contiguous(), count[:, -1].to(torch.int32)
    if may_keep:
        mask.fastattn_pages = (mask._version, pages, lengths)  # type: ignore[attr-defined]
    return pages, lengths
