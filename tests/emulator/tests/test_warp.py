"""Tests of instructions for whole warps and CTAs, calls, control flow and special registers."""

from __future__ import annotations

import pytest
import torch

from emulator import EmulatorError
from expected_errors import failing
from ptx_body import evaluate, run

LANES = torch.arange(32, dtype=torch.int32)


def mask(bits: torch.Tensor) -> int:
    return sum(1 << i for i, bit in enumerate(bits.tolist()) if bit)


@pytest.mark.parametrize("width", [32, 64])
def test_match(width: int) -> None:
    values = (LANES * 7 % 5).to(torch.int32 if width == 32 else torch.int64)
    values[3] = -1 if width == 32 else 1 << 40
    got = evaluate(f"match.any.sync.b{width} %d, %a, 0xffffffff;", torch.int32, values)
    assert [x % 2**32 for x in got.tolist()] == [mask(values == value) for value in values]
    body = f"match.all.sync.b{width} %t0|%p0, %a, 0xffffffff; selp.b32 %d, %t0, 7, %p0;"
    assert evaluate(body, torch.int32, values).tolist() == [7] * 32
    assert evaluate(body, torch.int32, torch.full_like(values, 5)).tolist() == [-1] * 32


@pytest.mark.parametrize("seed", range(3))
def test_members_that_differ_by_lane(seed: int) -> None:
    """Checks lanes of one path whose member masks differ: each has the mask of its group of 8."""
    body = "and.b32 %t0, %i, 24; shl.b32 %t0, 0xff, %t0; {}"
    shuffled = evaluate(body.format("shfl.sync.bfly.b32 %d, %a, 5, 31, %t0;"), torch.int32, LANES, seed=seed)
    assert torch.equal(shuffled, LANES ^ 5)
    sums = evaluate(body.format("redux.sync.add.s32 %d, %a, %t0;"), torch.int32, LANES, seed=seed)
    assert torch.equal(sums, LANES.view(4, 8).sum(1).repeat_interleave(8).int())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("vote.sync.all.pred %p1, %p0, 0xffffffff; selp.b32 %d, 1, 0, %p1;", [0] * 32),
        ("vote.sync.any.pred %p1, %p0, 0xffffffff; selp.b32 %d, 1, 0, %p1;", [1] * 32),
        ("vote.sync.uni.pred %p1, %p0, 0xffffffff; selp.b32 %d, 1, 0, %p1;", [0] * 32),
        ("vote.sync.ballot.b32 %d, !%p0, 0xffffffff;", [-1 << 12] * 32),
        ("@%p0 activemask.b32 %d; @!%p0 mov.b32 %d, 1;", [0xFFF] * 12 + [1] * 20),
        ("redux.sync.max.u32 %d, %a, 0xffffffff;", [-1] * 32),
        ("redux.sync.max.s32 %d, %a, 0xffffffff;", [30] * 32),
        ("redux.sync.xor.b32 %d, %a, 0xffffffff;", [-32] * 32),
    ],
)
def test_votes_and_reductions(body: str, expected: list[int]) -> None:
    values = LANES - 1
    assert evaluate(f"setp.lt.u32 %p0, %i, 12; {body}", torch.int32, values).tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_barriers_with_reductions(seed: int) -> None:
    body = """setp.lt.u32 %p0, %i, 70; bar.red.popc.u32 %t0, 0, %p0; bar.red.and.pred %p1, 1, 96, %p0;
    barrier.cta.red.or.aligned.pred %p2, 2, 96, !%p0; selp.b32 %t1, 1000, 0, %p1; selp.b32 %t2, 2000, 0, %p2;
    add.s32 %t0, %t0, %t1; add.s32 %d, %t0, %t2;"""
    assert evaluate(body, torch.int32, torch.zeros(96), seed=seed).tolist() == [2070] * 96


@pytest.mark.parametrize("seed", range(4))
def test_branches_by_index(seed: int) -> None:
    body = """table: .branchtargets ZERO, ONE, TWO; rem.u32 %t0, %i, 3; mov.b32 %d, 100;
    setp.lt.u32 %p0, %i, 30; @%p0 brx.idx %t0, table; bra.uni DONE;
    ZERO: mov.b32 %d, 5; bra.uni DONE; ONE: add.s32 %d, %i, 50; bra.uni DONE; TWO: mov.b32 %d, 7;
    DONE: shfl.sync.idx.b32 %t1, %d, %i, 31, 0xffffffff; mov.b32 %d, %t1;"""
    got = evaluate(body, torch.int32, torch.zeros(32), seed=seed)
    assert got.tolist() == [([5, lane + 50, 7][lane % 3] if lane < 30 else 100) for lane in range(32)]


def test_branch_beyond_its_list() -> None:
    body = "table: .branchtargets A, B; brx.idx %i, table; A: B: mov.b32 %d, 0;"
    with failing("out-of-bounds", "beyond the list"):
        evaluate(body, torch.int32, torch.zeros(3))


FUNCTIONS = """.func (.param .b32 result) twice(.param .b32 x)
{ .reg .b32 %r<3>; ld.param.b32 %r1, [x]; add.s32 %r2, %r1, %r1; st.param.b32 [result], %r2; ret; }
.func (.param .b32 result) leaves(.param .b32 x)
{ .reg .b32 %r<3>; .reg .pred %p; ld.param.b32 %r1, [x]; setp.gt.u32 %p, %r1, 20; @%p exit;
add.s32 %r2, %r1, 100; st.param.b32 [result], %r2; ret; }
.func other(.param .b64 x) { ret; }"""
CALL = """{{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r0;
{list}; mov.u64 %rd3, {second}; mov.u64 %rd2, twice; and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0;
selp.b64 %rd2, %rd2, %rd3, %p1; setp.ne.u32 %p2, %r0, 4; mov.b32 %r2, -1; @%p2 call (b), %rd2, (a), {label};
@%p2 ld.param.b32 %r2, [b]; }} add.s64 %rd1, %rd0, %rd9; st.global.b32 [%rd1], %r2;"""


PROTOTYPE = "proto: .callprototype (.param .b32 _) _ (.param .b32 _)"


@pytest.mark.parametrize("listed", ["targets: .calltargets twice, leaves", PROTOTYPE])
@pytest.mark.parametrize("seed", range(3))
def test_calls_through_pointers(listed: str, seed: int) -> None:
    """Checks that even lanes call one function and odd lanes another, where some exit; lane 4 does not call."""
    out = torch.full((32,), -7, dtype=torch.int32)
    body = CALL.format(list=listed, second="leaves", label=listed.split(":")[0])
    run(body, out, functions=FUNCTIONS, seed=seed)
    expected = [2 * lane if lane % 2 == 0 else lane + 100 if lane <= 20 else -7 for lane in range(32)]
    expected[4] = -1
    assert out.tolist() == expected


def test_call_through_a_pointer_to_something_else() -> None:
    with failing("call", "the address of no function with these parameters"):
        run(CALL.format(list=PROTOTYPE, second="other", label="proto"), torch.zeros(32), functions=FUNCTIONS)


@pytest.mark.parametrize("seed", range(4))
def test_exit_of_some_lanes(seed: int) -> None:
    """Checks that the remaining lanes reconverge, and that a barrier for all threads does not wait for exited ones."""
    body = """setp.lt.u32 %p1, %r0, 8; @%p1 bra SOME; and.b32 %r1, %r0, 1; setp.eq.u32 %p2, %r1, 0; @%p2 exit;
    bra.uni REST; SOME: setp.eq.u32 %p3, %r0, 5; @%p3 exit; REST: vote.sync.ballot.b32 %r2, 1, 0xffffffff;
    barrier.cta.sync 0; add.s64 %rd1, %rd0, %rd9; st.global.b32 [%rd1], %r2;"""
    out = torch.zeros(32, dtype=torch.int32)
    run(body, out, seed=seed)
    left = [lane for lane in range(32) if (lane < 8 and lane != 5) or (lane >= 8 and lane % 2)]
    expected = sum(1 << lane for lane in left)
    assert [x % 2**32 for x in out.tolist()] == [expected if lane in left else 0 for lane in range(32)]


def special(name: str, width: int = 32, **options: object) -> list[int]:
    dtype = torch.int32 if width == 32 else torch.int64
    return evaluate(f"mov.u{width} %d, {name};", dtype, torch.zeros(40), **options).tolist()  # type: ignore[arg-type]


def test_special_registers() -> None:
    threads = range(40)
    assert special("%laneid") == [thread % 32 for thread in threads]
    assert special("%warpid") == [thread // 32 for thread in threads]
    assert special("%nwarpid") == [2] * 40 and special("%dynamic_smem_size", shared_bytes=96) == [96] * 40
    assert special("%total_smem_size", shared_bytes=96) == [96] * 40
    assert special("%nsmid", num_sms=7) == [7] * 40 and all(0 <= x < 7 for x in special("%smid", num_sms=7))
    lanes = [thread % 32 for thread in threads]
    assert [x % 2**32 for x in special("%lanemask_lt")] == [2**lane - 1 for lane in lanes]
    assert [x % 2**32 for x in special("%lanemask_ge")] == [2**32 - 2**lane for lane in lanes]
    for name in ("%pm0", "%envreg5"):
        with pytest.raises(EmulatorError, match="unknown name"):
            special(name)


@pytest.mark.parametrize("name", ["%clock64", "%globaltimer"])
def test_clocks_do_not_go_back(name: str) -> None:
    body = f"mov.u64 %l1, {name}; nanosleep.u32 100; mov.u64 %l2, {name}; sub.s64 %d, %l2, %l1;"
    assert (evaluate(body, torch.int64, torch.zeros(32)) >= 0).all()
