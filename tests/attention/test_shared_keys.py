"""CTAs that share the keys of a tile of query rows, where there are fewer tiles than CTAs: shares, and the merge.

As PTX on an emulated GPU whose number of SMs the tests choose; the report says whether a merge took place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fastattn
import test_cuda_attention_options_sm90 as hopper_options
import test_cuda_attention_sm90 as hopper
from attention_cases import Case, compare, make_problem
from cuda_kernels import EMULATED, MARKS, each_dtype
from fastattn import reference
from fastattn.reference import pages
from oracle import check_against_oracle

if EMULATED:
    from emulator import EmulatorError, cuda_runtime, device, launches

pytestmark = [*MARKS, pytest.mark.skipif(not EMULATED, reason="chooses the number of SMs")]

CAUSAL = (-1, 0)
MERGES = "atom.acq_rel.gpu.global.cas.b64"


def check(case: Case, num_sms: int, is_cut: bool = True, architecture: int = 90, **launching: int) -> None:
    """Against the oracle, on so many SMs; whether tiles were shared must be as expected."""
    module = hopper_options if changes_scores(case) else hopper
    with device.emulated(architecture, num_sms=num_sms), launches.recorded() as found:
        result = module.run(case, **launching)
    (launched,) = found
    assert f"sm{architecture}" in launched.report.kernel
    assert (launched.report.opcodes.get(MERGES, 0) > 0) == is_cut
    compare(case, make_problem(case), result, names=("out", "lse"))


def changes_scores(case: Case) -> bool:
    return bool(case.softcap or case.alibi or case.mask or case.dropout)


@each_dtype
@pytest.mark.parametrize("head_dims", hopper.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL, (1300, 40)], ids=str)
def test_few_queries_over_many_keys(window: tuple[int, int], head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(
        shape=(2, 2, 2, 40, 1500), head_dims=head_dims, dtype=dtype, window=window, sinks=True, seed=sum(head_dims)
    )
    check(case, num_sms=13, seed=sum(head_dims))


@pytest.mark.parametrize("num_sms", [2, 3, 5, 9, 17, 40, 78])
def test_parts_of_one_tile(num_sms: int) -> None:
    """From two parts on: with 5 and with 17 the merge takes one more step. So many SMs have 49."""
    check(Case(shape=(1, 1, 1, 20, 128 * 5 * 78 // 2 + 3), head_dims=(128, 128)), num_sms, seed=num_sms)


@pytest.mark.parametrize("num_sms", [4, 5, 7])
@pytest.mark.parametrize("rows", [129, 300, 500])
def test_shares_that_begin_and_end_inside_of_tiles(rows: int, num_sms: int) -> None:
    """Under a causal mask tiles differ in length."""
    check(Case(shape=(1, 1, 1, rows, 3000), head_dims=(64, 48), window=CAUSAL), num_sms, seed=rows)


@pytest.mark.parametrize(
    "lengths",
    [
        ((40, 1, 0, 200, 7), (3000, 5, 30, 200, 0)),  # a long one among short ones; no rows; rows without keys
        ((0, 0, 33), (0, 900, 2000)),
        ((130, 260), (2500, 100)),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_of_unlike_lengths(lengths: tuple[tuple[int, ...], ...], head_dim: int) -> None:
    query_lengths, key_lengths = lengths
    case = Case(
        shape=(1, 2, 2, 0, 0), head_dims=(head_dim, head_dim), lengths=(query_lengths, key_lengths), window=CAUSAL
    )
    for num_sms in (5, 6):  # alone, and in clusters of two where the bounds of all lengths fill the GPU
        check(case, num_sms, seed=num_sms)


def test_more_packed_sequences_than_lanes() -> None:
    case = Case(lengths=((1,) * 70, (9,) * 50 + (3000,) + (1,) * 19), shape=(1, 1, 1, 0, 0), head_dims=(64, 64))
    check(case, num_sms=36)


def test_pairs_of_ctas_share_keys_with_other_pairs() -> None:
    """Two tiles of rows side by side, of which the second has no rows in one sequence."""
    case = Case(lengths=((200, 100), (4000, 100)), shape=(1, 1, 1, 0, 0), head_dims=(128, 128))
    with launches.recorded() as found:
        check(case, num_sms=4)
    assert found[0].report.waits.get("cluster barrier", 0) > 0


@pytest.mark.parametrize(
    "case",
    [
        Case(shape=(1, 2, 1, 100, 400)),  # a merge takes as long as what it would save
        Case(shape=(1, 8, 1, 192, 2000)),  # a tile for every CTA
        Case(shape=(1, 8, 1, 700, 2000)),
    ],
    ids=str,
)
def test_tiles_stay_whole_where_a_cut_does_not_pay(case: Case) -> None:
    check(replace(case, head_dims=(64, 64)), num_sms=8, is_cut=False)


@pytest.mark.parametrize("head_dims", hopper.HEAD_DIMS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(softcap=3.0, window=CAUSAL),
        Case(alibi="batch", sinks=True),
        Case(mask="bool", mask_shape=(1, 1, 1, 1)),
        Case(mask="min", mask_shape=(1, 0, 0, 1)),
        Case(dropout=0.3, window=(700, 100)),
    ],
    ids=str,
)
def test_options(case: Case, head_dims: tuple[int, int]) -> None:
    check(replace(case, shape=(1, 2, 2, 50, 1200), head_dims=head_dims, dtype=torch.bfloat16), num_sms=5)


@each_dtype
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "case",
    [
        Case(shape=(2, 2, 2, 40, 1500), window=CAUSAL, sinks=True),
        Case(shape=(1, 2, 2, 150, 1500), softcap=3.0, window=(1200, 30), sinks=True),
        Case(shape=(1, 2, 2, 0, 0), lengths=((40, 1, 0, 200, 7), (2000, 5, 30, 200, 0)), window=CAUSAL),
        Case(shape=(1, 1, 1, 0, 0), lengths=((1, 33), (1800, 7)), alibi="batch"),
    ],
    ids=str,
)
def test_kernels_for_sm_80(case: Case, head_dim: int, dtype: torch.dtype) -> None:
    check(replace(case, head_dims=(head_dim, head_dim), dtype=dtype), num_sms=13, architecture=80, seed=head_dim)


@pytest.mark.parametrize("num_sms", [1, 2, 5, 30])
@pytest.mark.parametrize("rows", [20, 300])
def test_parts_of_any_number_on_sm_80(rows: int, num_sms: int) -> None:
    case = Case(shape=(1, 1, 1, rows, 5000), head_dims=(128, 128), window=CAUSAL)
    tiles, ctas = (rows + 127) // 128, 2 * num_sms
    check(case, num_sms, is_cut=ctas >= 2 * tiles, architecture=80, seed=num_sms)


def test_tiles_stay_whole_on_sm_80() -> None:
    check(Case(shape=(1, 8, 1, 300, 1500), head_dims=(64, 64)), num_sms=4, is_cut=False, architecture=80)


@pytest.mark.parametrize("architecture", [80, 90])
def test_keys_in_pages(architecture: int) -> None:
    """Chunked prefill: a few new queries over long caches."""
    generator = torch.Generator().manual_seed(3)
    lengths, page_size = torch.tensor([2000, 1, 37], dtype=torch.int32), 16
    k_cache, v_cache = (torch.randn(200, 2, page_size, 64, generator=generator).half() for _ in range(2))
    table = torch.randint(200, (3, 126), generator=generator, dtype=torch.int32)
    query = torch.randn(3, 4, 70, 64, generator=generator).half()
    with (
        device.emulated(architecture, num_sms=20),
        cuda_runtime.raising_faults(),
        launches.recorded() as found,
        fastattn.use_backend("cuda"),
    ):
        out = fastattn.attention_with_kv_cache(query, k_cache, v_cache, lengths, block_table=table)
    assert sum(launched.report.opcodes.get(MERGES, 0) for launched in found) > 0
    keys, values = (pages.gather_pages(cache, table.long()) for cache in (k_cache, v_cache))
    for sequence, length in enumerate(lengths.tolist()):
        own = query[sequence : sequence + 1, :, max(0, 70 - length) :]
        arguments = own, keys[sequence : sequence + 1, :, :length], values[sequence : sequence + 1, :, :length]
        exact, _ = reference.attention(*(t.double() for t in arguments), causal=True)
        composite, _ = reference.attention(*arguments, causal=True, compute_dtype=torch.float16)
        check_against_oracle("out", out[sequence : sequence + 1, :, max(0, 70 - length) :], exact, composite)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("of_cache", [False, True], ids=["attention_varlen", "attention_with_kv_cache"])
def test_batch_invariant_bits(of_cache: bool, architecture: int) -> None:
    """A sequence alone, whose keys fill a GPU, and beside others: only with the option its keys are never shared."""
    generator = torch.Generator().manual_seed(5)
    lengths, num_queries = (2000, 3, 600), 70
    query = torch.randn(3, 2, num_queries, 64, generator=generator).half()
    key, value = (torch.randn(3, 2, 2000, 64, generator=generator).half() for _ in range(2))

    def attend(batch: int, batch_invariant: bool) -> torch.Tensor:
        if of_cache:
            cached = torch.tensor(lengths[:batch], dtype=torch.int32)
            of_batch = query[:batch], key[:batch], value[:batch]
            return fastattn.attention_with_kv_cache(*of_batch, cached, batch_invariant=batch_invariant)[0]
        packed = [query[:batch].transpose(1, 2).flatten(0, 1)]
        for tensor in (key, value):
            rows = [tensor[i, :, :length].transpose(0, 1) for i, length in enumerate(lengths[:batch])]
            packed.append(torch.cat(rows))
        offsets = [torch.tensor((0, *sizes)).cumsum(0).int() for sizes in ((num_queries,) * batch, lengths[:batch])]
        out = fastattn.attention_varlen(*packed, *offsets, num_queries, 2000, batch_invariant=batch_invariant)
        return out[:num_queries]

    for batch_invariant in (False, True):
        found = []
        for batch in (1, 3):
            with (
                device.emulated(architecture, num_sms=9),
                cuda_runtime.raising_faults(),
                launches.recorded() as recorded,
                fastattn.use_backend("cuda"),
            ):
                found.append(attend(batch, batch_invariant))
            has_merged = any(launched.report.opcodes.get(MERGES, 0) > 0 for launched in recorded)
            assert has_merged == (not batch_invariant)
        assert torch.equal(*found) == batch_invariant


@pytest.mark.parametrize("magnitude", [30.0, 300.0])
def test_parts_whose_maxima_lie_far_apart(magnitude: float) -> None:
    check(Case(shape=(1, 1, 1, 64, 3000), head_dims=(64, 64), magnitude=magnitude), num_sms=7)


def test_masked_keys_have_no_influence() -> None:
    """A NaN that no row of a part sees, in any part."""
    query, key, value = (torch.randn(1, 1, length, 64, dtype=torch.float16) for length in (30, 2000, 2000))
    key[:, :, :1000] = value[:, :, :1000] = torch.nan
    with device.emulated(90, num_sms=6), cuda_runtime.raising_faults():
        out, lse, _ = torch.ops.fastattn.attention_forward(*window_arguments(query, key, value, 900))
        clean = [tensor.nan_to_num(0.5) for tensor in (key, value)]
        expected, expected_lse, _ = torch.ops.fastattn.attention_forward(*window_arguments(query, *clean, 900))
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def window_arguments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, left: int) -> tuple:
    return (query, key, value, *[None] * 6, query.shape[2], key.shape[2], 0.125, left, 0, False, 0.0, 0.0, None)


@each_dtype
def test_who_comes_last_has_no_influence(dtype: torch.dtype) -> None:
    case = Case(shape=(1, 2, 1, 40, 2000), head_dims=(64, 64), dtype=dtype)
    with device.emulated(90, num_sms=20):
        first = hopper.run(case, seed=1)
        for seed in range(2, 6):
            again = hopper.run(case, seed=seed)
            assert torch.equal(first["out"], again["out"]) and torch.equal(first["lse"], again["lse"])


@pytest.mark.parametrize(
    ("instruction", "instead"),
    [("atom.acq_rel.gpu.global.cas.b64", "atom.relaxed.gpu.global.cas.b64")],
    ids=["parts are not released"],
)
def test_a_fault_planted_in_the_merge_is_found(instruction: str, instead: str) -> None:
    with cuda_runtime.replaced(instruction, instead), pytest.raises(EmulatorError) as caught:
        check(Case(shape=(1, 1, 1, 40, 2000), head_dims=(64, 64)), num_sms=6, seed=2)
    assert caught.value.kind == "race"
