"""Tests CTAs that split the keys of a tile of query rows, where there are fewer tiles than CTAs, and their merge.

On the emulator the tests choose the number of SMs, and the report shows whether a merge took place. A real GPU has a
fixed number of SMs: only results are checked there.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from attention_cases import Case, compare, make_problem, offsets
from cuda_kernels import DTYPES, EMULATED, MARKS, checked, each_dtype, only_emulated
from fastattn import reference
from fastattn.reference import pages
from kernel_device import DEVICE
from oracle import check_against_oracle
from shared_keys import check, each_architecture, emulated, merges, of_sm_80, run
from turns import in_turn

if EMULATED:
    from emulator import EmulatorError, cuda_runtime, launches

pytestmark = MARKS

CAUSAL = (-1, 0)
HOPPER_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


@pytest.mark.parametrize(
    ("head_dims", "window", "dtype"),
    in_turn(itertools.product(HOPPER_HEAD_DIMS, [(-1, -1), CAUSAL, (1300, 40)]), DTYPES),
    ids=str,
)
def test_few_queries_over_many_keys(window: tuple[int, int], head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(
        shape=(2, 2, 2, 40, 1500), head_dims=head_dims, dtype=dtype, window=window, sinks=True, seed=sum(head_dims)
    )
    check(case, num_sms=13, seed=sum(head_dims))


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [2, 3, 5, 9, 17, 40, 78])
def test_parts_of_one_tile(num_sms: int) -> None:
    """A tile has 2 splits or more: 49 with 78 SMs. From 5 and from 17 splits on, the merge takes one more step."""
    check(Case(shape=(1, 1, 1, 20, 128 * 5 * 78 // 2 + 3), head_dims=(128, 128)), num_sms, seed=num_sms)


@pytest.mark.parametrize("num_sms", [4, 5, 7])
@pytest.mark.parametrize("rows", [129, 300, 500])
def test_shares_that_begin_and_end_inside_of_tiles(rows: int, num_sms: int) -> None:
    """Under a causal mask, tiles differ in length."""
    check(Case(shape=(1, 1, 1, rows, 3000), head_dims=(64, 48), window=CAUSAL), num_sms, seed=rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    [
        (((40, 1, 0, 200, 7), (1500, 5, 30, 200, 0)), 64),  # a long one among short ones; no rows; no keys
        (((40, 1, 0, 200, 7), (1500, 5, 30, 200, 0)), 128),
        (((0, 0, 33), (0, 900, 2000)), 64),
        (((130, 260), (2500, 100)), 128),
    ],
    ids=str,
)
def test_packed_sequences_of_unlike_lengths(lengths: tuple[tuple[int, ...], ...], head_dim: int) -> None:
    query_lengths, key_lengths = lengths
    case = Case(
        shape=(1, 2, 2, 0, 0), head_dims=(head_dim, head_dim), lengths=(query_lengths, key_lengths), window=CAUSAL
    )
    for num_sms in (5, 6):  # without clusters, and in clusters of two where the bounds of all lengths fill the GPU
        check(case, num_sms, seed=num_sms)


def test_more_packed_sequences_than_lanes() -> None:
    case = Case(lengths=((1,) * 70, (9,) * 50 + (1100,) + (1,) * 19), shape=(1, 1, 1, 0, 0), head_dims=(64, 64))
    check(case, num_sms=36)


@only_emulated
def test_pairs_of_ctas_share_keys_with_other_pairs() -> None:
    """A pair of CTAs has two tiles of rows; in one sequence the second tile has no rows."""
    case = Case(lengths=((200, 100), (4000, 100)), shape=(1, 1, 1, 0, 0), head_dims=(128, 128))
    with launches.recorded() as found:
        check(case, num_sms=4)
    assert found[0].report.waits.get("cluster barrier", 0) > 0


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize(
    "case",
    [
        Case(shape=(1, 2, 1, 100, 400)),  # a merge takes as long as it would save
        Case(shape=(1, 8, 1, 192, 2000)),  # a tile for every CTA
        Case(shape=(1, 8, 1, 700, 2000)),
    ],
    ids=str,
)
def test_tiles_stay_whole_where_a_cut_does_not_pay(case: Case) -> None:
    check(replace(case, head_dims=(64, 64)), num_sms=8, is_cut=False)


OPTIONS = [
    Case(softcap=3.0, window=CAUSAL),
    Case(alibi="batch", sinks=True),
    Case(mask="bool", mask_shape=(1, 1, 1, 1)),
    Case(mask="min", mask_shape=(1, 0, 0, 1)),
    Case(dropout=0.3, window=(700, 100)),
]


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", HOPPER_HEAD_DIMS, ids=str)
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_options(case: Case, head_dims: tuple[int, int]) -> None:
    check(replace(case, shape=(1, 2, 2, 50, 1200), head_dims=head_dims, dtype=torch.bfloat16), num_sms=5)


@pytest.mark.slow
@of_sm_80
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "case",
    [
        *OPTIONS,
        Case(mask="float", mask_shape=(1, 1, 1, 1), sinks=True),
        Case(mask="inf", mask_shape=(0, 1, 1, 1), dropout=0.2, softcap=5.0, window=CAUSAL),
    ],
    ids=str,
)
def test_options_on_sm_80(case: Case, head_dim: int) -> None:
    """There are two tiles of rows, and the second has few."""
    case = replace(case, shape=(1, 2, 2, 70, 1000), head_dims=(head_dim, head_dim), seed=head_dim)
    check(case, num_sms=8, architecture=80, seed=head_dim)


@pytest.mark.slow
@each_architecture
def test_dropout_drops_the_same_where_keys_are_shared(architecture: int) -> None:
    """One-hot values show which keys a row attends to, for 256 keys at a time."""
    case = Case(shape=(1, 2, 2, 20, 768), head_dims=(64, 256), dropout=0.4, seed=9)
    problem = make_problem(case)
    problem.query.zero_()
    kept = []
    for batch_invariant in (False, True):
        columns = []
        for first in range(0, 768, 256):
            problem.value.zero_()
            problem.value[:, :, range(first, first + 256), range(256)] = 1
            with emulated(architecture, num_sms=6) as found:
                columns.append(run(case, problem, batch_invariant)["out"] != 0)
            assert (merges(found) > 0) == (not batch_invariant) or not EMULATED
        kept.append(torch.cat(columns, dim=-1))
    assert torch.equal(*kept)
    assert 0.55 < kept[0].double().mean() < 0.65


FEW_ROWS = [
    Case(shape=(2, 2, 2, 40, 1500), window=CAUSAL, sinks=True),
    Case(shape=(1, 2, 2, 150, 1500), softcap=3.0, window=(1200, 30), sinks=True),
    Case(shape=(1, 2, 2, 0, 0), lengths=((40, 1, 0, 200, 7), (2000, 5, 30, 200, 0)), window=CAUSAL),
    Case(shape=(1, 1, 1, 0, 0), lengths=((1, 33), (1800, 7)), alibi="batch"),
]


@pytest.mark.slow
@of_sm_80
@pytest.mark.parametrize(
    ("case", "head_dim", "dtype"),
    in_turn(itertools.product(FEW_ROWS, [32, 64, 96, 128, 192, 256]), DTYPES),
    ids=str,
)
def test_kernels_for_sm_80(case: Case, head_dim: int, dtype: torch.dtype) -> None:
    check(replace(case, head_dims=(head_dim, head_dim), dtype=dtype), num_sms=13, architecture=80, seed=head_dim)


@of_sm_80
@pytest.mark.parametrize("num_sms", [1, 2, 5, 30])
@pytest.mark.parametrize("rows", [20, 300])
def test_parts_of_any_number_on_sm_80(rows: int, num_sms: int) -> None:
    case = Case(shape=(1, 1, 1, rows, 5000), head_dims=(128, 128), window=CAUSAL)
    tiles, ctas = (rows + 127) // 128, 2 * num_sms
    check(case, num_sms, is_cut=ctas >= 2 * tiles, architecture=80, seed=num_sms)


@only_emulated
def test_tiles_stay_whole_on_sm_80() -> None:
    check(Case(shape=(1, 4, 1, 300, 1200), head_dims=(64, 64)), num_sms=2, is_cut=False, architecture=80)


@each_architecture
def test_keys_in_pages(architecture: int) -> None:
    """This is chunked prefill: a few new queries over long caches."""
    generator = torch.Generator().manual_seed(3)
    lengths, page_size = torch.tensor([2000, 1, 37], dtype=torch.int32, device=DEVICE), 16
    k_cache, v_cache = (torch.randn(200, 2, page_size, 64, generator=generator).half().to(DEVICE) for _ in range(2))
    table = torch.randint(200, (3, 126), generator=generator, dtype=torch.int32).to(DEVICE)
    query = torch.randn(3, 4, 70, 64, generator=generator).half().to(DEVICE)
    with emulated(architecture, num_sms=20) as found, checked(), fastattn.use_backend("cuda"):
        out = fastattn.attention_with_kv_cache(query, k_cache, v_cache, lengths, block_table=table)
    assert merges(found) > 0 or not EMULATED
    keys, values = (pages.gather_pages(cache, table.long()) for cache in (k_cache, v_cache))
    for sequence, length in enumerate(lengths.tolist()):
        own = query[sequence : sequence + 1, :, max(0, 70 - length) :]
        arguments = own, keys[sequence : sequence + 1, :, :length], values[sequence : sequence + 1, :, :length]
        exact, _ = reference.attention(*(t.double() for t in arguments), causal=True)
        composite, _ = reference.attention(*arguments, causal=True, compute_dtype=torch.float16)
        check_against_oracle("out", out[sequence : sequence + 1, :, max(0, 70 - length) :], exact, composite)


@each_architecture
@pytest.mark.parametrize("of_cache", [False, True], ids=["attention_varlen", "attention_with_kv_cache"])
def test_batch_invariant_bits(of_cache: bool, architecture: int) -> None:
    """A sequence fills the GPU alone, or runs with others. Only with batch_invariant are its keys never split."""
    generator = torch.Generator().manual_seed(5)
    lengths, num_queries = (2000, 3, 600), 70
    query = torch.randn(3, 2, num_queries, 64, generator=generator).half().to(DEVICE)
    key, value = (torch.randn(3, 2, 2000, 64, generator=generator).half().to(DEVICE) for _ in range(2))

    def attend(batch: int, batch_invariant: bool) -> Tensor:
        if of_cache:
            cached = torch.tensor(lengths[:batch], dtype=torch.int32, device=DEVICE)
            of_batch = query[:batch], key[:batch], value[:batch]
            return fastattn.attention_with_kv_cache(*of_batch, cached, batch_invariant=batch_invariant)[0]
        packed = [query[:batch].transpose(1, 2).flatten(0, 1)]
        for tensor in (key, value):
            rows = [tensor[i, :, :length].transpose(0, 1) for i, length in enumerate(lengths[:batch])]
            packed.append(torch.cat(rows))
        ends = (offsets(sizes) for sizes in ((num_queries,) * batch, lengths[:batch]))
        out = fastattn.attention_varlen(*packed, *ends, num_queries, 2000, batch_invariant=batch_invariant)
        return out[:num_queries]

    for batch_invariant in (False, True):
        results = []
        for batch in (1, 3):
            with emulated(architecture, num_sms=9) as found, checked(), fastattn.use_backend("cuda"):
                results.append(attend(batch, batch_invariant))
            assert (merges(found) > 0) == (not batch_invariant) or not EMULATED
        assert torch.equal(*results) or not batch_invariant
        if EMULATED:  # with so few SMs, the splits differ
            assert torch.equal(*results) == batch_invariant


@pytest.mark.parametrize("magnitude", [30.0, 300.0])
def test_parts_whose_maxima_lie_far_apart(magnitude: float) -> None:
    check(Case(shape=(1, 1, 1, 64, 3000), head_dims=(64, 64), magnitude=magnitude), num_sms=7)


@each_architecture
def test_masked_keys_have_no_influence(architecture: int) -> None:
    """NaN is in keys that no row sees; it must not reach the result of any split."""
    generator = torch.Generator().manual_seed(7)
    query, key, value = (
        torch.randn(1, 1, length, 64, generator=generator).half().to(DEVICE) for length in (30, 2000, 2000)
    )
    key[:, :, :1000] = value[:, :, :1000] = torch.nan
    with emulated(architecture, num_sms=6), checked():
        out, lse, *_ = torch.ops.fastattn.attention_forward(*window_arguments(query, key, value, 900))
        clean = [tensor.nan_to_num(0.5) for tensor in (key, value)]
        expected, expected_lse, *_ = torch.ops.fastattn.attention_forward(*window_arguments(query, *clean, 900))
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def window_arguments(query: Tensor, key: Tensor, value: Tensor, left: int) -> tuple[Any, ...]:
    return (query, key, value, *[None] * 6, query.shape[2], key.shape[2], 0.125, left, 0, None, 0, 0, 0.0, 0.0, None)


@pytest.mark.slow
@each_dtype
@each_architecture
@pytest.mark.parametrize(
    "case",
    [
        Case(shape=(1, 2, 1, 40, 2000), head_dims=(64, 64)),
        Case(shape=(1, 2, 1, 40, 2000), head_dims=(128, 128), softcap=3.0, window=CAUSAL),
        Case(lengths=((40, 1, 30), (2000, 30, 700)), shape=(1, 1, 1, 0, 0), head_dims=(64, 64), window=CAUSAL),
    ],
    ids=str,
)
def test_who_comes_last_has_no_influence(case: Case, architecture: int, dtype: torch.dtype) -> None:
    """On the emulator, the seed decides the order of CTAs and warps."""
    case = replace(case, dtype=dtype, seed=11)
    with emulated(architecture, num_sms=20 if architecture == 90 else 10) as found:
        first, again = run(case, seed=1), run(case, seed=2)
        assert torch.equal(first["out"], again["out"]) and torch.equal(first["lse"], again["lse"])
    for launched in found:
        assert merges([launched]) >= 8  # tiles of at least four splits
    compare(case, make_problem(case), first, names=("out", "lse"))


@only_emulated
@pytest.mark.parametrize(
    ("instruction", "instead"),
    [("atom.acq_rel.gpu.global.add.u64", "atom.relaxed.gpu.global.add.u64")],
    ids=["parts are not released"],
)
def test_a_fault_planted_in_the_merge_is_found(instruction: str, instead: str) -> None:
    with cuda_runtime.replaced(instruction, instead), pytest.raises(EmulatorError) as caught:
        check(Case(shape=(1, 1, 1, 40, 2000), head_dims=(64, 64)), num_sms=6, seed=2)
    assert caught.value.kind == "race"
