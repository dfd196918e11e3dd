"""Tests of bulk copies, their reductions, and distributed shared memory, with planted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import EmulatorError, TensorMap
from emulator_tma import WAIT, build, copy_in, copy_out
from expected_errors import fails

CLUSTER_BARRIER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
INIT = "mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;"


def expect(size: int) -> str:
    return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size};"


def bulk_load(size: int, wait: str = WAIT.format(parity=0)) -> str:
    return f"""
    @%p1 bra SKIP;
    {INIT} {expect(size)}
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], {size}, [%r2];
SKIP:
    bar.sync 0;
    {wait}
    {copy_out("%rd2", size)}
    """


def bulk_store(size: int, instruction: str, after: str = "cp.async.bulk.wait_group 0;") -> str:
    return f"""
    {copy_in("%rd1", size)}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra SKIP;
    {instruction} [%rd2], [%r1], {size};
    cp.async.bulk.commit_group;
    {after}
SKIP:
    """


STORE = "cp.async.bulk.global.shared::cta.bulk_group"


def run(body: str, *arrays: Any, shared: int = 4096, **options: Any) -> None:
    build(body, shared, len(arrays), has_map=False).launch("k", args=arrays, **options)


@pytest.mark.parametrize("seed", range(6))
def test_bulk_copies(seed: int) -> None:
    source, target = torch.randn(1000), torch.zeros(1000)
    run(bulk_load(4000), source, target, seed=seed)
    assert torch.equal(source, target)
    target.zero_()
    run(bulk_store(4000, STORE), source, target, seed=seed)
    assert torch.equal(source, target)


def test_cache_policies_and_prefetches_change_nothing() -> None:
    source, target = torch.randn(64), torch.zeros(64)
    policy = "createpolicy.fractional.L2::evict_first.b64 %rd5, 1.0;"
    load = bulk_load(256).replace("[%r1], [%rd1], 256, [%r2]", "[%r1], [%rd1], 256, [%r2], %rd5")
    load = load.replace("complete_tx::bytes", "complete_tx::bytes.L2::cache_hint")
    run(f"{policy} cp.async.bulk.prefetch.L2.global [%rd1], 256; {load}", source, target)
    assert torch.equal(source, target)


# PTX's definition of each operation on old and new values, in PyTorch.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda old, new: old + new,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "inc": lambda old, new: torch.where(old >= new, 0, old + 1),
    "dec": lambda old, new: torch.where((old == 0) | (old > new), new, old - 1),
}
TYPES = {
    "u32": torch.int32,
    "s32": torch.int32,
    "b32": torch.int32,
    "u64": torch.int64,
    "s64": torch.int64,
    "b64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
GLOBAL = {
    "add": ["u32", "s32", "u64", "f32", "f64", "f16", "bf16"],
    "min": ["u32", "s32", "u64", "s64", "f16", "bf16"],
    "max": ["u32", "s32", "u64", "s64", "f16", "bf16"],
    "inc": ["u32"],
    "dec": ["u32"],
    "and": ["b32", "b64"],
    "or": ["b32", "b64"],
    "xor": ["b32", "b64"],
}


def operands(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Returns two random tensors, [256]. Unsigned numbers are small, so that PyTorch's signed types hold them."""
    generator = torch.Generator().manual_seed(seed)
    if TYPES[kind].is_floating_point:
        return tuple(torch.randn(256, generator=generator).to(TYPES[kind]) for _ in range(2))
    low = 0 if kind[0] == "u" else -50
    return tuple(torch.randint(low, 50, (256,), generator=generator).to(TYPES[kind]) for _ in range(2))


@pytest.mark.parametrize(("op", "kind"), [(op, kind) for op, kinds in GLOBAL.items() for kind in kinds])
def test_reductions(op: str, kind: str) -> None:
    noftz = ".noftz" if op == "add" and kind in ("f16", "bf16") else ""
    for seed in range(2):
        old, new = operands(kind, seed)
        expected = REDUCTIONS[op](old, new)
        target = old.clone()
        instruction = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}{noftz}.{kind}"
        run(bulk_store(256 * old.element_size(), instruction), new, target, seed=seed)
        assert torch.equal(target, expected)
        if kind == "f64":
            continue
        target = old.clone()
        body = bulk_store(256 * old.element_size(), "TENSOR").replace(
            f"TENSOR [%rd2], [%r1], {256 * old.element_size()}",
            f"cp.reduce.async.bulk.tensor.1d.global.shared::cta.{op}.tile.bulk_group [%rd0, {{%r9}}], [%r1]",
        )
        dtype = {"u32": "uint32", "u64": "uint64"}.get(kind)
        module = build(f"mov.u32 %r9, 0; {body}", 2048, 1)
        module.launch("k", args=[TensorMap(target, [256], dtype=dtype), new], seed=seed)
        assert torch.equal(target, expected)


def test_a_reduction_flushes_subnormals_of_f32_only() -> None:
    new, target = torch.full((32,), 1e-40), torch.full((32,), 1e-40)
    run(bulk_store(128, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"), new, target)
    assert target.eq(0).all()
    new, target = torch.full((64,), 1e-7).half(), torch.full((64,), 1e-7).half()
    run(bulk_store(128, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16"), new, target)
    assert target.gt(new).all()


def test_reductions_of_many_ctas_add_up() -> None:
    new, target = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    body = bulk_store(1024, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32")
    run(body, new, target, grid=(20,), seed=3)
    assert torch.equal(target, 20 * new)


# Clusters


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_multicast(size: int, is_tensor: bool) -> None:
    """Checks that each CTA's multicast of its rows reaches all CTAs of the cluster."""
    part, mask = 1024, (1 << size) - 1
    if is_tensor:
        copy = """cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r20], [%rd0, {%r22, %r21}], [%r2], %h1;"""
    else:
        copy = f"""mul.wide.u32 %rd20, %r21, 128; add.u64 %rd20, %rd2, %rd20;
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r20], [%rd20], {part}, [%r2], %h1;"""
    body = f"""
    mov.u32 %r19, %cluster_ctarank; mad.lo.u32 %r20, %r19, {part}, %r1; mul.lo.u32 %r21, %r19, 8; mov.u32 %r22, 0;
    @%p1 bra READY;
    {INIT} {expect(part * size)}
READY:
    {CLUSTER_BARRIER}
    @%p1 bra SKIP;
    mov.u16 %h1, {mask};
    {copy}
SKIP:
    bar.sync 0;
    {WAIT.format(parity=0)}
    mul.wide.u32 %rd21, %r19, {part * size}; add.u64 %rd1, %rd1, %rd21;
    {copy_out("%rd1", part * size)}
    """
    source = torch.randn(8 * size, 32)
    for seed in range(5):
        out = torch.zeros(size, 8 * size, 32)
        args = [TensorMap(source, [8, 32]), out] if is_tensor else [None, out, source]
        module = build(body, part * size, len(args) - is_tensor - (not is_tensor), has_map=is_tensor)
        if not is_tensor:
            args = args[1:]
        module.launch("k", grid=(size,), cluster=(size,), args=args, seed=seed)
        assert torch.equal(out, source.expand(size, -1, -1))


def exchange(
    before: str, instruction: str, size: int, count: int = 1, after: str = "", *, ranks: int = 2
) -> Callable[[Tensor, Tensor, int], None]:
    """Returns a function that runs a kernel in which `count` threads of each CTA of a cluster execute `instruction`. It
    sends `size` bytes from %r1 to %r23 in the next CTA, whose mbarrier is at %r24. What arrives goes to global
    memory."""
    body = f"""
    mov.u32 %r19, %cluster_ctarank; add.u32 %r22, %r19, 1; rem.u32 %r22, %r22, {ranks}; add.u32 %r25, %r1, 2048;
    mov.u32 %r18, %ctaid.x; mul.wide.u32 %rd21, %r18, 1024; add.u64 %rd1, %rd1, %rd21; add.u64 %rd2, %rd2, %rd21;
    mapa.shared::cluster.u32 %r23, %r25, %r22; mapa.shared::cluster.u32 %r24, %r2, %r22;
    {copy_in("%rd1", 1024)}
    {before}
    fence.proxy.async.shared::cta;
    @%p1 bra READY;
    {INIT} {expect(size * count)}
READY:
    {CLUSTER_BARRIER}
    setp.ge.u32 %p3, %r0, {count};
    @%p3 bra SKIP;
    {instruction}
SKIP:
    {WAIT.format(parity=0)}
    add.u32 %r1, %r1, 2048;
    {copy_out("%rd2", 1024)}
    {after}
    {CLUSTER_BARRIER}
    """
    module = build(body, 4096, 2, has_map=False)

    def run(source: Tensor, target: Tensor, seed: int = 0) -> None:
        module.launch("k", grid=(2 * ranks,), cluster=(ranks,), args=[source, target], seed=seed)

    return run


SEND = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r23], [%r1], 1024, [%r24];"


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_between_ctas(ranks: int) -> None:
    source = torch.randn(2 * ranks, 256)
    for seed in range(4):
        target = torch.zeros_like(source)
        exchange("", SEND, 1024, ranks=ranks)(source, target, seed)
        assert torch.equal(target, source.view(2, ranks, 256).roll(1, 1).view(-1, 256))


def fill_destination(pointer: str) -> str:
    """Returns PTX that copies the words at the pointer to where the other CTA sends."""
    return copy_in(pointer, 1024).replace("IN", "AGAIN").replace("st.shared.b32 [%r50]", "st.shared.b32 [%r50+2048]")


BETWEEN_CTAS = [(op, kind) for op, kinds in GLOBAL.items() for kind in kinds if kind[1:] in ("32",) and kind != "f32"]


@pytest.mark.parametrize(("op", "kind"), [*BETWEEN_CTAS, ("add", "u64")])
def test_reductions_between_ctas(op: str, kind: str) -> None:
    """Checks reductions into another CTA, whose destination starts as a copy of its own source."""
    reduce = f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{kind}"
    old = torch.stack([operands(kind, seed)[0] for seed in range(4)]).view(4, -1)[:, : 1024 // TYPES[kind].itemsize]
    source = old.contiguous()
    target = torch.zeros_like(source)
    exchange(fill_destination("%rd1"), f"{reduce} [%r23], [%r1], 1024, [%r24];", 1024)(source, target, 1)
    sent = source.view(2, 2, -1).roll(1, 1).view(4, -1)
    assert torch.equal(target, REDUCTIONS[op](source, sent))


@pytest.mark.parametrize(
    ("vector", "registers"), [("", "%r30"), (".v2", "{%r30, %r31}"), (".v4", "{%r30, %r31, %r32, %r33}")]
)
def test_st_async(vector: str, registers: str) -> None:
    count = registers.count("%")
    instruction = f"""
    mad.lo.u32 %r26, %r0, {4 * count}, %r1; mad.lo.u32 %r27, %r0, {4 * count}, %r23;
    ld.shared{vector}.b32 {registers}, [%r26];
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [%r27], {registers}, [%r24];
    """
    source = torch.randn(4, 256)
    for seed in range(3):
        target = torch.zeros_like(source)
        exchange(fill_destination("%rd2"), instruction, 4 * count, 32)(source, target, seed)
        expected = torch.zeros_like(source)
        expected[:, : 32 * count] = source.view(2, 2, 256).roll(1, 1).view(4, 256)[:, : 32 * count]
        assert torch.equal(target, expected)


@pytest.mark.parametrize(("op", "kind"), BETWEEN_CTAS)
def test_red_async(op: str, kind: str) -> None:
    instruction = f"""
    mad.lo.u32 %r26, %r0, 4, %r1; mad.lo.u32 %r27, %r0, 4, %r23;
    ld.shared.b32 %r30, [%r26];
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op}.{kind} [%r27], %r30, [%r24];
    """
    source = torch.stack([operands(kind, seed)[0] for seed in range(4)])
    target = torch.zeros_like(source)
    exchange(fill_destination("%rd1"), instruction, 4, 32)(source, target)
    expected = source.clone()
    sent = source.view(2, 2, -1).roll(1, 1).view(4, -1)
    expected[:, :32] = REDUCTIONS[op](source, sent)[:, :32]
    assert torch.equal(target, expected)


def test_shared_memory_of_another_cta() -> None:
    """Checks loads, stores, atomics and queries through .shared::cluster and generic addresses."""
    body = f"""
    mov.u32 %r19, %cluster_ctarank; xor.b32 %r22, %r19, 1;
    shl.b32 %r3, %r0, 2; add.u32 %r3, %r3, %r1;
    mapa.shared::cluster.u32 %r23, %r3, %r22;
    cvt.u64.u32 %rd5, %r3; cvta.shared.u64 %rd6, %rd5; mapa.u64 %rd7, %rd6, %r22;
    mad.lo.u32 %r4, %r19, 100, %r0; st.shared.u32 [%r3], %r4; mov.u32 %r5, 0; st.shared.u32 [%r3+128], %r5;
    {CLUSTER_BARRIER}
    ld.shared::cluster.u32 %r10, [%r23];
    ld.u32 %r11, [%rd7];
    atom.shared::cluster.add.u32 %r12, [%r23+128], 5;
    red.relaxed.cluster.shared::cluster.add.u32 [%r23+128], 2;
    st.shared::cluster.u32 [%r23+256], %r4;
    {CLUSTER_BARRIER}
    ld.shared.u32 %r13, [%r3+128];
    ld.shared.u32 %r14, [%r3+256];
    getctarank.shared::cluster.u32 %r15, %r23; getctarank.u64 %r16, %rd7;
    isspacep.shared::cluster %p2, %rd7; isspacep.shared::cta %p3, %rd7; isspacep.shared %p4, %rd6;
    selp.u32 %r17, 1, 0, %p2; selp.u32 %r18, 2, 0, %p3; add.u32 %r17, %r17, %r18;
    selp.u32 %r18, 4, 0, %p4; add.u32 %r17, %r17, %r18;
    mad.lo.u32 %r20, %r19, 32, %r0; mul.wide.u32 %rd8, %r20, 32; add.u64 %rd1, %rd1, %rd8;
    st.global.v4.u32 [%rd1], {{%r10, %r11, %r12, %r13}};
    st.global.v4.u32 [%rd1+16], {{%r14, %r15, %r16, %r17}};
    """
    out = torch.zeros(2, 32, 8, dtype=torch.int32)
    run(body, out, grid=(2,), cluster=(2,), seed=1)
    lanes = torch.arange(32)
    for rank in range(2):
        other = (1 - rank) * 100 + lanes
        assert torch.equal(out[rank, :, 0], other.int()) and torch.equal(out[rank, :, 1], other.int())
        assert out[rank, :, 2].eq(0).all() and out[rank, :, 3].eq(7).all()
        assert torch.equal(out[rank, :, 4], other.int())
        assert out[rank, :, 5].eq(1 - rank).all() and out[rank, :, 6].eq(1 - rank).all() and out[rank, :, 7].eq(5).all()


# Planted faults, each with the correct kernel.


SOURCE = torch.arange(256, dtype=torch.float32)


def test_misaligned_bulk_copies() -> None:
    target = torch.zeros(256)
    run(bulk_load(1024), SOURCE, target)
    load = bulk_load(1024)
    for wrong, text in (
        (load.replace("[%r1], [%rd1], 1024", "[%r1+8], [%rd1], 1024"), "shared memory"),
        (load.replace("[%r1], [%rd1], 1024", "[%r1], [%rd1+4], 1008"), "global address"),
        (load.replace("[%r1], [%rd1], 1024", "[%r1], [%rd1], 1000"), "no multiple of 16"),
    ):
        error = fails("misaligned", text, lambda wrong=wrong: run(wrong, SOURCE, target))
        assert error.text.startswith("cp.async.bulk.shared::cluster") and error.thread == (0, 0, 0)


def test_bulk_copies_out_of_bounds() -> None:
    target = torch.zeros(256)
    fails("out-of-bounds", "reaching 16 bytes past the end of argument 0", lambda: run(bulk_load(1040), SOURCE, target))
    store = bulk_store(1024, STORE)
    fails("out-of-bounds", "argument 1", lambda: run(store, SOURCE, target[:255]))
    beyond = store.replace("[%rd2], [%r1], 1024", "[%rd2], [%r1+3200], 1024")
    fails("out-of-bounds", "of shared memory", lambda: run(beyond, SOURCE, target))


def test_a_wrong_number_of_bytes_is_a_deadlock_that_says_so() -> None:
    load = bulk_load(1024)
    for announced in (1008, 2048):
        wrong = load.replace(expect(1024), expect(announced))
        launch = lambda wrong=wrong: run(wrong, SOURCE, torch.zeros(256), instruction_limit=1 << 16)  # noqa: E731
        fails("deadlock", f"{announced - 1024} bytes", launch)


def outcomes(body: str, expected: Tensor, seeds: int = 16, **options: Any) -> set[str]:
    """Returns the outcomes of a copy of SOURCE at several seeds: "right", "wrong" or the kind of error."""
    seen = set()
    for seed in range(seeds):
        target = torch.zeros_like(expected)
        try:
            run(body, SOURCE, target, seed=seed, **options)
            seen.add("right" if torch.equal(target, expected) else "wrong")
        except EmulatorError as error:
            seen.add(error.kind)
    return seen


def test_a_wrong_parity_reads_too_early_or_waits_for_ever() -> None:
    assert outcomes(bulk_load(1024), SOURCE) == {"right"}
    wrong = bulk_load(1024, WAIT.format(parity=1))
    assert outcomes(wrong, SOURCE) == {"race", "deadlock"}
    assert outcomes(wrong, SOURCE, races=False) >= {"wrong", "deadlock"}


def test_a_missing_wait_for_a_load() -> None:
    """Checks for a race. Without the race detector, the kernel reads poison, or the CTA ends before the copy lands."""
    wrong = bulk_load(1024, "")
    assert outcomes(wrong, SOURCE) == {"race"}
    assert outcomes(wrong, SOURCE, races=False) >= {"wrong", "cluster"}
    assert outcomes(wrong, SOURCE, races=False, uninitialised=True) >= {"uninitialised"}


def test_a_source_that_is_overwritten_before_it_is_read() -> None:
    overwrite = "mov.u32 %r9, -1; st.shared.u32 [%r1], %r9; cp.async.bulk.wait_group 0;"
    right = bulk_store(1024, STORE, f"cp.async.bulk.wait_group.read 0; {overwrite}")
    wrong = bulk_store(1024, STORE, overwrite)
    assert outcomes(right, SOURCE) == {"right"}
    assert outcomes(wrong, SOURCE) == {"race"}
    assert outcomes(wrong, SOURCE, races=False) == {"right", "wrong"}


def test_waiting_for_reads_is_not_waiting_for_writes() -> None:
    """Checks that only wait_group without .read lets the CTA read back what it stored."""
    again = "ld.global.b32 %r9, [%rd2+4]; st.global.b32 [%rd2], %r9; cp.async.bulk.wait_group 0;"
    expected = SOURCE.clone()
    expected[0] = SOURCE[1]
    right = bulk_store(1024, STORE, f"cp.async.bulk.wait_group 0; {again}")
    wrong = bulk_store(1024, STORE, f"cp.async.bulk.wait_group.read 0; {again}")
    assert outcomes(right, expected) == {"right"}
    assert outcomes(wrong, expected) == {"race"}
    assert outcomes(wrong, expected, races=False) == {"right", "wrong"}


def test_a_missing_proxy_fence() -> None:
    wrong = bulk_store(1024, STORE).replace("fence.proxy.async.shared::cta;", "")
    assert outcomes(wrong, SOURCE) == {"proxy"}


def test_leaving_before_the_source_is_read_is_an_error() -> None:
    def launch() -> None:
        for seed in range(8):
            run(bulk_store(1024, STORE, ""), SOURCE, torch.zeros(256), seed=seed)

    fails("cluster", "has ended without waiting", launch)
    for seed in range(8):
        target = torch.zeros(256)
        run(bulk_store(1024, STORE, "cp.async.bulk.wait_group.read 0;"), SOURCE, target, seed=seed)
        assert torch.equal(target, SOURCE)


def test_groups_are_counted() -> None:
    """Checks that wait_group 1 completes all groups but the last."""
    body = f"""
    {copy_in("%rd1", 1024)}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra SKIP;
    {STORE} [%rd2], [%r1], 512;
    cp.async.bulk.commit_group;
    {STORE} [%rd2+512], [%r1+512], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 1;
    ld.global.b32 %r9, [%rd2+READ]; st.global.b32 [%rd3], %r9;
    cp.async.bulk.wait_group 0;
SKIP:
    """

    def read_back(at: int, **options: Any) -> set[float]:
        seen = set()
        for seed in range(16):
            target, result = torch.zeros(256), torch.zeros(1)
            run(body.replace("READ", str(at)), SOURCE + 1, target, result, seed=seed, **options)
            assert torch.equal(target, SOURCE + 1)
            seen.add(result.item())
        return seen

    assert read_back(0) == {1.0}
    assert read_back(512, races=False) == {0.0, 129.0}
    fails("race", "cp.async.bulk", lambda: read_back(512))


def test_cluster_faults() -> None:
    source, target = torch.zeros(4, 256), torch.zeros(4, 256)
    same = SEND.replace("%r23", "%r25").replace("%r24", "%r2")
    fails("cluster", "of the same CTA", lambda: exchange("", same, 1024)(source, target, 0))
    apart = SEND.replace("%r24", "%r2")
    fails("cluster", "in different CTAs", lambda: exchange("", apart, 1024)(source, target, 0))
    fails(
        "cluster",
        "mapa to CTA 7 of a cluster of 2",
        lambda: exchange("mov.u32 %r22, 7; mapa.shared::cluster.u32 %r23, %r25, %r22;", SEND, 1024)(source, target, 0),
    )
    multicast = (
        bulk_load(1024).replace("bytes [%r1]", "bytes.multicast::cluster [%r1]").replace(", [%r2];", ", [%r2], 2;")
    )
    fails("cluster", "more CTAs than", lambda: run(multicast, SOURCE, torch.zeros(256)))
    alone = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r0, [%r2];"
    fails("cluster", "cluster of one CTA", lambda: run(alone))


def test_mbarrier_faults_of_copies() -> None:
    load = bulk_load(1024)
    fails("mbarrier", "there is no mbarrier", lambda: run(load.replace("1024, [%r2]", "1024, [%r2+8]"), SOURCE, SOURCE))
    over = load.replace("bytes [%r1], [%rd1], 1024", "bytes [%r1+3088], [%rd1], 1024")
    fails("mbarrier", "where an mbarrier object is", lambda: run(over, SOURCE, torch.zeros(256), shared_bytes=64))


def test_unknown_forms_are_errors() -> None:
    forms: Sequence[str] = (
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {%r0, %r0, %r0}], [%r2];",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {%r0, %r0}], [%r2];",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r0}], [%r2];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%rd1], [%r1], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd1], [%r1], 16;",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], 16, %h1;",
        "red.async.release.gpu.global.add.u32 [%rd1], %r0;",
        "multimem.red.relaxed.gpu.global.add.u32 [%rd1], %r0;",
        "ld.global.u32 %r0, [%rd1, {%r0}];",
    )
    for form in forms:
        fails("unsupported", "", lambda form=form: run(form, SOURCE))
