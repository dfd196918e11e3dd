"""Tests of the race detector: a kernel without an edge is an error at every seed, and with the edge it passes."""

from __future__ import annotations

import pytest
import torch

from emulator import EmulatorError
from race_cases import AWAIT, SEEDS, TRY_WAIT, Case, fillings, kernel

# Warp 0 writes and executes $0; warp 1 executes $1 and reads.
HANDOVER = """@!%w0 bra READER; st.shared.u32 [%mine], %tid; $0 bra DONE;
    READER: $1 ld.shared.u32 %r6, [%theirs];
    DONE:"""
# The same with a word of shared memory that is 0 at first.
FLAG = f"@%t0 st.shared.u32 [%flag], 0; bar.sync 0; {HANDOVER}"
SPIN = "AGAIN: ld.{}.shared.u32 %r7, [%flag]; setp.eq.u32 %p3, %r7, 0; @%p3 bra AGAIN;"
# CTA 0 writes what CTA 1 reads; thread 0 of CTA 0 executes $0, thread 0 of CTA 1 executes $1.
SPLIT = """@!%c0 bra READER; st.global.u32 [%w], 1; bar.sync 0; @!%t0 bra DONE; $0 bra DONE;
    READER: @!%t0 bra WAIT; $1
    WAIT: bar.sync 0; ld.global.u32 %r6, [%v];
    DONE:"""
POLL = "AGAIN: {} %r7, [%out+1024]; setp.eq.u32 %p3, %r7, 0; @%p3 bra AGAIN;"
ADD = "atom.global.add.u32 %r7, [%out+1024], 0; setp.eq.u32 %p3, %r7, 0; @%p3 bra AGAIN;"
# Every CTA writes some words, executes $0, and adds to a counter with $1; the last CTA executes $2 and reads all words.
LAST_CTA = """mul.wide.u32 %rd1, %cta, 256; add.u64 %rd1, %rd1, %w; st.global.u32 [%rd1], %tid; $0 bar.sync 0;
    @!%t0 bra JOIN; $1 st.shared.u32 [%flag], %r6;
    JOIN: bar.sync 0; ld.shared.u32 %r6, [%flag]; setp.ne.u32 %p2, %r6, 3; @%p2 bra DONE; $2
    ld.global.u32 %r7, [%v]; ld.global.u32 %r7, [%v+256]; ld.global.u32 %r7, [%v+512]; ld.global.u32 %r7, [%v+768];
    DONE:"""
COUNT = "atom.global.add.u32 %r6, [%out+1024], 1;"
COPY = "cp.async.ca.shared.global [%mine], [%w], 4; cp.async.commit_group;"
MBARRIER = f"@%t0 mbarrier.init.shared.b64 [%bar], 32; bar.sync 0; {HANDOVER}"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%bar];"
# CTA 0 of a cluster of two writes to the shared memory of CTA 1, which reads it after $0.
REMOTE = """@!%c0 bra WAIT; mapa.shared::cluster.u32 %r5, %mine, 1; st.shared::cluster.u32 [%r5], %tid;
    WAIT: $0 @%c0 bra DONE; ld.shared.u32 %r6, [%theirs];
    DONE:"""
CLUSTER_MEETS = "barrier.cluster.arrive; barrier.cluster.wait;"
ARRIVE_REMOTE = "mbarrier.arrive.shared::cluster.b64 _, [%r5];"
# Warp 0 of CTA 0 writes to CTA 1 and arrives there; all threads of CTA 1 wait and read.
BETWEEN_CTAS = f"""@%t0 mbarrier.init.shared.b64 [%bar], 32; {CLUSTER_MEETS} @!%c0 bra READER; @!%w0 bra DONE;
    mapa.shared::cluster.u32 %r5, %mine, 1; st.shared::cluster.u32 [%r5], %tid;
    mapa.shared::cluster.u32 %r5, %bar, 1; $0 mbarrier.arrive.$1.shared::cluster.b64 _, [%r5]; bra DONE;
    READER: AGAIN: mbarrier.try_wait.parity.$2.shared.b64 %p3, [%bar], 0; @!%p3 bra AGAIN; $3
    @%w0 ld.shared.u32 %r6, [%mine]; bra END;
    DONE: $3
    END: {CLUSTER_MEETS}"""
# Warp 0 of CTA 0 writes to CTA 1; warp 1 of CTA 0 arrives there.
PASSED_ON = f"""@%t0 mbarrier.init.shared.b64 [%bar], 32; {CLUSTER_MEETS} @!%c0 bra READER;
    mapa.shared::cluster.u32 %r5, %mine, 1; @%w0 st.shared::cluster.u32 [%r5], %tid; bar.sync 0;
    mapa.shared::cluster.u32 %r5, %bar, 1; @!%w0 mbarrier.arrive.$0.shared::cluster.b64 _, [%r5]; bra DONE;
    READER: AGAIN: mbarrier.try_wait.parity.$1.shared.b64 %p3, [%bar], 0; @!%p3 bra AGAIN;
    @%w0 ld.shared.u32 %r6, [%mine];
    DONE: {CLUSTER_MEETS}"""

# %p1: true in lane 0; %r2: the lane; %r3: the address of a word of shared memory for the warp.
FIRST_LANE = """and.b32 %r2, %tid, 31; setp.eq.u32 %p1, %r2, 0; sub.u32 %r3, %tid, %r2; shl.b32 %r3, %r3, 2;
    add.u32 %r3, %r3, %buffer;"""
MEET = "bar.warp.sync -1;"
NO_MEETING = ("", "membar.cta;", "shfl.sync.idx.b32 %r7, %r2, 0, 31, -1;", "vote.sync.all.pred %p2, %p1, -1;")
ONE_ARRIVES = f"{FIRST_LANE} @%t0 mbarrier.init.shared.b64 [%bar], 1; bar.sync 0; {HANDOVER}"
ONE_AWAITS = f"@!%p1 bra REST; {TRY_WAIT} REST:"
ONE_TELLS = f"{FIRST_LANE} {FLAG}"
ONE_SPINS = f"@!%p1 bra REST; {SPIN.format('acquire.cta')} REST:"

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
            ("and.b32 %r2, %tid, 31; setp.eq.u32 %p1, %r2, 0; @%p1 cp.async.wait_group 0; bar.warp.sync -1;",),
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
    "mbarrier of another CTA": Case(
        BETWEEN_CTAS,
        right=(
            ("", "release.cluster", "acquire.cluster", ""),
            ("fence.acq_rel.cluster;", "relaxed.cluster", "relaxed.cluster", "fence.acq_rel.cluster;"),
            ("fence.acq_rel.cluster;", "release.cta", "acquire.cta", CLUSTER_MEETS),
        ),
        wrong=(
            ("", "relaxed.cluster", "acquire.cluster", ""),
            ("fence.acq_rel.cta;", "relaxed.cluster", "acquire.cluster", ""),
            ("", "release.cluster", "relaxed.cluster", "fence.acq_rel.cta;"),
        ),
        narrow=(
            ("", "release.cta", "acquire.cta", ""),
            ("", "release.cta", "acquire.cluster", ""),
            ("", "release.cluster", "acquire.cta", ""),
            ("fence.acq_rel.cluster;", "release.cta", "acquire.cta", "fence.acq_rel.cluster;"),
        ),
        grid=2,
        cluster=2,
    ),
    "mbarrier that a third warp passes on": Case(
        PASSED_ON,
        right=(("release.cluster", "acquire.cluster"),),
        wrong=(),
        narrow=(("release.cta", "acquire.cta"),),
        grid=2,
        cluster=2,
    ),
    "what another CTA has read": Case(
        f"""st.shared.u32 [%mine], 0; @%t0 mbarrier.init.shared.b64 [%bar], 64; {CLUSTER_MEETS} @%c0 bra WRITER;
        ld.shared.u32 %r6, [%theirs]; mapa.shared::cluster.u32 %r5, %bar, 0; $0 bra DONE;
        WRITER: $1 mapa.shared::cluster.u32 %r5, %mine, 1; st.shared::cluster.u32 [%r5], 1;
        DONE: {CLUSTER_MEETS}""",
        right=((f"{ARRIVE_REMOTE}", TRY_WAIT),),
        wrong=((f"{ARRIVE_REMOTE.replace('.arrive', '.arrive.relaxed.cluster')}", TRY_WAIT), (ARRIVE_REMOTE, "")),
        narrow=((f"bar.sync 0; st.shared.u32 [%mine], 1; {ARRIVE_REMOTE}", TRY_WAIT),),
        grid=2,
        cluster=2,
    ),
    "what another CTA has written": Case(
        f"""@%t0 mbarrier.init.shared.b64 [%bar], 64; @%t0 mbarrier.init.shared.b64 [%flag], 1; {CLUSTER_MEETS}
        @%c0 bra WRITER; @%t0 mbarrier.arrive.expect_tx.shared.b64 _, [%flag], 256; st.shared.u32 [%mine], 1; $0
        mapa.shared::cluster.u32 %r5, %bar, 0; {ARRIVE_REMOTE}
        MORE: mbarrier.try_wait.parity.shared.b64 %p2, [%flag], 0; @!%p2 bra MORE; bra.uni DONE;
        WRITER: {TRY_WAIT} mapa.shared::cluster.u32 %r5, %buffer, 1; mapa.shared::cluster.u32 %r7, %flag, 1;
        @%t0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%buffer], 256, [%r7];
        DONE: {CLUSTER_MEETS}""",
        right=(("fence.proxy.async;",), ("fence.proxy.async.shared::cta;",)),
        wrong=(),
        narrow=(("",), ("fence.proxy.async.global;",)),
        grid=2,
        cluster=2,
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
}


# Between diverged lanes of a warp.
CASES |= {
    "what one lane has written": Case(
        f"{FIRST_LANE} @!%p1 bra REST; st.shared.u32 [%r3], 1; REST: $0 ld.shared.u32 %r6, [%r3];",
        right=((MEET,), ("bar.sync 0;",), ("barrier.sync 3, 64;",)),
        wrong=tuple((missing,) for missing in NO_MEETING),
    ),
    "what one lane has written to global memory": Case(
        f"""{FIRST_LANE} sub.u32 %r3, %tid, %r2; mul.wide.u32 %rd1, %r3, 4; add.u64 %rd1, %rd1, %out;
        @!%p1 bra REST; st.global.u32 [%rd1], 1; REST: $0 ld.global.u32 %r6, [%rd1];""",
        right=((MEET,),),
        wrong=tuple((missing,) for missing in NO_MEETING),
    ),
    "one lane writes what others have read": Case(
        f"{FIRST_LANE} ld.shared.u32 %r6, [%r3]; $0 @!%p1 bra REST; st.shared.u32 [%r3], 1; REST:",
        right=((MEET,),),
        wrong=tuple((missing,) for missing in NO_MEETING),
    ),
    "both sides of a branch": Case(
        f"{FIRST_LANE} @%p1 bra FIRST; st.shared.u32 [%mine], 1; bra REST; FIRST: st.shared.u32 [%mine+$0], 2; REST:",
        right=(("0",), ("128",)),
        wrong=(("4",), ("124",)),
    ),
    "half of the warp meets": Case(
        f"""{FIRST_LANE} @!%p1 bra REST; st.shared.u32 [%r3], 1;
        REST: setp.lt.u32 %p2, %r2, 16; @%p2 bar.warp.sync 0xffff;
        setp.$0.u32 %p3, %r2, $1; @%p3 ld.shared.u32 %r6, [%r3];""",
        right=(("lt", "16"), ("eq", "15")),
        wrong=(("lt", "17"), ("eq", "16")),
    ),
    "a lane that has exited": Case(
        f"{FIRST_LANE} @!%p1 bra REST; st.shared.u32 [%r3], 1; exit; REST: $0 ld.shared.u32 %r6, [%r3];",
        right=(("barrier.sync 0;",),),
        wrong=((MEET,), ("",)),
    ),
    "one lane arrives for its warp": Case(
        ONE_ARRIVES,
        right=((f"{MEET} @%p1 {ARRIVE}", TRY_WAIT), (f"{MEET} @!%p1 bra DONE; {ARRIVE}", TRY_WAIT)),
        wrong=tuple((f"{missing} @%p1 {ARRIVE}", TRY_WAIT) for missing in NO_MEETING),
    ),
    "one lane arrives when its warp has read": Case(
        f"""{FIRST_LANE} @%t0 mbarrier.init.shared.b64 [%bar], 1; bar.sync 0; @!%w0 bra WRITER;
        ld.shared.u32 %r6, [%theirs]; $0 @!%p1 bra DONE; {ARRIVE} bra DONE;
        WRITER: {TRY_WAIT} st.shared.u32 [%mine], 1;
        DONE:""",
        right=((MEET,),),
        wrong=tuple((missing,) for missing in NO_MEETING),
    ),
    "one lane waits for its warp": Case(
        ONE_ARRIVES,
        right=((f"{MEET} @%p1 {ARRIVE}", ONE_AWAITS + MEET),),
        wrong=tuple((f"{MEET} @%p1 {ARRIVE}", ONE_AWAITS + missing) for missing in NO_MEETING),
    ),
    "one lane releases for its warp": Case(
        ONE_TELLS,
        right=(
            (f"{MEET} @%p1 st.release.cta.shared.u32 [%flag], 1;", ONE_SPINS + MEET),
            (f"{MEET} membar.cta; @%p1 st.volatile.shared.u32 [%flag], 1;", ONE_SPINS + MEET),
            (f"{MEET} @!%p1 bra DONE; fence.acq_rel.cta; red.shared.add.u32 [%flag], 1;", ONE_SPINS + MEET),
        ),
        wrong=(
            ("@%p1 st.release.cta.shared.u32 [%flag], 1;", ONE_SPINS + MEET),
            ("membar.cta; @%p1 st.volatile.shared.u32 [%flag], 1;", ONE_SPINS + MEET),
            ("@!%p1 bra DONE; fence.acq_rel.cta; red.shared.add.u32 [%flag], 1;", ONE_SPINS + MEET),
            (f"{MEET} @%p1 st.release.cta.shared.u32 [%flag], 1;", ONE_SPINS),
        ),
    ),
    "one lane copies what its warp has written": Case(
        f"""{FIRST_LANE} @!%w0 bra DONE; st.shared.u32 [%mine], 1; fence.proxy.async.shared::cta; $0 @!%p1 bra DONE;
        cp.async.bulk.global.shared::cta.bulk_group [%out], [%buffer], 128; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        DONE:""",
        right=((MEET,),),
        wrong=tuple((missing,) for missing in NO_MEETING),
    ),
    "cp.async of another lane": Case(
        f"{FIRST_LANE} {COPY} cp.async.wait_group 0; $0 ld.shared.u32 %r6, [%r3];",
        right=((MEET,), ("bar.sync 0;",)),
        wrong=tuple((missing,) for missing in NO_MEETING),
    ),
}


def test_lanes_in_step_see_what_the_others_have_written() -> None:
    """Checks that this holds until they diverge; PTX does not promise it, but kernels rely on it."""
    exchange = "xor.b32 %r3, %mine, 4; st.shared.u32 [%mine], 1; $ ld.shared.u32 %r6, [%r3];"
    parted = f"{FIRST_LANE} {exchange.replace('$', '@!%p1 bra REST; mov.u32 %r7, 1; REST:')}"
    for seed in SEEDS:
        kernel(exchange.replace("$", "")).launch("k", (1,), (64,), [None], seed=seed)
        with pytest.raises(EmulatorError, match="race"):
            kernel(parted).launch("k", (1,), (64,), [None], seed=seed)


@pytest.mark.parametrize(("case", "filling"), fillings(CASES, "wrong"))
def test_a_missing_edge_is_found_at_every_seed(case: Case, filling: tuple[str, ...]) -> None:
    case.check_wrong(filling, "race", "is not ordered with")


@pytest.mark.parametrize(("case", "filling"), fillings(CASES, "narrow"))
def test_an_mbarrier_of_too_narrow_a_scope_is_found_at_every_seed(case: Case, filling: tuple[str, ...]) -> None:
    case.check_wrong(filling, "race", r"with scope \.cta, which does not include another CTA")


@pytest.mark.parametrize(("case", "filling"), fillings(CASES, "right"))
def test_an_edge_orders_accesses(case: Case, filling: tuple[str, ...]) -> None:
    case.check(filling)


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


def test_stores_of_the_same_value() -> None:
    """Checks that they are races, except with ``replicated_stores`` by the same instruction and with the same value."""
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


# Two warps add to the same numbers.
ADDED_BY_WARPS = "@%w0 red.$0 [%w], $1; $2 @!%w0 red.$0 [%v], $1;"
REDUCE = (
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%out], [%buffer], 256; cp.async.bulk.commit_group;"
)
# CTAs add one after the other, in the order of their indices.
IN_ORDER = f"""st.shared.u32 [%mine], 0; fence.proxy.async; bar.sync 0; @!%t0 bra DONE;
    AGAIN: ld.$0.gpu.global.u32 %r7, [%out+1024]; setp.lt.u32 %p3, %r7, %cta; @%p3 bra AGAIN;
    {REDUCE} cp.async.bulk.wait_group$1 0; red.$2.gpu.global.add.u32 [%out+1024], 1;
    DONE:"""
SUMS = {
    "atomics of warps": Case(
        ADDED_BY_WARPS,
        right=(("global.add.f32", "0f3f800000", "bar.sync 0;"), ("global.add.u32", "%r2", "")),
        wrong=(
            ("global.add.f32", "0f3f800000", ""),
            ("global.add.noftz.f16x2", "%r2", ""),
            ("global.add.noftz.bf16", "%h0", "membar.gl;"),
        ),
    ),
    "wide atomics of warps": Case(
        "mov.u32 %r2, 0; @%t0 $0 [%out], $1; $2 setp.eq.u32 %p1, %tid, 32; @%p1 $0 [%out+$3], $1;",
        right=(
            ("red.global.add.v4.f32", "{%r2, %r2, %r2, %r2}", "bar.sync 0;", "0"),
            ("red.global.add.v4.f32", "{%r2, %r2, %r2, %r2}", "", "16"),
        ),
        wrong=(
            ("red.global.add.v4.f32", "{%r2, %r2, %r2, %r2}", "", "0"),
            ("red.global.add.noftz.v2.bf16x2", "{%r2, %r2}", "", "0"),
            ("red.global.add.f64", "0d3ff0000000000000", "", "0"),
        ),
    ),
    "atomics of lanes": Case("@%w0 red.global.add.f32 [$0], 0f3f800000;", right=(("%w",),), wrong=(("%out",),)),
    "atomics in shared memory": Case(
        "st.shared.u32 [%mine], 0; bar.sync 0; @%w0 red.shared.add.f32 [%mine], 0f3f800000;\n"
        "$0 @!%w0 red.shared.add.f32 [%theirs], 0f3f800000;",
        right=(("bar.sync 0;",),),
        wrong=(("",),),
    ),
    "bulk reductions of a thread": Case(
        f"st.shared.u32 [%mine], 0; fence.proxy.async; bar.sync 0; @!%t0 bra DONE; {REDUCE} $0 {REDUCE}\n DONE:",
        right=(("cp.async.bulk.wait_group 0;",),),
        wrong=(("",), ("cp.async.bulk.wait_group.read 0;",)),
    ),
    "CTAs that add in the order of their indices": Case(
        IN_ORDER,
        right=(("acquire", "", "release"),),
        wrong=(("acquire", ".read", "release"), ("relaxed", "", "release"), ("acquire", "", "relaxed")),
        grid=4,
    ),
}


@pytest.mark.parametrize(("case", "filling"), fillings(SUMS, "wrong"))
def test_a_sum_in_no_fixed_order_is_found_at_every_seed(case: Case, filling: tuple[str, ...]) -> None:
    case.check_wrong(filling, "race", "the order of the sum is not fixed", ordered_sums=True)
    case.check(filling)


@pytest.mark.parametrize(("case", "filling"), fillings(SUMS, "right"))
def test_a_sum_in_fixed_order(case: Case, filling: tuple[str, ...]) -> None:
    case.check(filling, ordered_sums=True)


def test_detection_follows_checks() -> None:
    module = kernel("st.shared.u32 [%buffer], %tid;")
    module.launch("k", (1,), (64,), [None], checks=False)
    with pytest.raises(EmulatorError, match="race"):
        module.launch("k", (1,), (64,), [None], checks=False, races=True)
