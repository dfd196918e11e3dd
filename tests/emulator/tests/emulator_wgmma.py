"""The manual's operand layouts of wgmma, implemented independently, and kernels with one wgmma. Not a test module."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emulator import Module, Report

WIDTHS = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
}
MODES = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes of the swizzle to the descriptor's code


@dataclass(frozen=True)
class Layout:
    """The layout in shared memory of a matrix of ``rows`` (of M or N) by 32 bytes of K.

    It is one of the manual's canonical layouts of 16-byte chunks. ``leading`` and ``stride`` are in bytes.
    """

    swizzle: int  # 0, 32, 64, 128
    mn_major: bool
    rows: int
    width: int  # bytes of an element
    leading: int
    stride: int
    start: int = 0  # offset in the first row of the pattern; for K-major a multiple of 32
    pattern: int = 0  # offset of the swizzle pattern, a multiple of 128

    def offset(self, row: int, k: int) -> int:
        """Returns the offset of an element in dynamic shared memory, in bytes."""
        per_unit = 16 // self.width
        if self.mn_major:
            unit, inside = divmod(row, per_unit)
            if self.swizzle == 0:
                at = unit * self.stride + k % 8 * 16 + k // 8 * self.leading
            else:
                span = self.swizzle // 16
                at = unit % span * 16 + unit // span * self.leading + k % 8 * self.swizzle + k // 8 * self.stride
        else:
            unit, inside = divmod(k, per_unit)
            between = 16 if self.swizzle else self.leading
            at = unit * between + row % 8 * max(self.swizzle, 16) + row // 8 * self.stride
        at += self.start
        # Swizzle<b, 4, 3>: xors bits 4 to 3 + b with bits 7 to 6 + b.
        bits = {0: 0, 32: 1, 64: 2, 128: 3}[self.swizzle]
        for bit in range(bits):
            if at >> (7 + bit) & 1:
                at ^= 1 << (4 + bit)
        return self.pattern + at + inside * self.width

    @property
    def descriptor(self) -> int:
        """The matrix descriptor. Its base offset is not 0 if the pattern does not start at a multiple of its size."""
        base = self.pattern >> 7 & (max(self.swizzle // 16, 1) - 1)
        start = self.pattern + self.start
        fields = (start >> 4) | (self.leading >> 4) << 16 | (self.stride >> 4) << 32 | base << 49
        return fields | MODES[self.swizzle] << 62

    def place(self, matrix: Tensor, memory: Tensor) -> None:
        """Writes the matrix, [rows, K], into ``memory`` (uint8)."""
        raw = matrix.contiguous().view(torch.uint8).view(*matrix.shape, self.width)
        at = [[self.offset(row, k) for k in range(matrix.shape[1])] for row in range(matrix.shape[0])]
        index = torch.tensor(at)[:, :, None] + torch.arange(self.width)
        assert len(index.unique()) == index.numel(), "the layout puts two elements into one place"
        memory[index] = raw

    @property
    def end(self) -> int:
        """An upper bound of the offsets that it covers."""
        return self.pattern + self.start + 1024 + self.rows // 8 * max(self.leading, self.stride, 256)


@dataclass(frozen=True)
class Form:
    """The shape, types, layouts and modifiers of a wgmma.mma_async."""

    columns: int
    a: str
    b: str
    sum: str = "f32"
    layout_a: Layout | None = None  # None: from registers
    layout_b: Layout | None = None
    signs: tuple[int, int] = (1, 1)
    adds: bool = True
    saturates: bool = False

    @property
    def depth(self) -> int:
        return 32 // WIDTHS[self.a]

    @property
    def registers(self) -> int:
        return self.columns // (4 if self.sum == "f16" else 2)

    @property
    def opcode(self) -> str:
        saturates = ".satfinite" if self.saturates else ""
        return f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.depth}.{self.sum}.{self.a}.{self.b}{saturates}"

    def operands(self, sums: str, a: str, b: str, predicate: str) -> str:
        tail = ""
        if self.sum != "s32":
            tail = f", {self.signs[0]}, {self.signs[1]}"
        if WIDTHS[self.a] == 2:
            assert self.layout_b is not None
            if self.layout_a is not None:
                tail += f", {int(self.layout_a.mn_major)}"
            tail += f", {int(self.layout_b.mn_major)}"
        return f"{{{sums}}}, {a}, {b}, {predicate}{tail};"


def kernel(form: Form, body: str | None = None) -> Module:
    """Returns a kernel that copies ``bytes`` of ``memory`` to shared memory, multiplies, and stores the accumulators.

    Its parameters: memory, bytes, registers of A, descriptors of A and B for shared memory at address 0, sums (in and
    out), scale-d. ``body`` replaces the instructions from the fence to the wait; ``{mma}`` in it is the wgmma.
    """
    sums = ", ".join(f"%f{i}" for i in range(form.registers))
    a = "{%r10, %r11, %r12, %r13}" if form.layout_a is None else "%rd10"
    mma = f"{form.opcode} {form.operands(sums, a, '%rd11', '%p1')}"
    if body is None:
        body = "wgmma.fence.sync.aligned;\n{mma}\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
    kind = {"f32": "f32", "f16": "b32", "s32": "s32"}[form.sum]
    count = form.registers
    ptx = f""".version 8.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 memory, .param .u32 bytes, .param .u64 left, .param .u64 da, .param .u64 db,
                  .param .u64 sums, .param .u32 adds)
{{
    .reg .pred %p<9>; .reg .b32 %r<40>; .reg .{kind} %f<{count + 4}>; .reg .b64 %rd<20>;
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [memory]; ld.param.u32 %r1, [bytes]; ld.param.u64 %rd2, [left]; ld.param.u64 %rd10, [da];
    ld.param.u64 %rd11, [db]; ld.param.u64 %rd3, [sums]; ld.param.u32 %r2, [adds];
    setp.ne.u32 %p1, %r2, 0;
    shl.b32 %r3, %r0, 2; mov.u32 %r4, smem;
    cvt.u64.u32 %rd19, %r4; shr.u64 %rd19, %rd19, 4; add.u64 %rd10, %rd10, %rd19; add.u64 %rd11, %rd11, %rd19;
COPY:
    setp.ge.u32 %p2, %r3, %r1; @%p2 bra DONE;
    cvt.u64.u32 %rd4, %r3; add.u64 %rd4, %rd4, %rd0; ld.global.b32 %r5, [%rd4]; add.u32 %r6, %r4, %r3;
    st.shared.b32 [%r6], %r5; add.u32 %r3, %r3, 512; bra COPY;
DONE:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mul.wide.u32 %rd5, %r0, 16; add.u64 %rd5, %rd5, %rd2;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd5];
    mul.wide.u32 %rd6, %r0, {4 * count}; add.u64 %rd6, %rd6, %rd3;
    {" ".join(f"ld.global.b32 %f{i}, [%rd6+{4 * i}];" for i in range(count))}
    {body.replace("{mma}", mma)}
    {" ".join(f"st.global.b32 [%rd6+{4 * i}], %f{i};" for i in range(count))}
    ret;
}}"""
    return Module(ptx)


def bytes_of(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.uint8)


def fragment_of_a(a: Tensor, width: int) -> Tensor:
    """Returns A's registers, [128, 16] bytes: thread 32 w + 4 g + t holds parts of rows 16 w + g and 16 w + g + 8."""
    raw = bytes_of(a).view(64, 32)
    out = torch.zeros(128, 4, 4, dtype=torch.uint8)
    for warp, g, t in itertools.product(range(4), range(8), range(4)):
        thread = 32 * warp + 4 * g + t
        low, high = 16 * warp + g, 16 * warp + g + 8
        out[thread, 0], out[thread, 1] = raw[low, 4 * t : 4 * t + 4], raw[high, 4 * t : 4 * t + 4]
        out[thread, 2], out[thread, 3] = raw[low, 16 + 4 * t : 20 + 4 * t], raw[high, 16 + 4 * t : 20 + 4 * t]
    return out.view(128, 16)


def sum_places(columns: int) -> tuple[Tensor, Tensor]:
    """Returns the rows and the columns of the accumulators of each thread, both [128, columns / 2]."""
    rows, places = [], []
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        pairs = itertools.product(range(columns // 8), (0, 8), (0, 1))
        for block, below, second in pairs:
            rows.append(16 * warp + lane // 4 + below)
            places.append(8 * block + 2 * (lane % 4) + second)
    return torch.tensor(rows).view(128, -1), torch.tensor(places).view(128, -1)


def run(
    form: Form, a: Tensor, b: Tensor, c: Tensor, body: str | None = None, seed: int = 0, **options: object
) -> tuple[Tensor, Report]:
    """Returns D, [64, N], and the report. ``a``: [64, K], ``b``: [N, K], ``c``: [64, N] in the type of the sums."""
    assert form.layout_b is not None
    if form.layout_a is not None:  # places B after A
        behind = -(-form.layout_a.end // 1024) * 1024
        form = replace(form, layout_b=replace(form.layout_b, pattern=form.layout_b.pattern + behind))
    assert form.layout_b is not None
    layouts = [(layout, x) for layout, x in ((form.layout_a, a), (form.layout_b, b)) if layout is not None]
    size = max(layout.end for layout, _ in layouts) + 1024
    memory = torch.full((size // 4 * 4,), 0xFF, dtype=torch.uint8)
    for layout, matrix in layouts:
        layout.place(matrix, memory)
    rows, columns = sum_places(form.columns)
    sums = c[rows, columns].contiguous()
    left = fragment_of_a(a, WIDTHS[form.a])
    descriptor_a = form.layout_a.descriptor if form.layout_a is not None else 0
    descriptors = [x if x < 2**63 else x - 2**64 for x in (descriptor_a, form.layout_b.descriptor)]
    args = [memory, len(memory), left, *descriptors, sums, int(form.adds)]
    report = kernel(form, body).launch("k", (1,), (128,), args, shared_bytes=len(memory), seed=seed, **options)  # type: ignore[arg-type]
    out = torch.zeros_like(c)
    out[rows, columns] = sums
    return out, report
