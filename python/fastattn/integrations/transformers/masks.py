"""Defines the mask function, which returns a mark instead of a mask if kernels can handle causality, windows, lengths
and packed sequences without a mask.

It never relies on the ``is_causal`` of layers: transformers' eager code ignores it, and some models set it wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import causal_mask_function, eager_mask, prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from fastattn.errors import InputError
from fastattn.functional.spread_attention import in_force
from fastattn.integrations.transformers.marks import mark_keys, mark_lengths, mark_offsets, mark_ranges
from fastattn.integrations.transformers.model_code import (
    check_uses_interface,
    has_attention_of_its_own,
    tells_its_window,
    wants_whole_masks,
)
from fastattn.integrations.transformers.patterns import Pattern, recognise, recognise_traced
from fastattn.masks import from_bool

MOST_MASKED_AT_ONCE = 2**24  # the most pairs of a query and a key in a mask that `_as_ranges` makes


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **ignored: Any,
) -> Tensor | None:
    """Returns a mark where a few numbers describe the mask (marks.py), else a mask ``[B, 1, Sq, Sk]``, or None if a
    single query sees every key.

    It is registered as an ``AttentionMaskInterface``: the arguments are those that transformers passes. Query ``i`` is
    at position ``q_offset + i``, key ``j`` at ``kv_offset + j``; ``attention_mask`` is the padding, ``[B, positions]``.

    Raises:
        InputError: the model's layers do not call the attention function.
    """
    check_uses_interface(config)
    is_read_by_others = has_attention_of_its_own(config)
    whole_mask = partial(
        partial(eager_mask, dtype=dtype) if is_read_by_others else sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    traced = is_tracing(q_offset if isinstance(q_offset, Tensor) else attention_mask)
    if traced:
        is_plain = allow_is_causal_skip and not use_vmap and local_size is not None
        pattern = recognise_traced(mask_function, config, local_size, is_plain)
    else:
        pattern = recognise(mask_function, last_position=kv_offset + kv_length - 1)
    if is_read_by_others:
        return whole_mask()
    if pattern is None:
        may_be_ranges = not traced and q_length > 1 and not in_force() and not wants_whole_masks(config)
        return _as_ranges(whole_mask, batch_size, q_length, kv_length, q_offset) if may_be_ranges else whole_mask()
    if (spread := in_force()) and pattern.window is not None and not (pattern.causal and tells_its_window(config)):
        error = InputError(
            "sliding_window: expected causal layers that pass it to the attention function, inside of "
            "fastattn.distributed.context_parallel, got a model that has it only in masks; run it outside of this block"
        )
        spread.refuse(error)

    if pattern.sequence_ids is not None:  # transformers only recognises packed sequences without padding or a cache
        if attention_mask is not None or wants_whole_masks(config) or not _window_is_known(pattern, kv_length, config):
            return whole_mask()
        return mark_offsets(pattern.sequence_ids.expand(batch_size, -1))

    present = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if present is not None:
        present = present[:, kv_offset : kv_offset + kv_length]
    ends_together = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if not pattern.causal:
        if not allow_is_bidirectional_skip:
            return whole_mask()
        if present is not None and not traced and bool(present.all()):
            present = None
        if pattern.window is not None and pattern.window < kv_length - 1:
            return mark_keys(present, kv_length, pattern.window, device) if ends_together else whole_mask()
        return mark_keys(None, kv_length, -1, device) if present is None else present[:, None, None, :]

    if not _window_is_known(pattern, kv_length, config):
        return whole_mask()
    if q_length == 1:
        if present is not None:
            is_later = torch.arange(kv_length, device=present.device) > q_offset - kv_offset
            if traced or not bool((present | is_later).all()):
                return whole_mask()  # [B, 1, 1, Sk]
        if not ends_together:
            return mark_lengths(q_offset + 1 - kv_offset, batch_size, device)
        return None if _hides_nothing(pattern, kv_length) else mark_keys(None, kv_length, None, device)
    if not allow_is_causal_skip or (traced and isinstance(q_offset, Tensor)):
        return whole_mask()
    count = int(q_offset) + q_length - kv_offset
    if count > kv_length:
        return whole_mask()
    if present is not None:
        present = present[:, :count]
        if not traced and bool(present.all()):
            present = None
    return mark_keys(present, count, None, device)


def _as_ranges(
    whole_mask: Callable[..., Any], batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor
) -> Any:
    """Returns the mark of the ranges of keys that each query sees, or the whole mask if a query has too many ranges.

    It makes the mask for some queries at a time, and waits for the GPU.
    """
    found, step = [], max(1, MOST_MASKED_AT_ONCE // max(1, batch_size * kv_length))
    try:
        for first in range(0, q_length, step):
            found.append(from_bool(whole_mask(q_length=min(step, q_length - first), q_offset=q_offset + first)))
    except InputError:
        return whole_mask()
    most = max(ranges.shape[-2] for ranges in found)
    return mark_ranges(torch.cat([pad(ranges, (0, 0, 0, most - ranges.shape[-2])) for ranges in found], dim=2))


def _window_is_known(pattern: Pattern, kv_length: int, config: Any) -> bool:
    """Returns whether the layers pass the window to the attention function, or the window hides no key."""
    return _hides_nothing(pattern, kv_length) or tells_its_window(config)


def _hides_nothing(pattern: Pattern, kv_length: int) -> bool:
    """Returns whether the window of a causal pattern hides no key."""
    return pattern.window is None or pattern.window >= kv_length
