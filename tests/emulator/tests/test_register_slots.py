"""Tests that registers keep their values, although those that are not alive at the same time share a slot."""

from __future__ import annotations

import pytest
import torch

from ptx_body import run

# Each value is computed and used once, so that the slots of earlier values are free again.
CHURN = "".join(f"add.u32 %r{i}, %r{i - 1}, 7; xor.b32 %r{i + 1}, %r{i}, %r0; " for i in range(21, 38, 2))


def results(body: str, register: str, seed: int = 0) -> list[int]:
    """Returns what the body leaves in the register of each lane."""
    out = torch.zeros(32, dtype=torch.int32)
    run(f"{body} add.u64 %rd1, %rd0, %rd9; st.global.b32 [%rd1], {register};", out, seed=seed)
    return out.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_guarded_write_leaves_the_other_lanes(seed: int) -> None:
    body = f"""add.u32 %r1, %r0, 100; mov.u32 %r20, %r0; {CHURN} setp.lt.u32 %p1, %r0, 5;
    @%p1 mov.u32 %r1, 3; {CHURN}"""
    assert results(body, "%r1", seed) == [3] * 5 + list(range(105, 132))


@pytest.mark.parametrize("seed", range(3))
def test_a_value_lives_around_a_loop(seed: int) -> None:
    """Checks a value that is read only at the top of a loop, before the loop writes other registers."""
    body = f"""mov.u32 %r1, 1000; mov.u32 %r2, 0; mov.u32 %r3, 0;
again: add.u32 %r2, %r2, %r1; mov.u32 %r20, %r2; {CHURN} add.u32 %r3, %r3, 1;
    setp.le.u32 %p1, %r3, %r0; @%p1 bra again;"""
    assert results(body, "%r2", seed) == [1000 * (i + 1) for i in range(32)]


@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_have_diverged_keep_their_values(seed: int) -> None:
    body = f"""add.u32 %r1, %r0, 1; add.u32 %r2, %r0, 2; and.b32 %r3, %r0, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra even;
    mov.u32 %r20, %r1; {CHURN} add.u32 %r4, %r1, 1000; bra.uni both;
even: mov.u32 %r20, %r2; {CHURN} {CHURN} add.u32 %r4, %r2, 2000;
both:"""
    assert results(body, "%r4", seed) == [1001 + i if i % 2 else 2002 + i for i in range(32)]


@pytest.mark.parametrize("seed", range(3))
def test_predicates_and_wide_values_keep_theirs(seed: int) -> None:
    forgotten = "".join(f"setp.gt.u32 %p{i}, %r0, {i}; selp.u32 %r21, 1, 0, %p{i}; " for i in range(3, 8))
    body = f"""setp.lt.u32 %p1, %r0, 5; {forgotten} setp.lt.u32 %p2, %r0, 9; {forgotten} mul.wide.u32 %rd2, %r0, 3;
    mov.u32 %r20, %r0; {CHURN} {forgotten} add.u64 %rd3, %rd2, 1; selp.u32 %r1, 10, 20, %p1;
    selp.u32 %r2, 100, 200, %p2; add.u32 %r1, %r1, %r2; cvt.u32.u64 %r3, %rd3; add.u32 %r1, %r1, %r3;"""
    expected = [(10 if i < 5 else 20) + (100 if i < 9 else 200) + 3 * i + 1 for i in range(32)]
    assert results(body, "%r1", seed) == expected


def test_what_nobody_has_written_has_all_bits_set() -> None:
    body = f"mov.u32 %r20, %r0; {CHURN} setp.eq.u32 %p1, %r0, 99; @%p1 mov.u32 %r1, 0; mov.b32 %f1, %r1;"
    assert results(body, "%f1") == [-1] * 32
