"""Tests the Hopper forward kernel against the oracle: in the cases of the kernels for sm_80, and its own rings,
clusters and persistent CTAs.

It runs on an H100 or H200 if there is one, else as PTX on the emulated sm_90, with all checks and at several seeds.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import cuda_forward
import fastattn
import instances
import test_cuda_attention as dense
import test_cuda_attention_options as options
from attention_cases import Case, compare, make_problem
from cuda_forward import CAUSAL, assert_equal, run
from cuda_kernels import DTYPES, EMULATED, HOPPER_MARKS, checked, each_dtype, only_emulated
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:
    from emulator import EmulatorError, cuda_runtime, device, launches


pytestmark = HOPPER_MARKS

Dims = tuple[int, int]  # head dim of queries and keys, head dim of values
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
BLOCK_M = dict(zip(HEAD_DIMS, (192, 128, 128, 192, 128, 128), strict=True))
BLOCK_N = dict(zip(HEAD_DIMS, (96, 128, 128, 80, 96, 80), strict=True))
KERNEL = "attention_forward_sm90"

each_head_dim = pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)


def check(case: Case, **launching: Any) -> None:
    cuda_forward.check(case, KERNEL, **launching)


# --- What every forward kernel must do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "window", "instance"),
    in_turn(
        itertools.product([*dense.SHAPES, (193, 97), (128, 129), (385, 383)], [(-1, -1), CAUSAL]),
        list(itertools.product([64, 128], DTYPES)),
        each=2,
    ),
    ids=str,
)
def test_shapes(shape: tuple[int, int], window: tuple[int, int], instance: tuple[int, torch.dtype]) -> None:
    (rows, keys), (head_dim, dtype) = shape, instance
    case = Case(
        shape=(1, 2, 2, rows, keys), head_dims=(head_dim, head_dim), window=window, dtype=dtype, small_tile=False
    )
    check(case, seed=rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dims", "case", "dtype"), in_turn(itertools.product(HEAD_DIMS, options.PLAIN_CASES), DTYPES), ids=str
)
def test_windows_sinks_and_packed_sequences(case: Case, head_dims: Dims, dtype: torch.dtype) -> None:
    check(replace(case, head_dims=head_dims, dtype=dtype))


@each_dtype
@pytest.mark.parametrize(
    "head_dims",
    [
        (8, 24),
        (40, 64),
        (72, 96),
        (128, 16),
        (16, 128),
        (136, 8),
        (144, 96),
        (184, 128),
        (192, 136),
        (72, 192),
        (200, 256),
    ],
    ids=str,
)
def test_head_dims_below_the_kernels_own(head_dims: Dims, dtype: torch.dtype) -> None:
    check(Case(head_dims=head_dims, dtype=dtype, window=(150, 4), sinks=True, shape=(1, 4, 2, 70, 300)))


@pytest.mark.parametrize(
    ("head_dims", "dtype", "scale"), in_turn(itertools.product(HEAD_DIMS, DTYPES), [-0.3, 0.0, 1.7]), ids=str
)
def test_any_scale(scale: float, head_dims: Dims, dtype: torch.dtype) -> None:
    check(Case(head_dims=head_dims, dtype=dtype, scale=scale, shape=(1, 2, 1, 140, 230), window=CAUSAL))


@pytest.mark.parametrize("layout", ["bshd", "sliced", "misaligned"])
@each_dtype
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(Case(layout=layout, shape=(2, 4, 2, 130, 200), head_dims=(64, 64), dtype=dtype))


@each_dtype
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (2,), (0, 1, 2)], ids=str)
def test_expanded_tensors(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    """A dimension of the tensor map has stride 0, and reads the same memory many times."""
    generator = torch.Generator().manual_seed(1)
    full = (2, 3, 100, 64)
    shape = [1 if dim in dims else size for dim, size in enumerate(full)]
    key, value = (torch.randn(shape, generator=generator).to(DEVICE, dtype).expand(full) for _ in range(2))
    query = torch.randn(full, generator=generator).to(DEVICE, dtype)
    dense.check(query, key, value, False)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expanded_queries(dim: int) -> None:
    """With few rows, a tile has rows of several heads; the tensor map has a stride between heads, here 0."""
    query, key, value = dense.inputs(64, torch.float16, 5, 100, heads=(8, 2), batch=2)
    dense.check(query.narrow(dim, 0, 1).expand(query.shape), key, value, False)


@pytest.mark.parametrize(
    ("growth", "head_dim", "dtype"), in_turn(itertools.product(dense.GROWTHS, [64, 256]), DTYPES), ids=str
)
def test_maxima_that_grow_from_tile_to_tile(growth: str, head_dim: int, dtype: torch.dtype) -> None:
    """Maxima grow by less and by more than what makes a row's reference follow; sums say where the kernel checks."""
    dense.check(*dense.growing_inputs(growth, head_dim, dtype, BLOCK_N[head_dim, head_dim]), False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dims", "dtype", "spoiled"), in_turn(itertools.product(HEAD_DIMS, DTYPES), ["nan", "inf"]), ids=str
)
def test_masked_keys_have_no_influence(spoiled: str, head_dims: Dims, dtype: torch.dtype) -> None:
    """NaN or infinity in one key reaches the rows that see it, and no other."""
    case = Case(window=CAUSAL, shape=(1, 4, 2, 300, 300), head_dims=head_dims, dtype=dtype)
    problem, clean, at = make_problem(case), run(case), 170
    problem.key[:, :, at], problem.value[:, :, at] = float(spoiled), float(spoiled)
    out, lse = run(case, problem, seed=sum(head_dims)).values()
    assert torch.equal(out[:, :, :at], clean["out"][:, :, :at]) and torch.equal(lse[..., :at], clean["lse"][..., :at])
    if spoiled == "nan":
        assert out[:, :, at:].isnan().all()


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("spoiled", ["nan", "inf"])
def test_masked_keys_have_no_influence_in_a_cluster(spoiled: str) -> None:
    """The producer makes the tile of values finite in place; later the other CTA's producer copies over it."""
    case = Case(window=CAUSAL, shape=(1, 4, 2, 200, 900), head_dims=(128, 128))
    problem, row = make_problem(case), 70
    with device.emulated(90, num_sms=4), launches.recorded() as found:
        clean = run(case)["out"]
        problem.key[:, :, 700 + row], problem.value[:, :, 700 + row] = float(spoiled), float(spoiled)
        out = run(case, problem)["out"]
    assert all(launched.report.waits.get("cluster barrier", 0) > 0 for launched in found)
    assert torch.equal(out[:, :, :row], clean[:, :, :row])


CASES_WITH_HIDDEN_KEYS = [
    Case(window=CAUSAL, shape=(1, 2, 2, 300, 300), head_dims=(64, 64)),
    Case(window=(40, 9), shape=(1, 2, 2, 150, 400), head_dims=(128, 128)),  # masked tiles at both ends
    Case(window=CAUSAL, shape=(2, 16, 16, 5, 300), head_dims=(64, 40), dtype=torch.bfloat16),  # heads share a tile
    Case(window=CAUSAL, shape=(1, 4, 2, 0, 0), lengths=((70, 30), (150, 200)), head_dims=(128, 72)),
    Case(window=CAUSAL, shape=(1, 2, 1, 40, 2400), head_dims=(64, 64)),  # several CTAs split the keys
    Case(window=CAUSAL, shape=(1, 2, 1, 200, 250), head_dims=(192, 128)),
    Case(window=CAUSAL, shape=(1, 2, 2, 150, 250), head_dims=(256, 256), sinks=True),
    Case(mask="bool", mask_shape=(0, 0, 1, 1), shape=(1, 2, 2, 150, 300), head_dims=(128, 128)),
    Case(window=(100, 30), softcap=3.0, shape=(1, 2, 2, 150, 300), head_dims=(96, 96)),
]


@pytest.mark.parametrize(
    ("case", "spoiled"),
    in_turn([(case,) for case in CASES_WITH_HIDDEN_KEYS], [float("nan"), float("inf"), -float("inf")], each=2),
    ids=str,
)
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(case: Case, spoiled: float) -> None:
    """Each such value is in a column of its own. All other numbers keep their bits."""
    problem = make_problem(case)
    clean = problem.value
    keys = clean.shape[0 if case.lengths else 2]
    at = torch.randint(keys, (8,), generator=torch.Generator().manual_seed(4)).tolist()
    at[:2] = keys - 1, keys - case.shape[3] // 2 - 1
    marks = torch.zeros_like(clean)
    for column, key in enumerate(at):
        marks[(key, 1, column) if case.lengths else (-1, -1, key, column)] = 1000
    results = []
    with device.emulated(90, num_sms=12) if EMULATED else contextlib.nullcontext():
        for value in (clean, marks, torch.where(marks > 0, spoiled, clean)):
            problem.value = value
            results.append(run(case, problem).values())
    (expected, expected_lse), (weights, _), (found, lse) = results
    sees = weights > 0
    assert sees.any() and torch.equal(lse, expected_lse)
    expected = torch.where(sees, spoiled, expected)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(posinf=-1e4, neginf=1e4), expected.nan_to_num(posinf=-1e4, neginf=1e4))


@only_emulated
@pytest.mark.parametrize("seed", range(3))
def test_values_may_be_made_finite_late(seed: int) -> None:
    """The last full tiles do not wait for the warp that makes values finite, and the next work tile's K runs ahead."""
    case = Case(window=CAUSAL, shape=(1, 2, 1, 512, 512), head_dims=(128, 128))
    problem, clean, at = make_problem(case), run(case)["out"], 400
    problem.value[:, :, at] = torch.nan
    consumers = 2 * 4  # warps; the producer's follow: the first copies, the second makes values finite
    with device.emulated(90, num_sms=1):
        out = run(case, problem, seed=seed, starved_warp=consumers + 1)["out"]
    assert torch.equal(out[:, :, :at], clean[:, :, :at]) and out[:, :, at:].isnan().all()


def test_what_stands_beyond_a_sequence_has_no_influence() -> None:
    """TMA copies whole boxes: in packed tensors also rows of the next sequence, or of none."""
    case = Case(lengths=((70, 30), (150, 200)), window=(20, 5), sinks=True, head_dims=(64, 64))
    problem, clean = make_problem(case), run(case)
    problem.value[150 + 140 :][:5] = torch.nan  # row i of sequence 1 sees keys 150 + 170 + i - 20 and later ones
    problem.key[:40] = torch.nan  # row i of sequence 0 sees keys 60 + i to 85 + i
    assert_equal(run(case, problem), clean)


# --- Rings, persistent CTAs, clusters ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dims", "tiles"), in_turn([(dims,) for dims in HEAD_DIMS], (1, 4, 2, 5, 3, 7), each=3), ids=str
)
def test_rings_go_round(head_dims: Dims, tiles: int) -> None:
    """There are any number of key tiles, with and without a masked one, and CTAs take several tiles of rows."""
    for missing in (0, 5):
        keys = tiles * BLOCK_N[head_dims] - missing
        check(Case(shape=(1, 3, 1, 2 * BLOCK_M[head_dims], keys), head_dims=head_dims), seed=tiles)


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("num_sms", [1, 2, 78, 132])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (3, 3)], ids=str)
def test_any_number_of_sms(heads: tuple[int, int], num_sms: int) -> None:
    """Pairs of CTAs share tiles of keys between heads, between tiles of rows, or not at all."""
    num_heads, group = heads[0], heads[0] // heads[1]
    with device.emulated(90, num_sms=num_sms):
        for window in ((-1, -1), CAUSAL):
            check(Case(shape=(1, num_heads, group, 500, 300), head_dims=(128, 128), window=window), seed=num_sms)


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize(
    ("case", "cluster"),
    [
        (Case(shape=(1, 4, 2, 200, 200), head_dims=(128, 128), window=CAUSAL), 2),  # two query heads of a KV head
        (Case(shape=(1, 2, 1, 256, 200), head_dims=(128, 128)), 2),  # two tiles of rows
        (Case(shape=(1, 2, 1, 256, 200), head_dims=(128, 128), window=CAUSAL), 1),  # these tiles see different keys
        (Case(shape=(1, 1, 1, 24 * 128, 100), head_dims=(256, 256), window=CAUSAL), 2),  # worth it for many tiles
        (Case(shape=(1, 1, 1, 17 * 128 - 3, 100), head_dims=(256, 256)), 2),  # the last CTA has no rows
        (Case(shape=(1, 4, 2, 200, 200), head_dims=(64, 64)), 1),  # the L2 cache serves every CTA
        (Case(shape=(1, 4, 2, 200, 200), head_dims=(192, 128)), 1),  # the L2 cache serves every CTA
        (Case(lengths=((130, 0, 1, 256), (200, 64, 0, 300)), shape=(1, 4, 2, 0, 0), head_dims=(128, 128)), 2),
        (Case(lengths=((130, 0, 1, 140), (200, 64, 0, 300)), shape=(1, 3, 1, 0, 0), head_dims=(128, 128)), 2),
    ],
    ids=str,
)
def test_clusters(case: Case, cluster: int) -> None:
    with device.emulated(90, num_sms=4), launches.recorded() as found:
        check(case)
    (launched,) = found
    assert (launched.report.waits.get("cluster barrier", 0) > 0) == (cluster == 2)


@only_emulated
@pytest.mark.parametrize("cluster", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_clusters_claim_each_tile_when_they_come_to_it(cluster: int) -> None:
    """A cluster claims its next tile while it loads the last keys of its tile, which has more than the ring holds."""
    tile, tiles, heads, num_clusters = 128, 5, 4, 4
    window = (5 * 128, -1)  # masks no key
    case = Case(shape=(1, heads * cluster, cluster, tiles * tile, 5 * 128), head_dims=(128, 128), window=window)
    with device.emulated(90, num_sms=num_clusters * cluster), launches.recorded() as found:
        result = run(case, log_writes=True)
    compare(case, make_problem(case), result, names=("out", "lse"))
    (launched,) = found
    assert (launched.report.waits.get("cluster barrier", 0) > 0) == (cluster == 2)
    atomics = {row.line for row in launched.report.rows if row.opcode.startswith("atom.")}
    begin, end = (result["out"].data_ptr() + offset for offset in (0, result["out"].nbytes))
    num_tiles = heads * tiles
    tile_bytes = result["out"].nbytes // (num_tiles * cluster)
    last_writes: dict[int, dict[int, int]] = {}  # CTA → its tile → time of the last write
    claims: dict[int, list[int]] = {}
    for time, write in enumerate(launched.report.writes):
        if write.line in atomics and write.cta % cluster == 0:
            claims.setdefault(write.cta, []).append(time)
        elif begin <= write.address < end:
            last_writes.setdefault(write.cta, {})[(write.address - begin) // tile_bytes] = time
    assert sum(map(len, last_writes.values())) == num_tiles * cluster
    # Each cluster gets its first tile without a claim, and makes one claim that gets no tile.
    assert sum(map(len, claims.values())) >= num_tiles
    for cta, times in claims.items():
        ends = sorted(last_writes[cta].values())
        claims_of_tiles = times[-len(ends) :]  # earlier atomics open the counter
        for number, time in enumerate(claims_of_tiles):
            assert sum(end < time for end in ends) >= number, "it has a tile that it has not begun"


@only_emulated
@pytest.mark.parametrize(("lengths", "claims"), [((640, 600, 520, 640), True), ((640, 1, 0, 1), False)], ids=str)
def test_packed_tiles_are_claimed_where_most_of_them_exist(lengths: tuple[int, ...], claims: bool) -> None:
    """With one long and many short sequences, most claims would find no tile."""
    case = Case(shape=(1, 1, 1, 0, 0), lengths=(lengths, lengths), head_dims=(128, 128), window=CAUSAL)
    with device.emulated(90, num_sms=2), launches.recorded() as found:
        check(case)
    (launched,) = found
    assert any(opcode.startswith("atom.") for opcode in launched.report.opcodes) == claims


@only_emulated
@pytest.mark.parametrize(("first_row", "claims"), [(300, True), (None, False)], ids=["block", "whole"])
def test_tiles_of_a_block_are_claimed(first_row: int | None, claims: bool) -> None:
    """A transfer between GPUs may hold some of the SMs while a block of a larger call is computed."""
    case = Case(shape=(1, 1, 1, 1280, 300), head_dims=(128, 128), first_row=first_row)
    with device.emulated(90, num_sms=2), launches.recorded() as found:
        check(case)
    (launched,) = found
    assert any(opcode.startswith("atom.") for opcode in launched.report.opcodes) == claims


@pytest.mark.slow
@only_emulated
def test_a_missing_fence_before_copies_over_values_that_were_read_is_found_in_a_cluster() -> None:
    """A warp of the other CTA has searched the values that this CTA's producer overwrites."""
    case = Case(shape=(1, 4, 2, 200, 700), head_dims=(128, 128), window=CAUSAL)
    with device.emulated(90, num_sms=4):
        check(case)
        with cuda_runtime.replaced("fence.proxy.async.shared::cta;", ""), pytest.raises(EmulatorError) as caught:
            check(case)
    assert caught.value.kind == "proxy"


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(shape=(2, 4, 2, 17, 300)),
        Case(shape=(1, 8, 8, 33, 500), window=CAUSAL, sinks=True),
        Case(shape=(2, 16, 16, 5, 200), window=(60, 0), scale=-0.3),
        Case(shape=(1, 64, 64, 3, 130), window=CAUSAL, first_row=0),
        Case(shape=(1, 8, 4, 100, 90), window=CAUSAL, layout="bshd"),  # rows before the first key
        Case(lengths=((30, 0, 1, 64), (90, 64, 0, 300)), shape=(1, 8, 4, 0, 0), window=(200, 3), sinks=True),
        Case(shape=(1, 6, 3, 40, 200), window=CAUSAL),  # 3 query heads per KV head: a tile has rows of one head
    ],
    ids=str,
)
def test_query_heads_in_the_rows_of_a_tile(case: Case, head_dims: Dims, dtype: torch.dtype) -> None:
    check(replace(case, head_dims=head_dims, dtype=dtype), seed=3)


@only_emulated
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((1, 16, 8, 33, 200), 2 * 3),  # 264 rows of 8 heads in 3 tiles of 128, not 8 of 33
        ((2, 16, 8, 3, 200), 2 * 2),
        ((1, 16, 8, 128, 200), 16),  # a head fills its tiles
        ((1, 12, 6, 33, 200), 12),  # 64 rows are no multiple of 6
    ],
    ids=str,
)
def test_heads_are_packed_where_that_takes_fewer_tiles(shape: tuple[int, int, int, int, int], tiles: int) -> None:
    with device.emulated(90, num_sms=1000), launches.recorded() as found:
        check(Case(shape=shape, head_dims=(128, 128)))
    assert [launched.grid for launched in found] == [(tiles, 1, 1)]


@each_head_dim
@each_dtype
def test_order_of_warps_and_copies_has_no_influence(head_dims: Dims, dtype: torch.dtype) -> None:
    case = Case(shape=(1, 2, 2, 300, 400), head_dims=head_dims, dtype=dtype, window=CAUSAL)
    assert_equal(run(case, seed=100), run(case, seed=1))


@only_emulated
def test_values_that_are_made_finite_pass_a_fence() -> None:
    case = Case(window=CAUSAL, shape=(1, 1, 1, 300, 300), head_dims=(64, 64))
    problem = make_problem(case)
    problem.value[:, :, 170] = torch.nan
    run(case, problem)
    with cuda_runtime.replaced("fence.proxy.async.shared::cta;", ""), pytest.raises(EmulatorError) as caught:
        run(case, problem, strict_proxy_reads=False)  # so that only writes need the fence
    assert caught.value.kind == "proxy"


@only_emulated
@pytest.mark.parametrize(
    ("instruction", "instead", "kinds"),
    [
        ("wgmma.wait_group.sync.aligned 1;", "", {"wgmma"}),
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", {"wgmma"}),
        ("wgmma.fence.sync.aligned;", "", {"wgmma"}),
        ("fence.proxy.async.shared::cta;", "", {"proxy"}),
    ],
    ids=["no wait for QK", "no wait for PV", "no fence", "no fence before a copy over values that were read"],
)
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str, kinds: set[str]) -> None:
    case = Case(shape=(1, 2, 1, 200, 500), head_dims=(64, 64))
    with cuda_runtime.replaced(instruction, instead), pytest.raises(EmulatorError) as caught:
        check(case)
    assert caught.value.kind in kinds


# --- The dispatcher ---------------------------------------------------------------------------------------------------


@each_head_dim
@each_dtype
def test_the_dispatcher_chooses_the_kernel(head_dims: Dims, dtype: torch.dtype) -> None:
    query, key, value = dense.inputs(head_dims[0], dtype, 20, 30)
    value = value[..., : head_dims[1]]
    name = f"{KERNEL}<{', '.join(map(str, dict.fromkeys(head_dims)))}, {str(dtype).removeprefix('torch.')}>"
    explained = fastattn.explain(fastattn.attention, query, key, value, causal=True)
    assert (explained.backend, explained.kernel) == ("cuda", name)
    with fastattn.record() as calls, checked():
        fastattn.attention(query, key, value, causal=True)
    assert calls == [("attention", "cuda", name)]


def test_every_instance_is_launched() -> None:
    assert instances.rows_of("attention/instances/forward_sm90.cu") == sorted(
        (*head_dims, dtype) for head_dims in HEAD_DIMS for dtype in instances.DTYPES
    )
