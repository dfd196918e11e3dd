"""Tests with random programs, which are compared with a lane-by-lane evaluation in numpy and PyTorch.

A program is a tree of straight-line code and of branches on predicates that differ by lane. All of it uses one set of
registers, which reveals a lane that executes too much or too little. Every run draws the same programs
(``derandomize``), and a failure shows the smallest program found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulator import Module

REGISTERS = 6  # of each kind
U32, S32 = np.uint32, np.int32


@dataclass(frozen=True)
class Operation:
    """An instruction. ``text`` has {d}, {a}, {b}, {c} for registers of ``kind``; ``apply`` evaluates numpy scalars."""

    text: str
    kind: str  # "r", "f" or "h"
    sources: int
    apply: Callable[..., object]


def wrap(value: int) -> np.uint32:
    return U32(int(value) % 2**32)


def signed(value: np.uint32) -> int:
    return int(value.astype(S32))


def half(function: Callable[..., torch.Tensor]) -> Callable[..., np.float16]:
    def apply(*values: np.float16) -> np.float16:
        return np.float16(function(*(torch.tensor(float(value), dtype=torch.float16) for value in values)).item())

    return apply


def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Computes a * b + c with one rounding: the exact product is added in fp64, rounded to odd, then to fp32."""
    product, c64 = np.float64(a) * np.float64(b), np.float64(c)
    total = product + c64
    if not np.isfinite(total):
        return np.float32(total)
    back = total - product
    error = (product - (total - back)) + (c64 - back)
    bits = total.view(np.int64)
    if error != 0 and bits & 1 == 0:
        total = np.int64(bits + (1 if (error > 0) == (total > 0) else -1)).view(np.float64)
    return np.float32(total)


def prmt(a: int, b: int, c: int) -> int:
    chosen = ((b << 32 | a) >> 8 * (c >> 4 * i & 7) & 255 for i in range(4))
    return sum((255 * (x >> 7) if c >> 4 * i & 8 else x) << 8 * i for i, x in enumerate(chosen))


INTEGER = [
    Operation("add.u32 {d}, {a}, {b};", "r", 2, lambda a, b: wrap(int(a) + int(b))),
    Operation("sub.s32 {d}, {a}, {b};", "r", 2, lambda a, b: wrap(int(a) - int(b))),
    Operation("mad.lo.s32 {d}, {a}, {b}, {c};", "r", 3, lambda a, b, c: wrap(int(a) * int(b) + int(c))),
    Operation("mul.hi.s32 {d}, {a}, {b};", "r", 2, lambda a, b: wrap(signed(a) * signed(b) >> 32)),
    Operation("mul.hi.u32 {d}, {a}, {b};", "r", 2, lambda a, b: wrap(int(a) * int(b) >> 32)),
    Operation("min.s32 {d}, {a}, {b};", "r", 2, lambda a, b: wrap(min(signed(a), signed(b)))),
    Operation("max.u32 {d}, {a}, {b};", "r", 2, lambda a, b: max(a, b)),
    Operation("abs.s32 {d}, {a};", "r", 1, lambda a: wrap(abs(signed(a)))),
    Operation("xor.b32 {d}, {a}, {b};", "r", 2, lambda a, b: a ^ b),
    Operation("lop3.b32 {d}, {a}, {b}, {c}, 0xCA;", "r", 3, lambda a, b, c: (a & b) | (~a & c)),
    Operation("shl.b32 {d}, {a}, {b};", "r", 2, lambda a, b: wrap(int(a) << int(b)) if b < 32 else U32(0)),
    Operation("shr.s32 {d}, {a}, {b};", "r", 2, lambda a, b: wrap(signed(a) >> min(int(b), 31))),
    Operation("shf.l.wrap.b32 {d}, {a}, {b}, {c};", "r", 3,
              lambda a, b, c: wrap((int(b) << 32 | int(a)) << int(c) % 32 >> 32)),
    Operation("prmt.b32 {d}, {a}, {b}, {c};", "r", 3, lambda a, b, c: wrap(prmt(int(a), int(b), int(c)))),
    Operation("popc.b32 {d}, {a};", "r", 1, lambda a: U32(int(a).bit_count())),
    Operation("bfe.u32 {d}, {a}, 5, 9;", "r", 1, lambda a: U32(int(a) >> 5 & 511)),
    Operation("sad.s32 {d}, {a}, {b}, {c};", "r", 3, lambda a, b, c: wrap(abs(signed(a) - signed(b)) + int(c))),
]  # fmt: skip
FLOAT = [
    Operation("add.rn.f32 {d}, {a}, {b};", "f", 2, lambda a, b: a + b),
    Operation("sub.f32 {d}, {a}, {b};", "f", 2, lambda a, b: a - b),
    Operation("mul.f32 {d}, {a}, {b};", "f", 2, lambda a, b: a * b),
    Operation("fma.rn.f32 {d}, {a}, {b}, {c};", "f", 3, fused),
    Operation("div.rn.f32 {d}, {a}, {b};", "f", 2, lambda a, b: a / b),
    Operation("sqrt.rn.f32 {d}, {a};", "f", 1, np.sqrt),
    Operation("neg.f32 {d}, {a};", "f", 1, lambda a: -a),
    Operation("cvt.rmi.f32.f32 {d}, {a};", "f", 1, np.floor),
]
HALF = [
    Operation("add.f16 {d}, {a}, {b};", "h", 2, half(torch.add)),
    Operation("sub.f16 {d}, {a}, {b};", "h", 2, half(torch.sub)),
    Operation("mul.f16 {d}, {a}, {b};", "h", 2, half(torch.mul)),
    Operation("max.NaN.f16 {d}, {a}, {b};", "h", 2, half(torch.maximum)),
    Operation("neg.f16 {d}, {a};", "h", 1, half(torch.neg)),
]
OPERATIONS = INTEGER + FLOAT + HALF
COMPARISONS: dict[str, Callable[..., bool]] = {
    "lt.s32": lambda a, b: signed(a) < signed(b),
    "ge.u32": lambda a, b: a >= b,
    "ne.s32": lambda a, b: a != b,
}


@dataclass(frozen=True)
class Step:
    """An operation with its registers and optionally a guard, which is a comparison of two integers."""

    operation: Operation
    registers: tuple[int, ...]  # d, a, b, c
    guard: tuple[str, int, int] | None


@dataclass(frozen=True)
class Branch:
    condition: tuple[str, int, int]
    yes: Block
    no: Block


Block = list[Step | Branch]
Registers = dict[str, list[object]]

REGISTER = st.integers(0, REGISTERS - 1)
CONDITION = st.tuples(st.sampled_from(sorted(COMPARISONS)), REGISTER, REGISTER)
STEP = st.builds(
    Step, st.sampled_from(OPERATIONS), st.tuples(*[REGISTER] * 4), st.one_of(st.none(), st.none(), CONDITION)
)
BLOCK = st.recursive(
    st.lists(STEP, min_size=1, max_size=6),
    lambda inner: st.lists(st.one_of(STEP, st.builds(Branch, CONDITION, inner, inner)), min_size=1, max_size=5),
    max_leaves=6,
)


@dataclass
class Writer:
    """Writes the PTX of a program."""

    lines: list[str] = field(default_factory=list)
    labels: int = 0

    def compare(self, condition: tuple[str, int, int]) -> None:
        self.lines.append(f"setp.{condition[0]} %p0, %r{condition[1]}, %r{condition[2]};")

    def block(self, block: Block) -> None:
        for item in block:
            if isinstance(item, Step):
                kind = item.operation.kind
                names = {name: f"%{kind}{register}" for name, register in zip("dabc", item.registers, strict=True)}
                if item.guard is not None:
                    self.compare(item.guard)
                self.lines.append(("" if item.guard is None else "@!%p0 ") + item.operation.text.format(**names))
                continue
            label = self.labels = self.labels + 1
            self.compare(item.condition)
            self.lines.append(f"@%p0 bra YES{label};")
            self.block(item.no)
            self.lines += [f"bra.uni DONE{label};", f"YES{label}:"]
            self.block(item.yes)
            self.lines.append(f"DONE{label}:")


def evaluate(block: Block, registers: Registers) -> None:
    """Evaluates a program for one lane."""

    def holds(condition: tuple[str, int, int]) -> bool:
        return COMPARISONS[condition[0]](registers["r"][condition[1]], registers["r"][condition[2]])

    for item in block:
        if isinstance(item, Branch):
            evaluate(item.yes if holds(item.condition) else item.no, registers)
        elif item.guard is None or not holds(item.guard):
            mine = registers[item.operation.kind]
            d, *sources = item.registers
            mine[d] = item.operation.apply(*(mine[i] for i in sources[: item.operation.sources]))


KINDS = {"r": (np.uint32, 4, "b32"), "f": (np.float32, 4, "b32"), "h": (np.float16, 2, "b16")}


def run(block: Block, inputs: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Runs a program on the emulator, and returns the registers of the warp."""
    writer = Writer()
    writer.block(block)
    moved = {kind: np.array(values) for kind, values in inputs.items()}
    code = {"ld": "", "st": ""}
    for index, (kind, (_, size, bits)) in enumerate(KINDS.items()):
        for register in range(REGISTERS):
            place = f"[%a{index}+{32 * size * register}]"
            code["ld"] += f"ld.global.{bits} %{kind}{register}, {place};\n"
            code["st"] += f"st.global.{bits} {place}, %{kind}{register};\n"
    addresses = "".join(
        f"ld.param.u64 %a{i}, [p{i}]; mad.wide.u32 %a{i}, %i, {size}, %a{i};\n"
        for i, (_, size, _) in enumerate(KINDS.values())
    )
    text = f""".version 8.0\n.target sm_80\n.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{ .reg .pred %p<1>; .reg .b32 %r<{REGISTERS}>, %i; .reg .f32 %f<{REGISTERS}>; .reg .b16 %h<{REGISTERS}>;
.reg .b64 %a<3>; mov.u32 %i, %tid.x;
{addresses}{code["ld"]}{chr(10).join(writer.lines)}
bar.sync 0;
{code["st"]}ret; }}"""
    Module(text).launch("k", (1,), (32,), list(moved.values()), seed=seed)
    return moved


@settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(block=BLOCK, seed=st.integers(0, 2**32 - 1))
def test_random_programs(block: Block, seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = (REGISTERS, 32)
    integers = generator.integers(0, 2**32, shape, dtype=np.uint32)
    inputs = {
        "r": np.where(generator.random(shape) < 0.5, integers % 40, integers).astype(np.uint32),
        "f": (generator.standard_normal(shape) * 2.0 ** generator.integers(-20, 20, shape)).astype(np.float32),
        "h": generator.standard_normal(shape).astype(np.float16),
    }
    got = run(block, inputs, seed)
    with np.errstate(all="ignore"):
        for lane in range(32):
            registers: Registers = {
                kind: [values[i, lane] for i in range(REGISTERS)] for kind, values in inputs.items()
            }
            evaluate(block, registers)
            for kind, values in got.items():
                for i in range(REGISTERS):
                    result, expected = values[i, lane], registers[kind][i]
                    assert np.array_equal(result, expected, equal_nan=kind != "r"), (kind, i, lane)
