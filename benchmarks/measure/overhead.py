"""Measures the time that fastattn adds to a call on the host, from the public function to the operator.

Stubs replace the kernels: operators for the CPU that only return tensors made beforehand. fastattn's dispatch is told
that the CPU is an H200. The figure is the time of the public function minus the time of the bare operator (the floor),
so the cost of the stub cancels. With gradients, the floor also includes the time that torch's autograd engine takes for
a view, the smallest operation. No GPU is needed.

Prints a table; ``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fastattn
from benchmarks.measure import environment, tables
from fastattn.dispatch import device
from fastattn.dispatch.device import DeviceFacts

H200 = DeviceFacts(arch=90, num_sms=132, shared_memory_bytes=227 * 1024, driver_cuda=13000)
AIM_WITHOUT_GRADIENTS_US, AIM_WITH_GRADIENTS_US = 5.0, 20.0
SHAPE = (1, 8, 16, 64)


def install_stand_ins() -> None:
    """Registers operators that compute nothing, and makes dispatch treat CPU tensors as tensors on an H200."""
    device.emulate_on_cpu(H200)
    out = torch.zeros(SHAPE, dtype=torch.bfloat16)
    lse = torch.zeros(SHAPE[:3])
    empty = torch.zeros(0)
    rows = torch.zeros(16, 64, dtype=torch.bfloat16)
    answers: dict[str, Callable[..., Any]] = {
        "attention_forward": lambda *args: (out.view_as(out), lse.view_as(lse), empty),
        "attention_backward": lambda *args: (*(out.view_as(out) for _ in range(3)), empty, empty, empty),
        "int8_matmul": lambda *args: rows.view_as(rows),
    }
    for namespace in ("fastattn", "fastattn_triton"):
        library = torch.library.Library(namespace, "IMPL")
        _kept.append(library)
        for name, answer in answers.items():
            library.impl(name, answer, "CPU")


_kept: list[torch.library.Library] = []


def microseconds(function: Callable[[], Any], repeats: int, calls: int) -> float:
    """Returns the mean time of a call in the fastest of ``repeats`` runs, because other load only adds time."""
    function()
    return min(timeit.repeat(function, number=calls, repeat=repeats)) / calls * 1e6


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], float]]:
    """Returns, by name, the public call, the floor (the least that any implementation runs), and the aim in µs."""
    query, key, value = (torch.randn(SHAPE, dtype=torch.bfloat16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    tail = (None,) * 6 + (0, 0, 0.125, -1, -1, None, 0, 0, 0.0, 0.0)
    triton_op = torch.ops.fastattn_triton.attention_forward.default
    native_op = torch.ops.fastattn.attention_forward.default
    backward_op = torch.ops.fastattn_triton.attention_backward.default
    out, lse = torch.zeros(SHAPE, dtype=torch.bfloat16), torch.zeros(SHAPE[:3])
    x, weight = torch.randn(16, 64, dtype=torch.bfloat16), fastattn.quantize_int8(torch.randn(64, 64))
    matmul_op = torch.ops.fastattn_triton.int8_matmul.default

    def bare(op: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def both_ways() -> None:
        torch.autograd.grad(fastattn.attention(*leaves), leaves, out)

    def engine_and_ops() -> None:
        torch.autograd.grad(leaves[0].view_as(query), leaves[:1], out)
        bare(triton_op, query, key, value, *tail)
        bare(backward_op, out, None, query, key, value, out, lse, *tail, False, False, False)

    without = AIM_WITHOUT_GRADIENTS_US
    return {
        "scaled_dot_product_attention": (
            lambda: fastattn.scaled_dot_product_attention(query, key, value),
            lambda: bare(native_op, query, key, value, *tail),
            without,
        ),
        "attention": (
            lambda: fastattn.attention(query, key, value),
            lambda: bare(native_op, query, key, value, *tail),
            without,
        ),
        "attention, forward + backward": (both_ways, engine_and_ops, AIM_WITH_GRADIENTS_US),
        "int8_linear": (
            lambda: fastattn.int8_linear(x, weight),
            lambda: bare(matmul_op, x, weight.data, weight.scale, None, None, "none"),
            without,
        ),
    }


def machine() -> dict[str, str]:
    """Returns the CPU, the versions, the date and the commit with which the figures were taken."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in cpus if line.startswith("model name")]
    return {
        "cpu": f"{len(names)} x {names[0]}" if names else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastattn": fastattn.native.BUILD["version"],
        "date": environment.now(),
        "commit": environment.commit(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="calls per repeat")
    parser.add_argument("--repeats", type=int, default=15, help="number of repeats; the fastest one counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if min(options.calls, options.repeats) < 1:
        parser.error("--calls, --repeats: expected at least 1")
    torch.set_num_threads(1)
    install_stand_ins()

    rows = []
    for name, (public, floor, aim) in cases().items():
        public_us = microseconds(public, options.repeats, options.calls)
        floor_us = microseconds(floor, options.repeats, options.calls)
        added = public_us - floor_us
        rows.append({"call": name, "public_us": public_us, "floor_us": floor_us, "added_us": added, "aim_us": aim})
    print(tables.overhead_table(rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
