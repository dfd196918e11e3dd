"""Recognises the mask that transformers means, from a function of indices that is composed of a few known functions.

Functions made by the same ``def`` share their ``__code__``, and their closures hold their parameters. A function that
is not recognised becomes a whole mask.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor
from transformers import masking_utils


class Pattern(NamedTuple):
    """Describes a recognised mask.

    ``window`` is the number of keys that a causal query sees, its own included, or that a query without a causal mask
    sees on either side. ``sequence_ids [B, S]`` is given for packed sequences: a query only sees keys of its sequence.
    """

    causal: bool
    window: int | None = None
    sequence_ids: Tensor | None = None


_CAUSAL = masking_utils.causal_mask_function
_BIDIRECTIONAL = masking_utils.bidirectional_mask_function
_NO_TENSOR: Any = None
_AND, _WINDOW, _WINDOW_BOTH_SIDES, _CHUNK, _PACKED, _REMAPPED = (
    made.__code__
    for made in (
        masking_utils.and_masks(_CAUSAL),
        masking_utils.sliding_window_overlay(1),
        masking_utils.sliding_window_bidirectional_overlay(1),
        masking_utils.chunked_overlay(1, _NO_TENSOR),
        masking_utils.packed_sequence_mask_function(_NO_TENSOR),
        masking_utils.remap_positions_for_packed_sequence(_CAUSAL, _NO_TENSOR),
    )
)


def recognise(mask_function: Callable[..., Any], last_position: int) -> Pattern | None:
    """Returns the pattern of ``mask_function``, or None; ``last_position`` is the position of the last key.

    It reads closures, which is impossible while a graph is traced: `recognise_traced` serves that case.
    """
    if mask_function in (_CAUSAL, _BIDIRECTIONAL):
        return Pattern(causal=mask_function is _CAUSAL)
    if not isinstance(mask_function, FunctionType) or mask_function.__code__ is not _AND:
        return None
    parts = _closure(mask_function)["mask_functions"]
    if len(parts) != 2:
        return None
    overlay, inner = parts
    if inner.__code__ is _PACKED:  # the order from transformers 5.24 on
        overlay, inner = inner, overlay
    if overlay.__code__ is _PACKED and inner.__code__ is _REMAPPED:
        within = recognise(_closure(inner)["mask_function"], last_position)
        if within is None or not within.causal or within.sequence_ids is not None:
            return None
        return within._replace(sequence_ids=_closure(overlay)["packed_sequence_mask"])
    if overlay.__code__ is _WINDOW and inner is _CAUSAL:
        return Pattern(causal=True, window=_closure(overlay)["sliding_window"])
    if overlay.__code__ is _WINDOW_BOTH_SIDES and inner is _BIDIRECTIONAL:
        return Pattern(causal=False, window=_closure(overlay)["sliding_window"])
    if overlay.__code__ is _CHUNK and inner is _CAUSAL and last_position < _closure(overlay)["chunk_size"]:
        return Pattern(causal=True)  # all keys are in the first chunk
    return None


def recognise_traced(
    mask_function: Callable[..., Any], config: Any, local_size: int | None, is_plain: bool
) -> Pattern | None:
    """Returns the pattern while a graph is traced, where closures cannot be read, or None.

    ``is_plain`` says that, according to transformers, the mask has nothing but causality and ``local_size``.
    """
    if mask_function in (_CAUSAL, _BIDIRECTIONAL):
        return Pattern(causal=mask_function is _CAUSAL)
    if is_plain and local_size is not None and local_size != getattr(config, "attention_chunk_size", None):
        return Pattern(causal=True, window=local_size)
    return None


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
