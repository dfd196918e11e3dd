"""Measures linear layers with int8 weights on the shapes of LLaMA models: fastattn against every importable peer.

GB/s count the int8 weight, its scales, the input and the output. The gradient of the input goes through autograd, as in
training; only the backward pass is timed.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import harness
from benchmarks.measure.cases import int8 as case_int8
from benchmarks.measure.harness import Benchmark
from benchmarks.measure.peers import int8 as peers_int8


def benchmark(options: argparse.Namespace) -> Benchmark:
    """Returns the benchmark that the options ask for."""
    return Benchmark(
        name="int8_matmul",
        title="int8 matmul",
        cases=case_int8.chosen(options),
        implementations=harness.chosen_implementations(options, case_int8.prepare, peers_int8.peers()),
        make_inputs=case_int8.make_inputs,
        work=case_int8.Int8Case.work,
        expected=case_int8.expected,
        checked=case_int8.checked_slice,
        differentiates=lambda case: case.gradient,
    )


def main(arguments: list[str] | None = None) -> None:
    harness.main(__doc__, case_int8.add_options, benchmark, arguments)
