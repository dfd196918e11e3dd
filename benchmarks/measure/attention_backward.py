"""Measures the gradients of attention: fastattn's kernels against every peer that can be imported.

Only the backward pass is timed. TFLOP/s count its five matrix products, half of them under a causal mask (the
FlashAttention papers' convention).
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
    peers = harness.chosen_peers(peers_attention.backward_peers(), options.peer)
    own = own_implementations(case_attention.prepare_backward, options.backend or ("cuda", "triton"))
    return Benchmark(
        name="attention_backward",
        title="attention backward",
        cases=case_attention.backward_cases(options),
        implementations=[*own, *peers],
        make_inputs=case_attention.make_inputs,
        input_bytes=case_attention.input_bytes,
        work=AttentionCase.backward_work,
        expected=case_attention.expected_backward,
        checked=case_attention.checked_slice,
        uses_graphs=lambda case: False,
        differentiates=lambda case: True,
    )


def main(arguments: list[str] | None = None) -> None:
    harness.main(__doc__, case_attention.add_options, benchmark, arguments)
