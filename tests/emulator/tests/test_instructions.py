"""Tests of ldmatrix, of lanes that diverge, of atomics, and of bank conflicts."""

from __future__ import annotations

import pytest
import torch

from ptx_body import run


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(trans: bool) -> None:
    source, out = torch.arange(256, dtype=torch.int16), torch.zeros(4, 32, 2, dtype=torch.int16)
    suffix = ".trans" if trans else ""
    report = run(
        ".shared .align 16 .b8 s[512]; mov.u32 %r1, s; shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2;"
        "mul.wide.u32 %rd2, %r0, 16; add.s64 %rd2, %rd0, %rd2; ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd2];"
        "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5}; bar.warp.sync 0xffffffff;"
        f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%r2, %r3, %r4, %r5}}, [%r1]; add.s64 %rd1, %rd1, %rd9;"
        + "".join(f"st.global.b32 [%rd1+{128 * i}], %r{2 + i};" for i in range(4)),
        source,
        out,
    )
    matrices = source.view(4, 8, 8)
    expected = matrices.transpose(1, 2) if trans else matrices
    assert torch.equal(out.view(4, 8, 8), expected)
    assert report.shared_wavefronts == 8 and report.bank_conflicts == 0


@pytest.mark.parametrize("seed", range(5))
def test_lanes_diverge_and_meet(seed: int) -> None:
    """Checks divergence: half of the lanes call a function that loops up to the lane's index; then all shuffle."""
    function = """.func (.param .b32 result) count(.param .b32 upto)
{ .reg .pred %p<2>; .reg .b32 %r<4>; ld.param.b32 %r1, [upto]; mov.u32 %r2, 0;
LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra END; add.u32 %r2, %r2, 1; bra LOOP;
END: st.param.b32 [result], %r2; ret; }"""
    body = """and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, 100; @%p1 bra SKIP;
{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r0; call.uni (b), count, (a); ld.param.b32 %r2, [b]; }
SKIP: shfl.sync.bfly.b32 %r3, %r2, 1, 31, 0xffffffff; add.s64 %rd1, %rd0, %rd9; st.global.b32 [%rd1], %r3;"""
    out = torch.zeros(32, dtype=torch.int32)
    run(body, out, functions=function, seed=seed)
    assert out.tolist() == [lane + 1 if lane % 2 == 0 else 100 for lane in range(32)]


def test_atomics_and_counters() -> None:
    total = torch.zeros(1)
    report = run("red.global.add.f32 [%rd0], 0f3F800000; ld.relaxed.gpu.global.f32 %f1, [%rd0];", total, threads=256)
    assert total.item() == 256
    assert report.instructions["atomic"] == 8 and report.instructions["global"] == 8
    assert report.global_sectors == 16


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 1), (8, 2), (128, 32), (0, 1)])
def test_bank_conflicts(stride: int, wavefronts: int) -> None:
    body = (
        f".shared .align 16 .b8 s[4096]; mov.u32 %r1, s; mad.lo.s32 %r1, %r0, {stride}, %r1; st.shared.b32 [%r1], %r0;"
    )
    report = run(body)
    assert (report.shared_wavefronts, report.bank_conflicts) == (wavefronts, wavefronts - 1)
