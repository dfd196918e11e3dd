"""Attention over whole sequences: fastattn's kernels against every peer that can be imported.

TFLOP/s count the two matrix products, half of them under a causal mask (the FlashAttention papers' convention).
"""

from __future__ import annotations

import argparse

import case_attention
import harness
import peers_attention
from case_attention import AttentionCase
from harness import Benchmark
from implementations import own_implementations


def benchmark(options: argparse.Namespace) -> Benchmark:
    """What the options ask for."""
    peers = harness.chosen_peers(peers_attention.forward_peers(), options.peer)
    own = own_implementations(case_attention.prepare_forward, options.backend or ("cuda", "triton"))
    return Benchmark(
        name="attention_forward",
        title="attention forward",
        cases=case_attention.chosen(options),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser)
    case_attention.add_options(parser)
    options = parser.parse_args(arguments)
    harness.report(benchmark(options), options)


if __name__ == "__main__":
    main()
