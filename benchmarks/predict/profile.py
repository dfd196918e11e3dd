"""Profiles the kernels without a GPU: their machine code, the emulator's counts, and PREDICTIONS of their time.

It profiles each kernel with the tiles that the launchers choose on an H200 and an A100. Registers, spills, shared
memory, CTAs per SM and the instructions of the main loop come from ptxas and the disassembler; bank conflicts, sectors,
bytes and multiply-adds, beside the least possible ones, from a small shape on the emulator. From both it predicts times
at points of the benchmarks' grids, by the model in `machine_model`. No GPU takes part, and nothing here is a result.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.predict import kernel_profiles  # isort: skip  (before whatever imports fastattn)

import torch
from tqdm import tqdm

import fastattn
from benchmarks.measure import environment
from benchmarks.measure.cases import attention as case_attention
from benchmarks.measure.cases import decode as case_decode
from benchmarks.measure.cases import int8 as case_int8
from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.measure.labels import label
from benchmarks.measure.tables import aligned
from benchmarks.predict import launch_geometry, predictions
from benchmarks.predict.kernel_profiles import Counted, Profile
from benchmarks.predict.launch_geometry import Geometry
from benchmarks.predict.machine_model import (
    HBM,
    ISSUE,
    L2,
    MACHINES,
    SHARED,
    SPECIAL,
    TENSOR,
    Load,
    Machine,
    Prediction,
    predict,
)
from emulator.device import USUAL
from fastattn import native
from fastattn.profiler.work import Work

TITLE = "PREDICTION, not measured"
CPU = torch.device("cpu")
FORWARD, BACKWARD, DECODE, INT8 = "attention_forward", "attention_backward", "decode", "int8_matmul"
CUDA, TRITON = "fastattn cuda", "fastattn triton"

# The emulator's classes of instructions, in groups that fit a table.
CLASSES = {
    "MMA": ("tensor core",),
    "MUFU": ("special function",),
    "float": ("float", "half", "convert"),
    "integer": ("integer", "logic", "compare", "move"),
    "memory": ("matrix load", "shared", "async", "global", "local", "atomic", "param"),
    "sync": ("barrier", "warp", "control", "other"),
}
RESOURCES = {"issue": ISSUE, "tensor": TENSOR, "ex2": SPECIAL, "shared": SHARED, "L2": L2, "HBM": HBM}


@dataclass(frozen=True)
class Point:
    """A case of a benchmark's grid, as one of the backends would run it on ``machine``."""

    benchmark: str
    implementation: str
    case: Any
    machine: Machine

    def geometries(self) -> dict[str, Geometry]:
        """Returns the geometry of each kernel, by a part of its name, in the order in which the kernels run."""
        case, machine, is_native = self.case, self.machine, self.implementation == CUDA
        shared_bytes = USUAL[machine.arch][1]
        if self.benchmark == DECODE:
            if is_native:
                return launch_geometry.native_decode(case, machine)
            return launch_geometry.decode(case, machine, shared_bytes)
        if self.benchmark == INT8:
            if is_native:
                return launch_geometry.native_int8_matmul(case, machine)
            return launch_geometry.int8_matmul(case, machine, shared_bytes)
        if self.benchmark == BACKWARD:
            if is_native:
                return launch_geometry.native_attention_backward(case, machine)
            return launch_geometry.attention_backward(case, machine)
        if is_native:
            return launch_geometry.native_attention_forward(case, machine)
        return launch_geometry.triton_attention_forward(case, machine)

    def work(self) -> Work:
        case: Any = self.case
        if self.benchmark == FORWARD:
            found: Work = case.forward_work()
        elif self.benchmark == BACKWARD:
            found = case.backward_work()
        else:
            found = case.work()
        return found

    def small(self) -> Point:
        """Returns a shape that the emulator runs in a second, with the same code: tiles, masks, and splits if any."""
        case, num_sms = self.case, 1
        if isinstance(case, AttentionCase):
            seqlen, heads = 1024 if self.benchmark == FORWARD else 256, 1
            if any(geometry.roles for geometry in self.geometries().values()):
                # CTAs share keys as in the large shape, unless the large shape does so only because it has many tiles:
                # with a causal mask and as many KV heads as query heads. There the predicted L2 traffic is too high.
                num_sms, heads = 2, 2 - case.heads // case.kv_heads % 2
            case = replace(case, seqlen=seqlen, batch=1, heads=heads, kv_heads=1)
        elif isinstance(case, DecodeCase):
            is_split = len(self.geometries()) > 1
            num_sms, context = (2, 1024) if is_split else (1, 1024 if self.implementation == CUDA else 256)
            group = case.heads // case.kv_heads
            case = replace(case, batch=1, context=context, heads=group, kv_heads=1, ragged=False)
        else:
            is_split = len(self.geometries()) > 1
            num_sms, width, depth = (4, 128, 2048) if is_split else (1, 256, 512)
            n, k = (depth, width) if case.gradient else (width, depth)
            case = replace(case, layer="small", m=min(case.m, 128), n=n, k=k)
        return replace(self, case=case, machine=replace(self.machine, num_sms=num_sms))

    def longer(self) -> Point | None:
        """Returns the small point with twice the steps for each CTA.

        None where there are steps of two kinds, or where twice the steps might be launched in another way.
        """
        case = self.case
        if self.implementation != CUDA or isinstance(case, AttentionCase):
            return None
        if isinstance(case, DecodeCase):
            return replace(self, case=replace(case, context=2 * case.context))
        return replace(self, case=replace(case, n=2 * case.n) if case.gradient else replace(case, k=2 * case.k))

    def call(self) -> None:
        """Runs the case on the emulated GPU, through the public functions if there is one for it."""
        inputs: Any
        is_native = self.implementation == CUDA
        sm80 = native.forced_int8_tile(80) if is_native and self.benchmark == INT8 else contextlib.nullcontext()
        with fastattn.use_backend(self.implementation.split()[1]), sm80:
            if isinstance(self.case, AttentionCase):
                inputs = case_attention.make_inputs(self.case, CPU, 0)
                is_forward = self.benchmark == FORWARD
                prepare = case_attention.prepare_forward if is_forward else case_attention.prepare_backward
                prepare(self.case, inputs).call()
            elif isinstance(self.case, DecodeCase):
                case_decode.prepare(self.case, case_decode.make_inputs(self.case, CPU, 0)).call()
            else:
                inputs = case_int8.make_inputs(self.case, CPU, 0)
                if self.case.gradient:
                    ops = torch.ops.fastattn if is_native else torch.ops.fastattn_triton
                    weight = inputs.weight
                    ops.int8_matmul_grad_input(inputs.grad_out, weight.data, weight.scale, False)
                else:
                    case_int8.prepare(self.case, inputs).call()


@dataclass(frozen=True)
class Code:
    """The kernels that all points with the same small shape share; ``profiles`` has the keys of their geometries."""

    small: Point
    profiles: dict[str, Profile]


# --- which points ----------------------------------------------------------------------------------------------------


def is_modelled(case: Any) -> bool:
    """Returns whether the model covers the case: dense, without bias, window, or CTAs that share the keys of a tile."""
    return not isinstance(case, AttentionCase) or not (case.varlen or case.bias or case.window >= 0 or case.queries)


def _is_quick(benchmark: str, case: Any) -> bool:
    """Returns whether a quick run includes the case, so that all its kernels compile in a minute."""
    if isinstance(case, AttentionCase):
        is_plain = case.dtype == "bfloat16" and case.head_dim <= 128
        return is_plain and (benchmark == FORWARD or (case.head_dim == 128 and case.causal))
    if isinstance(case, DecodeCase):
        return not case.page_size and case.heads == 32
    return case.group is None and case.m in (1, 2048)


def has_native_kernel(case: Any, machine: Machine) -> bool:
    """Returns whether a CUDA C++ kernel that the model covers runs the case.

    For Hopper's int8 kernels and for cuBLAS, `int8_curve` has the predictions.
    """
    if isinstance(case, AttentionCase):
        return launch_geometry.native_forward_kernel(case, machine) is not None
    return not isinstance(case, Int8Case) or launch_geometry.is_int8_matmul_for_sm80(case, machine)


def points(full: bool) -> list[Point]:
    """Returns the points of the benchmarks' full grids, or of some cases of their quick ones."""
    attention = case_attention.full_cases() if full else case_attention.quick_cases()
    grids: tuple[tuple[str, Sequence[Any]], ...] = (
        (FORWARD, attention),
        (BACKWARD, attention),
        (DECODE, case_decode.full_cases() if full else case_decode.quick_cases()),
        (INT8, case_int8.full_cases() if full else case_int8.quick_cases()),
    )
    found = []
    for benchmark, cases in grids:
        for case in cases:
            if not is_modelled(case) or not (full or _is_quick(benchmark, case)):
                continue
            if kernel_profiles.HAS_NATIVE:
                found += [Point(benchmark, CUDA, case, each) for each in MACHINES if has_native_kernel(case, each)]
            found += [Point(benchmark, TRITON, case, machine) for machine in MACHINES]
    return found


# --- profiles and predictions ----------------------------------------------------------------------------------------


def counted(small: Point) -> Counted:
    return Counted(kernel_profiles.run(small.machine, small.machine.num_sms, small.call), small.geometries())


def codes(chosen: Iterable[Point]) -> dict[Point, Code]:
    """Returns the kernels' code by small point. While the emulator runs a shape, ptxas compiles the previous one's."""
    smalls = list(dict.fromkeys(point.small() for point in chosen))
    pending: dict[Point, Future[dict[str, Profile]]] = {}
    with ThreadPoolExecutor(1) as pool:
        for small in tqdm(smalls, desc="kernels on the emulator", unit="shape"):
            found, longer = counted(small), small.longer()
            longer_found = None if longer is None else counted(longer)
            pending[small] = pool.submit(kernel_profiles.profiles, found, small.machine, longer_found)
    return {small: Code(small, future.result()) for small, future in pending.items()}


def predict_kernel(profile: Profile, geometry: Geometry, machine: Machine) -> Prediction | None:
    """Predicts one kernel's time; None if the kernel has products and its machine code is not known."""
    counts = profile.counts
    overfetch = max(kernel_profiles.SECTOR_BYTES * counts.global_sectors / max(counts.global_bytes, 1), 1.0)
    hbm_bytes = geometry.hbm_bytes * overfetch
    if not geometry.step_macs:
        load = kernel_profiles.streaming_load(profile, machine, geometry)
        return predict(machine, 1, load, Load(), hbm_bytes)
    if profile.facts is None:
        return None
    mean = kernel_profiles.load(profile, geometry, geometry.mean_steps, geometry.mean_masked_steps)
    longest = kernel_profiles.load(profile, geometry, geometry.longest_steps, geometry.longest_masked_steps)
    return predict(machine, geometry.ctas, mean, longest, hbm_bytes)


def predict_point(point: Point, code: Code) -> dict[str, Prediction] | None:
    """Predicts each kernel of a point; they run one after the other. None if one of them cannot be predicted."""
    found = {}
    for name, geometry in point.geometries().items():
        profile = code.profiles.get(name)
        prediction = None if profile is None else predict_kernel(profile, geometry, point.machine)
        if prediction is None:
            return None
        found[name] = prediction
    return found


# --- tables and JSON -------------------------------------------------------------------------------------------------


def configuration(point: Point) -> str:
    """Returns what the code depends on, like ``attention forward cuda, d 128, causal, bf16``."""
    without = {"seqlen", "batch", "context", "layer"} | (set() if point.benchmark == DECODE else {"heads"})
    words = f"{point.benchmark.replace('_', ' ')} {point.implementation.split()[1]}"
    split = ", split" if point.benchmark in (DECODE, INT8) and len(point.geometries()) > 1 else ""
    return f"{words}, {label(dataclasses.asdict(point.case), without)}{split}"


def rows_of(code: Code) -> list[dict[str, Any]]:
    """Returns the facts and counts of each kernel as JSON objects."""
    small, found = code.small, []
    for name, geometry in small.geometries().items():
        if name not in code.profiles:
            continue
        profile = code.profiles[name]
        facts, counts = profile.facts, profile.counts
        actual, least = kernel_profiles.sectors_per_request(counts)
        of_loops = [] if facts is None else kernel_profiles.loops(profile)
        found.append(
            {
                "configuration": configuration(small),
                "kernel": name,
                "machine": small.machine.name,
                "tile": geometry.tile.rpartition(", ")[0] if "splits" in geometry.tile else geometry.tile,
                "threads": profile.threads,
                "registers": None if facts is None else facts.registers,
                "spill_bytes": None if facts is None else facts.spill_store_bytes,
                "shared_bytes": counts.shared_bytes,
                "ctas_per_sm": kernel_profiles.occupancy(profile, small.machine),
                "steps": [{"instructions": loop.mix, "tensor_share": loop.tensor_share} for loop in of_loops],
                "counted_case": dataclasses.asdict(small.case),
                "bank_conflicts": counts.bank_conflicts,
                "shared_wavefronts": counts.shared_wavefronts,
                "sectors_per_request": actual,
                "least_sectors_per_request": least,
                "global_bytes": counts.global_bytes,
                "least_bytes": geometry.hbm_bytes,
                "mma_to_least": profile.redundancy,
            }
        )
    return found


def _or_dash(value: Any) -> str:
    return "–" if value is None else f"{value}"


def static_table(rows: Iterable[dict[str, Any]]) -> str:
    """Returns a table of the machine code: resources, and the instructions of a warp in a main-loop step, by class.

    Of a masked step it has only the total number of instructions.
    """
    header = ("kernel", "GPU", "tile", "registers", "spilled", "shared KB", "CTAs/SM", "step", *CLASSES, "masked step")
    cells: list[Sequence[str]] = []
    for row in rows:
        steps = [step["instructions"] for step in row["steps"]]
        of_classes = [str(sum(steps[0].get(each, 0) for each in group)) if steps else "–" for group in CLASSES.values()]
        totals = [str(sum(step.values())) for step in steps]
        cells.append(
            (
                row["kernel"],
                row["machine"],
                row["tile"] or "–",
                _or_dash(row["registers"]),
                _or_dash(row["spill_bytes"]),
                f"{row['shared_bytes'] / 1024:.0f}",
                _or_dash(row["ctas_per_sm"]),
                totals[0] if totals else "–",
                *of_classes,
                totals[1] if len(totals) > 1 else "–",
                f"{row['steps'][0]['tensor_share']:.0%}" if totals else "–",
            )
        )
    return aligned((*header, "MMA share"), cells)


def counts_table(rows: Iterable[dict[str, Any]]) -> str:
    """Returns a table of what the emulator counted on the small shape."""
    header = ("kernel", "GPU", "wavefronts", "bank conflicts", "sectors/request", "at best", "bytes", "to least")
    cells: list[Sequence[str]] = []
    for row in rows:
        wavefronts = row["shared_wavefronts"]
        cells.append(
            (
                row["kernel"],
                row["machine"],
                str(wavefronts),
                f"{row['bank_conflicts'] / wavefronts:.0%}" if wavefronts else "–",
                f"{row['sectors_per_request']:.1f}",
                f"{row['least_sectors_per_request']:.1f}",
                str(row["global_bytes"]),
                f"{row['global_bytes'] / row['least_bytes']:.2f}",
                f"{row['mma_to_least']:.2f}" if row["steps"] else "–",
            )
        )
    return aligned((*header, "MMA to least"), cells)


def prediction_table(predicted: dict[Point, dict[str, Prediction]]) -> str:
    """Returns a table of times, rates and binding resources, and each resource's own time as a share of the time."""
    header = ("case", "backend", "GPU", "predicted µs", "TFLOP/s", "GB/s", "bound by", *RESOURCES)
    cells: list[Sequence[str]] = []
    for point, kernels in predicted.items():
        seconds = sum(each.seconds for each in kernels.values())
        work = point.work()
        parts = (sum(each.seconds_by[name] for each in kernels.values()) / seconds for name in RESOURCES.values())
        cells.append(
            (
                f"{point.benchmark.replace('_', ' ')}: {label(dataclasses.asdict(point.case))}",
                point.implementation.split()[1],
                point.machine.name,
                f"{seconds * 1e6:.1f}",
                f"{work.flops / seconds / 1e12:.0f}",
                f"{work.bytes / seconds / 1e9:.0f}",
                binding(kernels),
                *(f"{part:.0%}" for part in parts),
            )
        )
    return aligned(header, cells)


def binding(kernels: dict[str, Prediction]) -> str:
    """Returns the resource that binds the kernel that takes longest."""
    return max(kernels.values(), key=lambda each: each.seconds).resource


def document(rows: list[dict[str, Any]], predicted: dict[Point, dict[str, Prediction]]) -> predictions.Predictions:
    """Returns the facts of the kernels and the predictions as a document that predictions.py writes."""
    return {
        "schema": predictions.SCHEMA,
        "prediction": True,
        "date": environment.now(),
        "commit": environment.commit(),
        "machines": [dataclasses.asdict(machine) for machine in MACHINES],
        "kernels": rows,
        "cases": [
            {
                "prediction": True,
                "machine": point.machine.name,
                "benchmark": point.benchmark,
                "case": dataclasses.asdict(point.case),
                "implementation": point.implementation,
                "seconds": sum(each.seconds for each in kernels.values()),
                "resource": binding(kernels),
                "kernels": {name: dict(each.seconds_by) for name, each in kernels.items()},
            }
            for point, kernels in predicted.items()
        ],
    }


def show(rows: list[dict[str, Any]], predicted: dict[Point, dict[str, Prediction]]) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["configuration"], []).append(row)
    render: tuple[tuple[str, Callable[[Iterable[dict[str, Any]]], str]], ...] = (
        ("Machine code; instructions: of a warp in one step of the main loop, rare branches included", static_table),
        ("Counted by the emulator on a small shape", counts_table),
    )
    for title, make in render:
        print(f"\n{title}\n")
        lines = iter(make(rows).splitlines())
        print(next(lines), next(lines), sep="\n")  # the header and its rule
        for name, group in groups.items():
            print(f"\n{name}")
            for _ in group:
                print(next(lines))
    print(f"\n{TITLE}: time by the model of benchmarks/predict/machine_model.py; launches not included\n")
    print(prediction_table(predicted))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every head dim, dtype, kind of cache and tile: minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything to this file, or into this folder")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)

    if not kernel_profiles.HAS_NATIVE:
        print("There is no nvcc here: nothing is said of the CUDA C++ kernels.")
    if not kernel_profiles.static_facts.has_tools():
        print("ptxas, cuobjdump or nvdisasm is missing here: machine code is not known, and kernels with matrix")
        print("products are not predicted.")
    wanted = points(chosen.full)
    known = codes(wanted)
    predicted = {point: predict_point(point, known[point.small()]) for point in wanted}
    complete = {point: kernels for point, kernels in predicted.items() if kernels is not None}
    rows = [row for code in known.values() for row in rows_of(code)]
    order = {name: place for place, name in reversed(list(enumerate(row["configuration"] for row in rows)))}
    rows.sort(key=lambda row: order[row["configuration"]])
    show(rows, complete)
    if chosen.json:
        print(f"predictions: {predictions.write(document(rows, complete), chosen.json)}")
