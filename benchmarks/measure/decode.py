"""Measures decoding over a KV cache: fastattn's kernels against every peer that can be imported.

Each sequence has one new query. GB/s count the cached keys and values of the actual lengths, once for all query heads
that share them, and the queries and results.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import harness
from benchmarks.measure.cases import decode as case_decode
from benchmarks.measure.harness import Benchmark
from benchmarks.measure.peers import decode as peers_decode


def benchmark(options: argparse.Namespace) -> Benchmark:
    """Returns the benchmark that the options ask for."""
    return Benchmark(
        name="decode",
        title="decode",
        cases=case_decode.chosen(options),
        implementations=harness.chosen_implementations(options, case_decode.prepare, peers_decode.peers()),
        make_inputs=case_decode.make_inputs,
        work=case_decode.DecodeCase.work,
        expected=case_decode.expected,
        checked=case_decode.checked_slice,
        differentiates=lambda case: False,
    )


def main(arguments: list[str] | None = None) -> None:
    harness.main(__doc__, case_decode.add_options, benchmark, arguments)
