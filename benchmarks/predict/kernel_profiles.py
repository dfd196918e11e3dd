"""Profiles a kernel without a GPU, by its machine code and by what the emulator counts on a small shape.

From both, `load` computes the load that a CTA of any shape puts on its SM; `machine_model` predicts times from it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from emulator import device, launches, native_library, options, static_facts
from emulator.launches import Launched
from emulator.report import InstructionCounts, Report
from emulator.static_facts import KernelFacts

if "fastattn" not in sys.modules:
    native_library.import_fastattn()

from benchmarks.predict.launch_geometry import Geometry, WarpSpecialised
from benchmarks.predict.machine_model import Load, Machine, ctas_per_sm, largest
from fastattn import native

# Whether the CUDA C++ kernels come from the emulator's build and not from the installed library.
HAS_NATIVE = native.BUILD["version"] == "0+emulated"
_SPECIAL_FUNCTIONS = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"}  # opcodes of PTX
_HMMA_MACS = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}
SECTOR_BYTES, WAVEFRONT_BYTES = 32, 128
SHARING_CTAS = 2  # the CTAs of a cluster that shares the copies of keys


@dataclass(frozen=True)
class Loop:
    """One pass of one warp through a loop: its instructions by class, and its multiply-adds by mma and by wgmma."""

    mix: dict[str, int]
    mma_macs: int
    wgmma_macs: int

    @property
    def instructions(self) -> int:
        return sum(self.mix.values())

    @property
    def macs(self) -> int:
        return self.mma_macs + self.wgmma_macs

    def of_one(self, steps: int) -> Loop:
        """Returns the loop's share for one step, if a pass has ``steps`` steps."""
        mix = {kind: round(count / steps) for kind, count in self.mix.items()}
        return Loop(mix, self.mma_macs // steps, self.wgmma_macs // steps)

    @property
    def tensor_share(self) -> float:
        """The share of tensor-core instructions among all instructions."""
        return self.mix.get("tensor core", 0) / self.instructions


@dataclass(frozen=True)
class Profile:
    """One kernel, compiled for one machine. ``facts`` is None if ptxas or the disassembler is missing."""

    kernel: str
    threads: int
    counts: Report  # the emulator's counts for the small shape
    counted: Geometry  # the small shape's geometry
    facts: KernelFacts | None
    longer: tuple[Report, Geometry] | None = None  # counts and geometry of a shape with more steps for each CTA

    @property
    def redundancy(self) -> float:
        """The ratio of executed multiply-adds to those that the tiles need: above 1, warps repeat each other's work."""
        return macs_of(self.counts) / self.counted.macs if self.counted.macs else 1.0


def macs_of(counts: Report) -> int:
    return sum(operations.multiply_adds for operations in counts.tensor_core.values())


def loop_of(opcodes: Iterable[str]) -> Loop:
    """Returns the loop with this machine code, a sequence of opcodes with their modifiers."""
    opcodes = list(opcodes)
    mma = wgmma = 0
    for opcode in opcodes:
        if found := re.match(r"HMMA\.(\d+)", opcode):
            mma += _HMMA_MACS[found[1]]
        elif found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", opcode):
            m, n, k = map(int, found.groups())
            wgmma += m * n * k // 4  # four warps execute it together
    return Loop(static_facts.mix(opcodes), mma, wgmma)


def loops(profile: Profile) -> list[Loop]:
    """Returns the main loops with the products of a step: that of unmasked steps and, if there are two, that of masked
    steps. Needs ``facts``.

    In an attention kernel, loops with fewer products than others repair values that are not finite, and do not run. A
    loop of the int8 gradient with more products also adds up the bias's gradient. Of the other loops, the shortest does
    not mask. In a warp-specialised kernel a pass may have several steps.
    """
    assert profile.facts is not None
    roles = profile.counted.roles
    of_step = profile.counted.step_macs // (profile.threads // 32 if roles is None else roles.consumers)
    found = [
        loop for loop in (loop_of(profile.facts.opcodes_of(body)) for body in profile.facts.main_loops) if loop.macs
    ]
    if roles is not None:
        found = [loop.of_one(loop.macs // of_step) for loop in found if loop.macs % of_step == 0]
    macs = {loop.macs for loop in found}
    chosen = of_step if of_step in macs else max(macs, default=0)
    whole = sorted((loop for loop in found if loop.macs == chosen), key=lambda loop: loop.instructions)
    return whole[:1] + whole[-1:] if len(whole) > 1 else whole


def load(profile: Profile, geometry: Geometry, steps: float, masked_steps: float) -> Load:
    """Returns the load of a CTA with so many unmasked and masked steps. Needs ``facts``, and a kernel with products.

    The instructions of a loop count for each pass of each warp, others once for each warp. They are limited to what the
    emulator counted, where `by_difference` can tell: machine code for options that are not in use does not run. The
    rest comes from `by_difference` or `traffic_of`, and all figures of a warp-specialised kernel from `by_role`.
    """
    if profile.counted.roles is not None:
        traffic = by_role(profile.counts, profile.counted, profile.counted.roles)
        macs = (geometry.first_steps + steps + masked_steps) * geometry.step_macs * profile.redundancy
        return traffic.once + traffic.step * steps + traffic.masked_step * masked_steps + Load(wgmma_macs=macs)
    assert profile.facts is not None
    found = loops(profile)
    plain, masked = found[0], found[-1]
    warps = profile.threads // 32
    outside = len(profile.facts.instructions) - sum(len(body) for body in profile.facts.main_loops)
    is_counted = profile.longer is not None
    traffic = by_difference(profile) if is_counted else traffic_of(profile.counts, profile.counted, warps)

    def with_code(counted: Load, code: Load) -> Load:
        if not is_counted:
            return counted + code
        fewer = {name: min(getattr(counted, name), getattr(code, name)) for name in ("instructions", "special")}
        return replace(counted, mma_macs=code.mma_macs, wgmma_macs=code.wgmma_macs, **fewer)

    total = with_code(traffic.once, Load(instructions=max(outside, 0) * warps))
    for loop, passes, counted in ((plain, steps, traffic.step), (masked, masked_steps, traffic.masked_step)):
        code = Load(
            instructions=loop.instructions,
            mma_macs=loop.mma_macs,
            wgmma_macs=loop.wgmma_macs,
            special=loop.mix.get("special function", 0),
        )
        total += with_code(counted, code * (geometry.step_macs * profile.redundancy / loop.macs)) * passes
    return total


@dataclass(frozen=True)
class Traffic:
    """The load that a CTA puts on shared memory and the L2: in an unmasked step, in a masked step, and once."""

    step: Load
    masked_step: Load
    once: Load


def traffic_of(counts: Report, geometry: Geometry, warps: int) -> Traffic:
    """Divides what the emulator counted on the shape of ``geometry`` among the steps.

    An instruction that all warps executed as often as there were steps of one kind belongs to these steps. One that
    they executed once for each CTA is outside the loops. Asynchronous copies run ahead of their steps: they, and all
    other instructions, are spread over all steps.
    """
    steps, masked_steps = geometry.ctas * geometry.mean_steps, geometry.ctas * geometry.mean_masked_steps
    step = masked = once = Load()
    for row in counts.rows:
        part = Load(wavefronts=row.shared_wavefronts, l2_bytes=SECTOR_BYTES * row.global_sectors)
        if not row.opcode.startswith("cp.async") and row.warps == warps * steps:
            step += part * (1 / steps)
        elif not row.opcode.startswith("cp.async") and row.warps == warps * masked_steps:
            masked += part * (1 / masked_steps)
        elif not row.opcode.startswith("cp.async") and row.warps == warps * geometry.ctas:
            once += part * (1 / geometry.ctas)
        else:
            spread = part * (1 / (steps + masked_steps))
            step, masked = step + spread, masked + spread
    return Traffic(step, masked, once)


def by_role(counts: Report, geometry: Geometry, roles: WarpSpecialised) -> Traffic:
    """Divides what the emulator counted on the shape of ``geometry`` in a warp-specialised kernel among its steps.

    This includes the PTX's instructions and special functions: the loops have branches that hardly ever run, which the
    machine code does not show. An instruction that all consumers executed once for every two unmasked steps belongs to
    these, and one that they executed for each masked step to those. What TMA copies is divided among all steps. It is
    also written to shared memory, twice if a CTA also copies for the other CTA of its cluster. The rest, like the first
    step, counts once for each tile.
    """
    steps, masked_steps = geometry.ctas * geometry.mean_steps, geometry.ctas * geometry.mean_masked_steps
    step = masked = total = Load()
    copied = receivers = 0
    for row in counts.rows:
        part = counted_part(row)
        if row.opcode.startswith("cp.async.bulk.tensor"):
            copied += row.global_bytes
            receivers = max(receivers, SHARING_CTAS if "multicast" in row.opcode else 1)
            part = replace(part, l2_bytes=0)
        if 2 * row.warps == roles.consumers * steps:
            step += part * (1 / steps)
        elif row.warps == roles.consumers * masked_steps and masked_steps != geometry.ctas:
            masked += part * (1 / masked_steps)
        total += part
    if not masked.instructions:  # no masked steps, or one for each tile, which look like what is done once for a tile
        masked = step
    once = largest((total + step * -steps + masked * -masked_steps) * (1 / geometry.ctas), Load())
    key_bytes = (copied - roles.query_bytes) / (steps + masked_steps + geometry.ctas)
    query_bytes = roles.query_bytes / geometry.ctas
    copies = Load(wavefronts=receivers * key_bytes / WAVEFRONT_BYTES, l2_bytes=key_bytes)
    query = Load(wavefronts=query_bytes / WAVEFRONT_BYTES, l2_bytes=query_bytes)
    return Traffic(step + copies, masked + copies, once + query + copies)


def by_difference(profile: Profile) -> Traffic:
    """Divides what the emulator counted more on the longer of two shapes by its additional steps.

    This needs no guess at what is in the loop. All steps count as of one kind, and instructions are those of the PTX.
    """
    assert profile.longer is not None
    (fewer, few_steps), (more, more_steps) = (
        (_counted_load(counts), geometry.ctas * (geometry.mean_steps + geometry.mean_masked_steps))
        for counts, geometry in ((profile.counts, profile.counted), profile.longer)
    )
    step = (more + fewer * -1) * (1 / (more_steps - few_steps))
    once = largest((fewer + step * -few_steps) * (1 / profile.counted.ctas), Load())
    return Traffic(step, step, once)


def counted_part(row: InstructionCounts) -> Load:
    return Load(
        instructions=row.warps,
        special=row.warps if row.opcode.split(".")[0] in _SPECIAL_FUNCTIONS else 0,
        wavefronts=row.shared_wavefronts,
        l2_bytes=SECTOR_BYTES * row.global_sectors,
    )


def _counted_load(counts: Report) -> Load:
    return sum(map(counted_part, counts.rows), Load())


def streaming_load(profile: Profile, machine: Machine, geometry: Geometry) -> Load:
    """Returns the load of an SM in a kernel without products: the emulator's counts, scaled by the bytes moved.

    Instructions are those of the PTX.
    """
    part = geometry.hbm_bytes / max(profile.counts.global_bytes, 1) / machine.num_sms
    return _counted_load(profile.counts) * part


def occupancy(profile: Profile, machine: Machine) -> int | None:
    """Returns the number of CTAs that fit on an SM, or None if the registers are not known."""
    if profile.facts is None:
        return None
    return ctas_per_sm(machine, profile.threads, profile.facts.registers, profile.counts.shared_bytes)


def run(machine: Machine, num_sms: int, call: Callable[[], Any]) -> list[Launched]:
    """Returns the launches of ``call`` on an emulated ``machine`` with ``num_sms`` SMs."""
    with device.emulated(machine.arch, num_sms), options.launching(seed=0, races=False), launches.recorded() as found:
        call()
    return found


@dataclass(frozen=True)
class Counted:
    """The launches of one call, and the geometry of each kernel, by a part of the kernel's name."""

    launched: Sequence[Launched]
    geometries: Mapping[str, Geometry]

    def by_part(self) -> dict[str, tuple[Launched, Geometry]]:
        """Returns the first launch of each kernel with its geometry, by the part of its name.

        Raises ``ValueError`` if a launch has another number of CTAs than its geometry says, or fewer multiply-adds.
        """
        found: dict[str, tuple[Launched, Geometry]] = {}
        for part, geometry in self.geometries.items():
            one = next((one for one in self.launched if part in one.report.kernel), None)
            if one is None:
                continue
            if geometry.step_macs and (math.prod(one.grid) != geometry.launched or macs_of(one.report) < geometry.macs):
                raise ValueError(
                    f"{one.report.kernel}: expected {geometry.launched} CTAs and {geometry.macs:.0f} multiply-adds, "
                    f"counted {math.prod(one.grid)} and {macs_of(one.report)}"
                )
            found[part] = one, geometry
        return found


def profiles(counted: Counted, machine: Machine, longer: Counted | None) -> dict[str, Profile]:
    """Returns the kernels' profiles, by the parts of their names. Raises ``ValueError`` like `Counted.by_part`."""
    found: dict[str, Profile] = {}
    of_longer = {} if longer is None else longer.by_part()
    for part, (one, geometry) in counted.by_part().items():
        name = one.report.kernel
        facts = _facts(one.ptx, machine).get(name)
        found[part] = Profile(name, math.prod(one.block), one.report, geometry, facts)
        if part in of_longer:
            more, of_more = of_longer[part]
            found[part] = replace(found[part], longer=(more.report, of_more))
    return found


def _facts(ptx: str, machine: Machine) -> dict[str, KernelFacts]:
    """Returns the facts of the kernels in ``ptx``, by name. PTX for an earlier GPU is compiled for this one.

    The GPU's driver and Triton compile it in the same way.
    """
    if not static_facts.has_tools():
        return {}
    is_earlier = static_facts.target_of(ptx) != f"sm_{machine.arch}a"
    return static_facts.of_ptx(ptx, f"sm_{machine.arch}" if is_earlier else None)


def sectors_per_request(counts: Report) -> tuple[float, float]:
    """Returns the sectors of global memory per request, and the fewest that the bytes of the lanes need."""
    requests = sum(row.warps for row in counts.rows if row.global_sectors)
    if not requests:
        return 0.0, 0.0
    return counts.global_sectors / requests, counts.global_bytes / SECTOR_BYTES / requests
