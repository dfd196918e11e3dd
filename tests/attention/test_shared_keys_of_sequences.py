"""Tests CTAs that split keys, where lengths in device memory are nonsense, or there are no rows or keys."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fastattn
from attention_cases import Case, make_problem, offsets
from cuda_kernels import EMULATED, MARKS, checked
from fastattn import reference
from kernel_device import DEVICE
from oracle import check_against_oracle
from shared_keys import check, each_architecture, emulated, merges, run

pytestmark = MARKS

CAUSAL = (-1, 0)
LENGTHS = ((40, 30, 20), (2000, 900, 300))  # 90 queries and 3200 keys


def ranges(cu_seqlens: tuple[int, ...], total: int, most: int) -> list[range]:
    """Returns the rows that count as each sequence's, for any offsets."""
    found = []
    for begin, end in itertools.pairwise(cu_seqlens):
        first = min(max(begin, 0), total)
        found.append(range(first, min(max(end, first), total, first + most)))
    return found


@each_architecture
@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["plain", "options"])
@pytest.mark.parametrize(
    ("offsets_q", "offsets_k"),
    [
        ((0, 40, 70, 90), (0, 2000, 5000, 3200)),  # beyond the tensor
        ((0, 40, 70, 90), (0, 2000, 500, 3200)),  # decreasing, then longer than max_seqlen_k
        ((0, 40, 70, 90), (0, 2000, 2900, -1)),
        ((-5, 40, 70, 2**31 - 1), (-(2**31), 2000, 2900, 2**31 - 1)),
        ((0, 40, 2**31 - 1, 70), (0, 2000, 2900, 3200)),
        ((0, 40, 90, -(2**31)), (2000, 0, 2900, 0)),
    ],
    ids=str,
)
def test_offsets_are_not_trusted(
    offsets_q: tuple[int, ...], offsets_k: tuple[int, ...], softcap: float, architecture: int
) -> None:
    """Nothing outside of the tensors is touched, and the result is that of the rows within them."""
    case = Case(lengths=LENGTHS, shape=(1, 2, 1, 0, 0), head_dims=(64, 64), window=CAUSAL, softcap=softcap, seed=13)
    problem = make_problem(case)
    problem.max_seqlens = (50, 2000)
    problem.cu_seqlens_q = torch.tensor(offsets_q, dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor(offsets_k, dtype=torch.int32, device=DEVICE)
    with emulated(architecture, num_sms=12) as found:
        out = run(case, problem, seed=offsets_k[2] % 7)["out"]
    assert merges(found) > 0 or not EMULATED
    for rows, keys in zip(ranges(offsets_q, 90, 50), ranges(offsets_k, 3200, 2000), strict=True):
        own = problem.query[rows], problem.key[keys], problem.value[keys]
        exact, composite = (
            reference.attention(
                *(tensor.transpose(0, 1)[None].to(dtype) for tensor in own),
                causal=True,
                softcap=softcap,
                compute_dtype=dtype,
            )[0]
            for dtype in (torch.float64, case.dtype)
        )
        check_against_oracle("out", out[rows].transpose(0, 1)[None], exact, composite)


@each_architecture
@pytest.mark.parametrize("offsets_q", [(0, 40, 10, 90), (60, 2**31 - 1, -1, 90), (90, 0, 90, 0)], ids=str)
def test_sequences_that_overlap(offsets_q: tuple[int, ...], architecture: int) -> None:
    """Two sequences write the same rows, to some result. Nothing else is written."""
    case = Case(lengths=LENGTHS, shape=(1, 2, 1, 0, 0), head_dims=(64, 64), window=CAUSAL, seed=14)
    problem = make_problem(case)
    problem.max_seqlens = (90, 2000)
    problem.cu_seqlens_q = torch.tensor(offsets_q, dtype=torch.int32, device=DEVICE)
    with emulated(architecture, num_sms=12) as found:
        result = run(case, problem, races=False)
    assert merges(found) > 0 or not EMULATED
    assert not any(tensor.isnan().any() for tensor in result.values())


@each_architecture
@pytest.mark.parametrize(
    "offsets_k",
    [
        (0, 2000, 1500, 1800),  # a negative length
        (-7, 1993, 1993, 2**31 - 1),  # longer than the pages
        (2**31 - 1, -(2**31), 1900, -1900),  # differences beyond 32 bits
    ],
    ids=str,
)
def test_offsets_of_keys_in_pages_are_not_trusted(offsets_k: tuple[int, ...], architecture: int) -> None:
    """Differences of offsets are lengths, which are clamped to between 0 and the maximum."""
    generator = torch.Generator().manual_seed(17)
    query = torch.randn(90, 2, 64, generator=generator).half().to(DEVICE)
    k_pages, v_pages = (torch.randn(200, 2, 16, 64, generator=generator).half().to(DEVICE) for _ in range(2))
    table = torch.randint(200, (3, 125), generator=generator, dtype=torch.int32).to(DEVICE)
    lengths = [min(max(end - begin, 0), 2000) for begin, end in itertools.pairwise(offsets_k)]
    results = []
    for ends in (torch.tensor(offsets_k, dtype=torch.int32, device=DEVICE), offsets(tuple(lengths))):
        with emulated(architecture, num_sms=12) as found, checked(seed=5), fastattn.use_backend("cuda"):
            out = fastattn.attention_varlen(
                query, k_pages, v_pages, offsets((40, 30, 20)), ends, 40, 2000, causal=True, block_table=table
            )
        assert merges(found) > 0 or not EMULATED
        assert not out.isnan().any()
        results.append(out)
    assert torch.equal(*results)


@each_architecture
@pytest.mark.parametrize(
    "lengths",
    [
        ((40, 30, 20), (2000, 0, 900)),  # no keys, among sequences whose keys are split
        ((1, 1, 1, 1), (2000, 0, 1, 300)),  # one row per sequence
        ((0, 40, 0), (2000, 1500, 0)),  # no rows
    ],
    ids=str,
)
def test_sequences_without_keys_among_those_that_are_cut(
    lengths: tuple[tuple[int, ...], ...], architecture: int
) -> None:
    query_lengths, key_lengths = lengths
    case = Case(lengths=(query_lengths, key_lengths), shape=(1, 2, 1, 0, 0), head_dims=(64, 64), window=CAUSAL, seed=15)
    check(replace(case, sinks=True), num_sms=12, architecture=architecture, seed=2)
    check(case, num_sms=12, architecture=architecture, seed=3)


@each_architecture
@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["plain", "options"])
@pytest.mark.parametrize(
    ("offsets_q", "total_q", "max_seqlen_q"),
    [
        ((0, 0, 0), 0, 0),  # no rows
        ((0, 0, 0), 0, 64),
        ((0, 0, 0), 10, 0),  # rows of no sequence
        ((0, 0, 0), 10, 64),
        ((0,), 10, 64),  # no sequences
        ((0,), 0, 0),
    ],
    ids=str,
)
def test_no_rows_over_many_keys(
    offsets_q: tuple[int, ...], total_q: int, max_seqlen_q: int, softcap: float, architecture: int
) -> None:
    case = Case(lengths=((total_q,), (3000,)), shape=(1, 2, 1, 0, 0), head_dims=(64, 64), softcap=softcap, seed=16)
    problem = make_problem(case)
    problem.cu_seqlens_q = torch.tensor(offsets_q, dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor((0, 2000, 3000)[: len(offsets_q)], dtype=torch.int32, device=DEVICE)
    problem.max_seqlens = (max_seqlen_q, 2000)
    with emulated(architecture, num_sms=12):
        result = run(case, problem)
    assert result["out"].shape == (total_q, 2, 64) and not result["out"].any()
    assert result["lse"].shape == (2, total_q) and (result["lse"] == -torch.inf).all()


@each_architecture
@pytest.mark.parametrize("shape", [(0, 2, 1, 40, 3000), (1, 2, 1, 0, 3000)], ids=str)
def test_empty_tensors_over_many_keys(shape: tuple[int, ...], architecture: int) -> None:
    batch, heads, _, rows, _ = shape
    case = Case(shape=shape, head_dims=(64, 64))
    with emulated(architecture, num_sms=12):
        result = run(case)
    assert result["out"].shape == (batch, heads, rows, 64) and result["lse"].shape == (batch, heads, rows)
