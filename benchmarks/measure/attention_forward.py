"""Measures attention over whole sequences: fastattn's kernels against every peer that can be imported.

TFLOP/s count the two matrix products: half of them under a causal mask (the FlashAttention papers' convention), or the
part that the mask leaves where there are fewer queries than keys.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import harness
from benchmarks.measure.cases import attention as case_attention
from benchmarks.measure.harness import Benchmark
from benchmarks.measure.peers import attention as peers_attention


def benchmark(options: argparse.Namespace) -> Benchmark:
    """Returns the benchmark that the options ask for."""
    return Benchmark(
        name="attention_forward",
        title="attention forward",
        cases=case_attention.forward_cases(options),
        implementations=harness.chosen_implementations(
            options, case_attention.prepare_forward, peers_attention.forward_peers()
        ),
        make_inputs=case_attention.make_inputs,
        work=case_attention.AttentionCase.forward_work,
        expected=case_attention.expected_forward,
        checked=case_attention.checked_slice,
        differentiates=lambda case: False,
    )


def main(arguments: list[str] | None = None) -> None:
    harness.main(__doc__, case_attention.add_options, benchmark, arguments)
