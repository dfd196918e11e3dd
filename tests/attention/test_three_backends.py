"""Tests that CUDA C++, Triton and PyTorch compute the same attention, with random combinations of all options.

Through the public functions, each backend meets the oracle's bound for output, lse and every gradient, and dropout
masks are equal bit for bit. Each run draws the same cases (``derandomize``), and a failure names the smallest failing
case; FASTATTN_EXAMPLES=1000 draws more examples, other ones in each run. Kernels run on a GPU if there is one, else on
the emulator.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attention_cases
from attention_cases import SEED, Case, compare, make_problem, run_public, use_small_tiles
from cuda_kernels import HAS_KERNELS, NO_KERNELS
from fastattn import reference
from kernel_device import DEVICE
from oracle import check_against_oracle

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,  # Triton compiles for seconds per structure
    pytest.mark.usefixtures("emulated_gpu", "tracked_tensors"),
    pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS),
]

MORE = int(os.environ.get("FASTATTN_EXAMPLES", "0"))
BACKENDS = ("cuda", "triton", "torch")
CAUSAL = (-1, 0)

# Triton compiles one kernel of each kind per structure; only what it does not specialise on is drawn. Together the
# structures have every pair of options that can meet. Gradients of a broadcast bias are sums of thousands of terms that
# cancel, for which a 16-bit composite gives no bound: test_cuda_attention_backward.py tests them.
STRUCTURES = [
    Case(mask="float", window=CAUSAL, softcap=20.0, sinks=True, dropout=0.3, head_dims=(40, 24)),
    Case(window=(40, 9), softcap=8.0, sinks=True, dropout=0.2, alibi="batch", grad_lse=True),
    Case(lengths=((1,), (1,)), window=CAUSAL, alibi="head", head_dims=(128, 96), dtype=torch.bfloat16),
    Case(window=CAUSAL, head_dims=(64, 64), dtype=torch.bfloat16, grad_lse=True),
    Case(mask="inf", window=(50, -1), dtype=torch.bfloat16, head_dims=(20, 33), grad_lse=True),
    Case(mask="bool", mask_shape=(1, 0, 1, 1), window=(-1, 30), dropout=0.1, sinks=True, softcap=5.0),
    Case(lengths=((1,), (1,)), window=(30, 3), softcap=4.0, sinks=True, dropout=0.4, grad_lse=True),
]
each_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
# Triton does not specialise on odd sizes above 1.
ODD = st.integers(1, 60).map(lambda half: 2 * half + 1)
HEADS = st.sampled_from([(2, 1), (3, 1), (3, 3), (4, 2)])  # query heads, group size


@pytest.fixture(autouse=True)
def allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loosens the bound of `check_against_oracle`, as its docstring says for drawn shapes."""
    lenient = functools.partial(check_against_oracle, allowance=4.0)
    monkeypatch.setattr(attention_cases, "check_against_oracle", lenient)
    use_small_tiles(monkeypatch)


@each_structure
@settings(
    max_examples=MORE or 4,  # the first is always the smallest
    derandomize=not MORE,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    data=st.data(),
    heads=HEADS,
    layout=st.sampled_from(["bhsd", "bshd"]),
    magnitude=st.sampled_from([1.0, 1.0, 10.0]),
    scale=st.sampled_from([None, 1.0, -0.3]),
    seed=st.integers(0, 1000),
)
def test_they_agree(
    data: Any,
    structure: Case,
    heads: tuple[int, int],
    layout: str,
    magnitude: float,
    scale: float | None,
    seed: int,
) -> None:
    case = replace(structure, magnitude=magnitude, scale=scale, seed=seed)
    # Some query must see at least two keys. Otherwise gradients are zero but for roundings, and the composite
    # computation, which sets the bound, has no error at all.
    if case.lengths is None:
        rows, keys, batch = data.draw(ODD), data.draw(ODD.map(lambda keys: keys + 6)), data.draw(st.integers(1, 2))
        case = replace(case, shape=(batch, *heads, rows, keys), layout=layout)
    else:
        lengths = st.lists(st.tuples(st.integers(0, 90), st.sampled_from([0, 7, 64, 65, 101])), min_size=1, max_size=4)
        drawn = data.draw(lengths)
        case = replace(case, lengths=tuple(zip(*drawn, strict=True)), shape=(1, *heads, 0, 0))
    problem = make_problem(case)
    for backend in BACKENDS:
        found = run_public(case, problem, backend, deterministic=data.draw(st.booleans()))
        compare(case, problem, found, names=found)


@pytest.mark.parametrize("lengths", [None, ((30, 0, 75), (20, 9, 68))], ids=["dense", "packed"])
def test_dropout_masks_are_equal_bit_for_bit(lengths: Any) -> None:
    """With uniform probabilities, one-hot values show the mask in the output, and ones in a row of dO in dV."""
    keys = 72
    case = Case(shape=(2, 2, 1, 75, keys), head_dims=(16, keys), dropout=0.35, lengths=lengths)
    problem = make_problem(case)
    problem.query.zero_()
    rows = [(0, 75), (1, 75)] if lengths is None else list(enumerate(lengths[0]))
    masks = []
    for backend in BACKENDS:
        problem.value.zero_()
        columns = torch.arange(problem.value.shape[-3 if lengths else -2], device=DEVICE)
        if lengths is None:
            problem.value[:] = torch.eye(keys, device=DEVICE)
        else:  # a key's position in its sequence
            begins = problem.cu_seqlens_k
            assert begins is not None
            within = columns - begins[torch.searchsorted(begins, columns, right=True) - 1]
            problem.value[columns, :, within] = 1
        masks.append(run_public(case, problem, backend)["out"] != 0)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    num_sequences = len(rows)
    keep = reference.dropout_keep(SEED, 0.35, num_sequences, 2, 75, keys, torch.device(DEVICE))
    if lengths is None:
        assert torch.equal(masks[0], keep)
    problem.value.fill_(1)
    problem.grad_out.zero_()
    problem.grad_out[(slice(None), slice(None), 5) if lengths is None else 5] = 1
    gradients = [run_public(case, problem, backend)["grad_value"] != 0 for backend in BACKENDS]
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
    seen = keep[0, :, 5] if lengths is None else keep[0, :, 5, :20]
    found = gradients[0][0] if lengths is None else gradients[0][:20].transpose(0, 1)
    assert torch.equal(found.all(-1), seen) and torch.equal(found.any(-1), seen)
