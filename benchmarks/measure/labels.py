"""Describes cases in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def label(case: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """Returns a row's ``case`` in a few words. ``without`` names fields to leave out."""
    if "granularity" in case:
        parts = _int8_parts(case)
    elif "context" in case:
        parts = _decode_parts(case)
    else:
        parts = _attention_parts(case)
    parts["dtype"] = _SHORT_DTYPES.get(case["dtype"], case["dtype"])
    return ", ".join(text for field, text in parts.items() if text and field not in without)


def _attention_parts(case: Mapping[str, Any]) -> dict[str, str]:
    mask = "causal" if case["causal"] else "full"
    return {
        "queries": f"{case['queries']} queries" if case.get("queries") else "",  # older results lack the field
        "seqlen": f"length {case['seqlen']}",
        "batch": f"batch {case['batch']}",
        "heads": f"{case['heads']}/{case['kv_heads']} heads",
        "head_dim": f"d {case['head_dim']}",
        "causal": f"window {case['window']}" if case["window"] >= 0 else mask,
        "varlen": "varlen" if case["varlen"] else "",
        "bias": "bias" if case["bias"] else "",
    }


def _decode_parts(case: Mapping[str, Any]) -> dict[str, str]:
    return {
        "batch": f"batch {case['batch']}",
        "context": f"context {case['context']}",
        "heads": f"{case['heads']}/{case['kv_heads']} heads",
        "head_dim": f"d {case['head_dim']}",
        "page_size": f"pages of {case['page_size']}" if case["page_size"] else "contiguous",
        "ragged": "ragged" if case["ragged"] else "",
    }


def _int8_parts(case: Mapping[str, Any]) -> dict[str, str]:
    return {
        "layer": f"{case['layer']} {case['n']} x {case['k']}",
        "m": f"M {case['m']}",
        "granularity": "per channel" if case["granularity"] == "channel" else f"groups of {case['granularity']}",
        "gradient": "input gradient" if case["gradient"] else "forward",
    }
