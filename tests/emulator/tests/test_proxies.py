"""Tests of the happens-before order of bulk copies, st.async and wgmma: their proxies and their completion."""

from __future__ import annotations

import pytest

from emulator import Module
from expected_errors import expecting, failing
from race_cases import SEEDS, TRY_WAIT, Case, fillings

BULK_LOAD = """@%t0 mbarrier.init.shared.b64 [%bar], 1; bar.sync 0; $0 @!%t0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%buffer], [%out], 256, [%bar];
    WAIT: $1"""
BULK_STORE = "@%t0 cp.async.bulk.global.shared::cta.bulk_group [%out], [%buffer], 256; cp.async.bulk.commit_group;"

# In a cluster of two CTAs, CTA 0 sends to CTA 1.
SEND = """@%t0 mbarrier.init.shared.b64 [%bar], 1; barrier.cluster.arrive; barrier.cluster.wait; @%c0 bra SEND;
    @%t0 mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 256; $0 ld.shared.u32 %r7, [%mine]; $1 bra DONE;
    SEND: mapa.shared::cluster.u32 %r5, %mine, 1; mapa.shared::cluster.u32 %r6, %bar, 1;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %tid, [%r6];
    DONE: barrier.cluster.arrive; barrier.cluster.wait;"""

CASES = {
    "st.async": Case(
        SEND, right=((TRY_WAIT, ""),), wrong=(("", TRY_WAIT), ("bar.sync 0;", TRY_WAIT)), grid=2, cluster=2
    ),
    "bulk copy into shared memory": Case(
        BULK_LOAD,
        right=(("", f"{TRY_WAIT} ld.shared.u32 %r6, [%mine];"),),
        wrong=(
            ("", f"ld.shared.u32 %r6, [%mine]; {TRY_WAIT}"),
            ("", f"bar.sync 0; ld.shared.u32 %r6, [%mine]; {TRY_WAIT}"),
        ),
    ),
    "bulk copy over what was written": Case(
        BULK_LOAD,
        right=(
            ("st.shared.u32 [%mine], 0; fence.proxy.async; bar.sync 0;", TRY_WAIT),
            ("st.shared.u32 [%mine], 0; fence.proxy.async.shared::cta; bar.sync 0;", TRY_WAIT),
            ("st.shared.u32 [%mine], 0; bar.sync 0; fence.proxy.async;", TRY_WAIT),
        ),
        wrong=(("st.shared.u32 [%mine], 0; fence.proxy.async;", TRY_WAIT),),
        unfenced=(
            ("st.shared.u32 [%mine], 0; bar.sync 0;", TRY_WAIT),
            ("st.shared.u32 [%mine], 0; fence.proxy.async.global; bar.sync 0;", TRY_WAIT),
            ("fence.proxy.async; st.shared.u32 [%mine], 0; bar.sync 0;", TRY_WAIT),
            ("st.shared.u32 [%mine], 0; bar.sync 0; @!%w0 fence.proxy.async;", TRY_WAIT),
        ),
    ),
    "bulk copy over what was read": Case(
        f"st.shared.u32 [%mine], 0; fence.proxy.async; bar.sync 0; {BULK_LOAD}",
        right=(("ld.shared.u32 %r6, [%theirs]; bar.sync 0;", TRY_WAIT),),
        wrong=(("ld.shared.u32 %r6, [%theirs]; fence.proxy.async;", TRY_WAIT),),
        unfenced=(("st.shared.u32 [%mine], 1; bar.sync 0; ld.shared.u32 %r6, [%theirs]; bar.sync 0;", TRY_WAIT),),
    ),
    "bulk copy of global memory that was written": Case(
        BULK_LOAD,
        right=(("st.global.u32 [%w], 0; fence.proxy.async.global; bar.sync 0;", TRY_WAIT),),
        wrong=(("st.global.u32 [%w], 0; fence.proxy.async;", TRY_WAIT),),
        unfenced=(("st.global.u32 [%w], 0; fence.proxy.async.shared::cta; bar.sync 0;", TRY_WAIT),),
    ),
    "writing over what a bulk copy has read": Case(
        BULK_LOAD,
        right=(("", f"{TRY_WAIT} st.global.u32 [%w], 0;"),),
        wrong=(("", f"st.global.u32 [%w], 0; {TRY_WAIT}"),),
    ),
    "bulk copy out of shared memory": Case(
        f"st.shared.u32 [%mine], 0; $0 {BULK_STORE} cp.async.bulk.wait_group 0;",
        right=(("fence.proxy.async; bar.sync 0;",), ("bar.sync 0; fence.proxy.async.shared::cta;",)),
        wrong=(("fence.proxy.async;",),),
        unfenced=(("bar.sync 0;",),),
    ),
    "a buffer that a bulk copy reads": Case(
        f"{BULK_STORE} $0 bar.sync 0; st.shared.u32 [%mine], 0;",
        right=(("cp.async.bulk.wait_group.read 0;",), ("cp.async.bulk.wait_group 0;",)),
        wrong=(
            ("",),
            ("cp.async.bulk.wait_group.read 1;",),
            ("@!%t0 cp.async.bulk.wait_group 0;",),
        ),
    ),
    "what a bulk copy writes": Case(
        f"{BULK_STORE} $0 bar.sync 0; ld.global.u32 %r6, [%w];",
        right=(("cp.async.bulk.wait_group 0;",),),
        wrong=(("cp.async.bulk.wait_group.read 0;",), ("",)),
    ),
    "two bulk copies to one place": Case(
        f"{BULK_STORE} $0 {BULK_STORE}", right=(("cp.async.bulk.wait_group 0;",),), wrong=(("",),)
    ),
    "bulk reductions and atomics": Case(
        "@!%t0 bra DONE; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%buffer], 256;\n"
        "$0 cp.async.bulk.commit_group; DONE: red.global.add.u32 [%w], 1; $1",
        right=(("", ""), ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%buffer], 256;", "")),
        wrong=(("", "ld.global.u32 %r6, [%w];"),),
    ),
}


@pytest.mark.parametrize(("case", "filling"), fillings(CASES, "wrong"))
def test_a_missing_edge_is_found_at_every_seed(case: Case, filling: tuple[str, ...]) -> None:
    case.check_wrong(filling, "race", "is not ordered with")


@pytest.mark.parametrize(("case", "filling"), fillings(CASES, "unfenced"))
def test_a_missing_fence_between_proxies_is_found_at_every_seed(case: Case, filling: tuple[str, ...]) -> None:
    case.check_wrong(filling, "proxy", r"without a fence\.proxy\.async between")


@pytest.mark.parametrize(("case", "filling"), fillings(CASES, "right"))
def test_an_edge_orders_accesses(case: Case, filling: tuple[str, ...]) -> None:
    case.check(filling)


MEET = "barrier.cluster.arrive; barrier.cluster.wait;"

# Kernels that `strict_proxy_reads` rejects: the async proxy overwrites what threads have read, without a fence.
READS = {
    "bulk copy over what was read": Case(
        f"st.shared.u32 [%mine], 0; fence.proxy.async; bar.sync 0; {BULK_LOAD}",
        right=(
            ("ld.shared.u32 %r6, [%theirs]; fence.proxy.async.shared::cta; bar.sync 0;", TRY_WAIT),
            ("ld.shared.u32 %r6, [%theirs]; bar.sync 0; @%t0 fence.proxy.async;", TRY_WAIT),
        ),
        wrong=(),
        unfenced=(
            ("ld.shared.u32 %r6, [%theirs]; bar.sync 0;", TRY_WAIT),
            ("fence.proxy.async; ld.shared.u32 %r6, [%theirs]; bar.sync 0;", TRY_WAIT),
            ("ld.shared.u32 %r6, [%theirs]; bar.sync 0; @!%w0 fence.proxy.async;", TRY_WAIT),
            ("ld.shared.u32 %r6, [%theirs]; fence.proxy.async.global; bar.sync 0;", TRY_WAIT),
            # A read by a copy in between does not hide the thread's read.
            (f"ld.shared.u32 %r6, [%theirs]; bar.sync 0; {BULK_STORE} cp.async.bulk.wait_group 0;", TRY_WAIT),
        ),
    ),
    "bulk copy to what was read": Case(
        f"st.shared.u32 [%mine], 0; fence.proxy.async; ld.global.u32 %r6, [%w]; $0 bar.sync 0; {BULK_STORE}",
        right=(("fence.proxy.async.global;",),),
        wrong=(),
        unfenced=(("",), ("fence.proxy.async.shared::cta;",)),
    ),
    # In a cluster of two CTAs, CTA 0 copies over what CTA 1 has read. An arrival of scope .cta tells it of the reads.
    "bulk copy to what another CTA has read": Case(
        f"""@%t0 mbarrier.init.shared.b64 [%bar], 64; @%t0 mbarrier.init.shared.b64 [%flag], 1;
        st.shared.u32 [%mine], 0; fence.proxy.async; {MEET} @%c0 bra WRITER;
        @%t0 mbarrier.arrive.expect_tx.shared.b64 _, [%flag], 256; ld.shared.u32 %r6, [%theirs];
        mapa.shared::cluster.u32 %r5, %bar, 0; mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r5];
        MORE: mbarrier.try_wait.parity.shared.b64 %p2, [%flag], 0; @!%p2 bra MORE; bra.uni DONE;
        WRITER: $0 {TRY_WAIT} $1 mapa.shared::cluster.u32 %r5, %buffer, 1; mapa.shared::cluster.u32 %r7, %flag, 1;
        @%t0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%buffer], 256, [%r7];
        DONE: {MEET}""",
        right=(("", "fence.proxy.async.shared::cluster;"), ("", "fence.proxy.async;")),
        wrong=(),
        unfenced=(("", ""), ("fence.proxy.async;", ""), ("", "fence.proxy.async.shared::cta;")),
        grid=2,
        cluster=2,
    ),
    "copies alone": Case(
        f"st.shared.u32 [%mine], 0; fence.proxy.async; bar.sync 0; {BULK_STORE} $0 bar.sync 0;"
        + BULK_LOAD.replace("$0", "").replace("$1", TRY_WAIT),
        right=(("cp.async.bulk.wait_group 0;",),),
        wrong=(),
    ),
}


@pytest.mark.parametrize(("case", "filling"), fillings(READS, "unfenced"))
def test_a_fence_that_is_missing_after_reads_is_found_on_request(case: Case, filling: tuple[str, ...]) -> None:
    case.check_wrong(filling, "proxy", r"without a fence\.proxy\.async between", strict_proxy_reads=True)
    case.check(filling)


@pytest.mark.parametrize(("case", "filling"), fillings(READS, "right"))
def test_a_fence_after_reads(case: Case, filling: tuple[str, ...]) -> None:
    case.check(filling, strict_proxy_reads=True)


LEFT_UNDER_WAY = {
    "load": (BULK_LOAD.replace("$0", "").replace("$1", "{}"), TRY_WAIT, 1),
    "store": (f"{BULK_STORE} {{}}", "cp.async.bulk.wait_group.read 0;", 1),
    "read by another CTA": (
        f"""st.shared.u32 [%mine], 0; {MEET} mapa.shared::cluster.u32 %r5, %mine, 0;
        ld.shared::cluster.u32 %r6, [%r5]; {{}}""",
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait;",
        2,
    ),
}


@pytest.mark.parametrize("name", LEFT_UNDER_WAY)
def test_nothing_outlasts_the_cta_whose_memory_it_touches(name: str) -> None:
    """Checks that the error is found at every seed, also if the operation happens to complete in time."""
    body, good, ctas = LEFT_UNDER_WAY[name]
    Case(body.replace("{}", good), (), (), grid=ctas, cluster=ctas).check(())
    case = Case(body.replace("{}", "ret;"), (), (), grid=ctas, cluster=ctas)
    for seed in range(8):
        with failing("cluster"):
            case.launch(case.fill(()), seed)


WGMMA = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
    .reg .b32 %r<4>; .reg .f32 %f<5>; .reg .b64 %rd<4>; .shared .align 128 .b8 buffer[2304];
    mov.u32 %r0, %tid.x; mov.u32 %r1, buffer; shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r1; mov.u32 %r3, 0;
    st.shared.v4.u32 [%r2], {%r3, %r3, %r3, %r3};
    shl.b32 %r2, %r0, 1; add.u32 %r2, %r2, %r1;
    st.shared.u16 [%r2+2048], 0;
    $0
    mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
    shr.u32 %r3, %r1, 4; cvt.u64.u32 %rd1, %r3; or.b64 %rd2, %rd1, 0x1000080000; add.u64 %rd3, %rd2, 128;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd2, %rd3, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    $1
    st.shared.u16 [%r2+2048], 0;
    wgmma.wait_group.sync.aligned 0;
    ret;
}"""
WAIT_ALL = "wgmma.wait_group.sync.aligned 0; bar.sync 0;"


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("fence.proxy.async; bar.sync 0;", WAIT_ALL, None),
        ("bar.sync 0; fence.proxy.async.shared::cta;", WAIT_ALL, None),
        ("bar.sync 0;", WAIT_ALL, "proxy"),
        ("fence.proxy.async;", WAIT_ALL, "race"),
        ("fence.proxy.async; bar.sync 0;", "bar.sync 0;", "race"),
        ("fence.proxy.async; bar.sync 0;", "wgmma.wait_group.sync.aligned 1; bar.sync 0;", "race"),
        ("fence.proxy.async; bar.sync 0;", "wgmma.wait_group.sync.aligned 0;", None),
    ],
)
def test_operands_of_wgmma(before: str, after: str, kind: str | None) -> None:
    """Checks operands that threads write, wgmma reads, and threads write again."""
    module = Module(WGMMA.replace("$0", before).replace("$1", after))
    for seed in SEEDS:
        with expecting(kind):
            module.launch("k", (1,), (128,), [None], seed=seed)


# As in CUTLASS's pipelines, warp 4 overwrites what the warpgroup has read after one of its threads has arrived.
RELEASE = """
    .reg .pred %p<4>;
    .shared .align 8 .b64 bar;
    setp.eq.u32 %p0, %r0, 96;
    setp.ge.u32 %p1, %r0, 128;
    @%p0 mbarrier.init.shared.b64 [bar], 1;
    fence.proxy.async;
    bar.sync 0;
    @%p1 bra LAST;"""
RELEASED = """
    {wait}
    @%p0 mbarrier.arrive.shared.b64 _, [bar];
    wgmma.wait_group.sync.aligned 0;
    bra.uni END;
LAST:
    mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0;
    @!%p2 bra LAST;
    st.shared.u16 [%r1+2048], 0;
END: ret;"""


@pytest.mark.parametrize(
    ("wait", "kind"),
    [
        ("wgmma.wait_group.sync.aligned 0;", None),
        ("wgmma.wait_group.sync.aligned 1;", "race"),
        ("", "race"),
    ],
)
def test_one_thread_speaks_for_the_warpgroup(wait: str, kind: str | None) -> None:
    """Checks that a warp that has waited for a wgmma knows that all four warps have read matrix B."""
    text = WGMMA.replace("buffer[2304]", "buffer[4352]").replace("[%r2+2048]", "[%r2+2560]")
    module = Module(text.replace("$0", RELEASE).replace("$1", RELEASED.format(wait=wait)))
    for seed in range(8):
        with expecting(kind):
            module.launch("k", (1,), (160,), [None], seed=seed)


@pytest.mark.parametrize("warps", [1, 3, 4])
@pytest.mark.parametrize("written", ["B", "the last warp's rows of A", "the next warp's rows of A"])
def test_waits_that_tell_of_their_own_warp(written: str, warps: int) -> None:
    """Checks what may be overwritten after ``warps`` warps have waited and arrived, with `wgmma_waits_by_warp`."""
    offset = {"B": 2048, "the last warp's rows of A": 512 * (warps - 1), "the next warp's rows of A": 512 * (warps % 4)}
    text = WGMMA.replace("buffer[2304]", "buffer[4352]").replace("[%r2+2048]", "[%r2+2560]")
    lanes = f"and.b32 %r3, %r0, 31; setp.eq.u32 %p3, %r3, 0; setp.lt.and.u32 %p3, %r0, {32 * warps}, %p3;"
    released = RELEASED.format(wait="wgmma.wait_group.sync.aligned 0;").replace("@%p0", "@%p3")
    released = released.replace("[%r1+2048]", f"[%r1+{offset[written]}]")
    start = RELEASE.replace("[bar], 1;", f"[bar], {warps};")
    module = Module(text.replace("$0", start + lanes).replace("$1", released))
    for seed in SEEDS:
        module.launch("k", (1,), (160,), [None], seed=seed)
        with expecting(None if warps == 4 or written == "the last warp's rows of A" else "race"):
            module.launch("k", (1,), (160,), [None], seed=seed, wgmma_waits_by_warp=True)
