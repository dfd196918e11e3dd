"""Translates the keywords that FlashAttention-3 and -4 added, and says why others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fastattn.checks import refuse_keywords, shown
from fastattn.errors import InputError

# Keywords that control how flash-attn's kernels are launched, and change no result.
_MEANINGLESS = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "zero_tensors")

DESCALES = ("q_descale", "k_descale", "v_descale")  # fp32 [B, Hk]: the factors by which fp8 numbers are multiplied

_REFUSED = {
    "attention_chunk": "chunked local attention is not supported; fastattn.attention takes key_ranges (fastattn.masks)",
    "qv": "a query for the values is not supported; pass torch.cat([q, qv], -1) as q and torch.cat([k, v], -1) as k",
    **dict.fromkeys(DESCALES, "only flash_attn_with_kvcache takes fp8; pass 16-bit tensors here"),
    "score_mod": "functions of scores are not supported; fastattn.attention takes a bias",
    "mask_mod": "functions as masks are not supported; fastattn.attention takes key_ranges (fastattn.masks) or a bias",
    "cu_seqlens_q": "ragged queries over a cache are not supported; call flash_attn_varlen_func with a block_table",
    "cu_seqlens_k_new": "ragged new keys are not supported; append them sequence by sequence",
    "rotary_seqlens": "other positions for rotary embedding are not supported; rotate q and k before the call",
    "leftpad_k": "a first key for each sequence is not supported here; flash_attn_with_kvcache takes cache_leftpad",
}


class Keywords(NamedTuple):
    """Holds the values of the added keywords that change a result."""

    sinks: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


_MEANINGS = {
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "seqused_q": "seqused_q",
    "seqused_k": "seqused_k",
    "page_table": "block_table",
    **{name: name for name in DESCALES},
}


def read_keywords(function: Callable[..., Any], given: dict[str, Any], *, served: tuple[str, ...]) -> Keywords:
    """Translates the keywords ``given``; ``served`` lists the fields of `Keywords` that ``function`` supports.

    Raises:
        InputError: a keyword asks for something that fastattn does not have.
        TypeError: flash-attn has no such keyword.
    """
    found: dict[str, Tensor] = {}
    for name, value in given.items():
        meaning = _MEANINGS.get(name)
        if name not in _MEANINGLESS and name not in _REFUSED and meaning is None:
            refuse_keywords(function, [name])
        if value is None or value is False or (isinstance(value, (int, float)) and value == 0) or name in _MEANINGLESS:
            continue
        if name in _REFUSED and name not in served:
            raise InputError(f"{name}: expected None in {function.__name__}, got {shown(value)}; {_REFUSED[name]}")
        assert meaning is not None
        if meaning not in served:
            ways = "flash_attn_varlen_func takes it, and flash_attn_with_kvcache takes lengths as cache_seqlens"
            raise InputError(f"{name}: expected None in {function.__name__}, got {shown(value)}; {ways}")
        found[meaning] = value
    return Keywords(**found)
