"""Holds small cases of every benchmark, and documents of synthetic results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.measure import results
from benchmarks.measure.cases import attention as case_attention
from benchmarks.measure.cases import decode as case_decode
from benchmarks.measure.cases import int8 as case_int8
from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.measure.cases.masks import MASKS
from benchmarks.measure.implementations import CUBLAS
from benchmarks.measure.labels import label
from fastattn.profiler.roofline import Limits, bound
from fastattn.profiler.work import Work

CPU = torch.device("cpu")
LIMITS = Limits(
    bytes_per_s=4e12, flops_per_s={"bfloat16": 8e14, "float16": 8e14}, eager_launch_s=5e-6, graph_launch_s=1e-6
)


ATTENTION = AttentionCase(head_dim=16, seqlen=48, batch=2, heads=4, kv_heads=2, dtype="float16")
ATTENTION_CASES = [
    ATTENTION,
    dataclasses.replace(ATTENTION, causal=True),
    dataclasses.replace(ATTENTION, causal=True, window=7),
    dataclasses.replace(ATTENTION, bias=True),
    dataclasses.replace(ATTENTION, causal=True, varlen=True),
    dataclasses.replace(ATTENTION, causal=True, window=7, varlen=True),
    dataclasses.replace(ATTENTION, dtype="bfloat16", varlen=True),
    dataclasses.replace(ATTENTION, causal=True, queries=5),
    dataclasses.replace(ATTENTION, causal=True, window=7, queries=13),
    dataclasses.replace(ATTENTION, bias=True, queries=5),
    *(dataclasses.replace(ATTENTION, mask=mask, seqlen=150) for mask in MASKS),
    dataclasses.replace(ATTENTION, causal=True, varlen=True, batch=3, queries=20),  # more than some sequences have
]
DECODE_CASES = [
    DecodeCase(batch=3, context=48, heads=4, kv_heads=2, head_dim=16, page_size=page_size, ragged=ragged)
    for page_size in (0, 16)
    for ragged in (False, True)
] + [DecodeCase(batch=1, context=48, heads=4, kv_heads=2, head_dim=16, page_size=page_size) for page_size in (0, 16)]
INT8_CASES = [
    Int8Case("small", m=5, n=32, k=256, granularity=granularity, gradient=gradient, dtype="float16")
    for granularity in ("channel", "128")
    for gradient in (False, True)
]


def name_of(case: Any) -> str:
    return label(dataclasses.asdict(case))


def document(name: str, rows: list[results.Row]) -> results.Document:
    """Returns a document of synthetic results, whose environment says that they are synthetic."""
    environment = {
        key: {"gpu": "SYNTHETIC GPU"}.get(key, "synthetic" if kind is str else 1)
        for key, kind in results.ENVIRONMENT.items()
    }
    return {
        "schema": results.SCHEMA,
        "benchmark": name,
        "date": "2000-01-01T00:00:00+00:00",
        "commit": "0123456789abcdef",
        "complete": True,
        "environment": environment,
        "limits": dataclasses.asdict(LIMITS),
        "rows": rows,
    }


def row_of(case: Any, name: str, is_peer: bool, eager_s: float, graph_s: float | None, work: Work) -> results.Row:
    def quartiles(seconds: float) -> results.Row:
        return {"median_s": seconds, "lower_s": 0.98 * seconds, "upper_s": 1.03 * seconds, "samples": 100}

    bounded = bound(work, LIMITS, "bfloat16", LIMITS.eager_launch_s)
    return {
        "case": dataclasses.asdict(case),
        "implementation": name,
        "version": "synthetic",
        "is_peer": is_peer,
        "status": "ok",
        "reason": None,
        "flops": work.flops,
        "bytes": work.bytes,
        "error": 1e-3,
        "eager": quartiles(eager_s),
        "graph": None if graph_s is None else quartiles(graph_s),
        "peak_bytes": 10**6,
        "resource": bounded.resource,
        "fraction": bounded.fraction(graph_s or eager_s),
        "ratio_to_best_peer": None,
    }


def synthetic_documents() -> dict[str, results.Document]:
    """Returns a document for each benchmark, with smooth synthetic curves."""

    def rows_over(cases: Sequence[Any], work_of: Callable[[Any], Work], factors: dict[str, float]) -> list[results.Row]:
        rows = []
        for case in cases:
            least = work_of(case)
            ideal = max(least.flops / 8e14, least.bytes / 4e12) + 2e-6
            for name, factor in factors.items():
                is_peer = not name.startswith("fastattn")
                rows.append(row_of(case, name, is_peer, ideal * factor + 3e-6, ideal * factor, least))
        return results.with_ratios(rows)

    decode = [case for case in case_decode.full_cases() if case.heads == 32 and case.batch == 16]
    attention = {"fastattn cuda": 1.4, "fastattn triton": 1.8, "flash-attn 3": 1.5, "torch SDPA cuDNN": 1.6}
    int8 = {"fastattn triton": 1.5, CUBLAS: 2.4, "torchao": 3.0}
    return {
        "attention_forward": document(
            "attention_forward", rows_over(case_attention.quick_cases(), AttentionCase.forward_work, attention)
        ),
        "attention_backward": document(
            "attention_backward", rows_over(case_attention.quick_cases(), AttentionCase.backward_work, attention)
        ),
        "decode": document("decode", rows_over(decode, DecodeCase.work, attention)),
        "int8_matmul": document("int8_matmul", rows_over(case_int8.quick_cases(), Int8Case.work, int8)),
    }
