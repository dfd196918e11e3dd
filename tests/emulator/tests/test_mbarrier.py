"""Tests of mbarrier objects, clusters, and CTAs that wait for each other, with kernels in PTX."""

from __future__ import annotations

import pytest
import torch

from emulator import EmulatorError, Module
from expected_errors import failing

SEEDS = range(8)


def kernel(body: str, target: str = "sm_90a") -> Module:
    """Returns a kernel ``k(.u64 out)`` with 20 registers of each kind; %rd0 is ``out`` and %r0 the thread's index."""
    return Module(f"""
.version 8.8
.target {target}
.address_size 64
.visible .entry k(.param .u64 out) {{
  .reg .pred %p<20>; .reg .b32 %r<20>; .reg .b64 %rd<20>;
  .shared .align 8 .b64 bar[4]; .shared .align 256 .b32 data[64];
  ld.param.u64 %rd0, [out];
  mov.u32 %r0, %tid.x;
  {body}
  ret;
}}
""")


def store() -> str:
    """Returns PTX for ``out[global thread index] = %r1``."""
    return """
  mov.u32 %r18, %ctaid.x; mov.u32 %r19, %ntid.x; mad.lo.u32 %r19, %r18, %r19, %r0;
  mul.wide.u32 %rd19, %r19, 4; add.u64 %rd19, %rd19, %rd0; st.global.u32 [%rd19], %r1;"""


def init(count: int, bar: str = "bar") -> str:
    return f"""
  setp.eq.u32 %p19, %r0, 0;
  @%p19 mbarrier.init.shared::cta.b64 [{bar}], {count};
  bar.sync 0;"""


def fails(module: Module, kind: str, match: str, **launch: object) -> None:
    options = {"grid": (1,), "block": (64,), "args": [torch.zeros(256, dtype=torch.int32)], **launch}
    with failing(kind, match) as caught:
        module.launch("k", **options)  # type: ignore[arg-type]
    assert caught.value.kernel == "k"
    assert caught.value.line is not None


def results(body: str, seed: int = 0, initial: int = 0, target: str = "sm_90a") -> list[int]:
    """Returns what 64 threads store to ``out``, where ``initial`` was."""
    out = torch.full((64,), initial, dtype=torch.int32)
    kernel(body, target).launch("k", block=(64,), args=[out], seed=seed)
    return out.tolist()


# The first warp writes data and arrives; the second waits for the phase and reads the data.
HANDOVER = """
  shl.b32 %r2, %r0, 2;
  mov.u32 %r3, data;
  add.u32 %r2, %r2, %r3;
  setp.lt.u32 %p0, %r0, 32;
  @%p0 bra PRODUCER;
  {wait}
  ld.shared.u32 %r1, [%r2 + -128];
  bra DONE;
PRODUCER:
  add.u32 %r4, %r0, 100;
  st.shared.u32 [%r2], %r4;
  mbarrier.arrive.shared.b64 %rd1, [bar];
  mov.u32 %r1, 7;
DONE:"""
WAITS = {
    "try_wait.parity": "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;\n @!%p1 bra WAIT;",
    "try_wait.parity with time": """WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [bar], 0, 1000;
  @!%p1 bra WAIT;""",
    "test_wait.parity": "WAIT: mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;\n @!%p1 bra WAIT;",
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_phase_completes_when_all_have_arrived(wait: str, seed: int) -> None:
    found = results(init(32) + HANDOVER.format(wait=WAITS[wait]) + store(), seed)
    assert found == [7] * 32 + [100 + i for i in range(32)]


@pytest.mark.parametrize("seed", SEEDS)
def test_phases_alternate_and_states_name_them(seed: int) -> None:
    """Checks five phases, in which all threads arrive and wait, alternately with the state and with the parity."""
    body = init(64) + "\n  mov.u32 %r1, 0;"
    for phase in range(5):
        wait = "[bar], %rd1" if phase % 2 == 0 else f"[bar], {phase % 2}"
        form = "test_wait" if phase % 2 == 0 else "try_wait.parity"
        body += f"""
  mbarrier.arrive.release.cta.shared::cta.b64 %rd1, [bar];
W{phase}: mbarrier.{form}.shared::cta.b64 %p1, {wait};
  @!%p1 bra W{phase};
  add.u32 %r1, %r1, 1;"""
    assert results(body + store(), seed) == [5] * 64


def test_transactions_hold_a_phase_back() -> None:
    body = f"""
  {init(64)}
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 4;
  mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 4;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
  @!%p1 bra WAIT;
  mov.u32 %r1, 3;
  {store()}"""
    assert results(body) == [3] * 64
    fails(
        kernel(body.replace("expect_tx.shared::cta.b64 _, [bar], 4", "expect_tx.shared::cta.b64 _, [bar], 8")),
        "deadlock",
        "waits for 0 of 64 arrivals and 256 bytes",
    )


def test_bytes_may_come_before_they_are_expected() -> None:
    """Checks that expect_tx may come after complete_tx and the arrival."""
    body = f"""
  {init(1)}
  setp.ne.u32 %p0, %r0, 0;
  @%p0 bra WAIT;
  mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 16;
  mbarrier.arrive.shared::cta.b64 _, [bar];
  mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {{}};
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
  @!%p1 bra WAIT;
  mov.u32 %r1, 3;
  {store()}"""
    assert results(body.format(16)) == [3] * 64
    fails(kernel(body.format(32)), "deadlock", "waits for 0 of 1 arrivals and 16 bytes")


@pytest.mark.parametrize("seed", SEEDS)
def test_try_wait_gives_up_in_the_end(seed: int) -> None:
    """Checks that a thread may poll before it arrives itself, so that try_wait must not block for ever."""
    body = f"""
  {init(64)}
  mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
  selp.u32 %r1, 1, 0, %p1;
  mbarrier.arrive.shared::cta.b64 _, [bar];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
  @!%p1 bra WAIT;
  {store()}"""
    assert results(body, seed, initial=-1) == [0] * 64


def test_dropped_arrivals_are_not_expected_again() -> None:
    """Checks that after the second warp has dropped out, the first one completes two more phases alone."""
    body = (
        init(64)
        + """
  mov.u32 %r1, 1;
  setp.lt.u32 %p0, %r0, 32;
  @!%p0 mbarrier.arrive_drop.shared::cta.b64 %rd1, [bar];
  @!%p0 bra DONE;"""
        + "".join(
            f"""
  mbarrier.arrive.shared::cta.b64 %rd1, [bar];
W{i}: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], {i % 2};
  @!%p1 bra W{i};
  add.u32 %r1, %r1, 1;"""
            for i in range(3)
        )
        + "\nDONE:"
    )
    assert results(body + store(), seed=3) == [4] * 32 + [1] * 32


def test_pending_count() -> None:
    body = init(7) + "\n  mov.u32 %r1, 0;\n  @%p19 mbarrier.arrive.shared::cta.b64 %rd1, [bar], 3;"
    body += "\n  @%p19 mbarrier.arrive.shared::cta.b64 %rd2, [bar];\n  @%p19 mbarrier.pending_count.b64 %r1, %rd2;"
    assert results(body + store())[0] == 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noinc", [False, True])
def test_cp_async_arrives_when_it_has_landed(noinc: bool, seed: int) -> None:
    body = f"""
  {init(64 if noinc else 1)}
  mul.wide.u32 %rd1, %r0, 4;
  add.u64 %rd1, %rd1, %rd0;
  shl.b32 %r2, %r0, 2;
  mov.u32 %r3, data;
  add.u32 %r2, %r2, %r3;
  cp.async.ca.shared.global [%r2], [%rd1], 4;
  cp.async.mbarrier.arrive{".noinc" if noinc else ""}.shared::cta.b64 [bar];
  bar.sync 0;
  {"" if noinc else "@%p19 mbarrier.arrive.shared::cta.b64 %rd2, [bar];"}
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
  @!%p1 bra WAIT;
  xor.b32 %r4, %r2, 128;
  ld.shared.u32 %r1, [%r4];
  bar.sync 0;
  {store()}"""
    out = torch.arange(64, dtype=torch.int32)
    kernel(body, target="sm_80").launch("k", block=(64,), args=[out], seed=seed)
    assert out.tolist() == [*range(32, 64), *range(32)]


def test_misuse_is_an_error() -> None:
    arrive = "  mbarrier.arrive.shared::cta.b64 %rd1, [bar];"
    fails(kernel(arrive), "mbarrier", r"there is no mbarrier object at offset \d+")
    fails(kernel(init(1) + init(1)), "mbarrier", "where an mbarrier object is already")
    fails(kernel(init(0)), "mbarrier", "it takes 1 to 1048575")
    fails(kernel(init(32) + "\n  ld.shared.b64 %rd1, [bar];"), "mbarrier", "where an mbarrier object is")
    fails(kernel(init(64).replace("[bar]", "[bar + 4]")), "misaligned", "8-byte aligned")
    once = init(32) + "\n  setp.lt.u32 %p0, %r0, 32;\n  @%p0 mbarrier.inval.shared::cta.b64 [bar];"
    fails(kernel(once), "mbarrier", "no mbarrier object")
    fails(kernel(init(63) + "\n  mbarrier.arrive.shared::cta.b64 %rd1, [bar], 2;"), "mbarrier", "arrivals at an")
    fails(
        kernel(init(64) + "\n  mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 2;"),
        "mbarrier",
        "parity is 0 or 1",
    )


def test_a_missing_arrival_is_a_deadlock_that_says_where() -> None:
    fails(
        kernel(init(33) + HANDOVER.format(wait=WAITS["try_wait.parity"])),
        "deadlock",
        r"for a phase of an mbarrier(.|\n)*mbarrier at offset \d+: phase 0 waits for 1 of 33 arrivals",
    )


CLUSTER = f"""
  mov.u32 %r2, %cluster_ctarank;
  mov.u32 %r3, %cluster_nctarank;
  mov.u32 %r4, %clusterid.x;
  mad.lo.u32 %r1, %r4, 100, %r2;
  mad.lo.u32 %r1, %r3, 1000, %r1;
  barrier.cluster.arrive.release.aligned;
  barrier.cluster.wait.acquire.aligned;
  {store()}"""


@pytest.mark.parametrize("seed", range(3))
def test_clusters_know_themselves_and_meet(seed: int) -> None:
    out = torch.zeros(8 * 64, dtype=torch.int32)
    kernel(CLUSTER).launch("k", grid=(8,), block=(64,), cluster=(4,), args=[out], seed=seed)
    assert out.view(8, 64)[:, 5].tolist() == [4000 + 100 * (i // 4) + i % 4 for i in range(8)]


def test_cluster_barriers_and_sizes_are_checked() -> None:
    arrive, wait = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"
    fails(kernel(arrive + arrive), "barrier", "without a wait", cluster=(1,))
    fails(kernel(wait), "barrier", "without an arrive", cluster=(1,))
    first = "mov.u32 %r1, %cluster_ctarank;\n setp.eq.u32 %p0, %r1, 0;\n @%p0 bra SKIP;\n"
    skipped = first + arrive + wait + "\nSKIP: mov.u32 %r1, 0;\n LOOP: bra LOOP;"
    fails(kernel(skipped), "limit", "instruction_limit", cluster=(2,), grid=(2,), instruction_limit=10000)
    waits = first + arrive + wait + "\nSKIP: bar.sync 1, 96;"
    fails(kernel(waits), "barrier", "multiple of 32", cluster=(2,), grid=(2,))
    for grid, cluster in (((3,), (2,)), ((32,), (32,))):
        with pytest.raises(EmulatorError, match="cluster"):
            kernel(CLUSTER).launch("k", grid=grid, block=(32,), cluster=cluster, args=[torch.zeros(4096)])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctas_may_wait_for_others_that_are_resident(workers: int) -> None:
    """Checks that CTAs run concurrently: each increments a counter and spins until all CTAs have."""
    body = f"""
  add.u64 %rd1, %rd0, 64;
  atom.global.add.u32 %r1, [%rd0], 1;
LOOP: ld.relaxed.gpu.global.u32 %r1, [%rd0];
  setp.lt.u32 %p0, %r1, 40;
  @%p0 bra LOOP;
  {store().replace("%rd19, %rd0", "%rd19, %rd1")}"""
    module = kernel(body)
    out = torch.zeros(16 + 40, dtype=torch.int32)
    module.launch("k", grid=(40,), block=(1,), args=[out], num_sms=2, workers=workers)
    assert out[16:].tolist() == [40] * 40
    with pytest.raises(EmulatorError, match="instruction_limit"):  # only 32 of the 40 CTAs fit on one SM
        out.zero_()
        module.launch("k", grid=(40,), block=(1,), args=[out], num_sms=1, instruction_limit=1 << 18, workers=workers)
