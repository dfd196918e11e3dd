"""Times the tests' emulator, with all checks, on a causal forward pass: one head, 512 x 512, d=128, bf16.

The kernels are the CUDA C++ one and the Triton one, compiled for sm_80. Compilation is not timed. No GPU
is needed.

Prints a table; ``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine_code import HAS_NATIVE  # isort: skip  (before whatever imports fastattn)

import torch

import fastattn
from benchmarks.measure import tables
from benchmarks.measure.overhead import machine
from emulator import Report, allocations, device, launches, options

AIM_SECONDS = 3.0  # for one run on one core
ROWS, HEAD_DIM = 512, 128


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, ROWS, HEAD_DIM, generator=generator).bfloat16() for _ in range(3)]


def forward(backend: str, workers: int) -> torch.Tensor:
    query, key, value = inputs()
    with options.launching(workers=workers, tracked=True), fastattn.use_backend(backend):
        return fastattn.attention(query, key, value, causal=True)


def check(out: torch.Tensor) -> None:
    """Asserts that the result is right: the time of a wrong computation would mean nothing."""
    query, key, value = (t.double() for t in inputs())
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert (out.double() - expected).abs().max() < 0.02, "the kernel's result is wrong"


def measure(backend: str, workers: int, repeats: int) -> tuple[float, Report]:
    """Returns the seconds of the fastest run, because other load only adds time, and the emulator's counts."""
    check(forward(backend, workers))  # also compiles
    seconds = []
    with launches.recorded() as found:
        for _ in range(repeats):
            start = time.perf_counter()
            forward(backend, workers)
            seconds.append(time.perf_counter() - start)
    return min(seconds), found[0].report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="number of runs; the fastest one counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args(arguments)
    if chosen.repeats < 1:
        parser.error("--repeats: expected at least 1")
    torch.set_num_threads(1)

    backends = {"native, sm_80": "cuda", "Triton, sm_80": "triton"}
    if not HAS_NATIVE:
        del backends["native, sm_80"]
    rows: list[dict[str, Any]] = []
    for name, backend in backends.items():
        for workers in (1, 2):
            with allocations.tracked(), device.emulated(arch=80):
                seconds, report = measure(backend, workers, chosen.repeats)
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
    formats = ("", "", ".3f", ".1f", ",", ",.0f")
    cells = [[format(*cell) for cell in zip(row.values(), formats, strict=True)] for row in rows]
    print(tables.aligned(("kernel", "workers", "seconds", "aim", "instructions", "a second"), cells))
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
