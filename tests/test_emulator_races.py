"""The emulator's happens-before detector: each kind of edge left out of a kernel is found at every seed, whatever order
things came in; with the edge, the kernel passes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from emulator import EmulatorError, Module

SEEDS = range(4)


def kernel(body: str) -> Module:
    """A kernel ``k(out)`` for CTAs of 64 threads.

    ``%tid``: the thread; ``%cta``: the CTA; ``%mine``: its word of ``buffer``; ``%theirs``: that of the thread with its
    lane in the other warp; ``%flag``, ``%bar``: 16 bytes each; ``%out``: the argument; ``%w``: where the thread's word
    is in the first 256 bytes of it, ``%v``: that of the other warp's thread; ``%t0``: it is thread 0 of its CTA;
    ``%w0``: it is in warp 0; ``%c0``: in CTA 0.
    """
    return Module(f"""
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 parameter)
{{
    .reg .pred %t0, %w0, %c0, %p<4>;
    .reg .b16 %h<4>;
    .reg .b32 %tid, %cta, %mine, %theirs, %buffer, %flag, %bar, %r<9>;
    .reg .b64 %out, %w, %v, %rd<9>;
    .shared .align 128 .b8 buffer[1024];
    .shared .align 16 .b8 flag[16];
    .shared .align 16 .b8 bar[16];
    mov.u32 %tid, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %buffer, buffer;
    mov.u32 %flag, flag;
    mov.u32 %bar, bar;
    shl.b32 %r0, %tid, 2;
    add.u32 %mine, %buffer, %r0;
    xor.b32 %r1, %r0, 128;
    add.u32 %theirs, %buffer, %r1;
    ld.param.u64 %out, [parameter];
    cvt.u64.u32 %w, %r0;
    add.u64 %w, %w, %out;
    cvt.u64.u32 %v, %r1;
    add.u64 %v, %v, %out;
    setp.eq.u32 %t0, %tid, 0;
    setp.lt.u32 %w0, %tid, 32;
    setp.eq.u32 %c0, %cta, 0;
    {body}
    cp.async.bulk.wait_group 0;  // bulk copies that nobody has waited for are an error of another kind
    ret;
}}""")


@dataclass(frozen=True)
class Case:
    """``body`` is right with each of ``right`` for its $0, $1, … and wrong with each of ``wrong``; with each of
    ``unfenced`` it only lacks a fence between proxies.
    """

    body: str
    right: tuple[tuple[str, ...], ...]
    wrong: tuple[tuple[str, ...], ...]
    unfenced: tuple[tuple[str, ...], ...] = ()
    grid: int = 1
    cluster: int = 1

    def fill(self, parts: tuple[str, ...]) -> Module:
        body = self.body
        for index, part in enumerate(parts):
            body = body.replace(f"${index}", part)
        return kernel(body)

    def launch(self, module: Module, seed: int, **options: bool) -> None:
        out = torch.zeros(512, dtype=torch.int32)
        cluster = (self.cluster, 1, 1)
        module.launch("k", (self.grid,), (64,), [out], cluster=cluster, seed=seed, instruction_limit=1 << 22, **options)


# Warp 0 writes what warp 1 reads, with $0 and $1 between.
HANDOVER = """@!%w0 bra READER; st.shared.u32 [%mine], %tid; $0 bra DONE;
    READER: $1 ld.shared.u32 %r6, [%theirs];
    DONE:"""
# Likewise where a word of shared memory is 0 at first.
FLAG = f"@%t0 st.shared.u32 [%flag], 0; bar.sync 0; {HANDOVER}"
SPIN = "AGAIN: ld.{}.shared.u32 %r7, [%flag]; setp.eq.u32 %p3, %r7, 0; @%p3 bra AGAIN;"
# CTA 0 writes what CTA 1 reads; thread 0 of the first does $0 and thread 0 of the other $1.
SPLIT = """@!%c0 bra READER; st.global.u32 [%w], 1; bar.sync 0; @!%t0 bra DONE; $0 bra DONE;
    READER: @!%t0 bra WAIT; $1
    WAIT: bar.sync 0; ld.global.u32 %r6, [%v];
    DONE:"""
POLL = "AGAIN: {} %r7, [%out+1024]; setp.eq.u32 %p3, %r7, 0; @%p3 bra AGAIN;"
ADD = "atom.global.add.u32 %r7, [%out+1024], 0; setp.eq.u32 %p3, %r7, 0; @%p3 bra AGAIN;"
# Every CTA writes a part, does $0 and adds to a counter with $1; the last one does $2 and reads all.
LAST_CTA = """mul.wide.u32 %rd1, %cta, 256; add.u64 %rd1, %rd1, %w; st.global.u32 [%rd1], %tid; $0 bar.sync 0;
    @!%t0 bra JOIN; $1 st.shared.u32 [%flag], %r6;
    JOIN: bar.sync 0; ld.shared.u32 %r6, [%flag]; setp.ne.u32 %p2, %r6, 3; @%p2 bra DONE; $2
    ld.global.u32 %r7, [%v]; ld.global.u32 %r7, [%v+256]; ld.global.u32 %r7, [%v+512]; ld.global.u32 %r7, [%v+768];
    DONE:"""
COUNT = "atom.global.add.u32 %r6, [%out+1024], 1;"
COPY = "cp.async.ca.shared.global [%mine], [%w], 4; cp.async.commit_group;"
MBARRIER = f"@%t0 mbarrier.init.shared.b64 [%bar], 32; bar.sync 0; {HANDOVER}"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%bar];"
AWAIT = "AGAIN: mbarrier.{}.shared.b64 %p3, [%bar], {}; @!%p3 bra AGAIN;"
TRY_WAIT = AWAIT.format("try_wait.parity", 0)
# CTA 0 of a cluster of two writes to the shared memory of CTA 1, which reads it after $0.
REMOTE = """@!%c0 bra WAIT; add.u32 %r5, %mine, 0x2000000; st.shared::cluster.u32 [%r5], %tid;
    WAIT: $0 @%c0 bra DONE; ld.shared.u32 %r6, [%theirs];
    DONE:"""

BULK_LOAD = """@%t0 mbarrier.init.shared.b64 [%bar], 1; bar.sync 0; $0 @!%t0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%buffer], [%out], 256, [%bar];
    WAIT: $1"""
BULK_STORE = "@%t0 cp.async.bulk.global.shared::cta.bulk_group [%out], [%buffer], 256; cp.async.bulk.commit_group;"

CASES = {
    "read after write": Case(
        "st.shared.u32 [%mine], %tid; $0 ld.shared.u32 %r6, [%theirs];",
        right=(("bar.sync 0;",), ("barrier.sync 3, 64;",)),
        wrong=(("",), ("bar.warp.sync 0xffffffff;",), ("membar.cta;",)),
    ),
    "write after read": Case(
        "st.shared.u32 [%mine], %tid; bar.sync 0; ld.shared.u32 %r6, [%theirs]; $0 st.shared.u32 [%mine], 0;",
        right=(("bar.sync 0;",),),
        wrong=(("",), ("membar.cta;",)),
    ),
    "write after write": Case("st.shared.u32 [$0], %tid;", right=(("%mine",),), wrong=(("%buffer",),)),
    "neighbouring bytes": Case(
        "and.b32 %r3, %tid, 31; shl.b32 %r3, %r3, 1; add.u32 %r3, %r3, %buffer; @%w0 st.shared.u8 [%r3], %r2;\n"
        "@!%w0 st.shared.u8 [%r3+$0], %r2;",
        right=(("1",),),
        wrong=(("0",), ("2",)),
    ),
    "vectors that overlap": Case(
        "and.b32 %r3, %tid, 15; shl.b32 %r3, %r3, 4; add.u32 %r3, %r3, %buffer;\n"
        "@%w0 st.shared.v2.u32 [%r3], {%r2, %r2}; @!%w0 st.shared.u16 [%r3+$0], %h0;",
        right=(("8",), ("14",)),
        wrong=(("6",), ("0",)),
    ),
    "arrive and sync": Case(HANDOVER, right=(("bar.arrive 1, 64;", "bar.sync 1, 64;"),), wrong=(("", ""),)),
    "arrive does not acquire": Case(
        HANDOVER,
        right=(("bar.sync 1, 64;", "bar.sync 1, 64;"),),
        wrong=(("bar.sync 1, 64;", "bar.arrive 1, 64;"),),
    ),
    "the wrong barrier": Case(
        """@!%w0 bra READER; st.shared.u32 [%mine], 1; bar.arrive 1, 64; st.shared.u32 [%mine+256], 1; bar.arrive 2, 64;
        bra DONE; READER: bar.sync 1, 64; $0 ld.shared.u32 %r6, [%theirs+256]; $1
        DONE:""",
        right=(("bar.sync 2, 64;", ""),),
        wrong=(("", "bar.sync 2, 64;"),),
    ),
    "warps that have exited": Case(
        "@!%w0 bra READER; st.shared.u32 [%mine], 1; exit; READER: $0 ld.shared.u32 %r6, [%theirs];",
        right=(("bar.sync 0;",),),
        wrong=(("",),),
    ),
    "atomics": Case(
        "atom.shared.add.u32 %r6, [%flag], 1; $0 ld.shared.u32 %r6, [%flag];",
        right=(("bar.sync 0;",),),
        wrong=(("",), ("membar.cta;",)),
    ),
    "release and acquire": Case(
        FLAG,
        right=(
            ("bar.warp.sync -1; st.release.cta.shared.u32 [%flag], 1;", SPIN.format("acquire.cta")),
            (
                "bar.warp.sync -1; membar.cta; st.volatile.shared.u32 [%flag], 1;",
                SPIN.format("volatile") + "membar.cta;",
            ),
            ("fence.acq_rel.cta; red.shared.add.u32 [%flag], 1;", SPIN.format("acquire.gpu")),
            ("red.release.cta.shared.add.u32 [%flag], 1;", SPIN.format("relaxed.cta") + "fence.acq_rel.cta;"),
        ),
        wrong=(
            ("st.shared.u32 [%flag], 1;", SPIN.format("weak")),
            ("membar.cta; st.shared.u32 [%flag], 1;", SPIN.format("weak") + "membar.cta;"),
            ("st.volatile.shared.u32 [%flag], 1;", SPIN.format("volatile")),
            ("st.release.cta.shared.u32 [%flag], 1;", SPIN.format("relaxed.cta")),
            ("st.relaxed.cta.shared.u32 [%flag], 1;", SPIN.format("acquire.cta")),
            ("st.volatile.shared.u32 [%flag], 1; membar.cta;", "membar.cta;" + SPIN.format("volatile")),
        ),
    ),
    "a flag between CTAs": Case(
        SPLIT,
        right=(
            ("membar.gl; st.volatile.global.u32 [%out+1024], 1;", POLL.format("ld.volatile.global.u32") + "membar.gl;"),
            ("red.release.gpu.global.add.u32 [%out+1024], 1;", POLL.format("ld.acquire.gpu.global.u32")),
            ("fence.acq_rel.gpu; red.global.add.u32 [%out+1024], 1;", f"AGAIN: {ADD} fence.acq_rel.gpu;"),
            ("membar.sys; atom.global.exch.b32 %r6, [%out+1024], 1;", POLL.format("ld.acquire.sys.global.u32")),
        ),
        wrong=(
            ("red.global.add.u32 [%out+1024], 1;", f"AGAIN: {ADD}"),
            ("red.global.add.u32 [%out+1024], 1;", f"AGAIN: {ADD} fence.acq_rel.gpu;"),
            ("fence.acq_rel.gpu; red.global.add.u32 [%out+1024], 1;", f"AGAIN: {ADD}"),
            (
                "membar.cta; st.volatile.global.u32 [%out+1024], 1;",
                POLL.format("ld.volatile.global.u32") + "membar.gl;",
            ),
            ("red.release.gpu.global.add.u32 [%out+1024], 1;", POLL.format("ld.acquire.cta.global.u32")),
            ("membar.gl; st.global.u32 [%out+1024], 1;", POLL.format("ld.volatile.global.u32") + "membar.gl;"),
            ("st.volatile.global.u32 [%out+1024], 1;", POLL.format("ld.volatile.global.u32") + "membar.gl;"),
        ),
        grid=2,
    ),
    "atomics of a scope that is too narrow": Case(
        "atom.$0.global.add.u32 %r6, [%out], 1;", right=(("gpu",), ("sys",)), wrong=(("cta",), ("cluster",)), grid=2
    ),
    "the last CTA": Case(
        LAST_CTA,
        right=(
            ("membar.gl;", COUNT, "membar.gl;"),
            ("", f"membar.gl; {COUNT} membar.gl;", ""),
            ("", COUNT.replace("atom", "atom.acq_rel.gpu"), ""),
        ),
        wrong=(
            ("", COUNT, ""),
            ("", COUNT, "membar.gl;"),
            ("membar.gl;", COUNT, ""),
            ("membar.cta;", COUNT, "membar.gl;"),
            ("", COUNT.replace("atom", "atom.release.gpu"), ""),
            ("", COUNT.replace("atom", "atom.acquire.gpu"), ""),
        ),
        grid=4,
    ),
    "CTAs that write different words": Case(
        "mul.wide.u32 %rd1, %cta, $0; add.u64 %rd1, %rd1, %w; st.global.u32 [%rd1], %tid;",
        right=(("256",),),
        wrong=(("0",), ("252",), ("4",)),
        grid=4,
    ),
    "cp.async without a wait": Case(
        f"{COPY} $0 ld.shared.u32 %r6, [%mine];",
        right=(("cp.async.wait_group 0;",), ("cp.async.wait_all;",)),
        wrong=(
            ("",),
            ("cp.async.wait_group 1;",),
            ("bar.sync 0;",),
            ("@%t0 cp.async.wait_group 0; bar.warp.sync -1;",),
        ),
    ),
    "cp.async of two stages": Case(
        f"{COPY} cp.async.ca.shared.global [%mine+256], [%w], 4; cp.async.commit_group; $0\n"
        "bar.sync 0; ld.shared.u32 %r6, [%theirs];",
        right=(("cp.async.wait_group 1;",),),
        wrong=(("cp.async.wait_group 2;",),),
    ),
    "cp.async that others read": Case(
        f"{COPY} $0 ld.shared.u32 %r6, [%theirs];",
        right=(("cp.async.wait_group 0; bar.sync 0;",),),
        wrong=(("cp.async.wait_group 0;",), ("bar.sync 0; cp.async.wait_group 0;",)),
    ),
    "cp.async into a buffer that is still read": Case(
        f"st.shared.u32 [%mine], 1; bar.sync 0; ld.shared.u32 %r6, [%theirs]; $0 {COPY}",
        right=(("bar.sync 0;",),),
        wrong=(("",),),
    ),
    "cp.async twice into a buffer": Case(
        f"{COPY} $0 {COPY}", right=(("cp.async.wait_group 0;",),), wrong=(("",), ("cp.async.wait_group 1;",))
    ),
    "cp.async of memory that is written": Case(
        f"{COPY} $0 st.global.u32 [%w], 1;", right=(("cp.async.wait_group 0;",),), wrong=(("",),)
    ),
    "mbarrier": Case(
        MBARRIER,
        right=(
            (ARRIVE, TRY_WAIT),
            (ARRIVE, AWAIT.format("test_wait.parity", 0)),
            (ARRIVE.replace("arrive", "arrive.release.cluster"), AWAIT.format("try_wait.parity.acquire.cluster", 0)),
            ("fence.acq_rel.cluster;" + ARRIVE.replace("arrive", "arrive.relaxed.cluster"), TRY_WAIT),
        ),
        wrong=(
            (ARRIVE, ""),
            (ARRIVE.replace("arrive", "arrive.relaxed.cluster"), TRY_WAIT),
            (ARRIVE, AWAIT.format("try_wait.parity.relaxed.cluster", 0)),
        ),
    ),
    "cp.async into an mbarrier": Case(
        f"@%t0 mbarrier.init.shared.b64 [%bar], 32; bar.sync 0; @!%w0 bra READER; {COPY} $0 bra DONE;\n"
        "READER: $1 ld.shared.u32 %r6, [%theirs];\n DONE:",
        right=(
            ("cp.async.mbarrier.arrive.noinc.shared.b64 [%bar];", TRY_WAIT),
            (f"cp.async.wait_group 0; {ARRIVE}", TRY_WAIT),
        ),
        wrong=((ARRIVE, TRY_WAIT), (f"cp.async.wait_group 1; {ARRIVE}", TRY_WAIT)),
    ),
    "barrier.cluster": Case(
        REMOTE,
        right=(
            ("barrier.cluster.arrive; barrier.cluster.wait;",),
            ("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",),
            ("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;",),
        ),
        wrong=(
            ("barrier.cluster.arrive.relaxed; barrier.cluster.wait;",),
            ("bar.sync 0; barrier.cluster.arrive.relaxed; barrier.cluster.wait;",),
        ),
        grid=2,
        cluster=2,
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
        right=(("ld.shared.u32 %r6, [%theirs]; fence.proxy.async; bar.sync 0;", TRY_WAIT),),
        wrong=(("ld.shared.u32 %r6, [%theirs]; fence.proxy.async;", TRY_WAIT),),
        unfenced=(("ld.shared.u32 %r6, [%theirs]; bar.sync 0;", TRY_WAIT),),
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


def parts(of: str) -> list[pytest.param]:
    return [
        pytest.param(case, filling, id=f"{name}-{index}")
        for name, case in CASES.items()
        for index, filling in enumerate(getattr(case, of))
    ]


@pytest.mark.quick
@pytest.mark.parametrize(("case", "filling"), parts("wrong"))
def test_a_missing_edge_is_found_at_every_seed(case: Case, filling: tuple[str, ...]) -> None:
    module = case.fill(filling)
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match="is not ordered with") as caught:
            case.launch(module, seed)
        assert caught.value.kind == "race" and caught.value.line is not None and caught.value.thread is not None
        case.launch(module, seed, races=False)


@pytest.mark.quick
@pytest.mark.parametrize(("case", "filling"), parts("right"))
def test_an_edge_orders_accesses(case: Case, filling: tuple[str, ...]) -> None:
    module = case.fill(filling)
    for seed in SEEDS:
        case.launch(module, seed)


@pytest.mark.quick
@pytest.mark.parametrize(("case", "filling"), parts("unfenced"))
def test_a_missing_fence_between_proxies_is_found_at_every_seed(case: Case, filling: tuple[str, ...]) -> None:
    module = case.fill(filling)
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=r"without a fence\.proxy\.async between") as caught:
            case.launch(module, seed)
        assert caught.value.kind == "proxy"
        case.launch(module, seed, races=False)


WGMMA = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .f32 %f<5>;
    .reg .b64 %rd<4>;
    .shared .align 128 .b8 buffer[2304];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, buffer;
    shl.b32 %r2, %r0, 4;
    add.u32 %r2, %r2, %r1;
    mov.u32 %r3, 0;
    st.shared.v4.u32 [%r2], {%r3, %r3, %r3, %r3};
    shl.b32 %r2, %r0, 1;
    add.u32 %r2, %r2, %r1;
    st.shared.u16 [%r2+2048], 0;
    $0
    mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
    shr.u32 %r3, %r1, 4;
    cvt.u64.u32 %rd1, %r3;
    or.b64 %rd2, %rd1, 0x1000080000;
    add.u64 %rd3, %rd2, 128;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd2, %rd3, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    $1
    st.shared.u16 [%r2+2048], 0;
    wgmma.wait_group.sync.aligned 0;
    ret;
}"""
WAIT_ALL = "wgmma.wait_group.sync.aligned 0; bar.sync 0;"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("fence.proxy.async; bar.sync 0;", WAIT_ALL, None),
        ("bar.sync 0; fence.proxy.async.shared::cta;", WAIT_ALL, None),
        ("bar.sync 0;", WAIT_ALL, "proxy"),
        ("fence.proxy.async;", WAIT_ALL, "race"),
        ("fence.proxy.async; bar.sync 0;", "bar.sync 0;", "race"),
        ("fence.proxy.async; bar.sync 0;", "wgmma.wait_group.sync.aligned 1; bar.sync 0;", "race"),
        ("fence.proxy.async; bar.sync 0;", "wgmma.wait_group.sync.aligned 0;", "race"),
    ],
)
def test_operands_of_wgmma(before: str, after: str, kind: str | None) -> None:
    """Written by all, read by the async proxy, and written again."""
    module = Module(WGMMA.replace("$0", before).replace("$1", after))
    for seed in SEEDS:
        if kind is None:
            module.launch("k", (1,), (128,), [None], seed=seed)
            continue
        with pytest.raises(EmulatorError) as caught:
            module.launch("k", (1,), (128,), [None], seed=seed)
        assert caught.value.kind == kind, caught.value


@pytest.mark.quick
def test_both_accesses_are_named() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    place = "mul.wide.u32 %rd1, %cta, 128; add.u64 %rd1, %rd1, %w;"
    body = f"{place}\n st.global.u32 [%rd1], 1;\n@%c0 ld.global.u32 %r6, [%w+$];"
    for seed in SEEDS:
        with pytest.raises(EmulatorError) as caught:
            kernel(body.replace("$", "128")).launch("k", (2,), (32,), [out], seed=seed)
        error = caught.value
        assert error.text is not None and error.cta is not None and error.thread == (0, 0, 0)
        other = 1 - error.cta[0]
        assert "byte 128 of argument 0, int32 [64]" in error.message
        assert f"by warp 0 (thread 0, 0, 0) of CTA ({other}, 0, 0) at PTX line" in error.message
        texts = ["st.global.u32 [%rd1], 1;", "@%c0 ld.global.u32 %r6, [%w+128];"]
        assert error.text == texts[other] and error.message.endswith(texts[1 - other])
    kernel(body.replace("$", "0")).launch("k", (2,), (32,), [out])


@pytest.mark.quick
def test_stores_of_the_same_value() -> None:
    """They are races, but for compilers that have several warps store what they all hold; even then only by the same
    instruction, and if the value is the same.
    """
    same, others = "st.shared.u32 [%buffer], 7;", "st.shared.u32 [%buffer], %tid;"
    two = "@%w0 st.shared.u32 [%buffer], 7; @!%w0 st.shared.u32 [%buffer], 7;"
    for seed in SEEDS:
        for body in (same, others, two):
            with pytest.raises(EmulatorError, match="race"):
                kernel(body).launch("k", (1,), (64,), [None], seed=seed)
        kernel(same).launch("k", (1,), (64,), [None], seed=seed, replicated_stores=True)
        for body in (others, two, f"{same} ld.shared.u32 %r6, [%buffer];"):
            with pytest.raises(EmulatorError, match="race"):
                kernel(body).launch("k", (1,), (64,), [None], seed=seed, replicated_stores=True)


@pytest.mark.quick
def test_detection_follows_checks() -> None:
    module = kernel("st.shared.u32 [%buffer], %tid;")
    module.launch("k", (1,), (64,), [None], checks=False)
    with pytest.raises(EmulatorError, match="race"):
        module.launch("k", (1,), (64,), [None], checks=False, races=True)
