"""Measures attention over whole sequences: fastattn's kernels against every peer that can be imported.

TFLOP/s count the two matrix products: half of them under a causal mask (the FlashAttention papers' convention), or the
part that the mask leaves where there are fewer queries than keys.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import harness
from benchmarks.measure.cases import attention as case_attention
from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.harness import Benchmark
from benchmarks.measure.implementations import own_implementations
from benchmarks.measure.peers import attention as peers_attention


def benchmark(options: argparse.Namespace) -> Benchmark:
    """Returns the benchmark that the options ask for."""
    peers = harness.chosen_peers(peers_attention.forward_peers(), options.peer)
    own = own_implementations(case_attention.prepare_forward, options.backend or ("cuda", "triton"))
    return Benchmark(
        name="attention_forward",
        title="attention forward",
        cases=case_attention.forward_cases(options),
        implementations=[*own, *peers],
        make_inputs=case_attention.make_inputs,
        input_bytes=case_attention.input_bytes,
        work=AttentionCase.forward_work,
        expected=case_attention.expected_forward,
        checked=case_attention.checked_slice,
        uses_graphs=lambda case: True,
        differentiates=lambda case: False,
    )


def main(arguments: list[str] | None = None) -> None:
    harness.main(__doc__, case_attention.add_options, benchmark, arguments)
