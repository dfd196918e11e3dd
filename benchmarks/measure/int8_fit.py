"""Fits the model of an int8 matmul's time, by which the library chooses kernels, to this machine's GPU.

The model of a kernel is a sum of terms (csrc/scheduler/choose_matmul_tile.h): a launch, the steps of the busiest CTA,
its work tiles, and collecting the partials of split tiles. The model of cuBLAS over dequantised weights is a sum too
(csrc/int8_matmul/ways.h): two launches for each block, three bytes per weight, and multiply-adds. Least squares of the
relative errors give each term's coefficient in seconds. A coefficient times the SM clock of the run is the number of
clocks that the two files need. benchmarks/results/<gpu>/int8_fit.json gets the coefficients, and each measured time
with the time that the library predicts from data sheets.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measure import environment, results, timing
from fastattn import native, quantize_int8

SCHEMA = 1
# A dequantised block has at most BLOCK_WEIGHTS weights and a multiple of BLOCK_MULTIPLE outputs (ways.h). RESIDENT maps
# an architecture to how many CTAs of the matmul (on Hopper: clusters) an SM holds, as in MatmulTile.
BLOCK_WEIGHTS, BLOCK_MULTIPLE = 1 << 25, 256
RESIDENT = {80: 2.0, 90: 0.5}
_CTAS_OF_A_TILE = {80: 1, 90: 2}  # on Hopper, the two CTAs of a cluster compute a work tile together


class Case(NamedTuple):
    """Describes a matmul ``[m, k] @ [n, k]^T``."""

    m: int
    n: int
    k: int


class Kernel(NamedTuple):
    """Names a kernel of the library. ``tile`` is what it computes in a step, with the fields of `native.KERNELS`."""

    name: str
    arch: int
    tile: dict[str, int]


class Sample(NamedTuple):
    """A measured case. ``terms`` says how often each term counts; ``predicted`` is the library's time, or None."""

    case: Case
    terms: tuple[float, ...]
    seconds: float
    predicted: float | None


KERNEL_TERMS = ("launch", "step", "piece", "shared", "part")
DEQUANTISED_TERMS = ("block", "weight_byte", "mac")


def kernels(names: dict[str, Any], arch: int) -> list[Kernel]:
    """Returns the bfloat16 kernels of the matmul for 16-bit activations that a GPU of ``arch`` runs, one per tile."""
    found = []
    for name, tile in names.items():
        matched = re.fullmatch(r"int8_matmul_sm(\d+)<\d+, bfloat16>", name)
        if matched and (int(matched[1]) == 80 or int(matched[1]) == arch):
            found.append(Kernel(name, int(matched[1]), tile))
    return found


def _outputs_of_tile(kernel: Kernel) -> int:
    return kernel.tile["block_n"] * _CTAS_OF_A_TILE[kernel.arch]


def kernel_cases(kernel: Kernel, num_sms: int) -> Iterator[Case]:
    """Yields cases with one tile of tokens: one or two full waves of tiles, and fewer tiles, which CTAs split."""
    resident, outputs = int(RESIDENT[kernel.arch] * num_sms), _outputs_of_tile(kernel)
    for k in (2048, 4096, 8192):
        for tiles in (resident, 2 * resident):
            yield Case(kernel.tile["block_m"], tiles * outputs, k)
        for splits in (2, 4, 8):
            yield Case(kernel.tile["block_m"], max(resident // splits, 1) * outputs, k)


def kernel_terms(kernel: Kernel, case: Case, dealt: native.LaunchSchedule, num_sms: int) -> tuple[float, ...] | None:
    """Returns how often each of ``KERNEL_TERMS`` counts, or None if a CTA has splits of several tiles."""
    tiles = math.ceil(case.m / kernel.tile["block_m"]) * math.ceil(case.n / _outputs_of_tile(kernel))
    steps = dealt.steps_of_full_gpu
    if dealt.slots == 0:
        return 1.0, steps, math.ceil(tiles / int(RESIDENT[kernel.arch] * num_sms)), 0.0, 0.0
    splits, rest = divmod(dealt.slots, tiles * _CTAS_OF_A_TILE[kernel.arch])
    if rest or dealt.ctas != dealt.slots:
        return None
    return 1.0, steps, 1.0, 1.0, splits - 1


def dequantised_cases() -> Iterator[Case]:
    """Yields cases with so many tokens that the tensor cores limit cuBLAS, for weights of one and of several blocks."""
    for n, k in ((2048, 4096), (4096, 4096), (8192, 4096), (14336, 4096), (8192, 8192), (16384, 8192)):
        for m in (2048, 4096, 8192):
            yield Case(m, n, k)


def dequantised_terms(case: Case) -> tuple[float, ...]:
    """Returns how often each of ``DEQUANTISED_TERMS`` counts."""
    weights, fitting = case.n * case.k, BLOCK_WEIGHTS // case.k
    outputs = case.n if fitting >= case.n else fitting // BLOCK_MULTIPLE * BLOCK_MULTIPLE
    return math.ceil(case.n / outputs), 3 * weights, case.m * weights


def fit(names: Sequence[str], samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the terms' coefficients in seconds, None where the samples do not determine them, and the worst error.

    ``measured_over_predicted`` is the median ratio of the measured time to the library's prediction.
    """
    terms = np.array([sample.terms for sample in samples], dtype=float).reshape(len(samples), len(names))
    seconds = np.array([sample.seconds for sample in samples])
    relative = terms / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    told = scale > 0
    columns = relative[:, told] / scale[told]
    if len(samples) == 0 or np.linalg.matrix_rank(columns) < columns.shape[1]:
        coefficients = dict.fromkeys(names)
        worst = None
    else:
        solved, *_ = np.linalg.lstsq(columns, np.ones(len(samples)), rcond=None)
        values = iter((solved / scale[told]).tolist())
        coefficients = {name: next(values) if known else None for name, known in zip(names, told, strict=True)}
        worst = float(np.abs(columns @ solved - 1).max())
    ratios = [sample.seconds / sample.predicted for sample in samples if sample.predicted]
    return {
        "seconds": coefficients,
        "worst_relative_error": worst,
        "measured_over_predicted": statistics.median(ratios) if ratios else None,
        "samples": [{**sample._asdict(), "case": sample.case._asdict()} for sample in samples],
    }


def fit_all(gpu: CudaGpu, names: dict[str, Any]) -> dict[str, Any]:
    """Returns a fit for each kernel in ``names`` that the GPU runs, and a fit for `native.DEQUANTISED`."""
    found = {}
    for kernel in kernels(names, gpu.arch):
        samples = []
        for case in kernel_cases(kernel, gpu.num_sms):
            terms = kernel_terms(kernel, case, gpu.dealt(kernel, case), gpu.num_sms)
            if terms is not None:
                samples.append(Sample(case, terms, gpu.seconds(kernel, case), gpu.predicted(kernel, case)))
        found[kernel.name] = fit(KERNEL_TERMS, samples)
    samples = [
        Sample(case, dequantised_terms(case), gpu.seconds(None, case), gpu.predicted(None, case))
        for case in dequantised_cases()
    ]
    found[native.DEQUANTISED] = fit(DEQUANTISED_TERMS, samples)
    return found


class CudaGpu:
    """Times calls on a GPU, and asks for the library's predictions. Kernel None: cuBLAS over dequantised weights."""

    def __init__(self, facts: native.NativeDeviceFacts, timer: timing.CudaTimer) -> None:
        self.timer = timer
        self.arch, self.num_sms, self.l2_bytes = facts.arch, facts.num_sms, facts.l2_bytes

    def _forced(self, kernel: Kernel | None) -> Any:
        return native.forced_int8_tile(*((-1,) if kernel is None else (kernel.arch, kernel.tile["block_m"])))

    def dealt(self, kernel: Kernel, case: Case) -> native.LaunchSchedule:
        """Returns how the kernel distributes the case over CTAs."""
        with self._forced(kernel):
            return native.int8_matmul_schedule("int8_matmul", self.arch, self.num_sms, False, *case)

    def predicted(self, kernel: Kernel | None, case: Case) -> float | None:
        """Returns the seconds that the library predicts for the call, or None if it makes no prediction."""
        product = native.Int8Product("int8_matmul", torch.bfloat16, False, False, *case)
        with self._forced(kernel):
            ways = native.int8_ways(product, self.arch, self.num_sms)
        microseconds = ways.get(native.DEQUANTISED if kernel is None else kernel.name)
        return None if microseconds is None else microseconds * 1e-6

    def seconds(self, kernel: Kernel | None, case: Case) -> float:
        """Returns a call's seconds in a CUDA graph, with enough sets of inputs that none is still in the L2."""
        bytes_of_set = case.n * case.k + 2 * case.m * (case.k + case.n)
        free_bytes, _ = torch.cuda.mem_get_info()
        num_sets = timing.num_input_sets(bytes_of_set, self.l2_bytes, free_bytes)

        def call_over_new_inputs() -> Callable[[], Any]:
            x = torch.randn(case.m, case.k, device="cuda", dtype=torch.bfloat16)
            weight = quantize_int8(torch.randn(case.n, case.k, device="cuda", dtype=torch.bfloat16))
            arguments = x, weight.data, weight.scale, None, None, "none", False
            return lambda: native.OPS.int8_matmul(*arguments)

        with self._forced(kernel):
            return self.timer.graph([call_over_new_inputs() for _ in range(num_sets)]).median_s


def document_of(fits: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """Returns the document to write. ``machine`` is the result of `environment.describe_gpu`."""
    when = {"date": environment.now(), "commit": environment.commit()}
    return {"schema": SCHEMA, "fit": "int8_matmul", **when, "environment": machine, "ways": fits}


def as_text(fits: dict[str, Any]) -> str:
    """Returns a line for each model: coefficients in ns, worst error, and the ratio of measured to predicted times."""
    lines = []
    for name, fitted in fits.items():
        terms = ", ".join(
            f"{term} {'unknown' if seconds is None else format(1e9 * seconds, '.4g')}"
            for term, seconds in fitted["seconds"].items()
        )
        worst, ratio = fitted["worst_relative_error"], fitted["measured_over_predicted"]
        error = "" if worst is None else f"; off by {worst:.1%} at most"
        against = "" if ratio is None else f"; {ratio:.2f} of the predicted time"
        lines.append(f"{name}: ns: {terms}{error}{against}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file to write, instead of the one under benchmarks/results")
    parser.add_argument("--seconds-per-figure", type=float, default=0.2)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("int8 fit: no NVIDIA GPU here, so nothing is measured, fitted or written.")
        return
    machine = environment.describe_gpu(torch.device("cuda", torch.cuda.current_device()))
    fits = fit_all(CudaGpu(native.device_facts(), timing.CudaTimer(options.seconds_per_figure)), native.KERNELS)
    print(as_text(fits))
    path = options.json or results.FOLDER / results.folder_name(machine["gpu"]) / "int8_fit.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document_of(fits, machine), indent=1) + "\n")
    print(f"fit: {path}")
