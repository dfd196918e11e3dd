"""Tests with planted faults: each is found with its place, and the repaired kernel passes."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from emulator import EmulatorError, Module
from emulator.report import Report
from expected_errors import failing
from ptx_body import evaluate

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def kernel(body: str, parameters: str = ".param .u64 out", shared: int = 0) -> Module:
    """Returns a kernel ``k`` with registers of every kind. ``%r0`` holds ``%tid.x``, and ``%rd0`` holds ``out``."""
    return Module(f"""{HEAD}
.visible .entry k({parameters})
{{
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<19>;
    .reg .f32 %f<9>;
    .reg .b64 %rd<9>;
    {f".shared .align 16 .b8 buffer[{shared}];" if shared else ""}
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [out];
    {body}
    ret;
}}""")


def fails(module: Module, kind: str, text: str, threads: int = 64, **options: object) -> EmulatorError:
    with failing(kind) as caught:
        module.launch("k", (1,), (threads,), [torch.zeros(64)], **options)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert caught.value.kernel == "k" and caught.value.line is not None
    return caught.value


STORE = "mul.wide.u32 %rd1, %r0, {scale}; add.s64 %rd1, %rd0, %rd1;\n st.global.u32 [%rd1+{offset}], %r0;"


@pytest.mark.parametrize(("offset", "thread"), [(4, 63), (-4, 0)])
def test_global_memory_out_of_bounds(offset: int, thread: int) -> None:
    error = fails(kernel(STORE.format(scale=4, offset=offset)), "out-of-bounds", "argument 0, float32 [64]")
    assert error.thread == (thread, 0, 0) and error.cta == (0, 0, 0)
    assert error.text is not None and error.text.startswith("st.global.u32")
    kernel(STORE.format(scale=4, offset=0)).launch("k", (1,), (64,), [torch.zeros(64)])


STORES = "st{}.u32 [%rd1-4], %r0;"
LOADS = "ld{}.u64 %rd2, [%rd1-8];"
SPACES = (".global", "", ".local", ".shared")


@pytest.mark.parametrize(("space", "instruction"), [*itertools.product(SPACES, (STORES, LOADS)), (".param", LOADS)])
def test_just_below_address_zero(space: str, instruction: str) -> None:
    """Checks an access one element before a null pointer, where address plus size overflows to 0."""
    frame = ".local .align 8 .b8 frame[16]; mov.u64 %rd1, 0; "
    with failing("out-of-bounds") as caught:
        kernel(frame + instruction.format(space)).launch("k", (1,), (1,), [torch.zeros(4)])
    assert "which is in" not in caught.value.message, caught.value


def test_misaligned() -> None:
    error = fails(kernel(STORE.format(scale=2, offset=0)), "misaligned", "no multiple of its size")
    assert error.thread in ((1, 0, 0), (33, 0, 0))  # either warp may come first


def test_a_copy_that_reaches_into_the_neighbour() -> None:
    """Checks a copy that begins in one argument and ends in another one, which follows it in memory."""
    body = "ld.param.u64 %rd0, [one]; mov.u32 %r1, buffer; cp.async.ca.shared.global [%r1], [%rd0], 16, {};"
    both = torch.zeros(64)
    for size, is_right in ((16, False), (12, False), (8, True)):
        module = kernel(body.format(size) + " cp.async.wait_all;", ".param .u64 one, .param .u64 out", shared=16)
        if is_right:
            module.launch("k", (1,), (1,), [both[:2], both[2:]])
            continue
        with pytest.raises(EmulatorError, match=f"out-of-bounds: a read of {size} bytes .* argument 0") as caught:
            module.launch("k", (1,), (1,), [both[:2], both[2:]])
        assert caught.value.text is not None and caught.value.text.startswith("ld.param")


SHARED = "mov.u32 %r1, buffer; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2; st.shared.u32 [%r1+{offset}], %r0;"


def test_shared_memory_out_of_bounds() -> None:
    assert fails(kernel(SHARED.format(offset=4), shared=256), "out-of-bounds", "shared").thread == (63, 0, 0)
    kernel(SHARED.format(offset=0), shared=256).launch("k", (1,), (64,), [torch.zeros(1)])


def test_local_memory_out_of_bounds() -> None:
    body = ".local .align 4 .b8 frame[16]; mov.u64 %rd1, frame; st.local.u32 [%rd1+{}], %r0;"
    fails(kernel(body.format(16)), "out-of-bounds", "local")
    kernel(body.format(12)).launch("k", (1,), (64,), [torch.zeros(1)])


def test_uninitialised_shared_memory() -> None:
    """Checks that it reads as NaN, and is an error with ``uninitialised``."""
    body = (
        "mov.u32 %r1, buffer;\n setp.eq.s32 %p1, %r0, 0; {}\n ld.shared.f32 %f1, [%r1]; @%p1 st.global.f32 [%rd0], %f1;"
    )
    bad, good = kernel(body.format(""), shared=4), kernel(body.format("st.shared.u32 [%r1], 0;"), shared=4)
    fails(bad, "uninitialised", "nothing has written", uninitialised=True)
    out = torch.zeros(1)
    bad.launch("k", (1,), (32,), [out])
    assert out.isnan().all()
    good.launch("k", (1,), (32,), [out], uninitialised=True)
    assert out.item() == 0


@pytest.mark.parametrize("count", [48, 128, 0])
def test_barrier_with_a_count_that_cannot_be(count: int) -> None:
    fails(kernel(f"bar.sync 1, {count};"), "barrier", "a multiple of 32")
    kernel("bar.sync 1, 64;").launch("k", (1,), (64,), [torch.zeros(1)])


def test_barrier_with_counts_that_differ() -> None:
    body = "setp.lt.u32 %p1, %r0, 32; mov.u32 %r1, {}; mov.u32 %r2, 96; selp.b32 %r1, %r1, %r2, %p1; bar.sync 1, %r1;"
    fails(kernel(body.format(64)), "barrier", "where others have arrived", threads=96)
    kernel(body.format(96)).launch("k", (1,), (96,), [torch.zeros(1)])


def test_barrier_that_nobody_waits_for() -> None:
    left = kernel("setp.lt.u32 %p1, %r0, 32; @%p1 bar.arrive 2, 64;")
    with failing("barrier", "nobody waited for"):
        left.launch("k", (1,), (64,), [torch.zeros(1)], unawaited=True)
    full = kernel("bar.arrive 2, 64;").launch("k", (3,), (64,), [torch.zeros(1)], unawaited=True)
    assert full.warnings == {} and "warning" not in str(full)


def test_arrivals_left_at_a_barrier_are_a_warning() -> None:
    """Checks the warning; PTX allows it, because the last arrival of a pipeline's barrier may have no waiter."""
    left = kernel("setp.lt.u32 %p1, %r0, 32; @%p1 bar.arrive 2, 64;")
    report = left.launch("k", (3,), (64,), [torch.zeros(1)])
    text = "threads arrived at barrier 2, which nobody waited for"
    assert report.warnings == {text: 3}
    assert f"warning: {text} (3 CTAs)" in str(report)
    assert Report.total([report, report]).warnings == {text: 6}


def test_divergent_barrier() -> None:
    body = "setp.lt.u32 %p1, %r0, {}; @%p1 bra HERE; bra.uni DONE; HERE: bar.sync 0; DONE:"
    fails(kernel(body.format(40)), "divergence", "0xff of the warp's 0xffffffff")
    kernel("bar.sync 0;").launch("k", (1,), (64,), [torch.zeros(1)])


MATRICES = [
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [buffer];",
    "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1, %r2}, {%r3}, {%r4}, {%r1, %r2};",
]


@pytest.mark.parametrize("instruction", MATRICES, ids=["ldmatrix", "mma"])
def test_matrix_of_which_some_lanes_have_left(instruction: str) -> None:
    """Checks that matrix instructions need all 32 lanes; other .aligned ones need the lanes that have not exited."""
    exits = "setp.lt.u32 %p1, %r0, 16; @!%p1 exit; bar.sync 0;"
    fails(kernel(exits + instruction, shared=128), "divergence", "lanes 0xffff of the warp's 0xffffffff", threads=32)
    fails(kernel(instruction, shared=128), "divergence", "lanes 0xff of the warp's 0xffffffff", threads=40)
    kernel(exits, shared=128).launch("k", (1,), (32,), [torch.zeros(1)])
    kernel(instruction, shared=128).launch("k", (1,), (32,), [torch.zeros(1)])


def test_deadlock_says_where_every_warp_is() -> None:
    body = "setp.lt.u32 %p1, %r0, 32;\n @%p1 bra HERE;\n bar.sync 1;\n bra.uni DONE;\n HERE: bar.sync 2;\n DONE:"
    error = fails(kernel(body), "deadlock", "no warp can go on")
    assert "warp 0: lanes 0xffffffff" in error.message and "warp 1: lanes 0xffffffff" in error.message
    assert "barrier 1: 32 threads have arrived" in error.message


def test_shuffle_that_waits_for_lanes_that_never_come() -> None:
    body = "setp.lt.u32 %p1, %r0, 8; {} shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffffffff;"
    error = fails(kernel(body.format("@%p1")), "deadlock", "member mask", threads=32)
    assert "shfl.sync.bfly.b32" in error.message
    kernel(body.format("")).launch("k", (1,), (32,), [torch.zeros(1)])


def test_a_loop_without_an_end() -> None:
    fails(kernel("AGAIN: bra.uni AGAIN;"), "limit", "has not ended", instruction_limit=10000)


def test_trap() -> None:
    fails(kernel("setp.eq.u32 %p1, %r0, 5; @%p1 trap;"), "trap", "thread (5, 0, 0)")


COPY = """cvta.to.global.u64 %rd1, %rd0; mov.u32 %r1, buffer; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2;
    cvt.u64.u32 %rd2, %r2; add.s64 %rd1, %rd1, %rd2;
    cp.async.ca.shared.global [%r1], [%rd1], 4; cp.async.commit_group;
    {}
    ld.shared.f32 %f1, [%r1]; add.f32 %f1, %f1, 0f3F800000; st.global.f32 [%rd1], %f1;"""


def test_a_missing_wait_shows_at_some_seed() -> None:
    expected = torch.arange(32) + 1.0

    def right(body: str, seed: int) -> bool:
        data = torch.arange(32).float()
        kernel(COPY.format(body), shared=128).launch("k", (1,), (32,), [data], seed=seed, races=False)
        return torch.equal(data, expected)

    assert not all(right("", seed) for seed in range(8))
    assert not all(right("cp.async.wait_group 1;", seed) for seed in range(8))
    assert all(right("cp.async.wait_group 0;", seed) for seed in range(8))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("frobnicate.b32 %r1, %r0;", "unknown instruction frobnicate"),
        ("add.s32.wrong %r1, %r0, %r0;", "unknown modifier .wrong"),
        ("add.rna.f32 %f1, %f1, %f1;", "unknown modifier .rna"),
        ("mov.b32 %r1, %rd0;", "another width"),
        ("tcgen05.fence::before_thread_sync;", "unknown instruction tcgen05"),
        ("mbarrier.init.global.b64 [%rd0], 1;", "an mbarrier object is in shared memory"),
        ("cp.async.bulk.commit_group;", "sm_90"),
    ],
)
def test_what_is_not_known_is_an_error(body: str, text: str) -> None:
    """Checks that unsupported code is an error even if it is never reached."""
    error = fails(kernel(f"bra.uni DONE;\n{body}\nDONE:"), "unsupported", text)
    assert error.text == body


def test_syntax_error_names_its_line() -> None:
    with failing("syntax", "expected ';'") as caught:
        Module(f"{HEAD}.visible .entry k()\n{{\n .reg .b32 %r<2>;\n mov.u32 %r0 %r1;\n ret;\n}}")
    assert caught.value.line == 7


def test_signed_exponents_belong_to_their_number() -> None:
    for number, value in (("1.5E-3", 1.5e-3), ("2e+2", 200.0), ("25E-1", 2.5)):
        found = evaluate(f"mov.f32 %d, {number};", torch.float32, torch.zeros(1))
        assert found.item() == pytest.approx(value)


@pytest.mark.parametrize(("target", "has_clusters"), [("sm_80", False), ("sm_90a", True), ("sm_100", True)])
def test_clusters_are_those_of_later_targets(target: str, has_clusters: bool) -> None:
    module = Module(f".version 8.6\n.target {target}\n.address_size 64\n.visible .entry k()\n{{ ret; }}")
    with contextlib.nullcontext() if has_clusters else pytest.raises(EmulatorError, match=f"{target} has no clusters"):
        module.launch("k", (2,), (32,), [], cluster=(2, 1, 1))


def test_arguments() -> None:
    module = kernel("")
    for arguments in ([], [1.5], [b"1234"]):
        with pytest.raises(EmulatorError, match="arguments"):
            module.launch("k", (1,), (32,), arguments)
    with pytest.raises(EmulatorError, match="shared memory"):
        module.launch("k", (1,), (32,), [None], shared_bytes=200 << 10)
    with pytest.raises(EmulatorError, match="no kernel"):
        module.launch("nothing", (1,), (32,), [])
