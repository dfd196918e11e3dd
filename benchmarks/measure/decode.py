"""Measures decoding over a KV cache: fastattn's kernels against every peer that can be imported.

Each sequence has one new query. GB/s count the cached keys and values of the actual lengths, once for all query heads
that share them, and the queries and results.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import harness
from benchmarks.measure.cases import decode as case_decode
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.harness import Benchmark
from benchmarks.measure.implementations import own_implementations
from benchmarks.measure.peers import decode as peers_decode


def benchmark(options: argparse.Namespace) -> Benchmark:
    """Returns the benchmark that the options ask for."""
    peers = harness.chosen_peers(peers_decode.peers(), options.peer)
    own = own_implementations(case_decode.prepare, options.backend or ("cuda", "triton"))
    return Benchmark(
        name="decode",
        title="decode",
        cases=case_decode.chosen(options),
        implementations=[*own, *peers],
        make_inputs=case_decode.make_inputs,
        input_bytes=case_decode.input_bytes,
        work=DecodeCase.work,
        expected=case_decode.expected,
        checked=case_decode.checked_slice,
        uses_graphs=lambda case: True,
        differentiates=lambda case: False,
    )


def main(arguments: list[str] | None = None) -> None:
    harness.main(__doc__, case_decode.add_options, benchmark, arguments)
