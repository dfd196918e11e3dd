"""Defines the benchmarks: the cases, the implementations and the checks of each. ``--help`` shows their docstrings."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence

from benchmarks.measure import harness
from benchmarks.measure.cases import attention as case_attention
from benchmarks.measure.cases import decode as case_decode
from benchmarks.measure.cases import int8 as case_int8
from benchmarks.measure.harness import Benchmark, chosen_implementations
from benchmarks.measure.peers import attention as peers_attention
from benchmarks.measure.peers import decode as peers_decode
from benchmarks.measure.peers import int8 as peers_int8


def attention_forward(options: argparse.Namespace) -> Benchmark:
    """Measures attention over whole sequences: fastattn's kernels against every peer that can be imported.

    TFLOP/s count the two matrix products: half of them under a causal mask (the FlashAttention papers' convention), or
    only the visible pairs if there are fewer queries than keys.
    """
    return Benchmark(
        name="attention_forward",
        cases=case_attention.forward_cases(options),
        implementations=chosen_implementations(
            options, case_attention.prepare_forward, peers_attention.forward_peers()
        ),
        make_inputs=case_attention.make_inputs,
        work=case_attention.AttentionCase.forward_work,
        expected=case_attention.expected_forward,
        checked=case_attention.checked_slice,
    )


def attention_backward(options: argparse.Namespace) -> Benchmark:
    """Measures the gradients of attention: fastattn's kernels against every peer that can be imported.

    Only the backward pass is timed. TFLOP/s count its five matrix products, half of them under a causal mask (the
    FlashAttention papers' convention).
    """
    return Benchmark(
        name="attention_backward",
        cases=case_attention.backward_cases(options),
        implementations=chosen_implementations(
            options, case_attention.prepare_backward, peers_attention.backward_peers()
        ),
        make_inputs=case_attention.make_inputs,
        work=case_attention.AttentionCase.backward_work,
        expected=case_attention.expected_backward,
        checked=case_attention.checked_slice,
        differentiates=lambda case: True,
    )


def decode(options: argparse.Namespace) -> Benchmark:
    """Measures decoding over a KV cache: fastattn's kernels against every peer that can be imported.

    Each sequence has one new query. GB/s count the cached keys and values of the actual lengths, once for all query
    heads that share them, and the queries and results.
    """
    return Benchmark(
        name="decode",
        cases=case_decode.chosen(options),
        implementations=chosen_implementations(options, case_decode.prepare, peers_decode.peers()),
        make_inputs=case_decode.make_inputs,
        work=case_decode.DecodeCase.work,
        expected=case_decode.expected,
        checked=case_decode.checked_slice,
    )


def int8_matmul(options: argparse.Namespace) -> Benchmark:
    """Measures linear layers with int8 weights on the shapes of LLaMA models: fastattn against every importable peer.

    GB/s count the int8 weight, its scales, the input and the output. The gradient of the input goes through autograd,
    as in training; only the backward pass is timed.
    """
    return Benchmark(
        name="int8_matmul",
        cases=case_int8.chosen(options),
        implementations=chosen_implementations(options, case_int8.prepare, peers_int8.peers()),
        make_inputs=case_int8.make_inputs,
        work=case_int8.Int8Case.work,
        expected=case_int8.expected,
        checked=case_int8.checked_slice,
        differentiates=lambda case: case.gradient,
    )


# For each benchmark: the function that makes it from the parsed options, and the function that adds its cases' options.
BENCHMARKS = {
    "attention_forward": (attention_forward, case_attention.add_options),
    "attention_backward": (attention_backward, case_attention.add_options),
    "decode": (decode, case_decode.add_options),
    "int8_matmul": (int8_matmul, case_int8.add_options),
}


def options_of(name: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of a benchmark: the options of all benchmarks and those of its cases."""
    benchmark, add_case_options = BENCHMARKS[name]
    description = inspect.getdoc(benchmark)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser)
    add_case_options(parser)
    return parser.parse_args(arguments)


def main(name: str, arguments: Sequence[str] | None = None) -> None:
    options = options_of(name, arguments)
    harness.report(BENCHMARKS[name][0](options), options)
