"""Tests of the counters of launches: tensor-core work by type, memory requests, waits, and sums over launches."""

from __future__ import annotations

import pytest
import torch

from emulator import InstructionCounts, Module, Report, launches

PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out, .param .u32 stride)
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<3>;
    .shared .align 16 .b8 buffer[2048];
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [out];
    ld.param.u32 %r1, [stride];
    mul.lo.u32 %r2, %r0, %r1;
    mov.u32 %r3, buffer;
    add.s32 %r3, %r3, %r2;
    st.shared.u32 [%r3], %r0;
    bar.sync 3;
    mul.wide.u32 %rd1, %r2, 1;
    add.s64 %rd1, %rd0, %rd1;
    st.global.u32 [%rd1], %r0;
    ret;
}"""


def launch(stride: int, grid: int = 1) -> Report:
    # races=False: the CTAs write the same numbers to the same addresses.
    return Module(PTX).launch("k", (grid,), (64,), [torch.zeros(1024), stride], races=False)


def row(report: Report, opcode: str) -> InstructionCounts:
    (found,) = (row for row in report.rows if row.opcode.startswith(opcode))
    return found


@pytest.mark.parametrize(("stride", "sectors", "conflicts"), [(4, 4, 0), (8, 8, 1), (32, 32, 7)])
def test_memory_by_request(stride: int, sectors: int, conflicts: int) -> None:
    report = launch(stride)
    store = row(report, "st.global")
    assert (store.warps, store.bytes_per_request, store.sectors_per_request) == (2, 128, sectors)
    assert row(report, "st.shared").shared_wavefronts == 2 * (conflicts + 1)
    assert row(report, "st.shared").bank_conflicts == 2 * conflicts == report.bank_conflicts


def test_waits_are_counted_for_each_barrier() -> None:
    """Checks that only one of two warps waits, because the later one completes the barrier."""
    assert launch(4).waits == {"barrier 3": 1}
    assert launch(4, grid=5).waits == {"barrier 3": 5}


def test_shared_memory_of_a_cta() -> None:
    report = Module(PTX).launch("k", (1,), (64,), [torch.zeros(1024), 4], shared_bytes=512)
    assert report.shared_bytes == 2048 + 512


def counts(opcode: str, warps: int = 8, kernel: str = "k", line: int = 1) -> InstructionCounts:
    return InstructionCounts("tensor core", opcode, line, "file.cu:7", warps, 32 * warps, 0, 0, 0, 0, kernel)


@pytest.mark.parametrize(
    ("opcode", "types", "instructions", "multiply_adds"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "bf16 * bf16 + f32", 8, 8 * 16 * 8 * 16),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "tf32 * tf32 + f32", 8, 8 * 16 * 8 * 8),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.u8.s8.s32", "u8 * s8 + s32", 8, 8 * 16 * 8 * 32),
        ("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e5m2.f16", "e4m3 * e5m2 + f16", 8, 8 * 16 * 8 * 32),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "f64 * f64 + f64", 8, 8 * 8 * 8 * 4),
        # Four warps execute one wgmma.
        ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "bf16 * bf16 + f32", 2, 2 * 64 * 256 * 16),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3", "e4m3 * e4m3 + f32", 2, 2 * 64 * 8 * 32),
    ],
)
def test_tensor_core_operations_by_type(opcode: str, types: str, instructions: int, multiply_adds: int) -> None:
    report = Report("k", (counts(opcode), counts("wgmma.fence.sync.aligned")), 0, {})
    assert set(report.tensor_core) == {types}
    assert report.tensor_core[types].instructions == instructions
    assert report.tensor_core[types].multiply_adds == multiply_adds


def test_the_sum_of_several_reports() -> None:
    first, second = launch(4), launch(8, grid=3)
    other = Report("other", (counts("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 5, "other"),), 9999, {}, 40)
    total = Report.total([first, second, other])
    assert total.kernel == "k, other" and total.launches == 3
    assert total.shared_bytes == 9999 and total.registers == 40
    assert total.waits == {"barrier 3": 4}
    assert len(total.rows) == len(first.rows) + 1
    for name in ("global_bytes", "global_sectors", "shared_wavefronts", "bank_conflicts"):
        assert getattr(total, name) == getattr(first, name) + getattr(second, name)
    assert row(total, "st.global").warps == 2 + 6
    assert total.instructions["tensor core"] == 5
    assert total.by_source_line["file.cu:7"] == 5
    assert Report.total([]).rows == ()
    assert Report.total([total, total]).instructions["tensor core"] == 10


def test_it_reads_well() -> None:
    text = str(Report.total([launch(4), launch(4)]))
    assert "in 2 launches" in text and "barrier 3 2" in text and "global memory 512 bytes" in text


def test_every_launch_is_noted_for_those_who_listen() -> None:
    with launches.recorded() as outer:
        first = launch(4)
        with launches.recorded() as inner:
            second = launch(8, grid=3)
    launch(4)
    assert [noted.report for noted in outer] == [first, second]
    assert [(noted.report, noted.grid, noted.block, noted.ptx) for noted in inner] == [
        (second, (3, 1, 1), (64, 1, 1), PTX)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_an_instruction_that_waits_counts_once(seed: int) -> None:
    text = PTX.replace("sm_80", "sm_90").replace("bar.sync 3;", "barrier.cluster.arrive; barrier.cluster.wait;")
    report = Module(text).launch("k", (4,), (64,), [torch.zeros(1024), 4], cluster=(2,), seed=seed, races=False)
    assert row(report, "barrier.cluster.wait").warps == row(report, "barrier.cluster.arrive").warps == 8
