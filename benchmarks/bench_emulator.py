"""How fast the emulator of the tests is: a causal forward of one head, 512 x 512, d=128, bf16, with all checks on.

The kernels are the native one and Triton's, as nvcc and Triton compile them for sm_80. Compiling is not timed. No GPU
is needed.

Prints a table; ``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # so that Triton lets kernels have CPU tensors
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

import test_emulator_cuda_forward as native
from bench_overhead import machine
from emulator import Report, launches
from emulator.nvcc_compile import nvcc
from emulator.triton_compile import on_emulator
from fastattn.triton_kernels.attention_forward import attention_forward

AIM_SECONDS = 3.0  # on one core
ROWS, HEAD_DIM = 512, 128
SCALE = HEAD_DIM**-0.5


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, ROWS, HEAD_DIM, generator=generator).bfloat16() for _ in range(3)]


def native_forward(workers: int) -> torch.Tensor:
    return native.run(*inputs(), True, workers=workers)[0]


def triton_forward(workers: int) -> torch.Tensor:
    query, key, value = inputs()
    absent = (None, None, None, None, None, None)  # bias, ALiBi, sinks, dropout seed, lengths of queries and of keys
    with on_emulator(80, workers=workers):
        return attention_forward(query, key, value, *absent, 0, 0, SCALE, -1, 0, False, 0.0, 0.0)[0]


def check(out: torch.Tensor) -> None:
    """A figure of a wrong result would say nothing."""
    query, key, value = (t.double() for t in inputs())
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)
    assert (out.double() - expected).abs().max() < 0.02, "the kernel's result is wrong"


def measure(forward: Callable[[int], torch.Tensor], workers: int, repeats: int) -> tuple[float, Report]:
    """The quickest of some runs, in seconds: what else the machine does only ever adds. And what was counted."""
    check(forward(workers))  # also compiles
    seconds = []
    with launches.recorded() as found:
        for _ in range(repeats):
            start = time.perf_counter()
            forward(workers)
            seconds.append(time.perf_counter() - start)
    return min(seconds), found[0].report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the quickest counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    kernels = {"Triton, sm_80": triton_forward}
    if nvcc() is not None:
        kernels = {"native, sm_80": native_forward, **kernels}
    rows = []
    print(f"{'causal forward':<16}{'workers':>9}{'seconds':>9}{'aim':>6}{'instructions':>14}{'a second':>12}")
    for name, forward in kernels.items():
        for workers in (1, 2):
            seconds, report = measure(forward, workers, arguments.repeats)
            executed = sum(report.instructions.values())
            rows.append(
                {
                    "kernel": name,
                    "workers": workers,
                    "seconds": seconds,
                    "aim_seconds": AIM_SECONDS,
                    "warp_instructions": executed,
                    "warp_instructions_per_second": executed / seconds,
                }
            )
            print(
                f"{name:<16}{workers:>9}{seconds:>9.3f}{AIM_SECONDS:>6.1f}{executed:>14,}{executed / seconds:>12,.0f}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
