"""Kernels of a few instructions, with bounds for the difference between a GPU's and the emulator's results.

Not a test module. In `CASES`, each thread reads three 64-bit words and writes one; `ATOMICS` update a few cells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

THREADS, CTAS = 128, 8
HEADER = ".version {version}\n.target {target}\n.address_size 64\n"


@dataclass(frozen=True)
class Bound:
    """A bound of |GPU's result - exact result| from the PTX manual: the sum of the three fields."""

    relative: float = 0.0
    ulps: float = 0.0  # units in the last place of the result's type
    absolute: float = 0.0


EXACT = None

# For each kind of result: the PTX that moves it into the 64-bit word that a thread stores, and the dtype to view it as.
RESULTS: dict[str, tuple[str, torch.dtype]] = {
    "b32": ("cvt.u64.u32 %rd7, %r7;", torch.int64),
    "b64": ("", torch.int64),
    "f32": ("mov.b32 %r7, %f7; cvt.u64.u32 %rd7, %r7;", torch.float32),
    "f64": ("mov.b64 %rd7, %d7;", torch.float64),
    "f16": ("mov.b32 %r7, {%h7, %h8};", torch.float16),
    "bf16": ("mov.b32 %r7, {%h7, %h8};", torch.bfloat16),
    "f16x2": ("", torch.float16),
    "bf16x2": ("", torch.bfloat16),
}


@dataclass(frozen=True)
class Case:
    """A kernel of a few instructions. ``body`` has its operands in %r1 to %r3, %rd1 to %rd3 (all 64 bits), %f1 to %f3,
    %d1 to %d3 and %h1 to %h3, and leaves its result in register 7 of the result's kind."""

    name: str
    body: str
    result: str
    operands: str  # the type of the operands: "bits", "f32", "f64", "f16" or "bf16"
    bound: Bound | None = EXACT
    domain: tuple[float, float] | None = None  # limits of all operands; None: all values
    target: str = "sm_80"

    def __str__(self) -> str:
        return self.name

    def ptx(self) -> str:
        kind = self.result
        into_words = RESULTS[kind][0]
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            into_words += " cvt.u64.u32 %rd7, %r7;"
        version = "7.8" if self.target == "sm_80" else "8.0"
        return f"""{HEADER.format(version=version, target=self.target)}
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 out)
{{
    .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .f32 %f<9>; .reg .f64 %d<9>; .reg .b64 %rd<20>;
    .shared .align 16 .b8 buffer[{16 * THREADS}];
    mov.u32 %r10, %tid.x; mov.u32 %r11, %ctaid.x; mov.u32 %r12, %ntid.x;
    mad.lo.u32 %r11, %r11, %r12, %r10; mul.wide.u32 %rd10, %r11, 8;
    ld.param.u64 %rd1, [a]; add.s64 %rd1, %rd1, %rd10; ld.global.b64 %rd1, [%rd1];
    ld.param.u64 %rd2, [b]; add.s64 %rd2, %rd2, %rd10; ld.global.b64 %rd2, [%rd2];
    ld.param.u64 %rd3, [c]; add.s64 %rd3, %rd3, %rd10; ld.global.b64 %rd3, [%rd3];
    mov.b64 {{%r1, %r4}}, %rd1; mov.b64 {{%r2, %r5}}, %rd2; mov.b64 {{%r3, %r6}}, %rd3;
    mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3;
    mov.b64 %d1, %rd1; mov.b64 %d2, %rd2; mov.b64 %d3, %rd3;
    mov.b32 {{%h1, %h4}}, %r1; mov.b32 {{%h2, %h5}}, %r2; mov.b32 {{%h3, %h6}}, %r3; mov.b16 %h8, 0;
    {self.body}
    {into_words}
    ld.param.u64 %rd9, [out]; add.s64 %rd9, %rd9, %rd10; st.global.b64 [%rd9], %rd7;
    ret;
}}"""


def special_values(kind: str) -> Tensor:
    values = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, 100.0, torch.inf, -torch.inf, torch.nan]
    dtype = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    limits = torch.finfo(dtype)
    edges = [limits.max, limits.min, limits.tiny, limits.tiny / 8, -limits.tiny / 4, 1 + limits.eps]
    return torch.tensor(values + edges, dtype=torch.float64).to(dtype)


def operand(kind: str, domain: tuple[float, float] | None, generator: torch.Generator) -> Tensor:
    """Returns [THREADS * CTAS] 64-bit words with numbers of many magnitudes and special values."""
    count = THREADS * CTAS
    if kind == "bits":
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)
        small = torch.randint(-70, 70, (count,), generator=generator)
        edges = torch.tensor([0, 1, -1, 1 << 31, (1 << 31) - 1, -(1 << 31), -(1 << 63), (1 << 63) - 1])
        words[::3] = small[::3]
        words[1 : 1 + 5 * len(edges) : 5] = edges[torch.randperm(len(edges), generator=generator)]
        return words
    dtype = special_values(kind).dtype
    per_word = 8 // dtype.itemsize
    if domain is not None:
        low, high = domain
        return (torch.rand(count * per_word, generator=generator) * (high - low) + low).to(dtype).view(torch.int64)
    values = torch.randn(count * per_word, generator=generator, dtype=torch.float64)
    spread = 30.0 if dtype in (torch.float32, torch.float64, torch.bfloat16) else 6.0
    values *= torch.exp2(spread * torch.randn(values.shape, generator=generator, dtype=torch.float64))
    values[::2] = torch.randn(len(values[::2]), generator=generator, dtype=torch.float64)
    values = values.to(dtype)
    special = special_values(kind)
    places = torch.randperm(len(values), generator=generator)[: 4 * len(special)]
    values[places] = special.repeat(4)
    return values.view(torch.int64)


def simple(operands: str, result: str, *bodies: str, **options: Any) -> list[Case]:
    """Returns a case for each body, named by the opcode that writes the result: ``add.s32`` for ``add.s32 %r7, …;``."""
    found = []
    for body in bodies:
        steps = [words for step in body.split(";") if len(words := step.split()) > 1]
        writing = [
            words for words in steps if re.match(r"%[a-z]+7\b", words[1]) and words[0] not in ("selp.b32", "mov.u32")
        ]
        found.append(Case((writing or steps)[0][0], body, result, operands, **options))
    return found


def with_types(template: str, *types: str) -> list[str]:
    return [template.replace("TYPE", kind) for kind in types]


INTEGER = simple(
    "bits",
    "b32",
    "add.s32 %r7, %r1, %r2;",
    "add.sat.s32 %r7, %r1, %r2;",
    "sub.u32 %r7, %r1, %r2;",
    *with_types("mul.lo.TYPE %r7, %r1, %r2;", "s32", "u32"),
    *with_types("mul.hi.TYPE %r7, %r1, %r2;", "s32", "u32"),
    "mad.lo.s32 %r7, %r1, %r2, %r3;",
    *with_types("mad.hi.TYPE %r7, %r1, %r2, %r3;", "s32", "u32"),
    *with_types("min.TYPE %r7, %r1, %r2;", "s32", "u32"),
    *with_types("max.TYPE %r7, %r1, %r2;", "s32", "u32"),
    "abs.s32 %r7, %r1;",
    "neg.s32 %r7, %r1;",
    *with_types("shr.TYPE %r7, %r1, %r2;", "s32", "u32", "b32"),
    "shl.b32 %r7, %r1, %r2;",
    *with_types("shf.TYPE.b32 %r7, %r1, %r2, %r3;", "l.wrap", "l.clamp", "r.wrap", "r.clamp"),
    *with_types("bfe.TYPE %r7, %r1, %r2, %r3;", "s32", "u32"),
    "bfi.b32 %r7, %r1, %r2, %r3, %r4;",
    "brev.b32 %r7, %r1;",
    "clz.b32 %r7, %r1;",
    "popc.b32 %r7, %r1;",
    *with_types("bfind.TYPE %r7, %r1;", "s32", "u32", "shiftamt.u32"),
    *with_types("sad.TYPE %r7, %r1, %r2, %r3;", "s32", "u32"),
    *with_types("prmt.b32TYPE %r7, %r1, %r2, %r3;", "", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"),
    "lop3.b32 %r7, %r1, %r2, %r3, 0x2d;",
    "lop3.b32 %r7, %r1, %r2, %r3, 0xe8;",
    *with_types("dp4a.TYPE %r7, %r1, %r2, %r3;", "s32.s32", "u32.u32", "s32.u32"),
    "not.b32 %r7, %r1;",
    "xor.b32 %r7, %r1, %r2;",
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r7, %r1, %r3, %p1;",
    "add.cc.u32 %r8, %r1, %r2; addc.u32 %r7, %r4, %r5;",
    *with_types("or.b32 %r3, %r2, 1; div.TYPE %r7, %r1, %r3;", "s32", "u32"),
    *with_types("or.b32 %r3, %r2, 1; rem.TYPE %r7, %r1, %r3;", "s32", "u32"),
) + simple(
    "bits",
    "b64",
    "add.s64 %rd7, %rd1, %rd2;",
    *with_types("mul.lo.TYPE %rd7, %rd1, %rd2;", "s64"),
    *with_types("mul.hi.TYPE %rd7, %rd1, %rd2;", "s64", "u64"),
    *with_types("mul.wide.TYPE %rd7, %r1, %r2;", "s32", "u32"),
    *with_types("mad.wide.TYPE %rd7, %r1, %r2, %rd3;", "s32", "u32"),
    *with_types("min.TYPE %rd7, %rd1, %rd2;", "s64", "u64"),
    *with_types("shr.TYPE %rd7, %rd1, %r2;", "s64", "u64"),
    "shl.b64 %rd7, %rd1, %r2;",
    *with_types("or.b64 %rd4, %rd2, 1; div.TYPE %rd7, %rd1, %rd4;", "s64", "u64"),
    *with_types("or.b64 %rd4, %rd2, 1; rem.TYPE %rd7, %rd1, %rd4;", "s64", "u64"),
    *with_types("bfe.TYPE %rd7, %rd1, %r2, %r3;", "s64", "u64"),
    "brev.b64 %rd7, %rd1;",
    "xor.b64 %rd7, %rd1, %rd2;",
)  # fmt: skip

FLOAT = [
    *simple(
        "f32",
        "f32",
        *with_types("add.TYPE %f7, %f1, %f2;", "f32", "ftz.f32", "rz.f32", "rm.f32", "rp.f32", "sat.f32"),
        *with_types("sub.TYPE %f7, %f1, %f2;", "f32", "ftz.f32"),
        *with_types("mul.TYPE %f7, %f1, %f2;", "f32", "ftz.f32", "rz.f32", "rm.f32", "rp.f32", "sat.f32"),
        *with_types("fma.TYPE %f7, %f1, %f2, %f3;", "rn.f32", "rn.ftz.f32", "rz.f32", "rm.f32", "rp.f32", "rn.sat.f32"),
        *with_types("min.TYPE %f7, %f1, %f2;", "f32", "ftz.f32", "NaN.f32"),
        *with_types("max.TYPE %f7, %f1, %f2;", "f32", "ftz.f32", "NaN.f32"),
        *with_types("div.TYPE %f7, %f1, %f2;", "rn.f32", "rn.ftz.f32", "rz.f32"),
        *with_types("rcp.TYPE %f7, %f1;", "rn.f32", "rz.f32"),
        *with_types("sqrt.TYPE %f7, %f1;", "rn.f32", "rn.ftz.f32", "rp.f32"),
        "abs.ftz.f32 %f7, %f1;",
        "neg.f32 %f7, %f1;",
        "copysign.f32 %f7, %f1, %f2;",
    ),
    *simple(
        "f64",
        "f64",
        *with_types("add.TYPE %d7, %d1, %d2;", "f64", "rz.f64"),
        *with_types("mul.TYPE %d7, %d1, %d2;", "f64", "rp.f64"),
        *with_types("fma.TYPE %d7, %d1, %d2, %d3;", "rn.f64", "rm.f64"),
        *with_types("TYPE %d7, %d1, %d2;", "div.rn.f64", "min.f64", "max.f64"),
        "sqrt.rn.f64 %d7, %d1;",
        "rcp.rn.f64 %d7, %d1;",
    ),
    *simple(
        "f32",
        "b32",
        *with_types(
            "setp.TYPE.f32 %p1, %f1, %f2; selp.b32 %r7, 1, 0, %p1;",
            *("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan", "lt.ftz"),
        ),
        "set.lt.u32.f32 %r7, %f1, %f2;",
    ),
]

HALF = [
    *(
        case
        for kind, target in (("f16", "sm_80"), ("bf16", "sm_90"))
        for case in simple(
            kind,
            f"{kind}x2",
            f"add.{kind}x2 %r7, %r1, %r2;",
            f"sub.{kind}x2 %r7, %r1, %r2;",
            f"mul.{kind}x2 %r7, %r1, %r2;",
            target=target,
        )
    ),
    *(
        case
        for kind in ("f16", "bf16")
        for case in simple(
            kind,
            f"{kind}x2",
            f"fma.rn.{kind}x2 %r7, %r1, %r2, %r3;",
            f"fma.rn.relu.{kind}x2 %r7, %r1, %r2, %r3;",
            f"min.{kind}x2 %r7, %r1, %r2;",
            f"max.NaN.{kind}x2 %r7, %r1, %r2;",
            f"neg.{kind}x2 %r7, %r1;",
            f"abs.{kind}x2 %r7, %r1;",
        )
    ),
    *simple("f16", "f16", "add.ftz.f16 %h7, %h1, %h2;", "mul.sat.f16 %h7, %h1, %h2;", "fma.rn.f16 %h7, %h1, %h2, %h3;"),
    *simple("bf16", "bf16", "fma.rn.bf16 %h7, %h1, %h2, %h3;", "min.bf16 %h7, %h1, %h2;"),
    *simple("f16", "b32", "setp.lt.f16 %p1, %h1, %h2; selp.b32 %r7, 1, 0, %p1;"),
]

CONVERSION = [
    *simple(
        "f32",
        "b32",
        *with_types("cvt.TYPE.s32.f32 %r7, %f1;", "rni", "rzi", "rmi", "rpi", "rzi.ftz"),
        *with_types("cvt.TYPE.u32.f32 %r7, %f1;", "rni", "rzi"),
        "cvt.rzi.sat.s8.f32 %r7, %f1; and.b32 %r7, %r7, 255;",
    ),
    *simple("f32", "b64", "cvt.rzi.s64.f32 %rd7, %f1;", "cvt.rzi.u64.f32 %rd7, %f1;"),
    *simple("f64", "b32", "cvt.rzi.s32.f64 %r7, %d1;"),
    *simple("f64", "f32", *with_types("cvt.TYPE.f32.f64 %f7, %d1;", "rn", "rz", "rp", "rn.ftz")),
    *simple("f32", "f64", "cvt.f64.f32 %d7, %f1;"),
    *simple("f32", "f32", *with_types("cvt.TYPE.f32.f32 %f7, %f1;", "rni", "rzi", "rmi.ftz", "sat")),
    *simple("f32", "f16", *with_types("cvt.TYPE.f16.f32 %h7, %f1;", "rn", "rz", "rn.ftz", "rn.sat")),
    *simple("f32", "f16x2", *with_types("cvt.TYPE.f16x2.f32 %r7, %f1, %f2;", "rn", "rz", "rn.relu")),
    *simple("f32", "bf16x2", *with_types("cvt.TYPE.bf16x2.f32 %r7, %f1, %f2;", "rn", "rz", "rn.relu")),
    *simple("f32", "bf16", *with_types("cvt.TYPE.bf16.f32 %h7, %f1;", "rn", "rz")),
    *simple("f16", "f32", "cvt.f32.f16 %f7, %h1;"),
    *simple("f16", "b32", "cvt.rzi.s32.f16 %r7, %h1;"),
    *simple("f32", "f32", "cvt.rna.tf32.f32 %r7, %f1; mov.b32 %f7, %r7;", domain=(-1e30, 1e30)),
    *simple("bits", "f32", *with_types("cvt.TYPE.f32.s32 %f7, %r1;", "rn", "rz"), "cvt.rn.f32.u64 %f7, %rd1;"),
    *simple("bits", "f64", "cvt.rn.f64.s64 %d7, %rd1;", "cvt.rn.f64.u32 %d7, %r1;"),
    *simple("bits", "f16", "cvt.rn.f16.s32 %h7, %r1;"),
    *simple("bits", "b32", "cvt.s32.s8 %r7, %r1;", "cvt.u32.u16 %r7, %h1;", "cvt.sat.u8.s32 %r7, %r1;"),
]

APPROXIMATE = [
    *simple("f32", "f32", "rcp.approx.f32 %f7, %f1;", "rcp.approx.ftz.f32 %f7, %f1;", bound=Bound(ulps=1)),
    *simple("f32", "f32", "sqrt.approx.f32 %f7, %f1;", "sqrt.approx.ftz.f32 %f7, %f1;", bound=Bound(2**-23)),
    *simple("f32", "f32", "rsqrt.approx.f32 %f7, %f1;", "rsqrt.approx.ftz.f32 %f7, %f1;", bound=Bound(2**-22.9)),
    *simple("f32", "f32", "ex2.approx.f32 %f7, %f1;", "ex2.approx.ftz.f32 %f7, %f1;", bound=Bound(ulps=2)),
    *simple("f32", "f32", "lg2.approx.f32 %f7, %f1;", bound=Bound(absolute=2**-22), domain=(0.5001, 1.9999)),
    *simple("f32", "f32", "lg2.approx.ftz.f32 %f7, %f1;", bound=Bound(relative=2**-22), domain=(2.0, 1e6)),
    *simple("f32", "f32", "sin.approx.f32 %f7, %f1;", "cos.approx.f32 %f7, %f1;", bound=Bound(absolute=2**-20.5),
            domain=(-6.28, 6.28)),
    *simple("f32", "f32", "tanh.approx.f32 %f7, %f1;", bound=Bound(2**-11)),
    *simple("f32", "f32", "div.full.f32 %f7, %f1, %f2;", bound=Bound(ulps=2)),
    *simple("f32", "f32", "div.approx.f32 %f7, %f1, %f2;", bound=Bound(ulps=2), domain=(1e-5, 1e5)),
    *simple("f16", "f16x2", "ex2.approx.f16x2 %r7, %r1;", bound=Bound(2**-9.9), domain=(-14.0, 15.0)),
    *simple("f16", "f16x2", "tanh.approx.f16x2 %r7, %r1;", bound=Bound(absolute=2**-10.987)),
    *simple("bf16", "bf16x2", "ex2.approx.ftz.bf16x2 %r7, %r1;", bound=Bound(2**-7), domain=(-100.0, 100.0),
            target="sm_90"),
    *simple("bf16", "bf16x2", "tanh.approx.bf16x2 %r7, %r1;", bound=Bound(absolute=2**-8), target="sm_90"),
]  # fmt: skip

ONE_BIT = "mul.lo.u32 %r2, %r11, 0x9e3779b1; shr.u32 %r2, %r2, 27; mov.u32 %r3, 1; shl.b32 %r2, %r3, %r2;"
WARP = [
    *simple(
        "bits",
        "b32",
        *with_types(
            "shfl.sync.TYPE.b32 %r7|%p1, %r1, %r10, 0x1f, -1; @%p1 add.u32 %r7, %r7, 1;", "up", "down", "bfly", "idx"
        ),
        "shfl.sync.bfly.b32 %r7, %r1, 5, 0x1807, -1;",
        "setp.lt.s32 %p1, %r1, 0; vote.sync.ballot.b32 %r7, %p1, -1;",
        "setp.eq.s32 %p1, %r1, 0; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r7, 1, 0, %p2;",
        "and.b32 %r2, %r1, 7; match.any.sync.b32 %r7, %r2, -1;",
        # The lanes' values differ in every second warp.
        "shr.u32 %r2, %r11, 5; and.b32 %r2, %r2, %r10; and.b32 %r2, %r2, 1; match.all.sync.b32 %r7|%p1, %r2, -1;",
        *with_types("redux.sync.TYPE %r7, %r1, -1;", "add.s32", "min.s32", "max.u32"),
        # Each lane sets one bit, or all bits but one.
        *with_types(f"{ONE_BIT} redux.sync.TYPE %r7, %r2, -1;", "or.b32", "xor.b32"),
        f"{ONE_BIT} not.b32 %r2, %r2; redux.sync.and.b32 %r7, %r2, -1;",
        # Half of the lanes execute it, after they have diverged from the others.
        "and.b32 %r2, %r10, 1; setp.eq.u32 %p1, %r2, 0; mov.u32 %r7, 0; @!%p1 bra DONE;\n"
        "shfl.sync.down.b32 %r7, %r1, 2, 0x1f, 0x55555555;\nDONE:",
    )
]

EXCHANGE = "mov.u32 %r5, buffer; shl.b32 %r6, %r10, 4; add.u32 %r6, %r5, %r6; st.shared.v2.b64 [%r6], {%rd1, %rd2};"
ROW = "and.b32 %r8, %r10, 0x60; and.b32 %r9, %r10, {lanes}; or.b32 %r8, %r8, %r9; mad.lo.u32 %r6, %r8, 16, %r5;"
MEMORY = [
    *simple(
        "bits",
        "b64",
        f"{EXCHANGE} bar.sync 0; xor.b32 %r8, %r10, 37; mad.lo.u32 %r6, %r8, 16, %r5; ld.shared.b64 %rd7, [%r6+8];",
    ),
    *(
        Case(
            f"ldmatrix.x{count}{trans}",
            f"{EXCHANGE} bar.sync 0; {ROW.format(lanes=8 * count - 1)}\n"
            f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r6];\n{fold}",
            "b32",
            "bits",
        )
        for trans in ("", ".trans")
        for count, registers, fold in (
            (1, "%r7", ""),
            (2, "%r7, %r13", "mad.lo.u32 %r7, %r13, 3, %r7;"),
            (4, "%r7, %r13, %r14, %r15", "mad.lo.u32 %r7, %r13, 3, %r7; mad.lo.u32 %r7, %r14, 5, %r7;"
             "mad.lo.u32 %r7, %r15, 7, %r7;"),
        )
    ),
]  # fmt: skip

CASES = INTEGER + FLOAT + HALF + CONVERSION + APPROXIMATE + WARP + MEMORY


@dataclass(frozen=True)
class AtomicCase:
    """A kernel whose threads update one of 8 cells each, at [%rd1], with a small number in %r1, %f1, %d1 and %rd2."""

    instruction: str
    target: str = "sm_80"

    def __str__(self) -> str:
        (name,) = re.findall(r"(?:red|atom)\.global\.(?:[\w.]+)", self.instruction)[:1]
        return str(name)

    def ptx(self) -> str:
        return f"""{HEADER.format(version="7.8" if self.target == "sm_80" else "8.1", target=self.target)}
.visible .entry k(.param .u64 cells)
{{
    .reg .pred %p<3>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .f64 %d<9>; .reg .b64 %rd<9>;
    mov.u32 %r4, %tid.x; mov.u32 %r5, %ctaid.x; mad.lo.u32 %r4, %r5, 77, %r4;
    and.b32 %r5, %r4, 7; ld.param.u64 %rd1, [cells]; mad.wide.u32 %rd1, %r5, 16, %rd1;
    rem.u32 %r1, %r4, 13; sub.s32 %r1, %r1, 5;
    cvt.rn.f32.s32 %f1, %r1; cvt.rn.f64.s32 %d1, %r1; cvt.s64.s32 %rd2, %r1;
    {self.instruction}
    ret;
}}"""


# The order of the threads does not change the results, because sums are of small integers.
ATOMICS = [
    *(AtomicCase(f"red.global.{op}.{kind} [%rd1], %r1;") for op in ("add", "min", "max") for kind in ("s32", "u32")),
    *(AtomicCase(f"red.global.{op}.b32 [%rd1], %r1;") for op in ("and", "or", "xor")),
    AtomicCase("red.global.add.u64 [%rd1], %rd2;"),
    AtomicCase("red.global.inc.u32 [%rd1], 6;"),
    AtomicCase("red.global.add.f32 [%rd1], %f1;"),
    AtomicCase("red.global.add.f64 [%rd1], %d1;"),
    AtomicCase("cvt.rn.f16x2.f32 %r2, %f1, %f1; red.global.add.noftz.f16x2 [%rd1], %r2;"),
    AtomicCase("cvt.rn.bf16x2.f32 %r2, %f1, %f1; red.global.add.noftz.bf16x2 [%rd1], %r2;", "sm_90"),
    AtomicCase("red.global.add.v4.f32 [%rd1], {%f1, %f1, %f1, %f1};", "sm_90"),
    AtomicCase("atom.global.add.u32 %r2, [%rd1], 1; atom.global.exch.b32 %r3, [%rd1+4], 9;"),
    AtomicCase("AGAIN: ld.volatile.global.u32 %r2, [%rd1]; add.u32 %r3, %r2, %r1;\n"
               "atom.global.cas.b32 %r6, [%rd1], %r2, %r3; setp.ne.u32 %p1, %r6, %r2;\n @%p1 bra AGAIN;"),
]  # fmt: skip
