"""Decoding over a KV cache: fastattn's kernels against every peer that can be imported.

One new query per sequence. GB/s count the cached keys and values of the actual lengths, once for all query heads that
share them, and the queries and results.
"""

from __future__ import annotations

import argparse

import case_decode
import harness
import peers_decode
from case_decode import DecodeCase
from harness import Benchmark
from implementations import own_implementations


def benchmark(options: argparse.Namespace) -> Benchmark:
    """What the options ask for."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser)
    case_decode.add_options(parser)
    options = parser.parse_args(arguments)
    harness.report(benchmark(options), options)


if __name__ == "__main__":
    main()
