"""Measures linear layers with int8 weights on the shapes of LLaMA models: fastattn against every importable peer.

GB/s count the int8 weight, its scales, the input and the output. The gradient of the input goes through autograd, as in
training; only the backward pass is timed.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import harness
from benchmarks.measure.cases import int8 as case_int8
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.measure.harness import Benchmark
from benchmarks.measure.implementations import own_implementations
from benchmarks.measure.peers import int8 as peers_int8


def benchmark(options: argparse.Namespace) -> Benchmark:
    """Returns the benchmark that the options ask for."""
    peers = harness.chosen_peers(peers_int8.peers(), options.peer)
    own = own_implementations(case_int8.prepare, options.backend or ("cuda", "triton"))
    return Benchmark(
        name="int8_matmul",
        title="int8 matmul",
        cases=case_int8.chosen(options),
        implementations=[*own, *peers],
        make_inputs=case_int8.make_inputs,
        input_bytes=case_int8.input_bytes,
        work=Int8Case.work,
        expected=case_int8.expected,
        checked=case_int8.checked_slice,
        uses_graphs=lambda case: not case.gradient,
        differentiates=lambda case: case.gradient,
    )


def main(arguments: list[str] | None = None) -> None:
    harness.main(__doc__, case_int8.add_options, benchmark, arguments)
