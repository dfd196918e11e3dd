"""Tests of loads and stores, atomics, addresses, variables, and of instructions that the targets do not have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulator import EmulatorError, Module
from expected_errors import failing
from ptx_body import evaluate, run

LOADS = [
    "ld.volatile.global.b32", "ld.relaxed.cta.global.b32", "ld.relaxed.gpu.global.b32", "ld.acquire.sys.global.b32",
    "ld.relaxed.sys.b32", "ld.mmio.relaxed.sys.global.b32", "ld.weak.global.cv.b32", "ld.global.nc.b32",
    "ld.global.nc.L1::no_allocate.L2::128B.b32", "ld.global.nc.L1::evict_last.b32", "ld.global.lu.b32",
    "ld.global.L1::evict_first.L2::256B.b32", "ld.b32", "ld.global.ca.u32",
]  # fmt: skip
STORES = [
    "st.volatile.global.b32", "st.relaxed.cta.global.b32", "st.release.gpu.global.b32", "st.release.sys.b32",
    "st.mmio.relaxed.sys.global.b32", "st.weak.global.wt.b32", "st.global.cs.b32", "st.global.L1::no_allocate.b32",
]  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
def test_loads(load: str) -> None:
    source = torch.arange(32, dtype=torch.int32)
    out = torch.zeros_like(source)
    run(
        f"add.s64 %rd2, %rd0, %rd9; {load} %r1, [%rd2]; add.s64 %rd2, %rd1, %rd9; st.global.b32 [%rd2], %r1;",
        source,
        out,
    )
    assert torch.equal(out, source)


@pytest.mark.parametrize("store", STORES)
def test_stores(store: str) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    run(f"add.s64 %rd2, %rd0, %rd9; {store} [%rd2], %r0;", out)
    assert out.tolist() == list(range(32))


def test_cache_policies_and_hints() -> None:
    body = """createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %l1, 0.5;
    createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %l2, [%l0], 64, 128; createpolicy.cvt.L2.b64 %l3, 7;
    ld.param.u64 %l4, [p0]; prefetch.global.L2 [%l4]; prefetchu.L1 [%l4]; prefetch.global.L2::evict_last [%l4];
    mad.wide.u32 %l4, %i, 4, %l4; ld.global.L2::cache_hint.b32 %d, [%l4], %l1;"""
    source = torch.arange(32, dtype=torch.int32)
    assert torch.equal(evaluate(body, torch.int32, source), source)


@pytest.mark.parametrize("seed", range(4))
def test_asynchronous_copies_to_a_mapped_address(seed: int) -> None:
    """Checks that cp.async takes a .shared::cluster address of the CTA's own shared memory."""
    source, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = """.shared .align 16 .b8 s[128]; mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r1, %r1, %r2;
    mov.u32 %r3, %cluster_ctarank; mapa.shared::cluster.u32 %r4, %r1, %r3; add.u64 %rd2, %rd0, %rd9;
    cp.async.ca.shared.global [%r4], [%rd2], 4; cp.async.wait_all; ld.shared.u32 %r5, [%r1];
    add.u64 %rd2, %rd1, %rd9; st.global.u32 [%rd2], %r5;"""
    run(body, source, out, target="sm_90a", seed=seed)
    assert torch.equal(out, source)


def test_asynchronous_copies_with_hints() -> None:
    """Checks a cache policy, and a predicate that ignores the source, which gives zeros."""
    source, out = torch.arange(128, dtype=torch.int32), torch.full((128,), -1, dtype=torch.int32)
    body = """.shared .align 16 .b8 s[512]; mov.u32 %r1, s; shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2;
    cvt.u64.u32 %rd2, %r2; add.s64 %rd3, %rd0, %rd2; add.s64 %rd4, %rd1, %rd2; mov.b64 %rd5, 0;
    setp.eq.u32 %p1, %r0, 3; @{guard} cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r1], [%rd3], 16, %rd5;
    {other} cp.async.wait_all; ld.shared.v4.b32 {{%r3, %r4, %r5, %r6}}, [%r1];
    st.global.v4.b32 [%rd4], {{%r3, %r4, %r5, %r6}};"""
    for other in (
        "@%p1 cp.async.ca.shared.global [%r1], [%rd3], 16, %p1;",
        "@%p1 cp.async.ca.shared.global [%r1], [%rd3], 16, 0;",
    ):
        run(body.format(guard="!%p1", other=other), source, out)
        expected = source.clone()
        expected[12:16] = 0
        assert torch.equal(out, expected)


def test_registers_of_128_bits() -> None:
    """Checks loads, stores, unpacking and packing; on sm_90 also atomic exch and cas."""
    storage = torch.arange(8, dtype=torch.int64)
    data = storage[(-storage.data_ptr() % 16) // 8 :][:6]
    data.copy_(torch.tensor([1, 2, 3, 4, 5, 6]))
    body = """.reg .b128 %q<4>; setp.eq.u32 %p1, %r0, 0; @!%p1 bra DONE;
    ld.global.b128 %q0, [%rd0]; mov.b128 {%rd1, %rd2}, %q0; mov.b128 %q1, {%rd2, %rd1};
    atom.global.exch.b128 %q2, [%rd0+16], %q1; st.global.b128 [%rd0], %q2;
    mov.b64 %rd3, 5; mov.b64 %rd4, 6; mov.b128 %q3, {%rd3, %rd4}; atom.cas.gpu.b128 %q3, [%rd0+32], %q3, %q1; DONE:"""
    run(body, data, target="sm_90")
    assert data.tolist() == [3, 4, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("vector", "kind"), [("v2", "f32"), ("v4", "f32"), ("v2", "f16"), ("v8", "bf16"), ("v4", "f16x2")]
)
@pytest.mark.parametrize("returns", [False, True])
def test_vector_atomics(vector: str, kind: str, returns: bool) -> None:
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}.get(kind, torch.float16)
    count = int(vector[1:])
    numbers = count * (2 if kind == "f16x2" else 1)
    storage = torch.zeros(32, dtype=dtype)
    data = storage[(-storage.data_ptr() % 16) // storage.element_size() :][:numbers]
    data.copy_(torch.arange(numbers))
    letter = "f" if kind == "f32" else "r" if kind == "f16x2" else "h"
    ones = {"f32": "0f3F800000", "f16": "0x3C00", "bf16": "0x3F80", "f16x2": "0x3C003C00"}[kind]
    width = {"f": 32, "r": 32, "h": 16}[letter]
    moves = "".join(f"mov.b{width} %{letter}{i}, {ones};" for i in range(1, count + 1))
    sources = "{" + ", ".join(f"%{letter}{i}" for i in range(1, count + 1)) + "}"
    flush = "" if kind == "f32" else ".noftz"
    results = "{" + ", ".join(["_"] * count) + "}, " if returns else ""
    opcode = f"{'atom' if returns else 'red'}.relaxed.gpu.global.add{flush}.{vector}.{kind}"
    registers = ".reg .b16 %h9;" if letter == "h" else ""
    run(f"{registers} {moves} {opcode} {results}[%rd0], {sources};", data, threads=64, target="sm_90")
    assert torch.equal(data, (torch.arange(numbers) + 64).to(dtype))


@pytest.mark.parametrize("space", ["", ".global"])
def test_atomics_flush_subnormals_in_global_memory_alone(space: str) -> None:
    """Checks that .f32 additions flush operands and results in global memory, but not in shared (PTX ISA, "atom")."""
    tiny = 2.0**-130
    data = torch.tensor([0.0, 2.0**-126, -tiny, tiny, 0.0, 0.0])
    body = f"""setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE; mov.f32 %f1, 0f00080000; mov.f32 %f2, 0f80C00000;
    red{space}.add.f32 [%rd0], %f1; atom{space}.add.f32 %f3, [%rd0+4], %f2; mov.f32 %f4, 0f80000000;
    red{space}.add.f32 [%rd0+8], %f4; red{space}.add.v2.f32 [%rd0+16], {{%f1, %f1}};
    .shared .align 4 .b32 s; st.shared.f32 [s], %f1; red.shared.add.f32 [s], %f1; ld.shared.f32 %f5, [s];
    st.global.f32 [%rd0+12], %f5; DONE:"""
    run(body, data, target="sm_90")
    assert data.tolist() == [0, 0, 0, 2 * tiny, 0, 0] and data[1:3].signbit().all()


@pytest.mark.parametrize(("name", "initial", "expected"), [("min", 5.0, -3.0), ("max", -7.0, 28.0)])
def test_extremes_of_vectors(name: str, initial: float, expected: float) -> None:
    data = torch.full((2,), initial, dtype=torch.float16)
    body = f"sub.s32 %r1, %r0, 3; cvt.rn.f16.s32 %h1, %r1; red.global.{name}.noftz.v2.f16 [%rd0], {{%h1, %h1}};"
    run(body, data, target="sm_90")
    assert data.tolist() == [expected] * 2


def test_narrow_compare_and_swap() -> None:
    data = torch.tensor([7, 1], dtype=torch.int16)
    run("mov.b16 %h1, 7; cvt.u16.u32 %h2, %r0; atom.global.cas.b16 %h3, [%rd0], %h1, %h2;", data)
    assert 0 <= data[0] < 32 and data[1] == 1


VARIABLES = """.global .align 4 .b32 table[4] = {10, 20, 30, 40};
.const .align 4 .f32 weights[2] = {0f3F800000, 2.5};
.global .align 8 .u64 places[3] = {table, generic(table)+8, generic(places)+16};
.visible .global .align 2 .b16 rows[2][2] = {{1, 2}, {3, 4}};
.weak .func (.param .b32 r) helper() { .reg .b32 %r; mov.b32 %r, 3; st.param.b32 [r], %r; ret; }"""


def test_variables_with_initial_values() -> None:
    out = torch.zeros(6, dtype=torch.int32)
    body = """setp.ne.u32 %p1, %r0, 0; @%p1 exit; ld.global.u64 %rd1, [places]; ld.global.b32 %r1, [%rd1+4];
    ld.global.u64 %rd1, [places+8]; ld.b32 %r2, [%rd1]; ld.const.f32 %f1, [weights+4]; cvt.rzi.s32.f32 %r3, %f1;
    ld.global.u64 %rd1, [places+16]; mov.u64 %rd2, places; sub.s64 %rd1, %rd1, %rd2; cvt.u32.u64 %r4, %rd1;
    ld.global.u16 %r5, [rows+6]; { .param .b32 b; call (b), helper, (); ld.param.b32 %r6, [b]; }
    st.global.v2.b32 [%rd0], {%r1, %r2}; st.global.v2.b32 [%rd0+8], {%r3, %r4};
    st.global.v2.b32 [%rd0+16], {%r5, %r6};"""
    run(body, out, functions=VARIABLES)
    assert out.tolist() == [20, 30, 2, 16, 4, 3]


def test_an_initial_value_that_is_nowhere() -> None:
    with pytest.raises(EmulatorError, match="the address of nothing"):
        Module(".version 8.0\n.target sm_80\n.address_size 64\n.global .u64 p = nothing;")


@pytest.mark.parametrize("space", ["global", "shared", "local", "param"])
def test_address_spaces(space: str) -> None:
    """Checks that a generic address is in exactly one state space, and that cvta.to reverses cvta."""
    places = {"global": "%rd0", "shared": "s", "local": "l", "param": "p0"}
    tests = "".join(
        f"isspacep.{other} %p1, %rd2; selp.b32 %r2, {1 << i}, 0, %p1; or.b32 %r1, %r1, %r2;"
        for i, other in enumerate(places)
    )
    body = f""".shared .b32 s; .local .b32 l; mov.b64 %rd1, {places[space]}; cvta.{space}.u64 %rd2, %rd1;
    mov.b32 %r1, 0; {tests} cvta.to.{space}.u64 %rd3, %rd2; setp.eq.s64 %p2, %rd3, %rd1; selp.b32 %r3, 16, 0, %p2;
    add.s32 %r1, %r1, %r3; st.global.b32 [%rd0], %r1;"""
    out = torch.zeros(1, dtype=torch.int32)
    run(body, out, threads=1)
    assert out.item() == 16 + (1 << list(places).index(space))


def test_in_a_cluster_an_address_tells_whose_shared_memory_it_is_in() -> None:
    """So code that packs an address into fewer bits, as wgmma's descriptors do, has to remove the upper ones."""
    found = torch.zeros(2, 32, dtype=torch.int32)
    body = """mov.u32 %r1, buffer; mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd2, %r2, 128; add.u64 %rd2, %rd2, %rd9;
    add.u64 %rd0, %rd0, %rd2; st.global.u32 [%rd0], %r1; st.shared.u32 [buffer], %r2; ld.shared.u32 %r3, [%r1];"""
    shared = ".extern .shared .align 16 .b8 buffer[];"
    for cluster, apart in ((2, 1 << 24), (1, 0)):
        run(body, found, functions=shared, target="sm_90", grid=(2,), cluster=(cluster,), shared_bytes=64)
        assert (found[1] - found[0] == apart).all() and (found[0] % (1 << 24) == found[0, 0] % (1 << 24)).all()


def test_shared_is_the_cta_and_the_cluster() -> None:
    body = """.shared .b32 s; mov.b64 %rd1, s; cvta.shared.u64 %rd2, %rd1; isspacep.shared::cta %p1, %rd2;
    selp.b32 %r1, 1, 0, %p1; st.global.b32 [%rd0], %r1;"""
    out = torch.zeros(1, dtype=torch.int32)
    run(body, out, threads=1)
    assert out.item() == 1


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.wait::ld.sync.aligned;",
        "multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd0];",
        "ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd0];",
        "add.f32x2 %rd1, %rd1, %rd1;",
        "add.f32.f16 %f1, %h1, %f1;",
        "max.f32 %f1, %f1, %f2, %f3;",
        "redux.sync.max.f32 %f1, %f1, 0xffffffff;",
        "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;",
        "cvt.rna.f16.f32 %h1, %f1;",
        "fma.f32 %f1, %f1, %f1, %f1;",
        "fma.rn.oob.f16 %h1, %h1, %h1, %h1;",
        "add.sat.u32 %r1, %r1, %r1;",
        "mul.sat.lo.s32 %r1, %r1, %r1;",
        "sqrt.f32 %f1, %f1;",
        "vadd.s32.s32.s32 %r1, %r1, %r1;",
        "mov.u32 %r1, %pm0;",
        "tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [t, {%r1}];",
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {%f1, %f2}, {%r1, %r2}, {%r5, %r6}, {%f1, %f2};",
        "atom.global.add.v4.f16x2 %r1, [%rd0], %r1;",
        "fence.proxy.sideways;",
        "prefetch.global.L3 [%rd0];",
    ],
)
def test_what_hopper_does_not_have_is_an_error(instruction: str) -> None:
    with failing("unsupported") as caught:
        run(f"bra DONE;\n{instruction}\nDONE:", torch.zeros(8), target="sm_90")
    assert caught.value.text == instruction


@pytest.mark.parametrize(
    "instruction",
    [
        "max.relu.s32 %r1, %r1, %r1;",
        "add.u16x2 %r1, %r1, %r1;",
        "red.global.add.v2.f32 [%rd0], {%f1, %f2};",
        "cvt.rn.bf16.f64 %h1, %d1;",
        "cvt.rn.tf32.f32 %r1, %f1;",
        "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%d0, %d1, _, _}, {%d4, %d5}, {%d6}, {%d0, %d1, %d2, %d3};",
    ],
)
def test_what_came_with_hopper_is_an_error_before(instruction: str) -> None:
    source: Tensor = torch.zeros(2)
    run(f"bra DONE;\n{instruction}\nDONE:", source, target="sm_90a")
    with pytest.raises(EmulatorError, match="known for sm_90 and later"):
        run(f"bra DONE;\n{instruction}\nDONE:", source, target="sm_80")
