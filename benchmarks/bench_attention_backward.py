"""The gradients of attention: fastattn's kernels against every peer that can be imported.

Only the backward pass is timed. TFLOP/s count its five matrix products, half of them under a causal mask (the
FlashAttention papers' convention).
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
    peers = harness.chosen_peers(peers_attention.backward_peers(), options.peer)
    own = own_implementations(case_attention.prepare_backward, options.backend or ("cuda", "triton"))
    return Benchmark(
        name="attention_backward",
        title="attention backward",
        cases=case_attention.chosen(options),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser)
    case_attention.add_options(parser)
    options = parser.parse_args(arguments)
    harness.report(benchmark(options), options)


if __name__ == "__main__":
    main()
