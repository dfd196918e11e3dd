"""Prints what kernels are compiled to, and what they execute on a small shape, without a GPU.

``python -m benchmarks.machine_code.kernels decode "d 128"`` keeps the calls whose description has all these words. The
calls are small cases of the benchmarks. They run on the tests' emulator, as an A100 and as an H200, each with 2 SMs.

- Machine code, by ptxas and nvdisasm: registers, bytes that a thread spills, shared memory of a CTA, CTAs that fit on
  an SM, and the instructions of the main loop by class. If a kernel has several main loops, the table shows the one
  with the most tensor-core instructions, and if they have equally many, the shortest, which applies no mask. The count
  may include branches that rarely run.
- Counts by the emulator: CTAs and their threads, warp instructions, shared-memory wavefronts and the fraction of them
  that are bank conflicts, and global-memory sectors per request, next to the sectors that the bytes of all lanes fill.
  Each call's line has the bytes and multiply-adds of all its kernels, relative to the least that the call needs.

``python -m emulator profile`` shows the launches of any script by source line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.machine_code import HAS_NATIVE  # isort: skip  (before whatever imports fastattn)

import torch
from tqdm import tqdm

import fastattn
from benchmarks.measure.cases import attention, decode, int8
from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.measure.implementations import Prepare
from benchmarks.measure.labels import label
from benchmarks.measure.tables import aligned
from emulator import device, launches, options, profiling, static_facts
from emulator.launches import Launched
from emulator.static_facts import KernelFacts
from fastattn import native
from fastattn.profiler.kernel_names import short_name
from fastattn.profiler.work import Work

GPUS = {80: "A100", 90: "H200"}
NUM_SMS = 2
# The limits of an SM (CUDA programming guide, "Technical Specifications per Compute Capability"). The driver reserves
# 1 KB of shared memory in each CTA, and a warp's registers are a multiple of 256.
SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
REGISTERS, WARPS, CTAS = 1 << 16, 64, 32
SECTOR_BYTES = 32

# The columns of the table, each with the emulator's instruction classes that it sums.
CLASSES = {
    "MMA": ("tensor core",),
    "MUFU": ("special function",),
    "float": ("float", "half", "convert"),
    "integer": ("integer", "logic", "compare", "move"),
    "memory": ("matrix load", "shared", "async", "global", "local", "atomic", "param"),
    "sync": ("barrier", "warp", "control", "other"),
}
# For each op the module of its cases, and the function that prepares fastattn's call.
PREPARES: dict[str, tuple[Any, Prepare]] = {
    "forward": (attention, attention.prepare_forward),
    "backward": (attention, attention.prepare_backward),
    "decode": (decode, decode.prepare),
    "int8": (int8, int8.prepare),
}


@dataclass(frozen=True)
class Call:
    """Describes a call of an op by a backend, on a GPU of compute capability ``arch`` / 10."""

    op: str
    backend: str
    arch: int
    case: Any

    def __str__(self) -> str:
        return f"{self.op} {self.backend} {GPUS[self.arch]}, {label(dataclasses.asdict(self.case))}"

    def work(self) -> Work:
        if self.op == "backward":
            return self.case.backward_work()
        return self.case.forward_work() if self.op == "forward" else self.case.work()

    def run(self) -> list[Launched]:
        """Runs the call on the emulator and returns its launches, without launches that prepare it."""
        cases, prepare = PREPARES[self.op]
        with contextlib.ExitStack() as stack:
            stack.enter_context(device.emulated(self.arch, NUM_SMS))
            stack.enter_context(options.launching(seed=0, races=False))
            stack.enter_context(fastattn.use_backend(self.backend))
            if (self.op, self.backend) == ("int8", "cuda"):  # never cuBLAS; kernels for sm_90 only above 64 tokens
                stack.enter_context(native.forced_int8_tile(self.arch if self.case.m > 64 else 80))
            prepared = prepare(self.case, cases.make_inputs(self.case, torch.device("cpu"), 0))
            with launches.recorded() as found:
                prepared.call()
        return found


def calls(full: bool) -> list[Call]:
    """Returns calls that the emulator runs in about a second each; the full list has every head dim and mask."""
    one = AttentionCase(128, 512, batch=1, heads=2, kv_heads=1, causal=True)
    dims = (64, 96, 128, 192, 256) if full else (64, 128)
    masks = (True, False) if full else (True,)
    sequences = [replace(one, head_dim=dim, causal=causal) for dim in dims for causal in masks]
    step = DecodeCase(1, 1024, heads=4, kv_heads=1)
    steps = [replace(step, head_dim=dim, page_size=page) for dim in dims for page in ((0, 16) if full else (0,))]
    layer = Int8Case("small", 1, 256, 512)
    layers = [replace(layer, m=m, granularity=size) for m in (1, 16, 128) for size in ("channel", "128")]
    found: list[tuple[str, Any]] = [("forward", case) for case in sequences]
    found += [("backward", replace(case, seqlen=256)) for case in sequences]
    found += [("decode", case) for case in steps]
    found += [("int8", case) for case in (*layers, replace(layer, m=128, gradient=True))]
    backends = ("cuda", "triton") if HAS_NATIVE else ("triton",)
    return [Call(op, backend, arch, case) for op, case in found for backend in backends for arch in GPUS]


def ctas_per_sm(arch: int, threads: int, registers: int, shared_bytes: int) -> int:
    """Returns how many CTAs fit on an SM."""
    warps = math.ceil(threads / 32)
    registers_of_warp = math.ceil(32 * max(registers, 1) / 256) * 256
    return min(
        CTAS, WARPS // warps, REGISTERS // registers_of_warp // warps, SHARED_BYTES[arch] // (shared_bytes + 1024)
    )


def facts_of(launched: Launched, arch: int) -> KernelFacts | None:
    """Returns facts of the machine code for ``arch``, also from PTX for an earlier GPU; None if a tool is missing."""
    if not static_facts.has_tools():
        return None
    is_earlier = static_facts.target_of(launched.ptx) != f"sm_{arch}a"
    return static_facts.of_ptx(launched.ptx, f"sm_{arch}" if is_earlier else None)[launched.report.kernel]


def code_cells(launched: Launched, arch: int) -> list[str]:
    """Returns a kernel's cells in the machine-code table; without the tools only name and shared memory are known."""
    shared_bytes, facts = launched.report.shared_bytes, facts_of(launched, arch)
    cells = [short_name(profiling.demangled(launched.report.kernel))]
    if facts is None:
        return [*cells, "–", "–", f"{shared_bytes / 1024:.0f}", *["–"] * (3 + len(CLASSES))]
    loop = facts.main_loop if facts.main_loops else []
    mix = static_facts.mix(loop)
    fitting = ctas_per_sm(arch, math.prod(launched.block), facts.registers, shared_bytes)
    cells += [str(facts.registers), str(facts.spill_store_bytes), f"{shared_bytes / 1024:.0f}", str(fitting)]
    cells += [str(len(facts.instructions)), str(len(loop))]
    return cells + [str(sum(mix.get(name, 0) for name in names)) for names in CLASSES.values()]


def count_cells(launched: Launched) -> list[str]:
    """Returns a launch's cells in the table of counts."""
    report = launched.report
    requests = sum(row.warps for row in report.rows if row.global_sectors)
    wavefronts = report.shared_wavefronts
    return [
        short_name(profiling.demangled(report.kernel)),
        f"{math.prod(launched.grid)} x {math.prod(launched.block)}",
        str(sum(report.instructions.values())),
        str(wavefronts),
        f"{report.bank_conflicts / wavefronts:.0%}" if wavefronts else "–",
        f"{report.global_sectors / requests:.1f}" if requests else "–",
        f"{report.global_bytes / SECTOR_BYTES / requests:.1f}" if requests else "–",
        str(report.global_bytes),
        str(sum(operations.multiply_adds for operations in report.tensor_core.values())),
    ]


def show(ran: Sequence[tuple[Call, list[Launched]]]) -> None:
    """Prints both tables, with a line that describes each call, followed by a line for each of its launches."""
    code_header = ("kernel", "registers", "spilled", "shared KB", "CTAs/SM", "instructions", "main loop", *CLASSES)
    count_header = ("kernel", "CTAs", "instructions", "wavefronts", "conflicts", "sectors", "of bytes", "bytes", "MACs")
    code = [code_cells(one, call.arch) for call, launched in ran for one in launched]
    counts = [count_cells(one) for _, launched in ran for one in launched]
    for title, header, cells in (("Machine code", code_header, code), ("Counted", count_header, counts)):
        lines = iter(aligned(header, cells).splitlines())
        print(f"\n{title}\n\n{next(lines)}\n{next(lines)}")
        for call, launched in ran:
            least, reports = call.work(), [one.report for one in launched]
            moved = sum(report.global_bytes for report in reports) / least.bytes
            macs = sum(part.multiply_adds for report in reports for part in report.tensor_core.values())
            counted = f": bytes {moved:.2f}, MACs {2 * macs / least.flops:.2f} of the least" if cells is counts else ""
            print(f"\n{call}{counted}")
            for _ in launched:
                print(next(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only calls whose description contains all of these")
    parser.add_argument("--full", action="store_true", help="every head dim, mask and kind of cache: minutes")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not HAS_NATIVE:
        print("There is no nvcc here: the CUDA C++ kernels are left out.")
    if not static_facts.has_tools():
        print("ptxas, cuobjdump or nvdisasm is missing here: the machine code is not known.")
    wanted = [call for call in calls(chosen.full) if all(word in str(call) for word in chosen.words)]
    show([(call, call.run()) for call in tqdm(wanted, desc="on the emulator", unit="call")])


if __name__ == "__main__":
    main()
