"""Formats cases as words, and rows of results as figures. Imports neither torch nor tabulate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

Row = dict[str, Any]
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
    mask = case.get("mask") or ("causal" if case["causal"] else "full")  # older results lack "mask"
    return {
        "queries": f"{case['queries']} queries" if case.get("queries") else "",  # older results lack "queries"
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


def grouped_by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each case by its label, in the order of the rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label(row["case"]), []).append(row)
    return groups


def seconds_of(row: Row) -> float:
    """Returns the time that represents a row: the time in a CUDA graph if it was measured, else the eager time."""
    return float((row["graph"] or row["eager"])["median_s"])


def figures(row: Row) -> dict[str, str]:
    """Returns the cells of an "ok" row by column.

    TFLOP/s, GB/s and "of limit" are computed from the time in a CUDA graph if there is one, else from the eager time.
    """
    seconds, eager, graph = seconds_of(row), row["eager"], row["graph"]
    return {
        "implementation": row["implementation"],
        "eager µs": f"{eager['median_s'] * 1e6:.1f}",
        "± %": f"{100 * (eager['upper_s'] - eager['lower_s']) / eager['median_s']:.1f}",
        "graph µs": f"{graph['median_s'] * 1e6:.1f}" if graph else "–",
        "TFLOP/s": f"{row['flops'] / seconds / 1e12:.1f}",
        "GB/s": f"{row['bytes'] / seconds / 1e9:.0f}",
        "of limit": f"{row['fraction']:.0%}",
        "bound by": row["resource"],
        "peak MB": f"{row['peak_bytes'] / 1e6:.1f}",
        "error": f"{row['error']:.1e}",
        "to best peer": "–" if row["ratio_to_best_peer"] is None else f"{row['ratio_to_best_peer']:.2f}",
    }
