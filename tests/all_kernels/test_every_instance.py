"""Compares each instance of the CUDA C++ kernels that have many template axes with the oracle."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

import append_cases
import attention_cases
import decode_cases
import fastattn
import instances
from cuda_kernels import DTYPES, EMULATED, MARKS, NEEDS_HOPPER, checked, only_emulated

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import device

pytestmark = MARKS

HOPPER_DIMS = sorted({row[:2] for row in instances.rows_of("attention/instances/forward_sm90.cu")})
CACHES = ({}, {"int8": True}, {"fp8": "heads"})
INSTANCES = list(itertools.product((64, 128, 256), DTYPES, range(len(CACHES))))
each_instance = pytest.mark.parametrize(("dim", "dtype", "cache"), INSTANCES, ids=str)


@each_instance
@pytest.mark.parametrize("queries", [1, 9], ids=["16 rows", "32 rows"])
def test_every_instance_of_decoding(dim: int, dtype: torch.dtype, cache: int, queries: int) -> None:
    case = decode_cases.Case("instance", dims=(dim, dim), dtype=dtype, queries=queries, **CACHES[cache])

    with checked():
        decode_cases.check(case, decode_cases.operator_of(torch.ops.fastattn))


@each_instance
def test_every_instance_of_append(dim: int, dtype: torch.dtype, cache: int) -> None:
    case = append_cases.Case("instance", dims=(dim, dim), dtype=dtype, tokens=7, absent=(-1,), **CACHES[cache])
    arguments = append_cases.make_arguments(case)
    expected = append_cases.expected(arguments)
    with checked(), fastattn.use_backend("cuda"):
        fastattn.append_to_cache(**arguments)
    append_cases.check_caches(arguments, expected)


def check_attention(head_dims: tuple[int, int], softcap: float, dtype: torch.dtype) -> None:
    """Runs forward and backward against the oracle."""
    case = attention_cases.Case(
        shape=(1, 2, 2, 20, 70), head_dims=head_dims, window=(-1, 0), softcap=softcap, dtype=dtype
    )
    problem = attention_cases.make_problem(case)
    with checked():
        found = attention_cases.run_public(case, problem, "cuda", deterministic=True)
    attention_cases.compare(case, problem, found, names=found)


@pytest.mark.parametrize(
    ("dim", "softcap", "dtype"), list(itertools.product((32, 64, 96, 128, 192, 256), (0.0, 9.0), DTYPES)), ids=str
)
def test_every_instance_of_attention(dim: int, softcap: float, dtype: torch.dtype) -> None:
    check_attention((dim, dim), softcap, dtype)


@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("head_dims", "softcap", "dtype"), list(itertools.product(HOPPER_DIMS, (0.0, 9.0), DTYPES)), ids=str
)
def test_every_instance_of_attention_on_hopper(head_dims: tuple[int, int], softcap: float, dtype: torch.dtype) -> None:
    with device.emulated(90) if EMULATED else contextlib.nullcontext():
        check_attention(head_dims, softcap, dtype)


@only_emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [96, 128])
def test_every_instance_for_little_shared_memory(dim: int, dtype: torch.dtype) -> None:
    """The usual tiles of keys do not fit into 99 KB of shared memory."""
    with device.emulated(80, shared_memory_bytes=99 << 10):
        check_attention((dim, dim), 0.0, dtype)
