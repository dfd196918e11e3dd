"""Tests of Hopper's instructions around wgmma: stmatrix, elect, setmaxnreg, griddepcontrol."""

from __future__ import annotations

import pytest
import torch

from emulator import EmulatorError, Module, Report
from expected_errors import failing


def module(body: str, directives: str = "", shared: int = 1024) -> Module:
    """Returns a kernel: ``%r0`` is the thread's index, ``%rd0`` the argument, ``%r1`` the address of shared memory."""
    return Module(f""".version 8.4\n.target sm_90a\n.address_size 64
.visible .entry k(.param .u64 out) {directives}
{{
    .reg .pred %p<9>; .reg .b32 %r<40>; .reg .f32 %f<9>; .reg .b64 %rd<9>;
    .shared .align 128 .b8 s[{shared}];
    mov.u32 %r0, %tid.x; mov.u32 %r1, s; ld.param.u64 %rd0, [out];
    {body}
    ret;
}}""")


def fails(kernel: Module, kind: str, text: str, threads: int = 128) -> EmulatorError:
    for seed in range(3):
        with failing(kind) as caught:
            kernel.launch("k", (1,), (threads,), [torch.zeros(1024)], seed=seed)
        assert text in str(caught.value)
    return caught.value


def store_matrices(count: int, trans: bool, stride: int) -> tuple[torch.Tensor, Report]:
    """Runs stmatrix with rows of 16 bytes, ``stride`` bytes apart. Register r of lane t holds elements 64 r + 2 t and
    64 r + 2 t + 1. Returns the stored matrices, [count, 8, 8], and the report."""
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    values = "".join(
        f"mad.lo.u32 %r{10 + i}, %r0, 2, {64 * i}; mad.lo.u32 %r{10 + i}, %r{10 + i}, 65537, 65536;"
        for i in range(count)
    )
    suffix = ".trans" if trans else ""
    body = f"""{values} mad.lo.u32 %r2, %r0, {stride}, %r1;
    stmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 [%r2], {{{registers}}};
    bar.warp.sync 0xffffffff; mov.u32 %r3, 0;
LOOP: mad.lo.u32 %r4, %r0, 4, %r3; cvt.u64.u32 %rd1, %r4; add.u64 %rd1, %rd1, %rd0; add.u32 %r5, %r1, %r4;
    ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd1], %r6;
    add.u32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, 4096; @%p1 bra LOOP;"""
    out = torch.zeros(2048, dtype=torch.int16)
    report = module(body, shared=4096).launch("k", (1,), (32,), [out])
    rows = torch.stack([out[lane * stride // 2 : lane * stride // 2 + 8] for lane in range(8 * count)])
    return rows.view(count, 8, 8), report


@pytest.mark.parametrize(("count", "trans"), [(n, trans) for n in (1, 2, 4) for trans in (False, True)])
def test_stmatrix(count: int, trans: bool) -> None:
    got, report = store_matrices(count, trans, 16)
    expected = torch.arange(64 * count, dtype=torch.int16).view(count, 8, 8)
    assert torch.equal(got, expected.transpose(1, 2) if trans else expected)
    row = next(row for row in report.rows if row.opcode.startswith("stmatrix"))
    assert (row.shared_wavefronts, row.bank_conflicts) == (count, 0)


def test_stmatrix_conflicts_and_faults() -> None:
    report = store_matrices(4, False, 128)[1]
    row = next(row for row in report.rows if row.opcode.startswith("stmatrix"))
    assert row.bank_conflicts == 28  # all eight rows of a matrix start in the same bank
    store = "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r0};"
    fails(module(f"mad.lo.u32 %r2, %r0, 8, %r1; {store}"), "misaligned", "no multiple", 32)
    fails(module(f"mad.lo.u32 %r2, %r0, 256, %r1; {store}"), "out-of-bounds", "shared", 32)
    module(f"mad.lo.u32 %r2, %r0, 16, %r1; {store}").launch("k", (1,), (32,), [torch.zeros(1)])


def test_elect() -> None:
    """Checks that one lane leads, always the same one, with and without the result for its number."""
    body = """mov.u32 %r2, 0; mov.u32 %r3, 0xff0; setp.lt.u32 %p2, %r0, 4; setp.ge.u32 %p3, %r0, 12;
    @%p2 bra END; @%p3 bra END;
    elect.sync %r4|%p1, %r3; selp.u32 %r2, 100, 0, %p1; add.u32 %r2, %r2, %r4; elect.sync _|%p4, %r3;
    @%p4 add.u32 %r2, %r2, 1000;
END: mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1; st.global.u32 [%rd1], %r2;"""
    out = torch.zeros(32, dtype=torch.int32)
    module(body).launch("k", (1,), (32,), [out])
    assert out.tolist() == [0] * 4 + [1104] + [4] * 7 + [0] * 20
    fails(module("elect.sync _|%p1, 0xf;"), "divergence", "member mask", 32)


# Two warpgroups: the first releases registers, the second takes them.
SPLIT = """setp.lt.u32 %p1, %r0, 128; @%p1 bra PRODUCER; {consumer} bra END; PRODUCER: {producer} END:"""
INCREASE, DECREASE = "setmaxnreg.inc.sync.aligned.u32 {};", "setmaxnreg.dec.sync.aligned.u32 {};"


@pytest.mark.parametrize(
    "directives", [".maxnreg 128", ".maxntid 256, 1, 1 .minnctapersm 2", ".reqntid 256 .minnctapersm 2"]
)
def test_setmaxnreg(directives: str) -> None:
    """Checks the limit with 128 registers per thread: 40 + 216 fit into 2 * 128, 40 + 224 do not."""
    split = SPLIT.format(producer=DECREASE.format(40), consumer=INCREASE.format("{}"))
    for seed in range(4):
        module(split.format(216), directives).launch("k", (1,), (256,), [torch.zeros(1)], seed=seed)
    error = fails(module(split.format(224), directives), "deadlock", "for registers that other warps give back", 256)
    assert error.text is not None and "setmaxnreg.inc" in error.text


def test_setmaxnreg_waits_for_the_other_warpgroup() -> None:
    """Checks that the consumer's .inc waits for the producer's .dec, which comes later."""
    late = (
        f"mov.u32 %r5, 0; LOOP: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 3000; @%p2 bra LOOP; {DECREASE.format(24)}"
    )
    for seed in range(4):
        kernel = module(SPLIT.format(producer=late, consumer=INCREASE.format(232)), ".maxnreg 128")
        kernel.launch("k", (1,), (256,), [torch.zeros(1)], seed=seed)


def test_setmaxnreg_faults() -> None:
    fails(module(DECREASE.format(160), ".maxnreg 128"), "wgmma", "128 registers, which is fewer")
    fails(module(INCREASE.format(64), ".maxnreg 128"), "wgmma", "128 registers, which is more")
    fails(module(DECREASE.format(64), ".maxnreg 128"), "wgmma", "fewer than 4 warps", 96)
    part = f"setp.lt.u32 %p1, %r0, 64; @%p1 bra END; {DECREASE.format(64)} END:"
    fails(module(part, ".maxnreg 128"), "wgmma", "only some warps of warpgroup 0")
    module(DECREASE.format(64), ".maxnreg 128").launch("k", (1,), (128,), [torch.zeros(1)])
    module(INCREASE.format(256)).launch("k", (1,), (128,), [torch.zeros(1)])  # registers at launch unknown: no limit
    for number in (16, 100, 264):
        with pytest.raises(EmulatorError, match="multiple of 8"):
            module(DECREASE.format(number)).parameters("k")


def test_griddepcontrol() -> None:
    body = "griddepcontrol.wait; griddepcontrol.launch_dependents; st.global.u32 [%rd0], 7;"
    out = torch.zeros(1, dtype=torch.int32)
    module(body).launch("k", (1,), (32,), [out])
    assert out.item() == 7
