"""Measures the gradients of attention: fastattn's kernels against every peer that can be imported.

Only the backward pass is timed. TFLOP/s count its five matrix products, half of them under a causal mask (the
FlashAttention papers' convention).
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
        name="attention_backward",
        title="attention backward",
        cases=case_attention.backward_cases(options),
        implementations=harness.chosen_implementations(
            options, case_attention.prepare_backward, peers_attention.backward_peers()
        ),
        make_inputs=case_attention.make_inputs,
        work=case_attention.AttentionCase.backward_work,
        expected=case_attention.expected_backward,
        checked=case_attention.checked_slice,
        differentiates=lambda case: True,
    )


def main(arguments: list[str] | None = None) -> None:
    harness.main(__doc__, case_attention.add_options, benchmark, arguments)
