"""Tests the largest score of each head (``return_max_logit``) of every backend against the formula in float64."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from attention_cases import offsets
from cuda_kernels import EMULATED, HAS_KERNELS, NO_KERNELS, checked, only_emulated
from fastattn import reference
from kernel_device import DEVICE
from oracle import check_against_oracle

if EMULATED:
    from emulator import device, launches

pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

CAUSAL = {"causal": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": CAUSAL,
    "window": {"window": (20, 3)},
    "a negative scale": {"scale": -0.2, **CAUSAL},
    "a scale of 0": {"scale": 0.0},
    "sinks": {"sinks": True, **CAUSAL},
    "softcap": {"softcap": 3.0, "sinks": True},
    "ALiBi": {"alibi_slopes": True, **CAUSAL},
    "a mask": {"bias": "bool"},
    "a bias": {"bias": "float", "dropout_p": 0.3, "sinks": True},
}
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


@pytest.fixture(params=["sm_80", "sm_90", "triton", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces a backend and yields its name; "sm_80" and "sm_90" are the CUDA C++ kernels of that architecture."""
    if request.param == "torch":
        with fastattn.use_backend("torch"):
            yield "torch"
    elif request.param == "triton":
        with fastattn.use_backend("triton"):
            yield "triton"
    elif not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    else:
        arch = int(request.param.removeprefix("sm_"))
        if not EMULATED and (torch.cuda.get_device_capability() == (9, 0)) != (arch == 90):
            pytest.skip(f"needs a GPU that runs the kernels for {request.param}")
        gpu = device.emulated(arch, num_sms=3) if EMULATED else contextlib.nullcontext()
        with gpu, fastattn.use_backend("cuda"):
            yield "cuda"


def make(
    heads: tuple[int, int] = (4, 2),
    rows: int = 70,
    keys: int = 203,
    head_dims: tuple[int, int] = (64, 64),
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """Draws tensors whose scores are all negative: a row or key beyond the tensors, with score 0, would win."""
    generator = torch.Generator().manual_seed(seed + rows + keys + head_dims[0])
    query = torch.rand(2, heads[0], rows, head_dims[0], generator=generator) + 0.5
    key = -torch.rand(2, heads[1], keys, head_dims[0], generator=generator) - 0.1
    value = torch.randn(2, heads[1], keys, head_dims[1], generator=generator)
    query, key, value = (tensor.to(torch.bfloat16).to(DEVICE) for tensor in (query, key, value))
    return query, key, value, generator


def options_of(name: str, query: Tensor, key: Tensor, generator: torch.Generator) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    (batch, heads, rows, _), keys = query.shape, key.shape[2]
    if "sinks" in options:
        options["sinks"] = torch.full((heads,), 50.0, device=DEVICE)  # far above every score
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(heads, generator=generator).to(DEVICE)
    if options.get("bias") == "bool":
        options["bias"] = (torch.rand(batch, 1, rows, keys, generator=generator) < 0.3).to(DEVICE)
    elif "bias" in options:
        bias = torch.randn(1, heads, rows, keys, generator=generator)
        options["bias"] = bias.masked_fill(bias > 1, -math.inf).to(torch.bfloat16).to(DEVICE)
    if "dropout_p" in options:
        options["dropout_seed"] = 7
    return options


def check(tensors: tuple[Tensor, ...], options: dict[str, Any], function: str = "attention", **others: Any) -> Tensor:
    """Returns the largest scores of ``function``, and checks that its other results are the same without them."""
    attend, formula = getattr(fastattn, function), getattr(reference, function)
    with checked():
        out, lse, max_logit = attend(*tensors, return_lse=True, return_max_logit=True, **options, **others)
        (out_alone, max_alone) = attend(*tensors, return_max_logit=True, **options, **others)
    wide = tuple(t.double() if t.is_floating_point() else t for t in tensors[:3])
    composite_results = formula(*tensors, return_max_logit=True, compute_dtype=tensors[0].dtype, **options)
    for name, actual, exact, composite in zip(
        ("out", "lse", "max_logit"),
        (out, lse, max_logit),
        formula(*wide, *tensors[3:], return_max_logit=True, **options),
        composite_results,
        strict=True,
    ):
        check_against_oracle(name, actual, exact, composite)
    assert torch.equal(out, out_alone) and torch.equal(max_logit, max_alone)
    assert max_logit.shape == (tensors[0].shape[1],) and max_logit.dtype == torch.float32
    return max_logit


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(options: str, backend: str) -> None:
    query, key, value, generator = make()
    check((query, key, value), options_of(options, query, key, generator))


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_head_dim(head_dims: tuple[int, int], backend: str) -> None:
    query, key, value, _ = make(rows=150, keys=330, head_dims=head_dims)
    check((query, key, value), CAUSAL)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (3, 3)], ids=str)
def test_few_rows_over_many_keys(heads: tuple[int, int], backend: str) -> None:
    """CTAs that split the keys of a tile each find a maximum. Heads are not packed into rows."""
    query, key, value, _ = make(heads, rows=5, keys=3000)
    check((query, key, value), CAUSAL)


@pytest.mark.slow
def test_signs_and_infinities(backend: str) -> None:
    """Many CTAs find negative, zero, positive and infinite scores, in any order."""
    query, key, value, generator = make(rows=300, keys=150)
    query = torch.randn(query.shape, generator=generator).to(query)
    key = torch.randn(key.shape, generator=generator).to(key)
    query[:, 1] = 0.0
    query[1, 2, 200], key[1, 1, 100] = 1e20, 1e20
    _, max_logit = fastattn.attention(query, key, value, return_max_logit=True)
    expected = reference.attention(query.double(), key.double(), value.double(), return_max_logit=True)[2]
    assert expected[0] > 0 and expected[1] == 0 and expected[2] > 1e30
    torch.testing.assert_close(max_logit, expected.float(), rtol=1e-3, atol=0)
    query[:, 0] = query[:, 0].abs()
    key[:, 0] = -key[:, 0].abs()
    bias = torch.zeros(1, 4, 300, 150, device=DEVICE)
    bias[0, 3, 7, 9] = math.inf
    _, max_logit = fastattn.attention(query, key, value, bias=bias, return_max_logit=True)
    expected = reference.attention(
        query.double(), key.double(), value.double(), bias=bias.double(), return_max_logit=True
    )
    torch.testing.assert_close(max_logit, expected[2].float(), rtol=1e-3, atol=0)
    assert max_logit[0] < 0 and max_logit[3] == math.inf


@only_emulated
@pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
@pytest.mark.parametrize("heads", [(4, 2), pytest.param((3, 3), marks=pytest.mark.slow)], ids=str)
def test_clusters_of_two_ctas(heads: tuple[int, int]) -> None:
    """The CTAs of a pair have two heads, or two tiles of rows of one head; each finds its own maximum."""
    query, key, value, _ = make(heads, rows=512, keys=200, head_dims=(128, 128))
    with device.emulated(90, num_sms=4), fastattn.use_backend("cuda"), launches.recorded() as found:
        check((query, key, value), {})
    assert all(launched.report.waits.get("cluster barrier", 0) > 0 for launched in found)


@pytest.mark.parametrize("options", ["plain", "causal", "softcap"])
def test_packed_sequences(options: str, backend: str) -> None:
    lengths = (3, 0, 140, 17), (90, 5, 141, 0)  # one sequence has no rows, and one has no keys
    rows, keys = (sum(some) for some in lengths)
    query, key, value, generator = make(rows=rows, keys=keys)
    packed = tuple(tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    others = (offsets(lengths[0]), offsets(lengths[1]), max(lengths[0]), max(lengths[1]))
    drawn = options_of(options, query, key, generator)
    max_logit = check((*packed, *others), drawn, "attention_varlen")
    for_each = []  # each sequence alone
    for (first_row, end_row), (first_key, end_key) in zip(
        itertools.pairwise(others[0].tolist()), itertools.pairwise(others[1].tolist()), strict=True
    ):
        alone = (query[:1, :, first_row:end_row], *(t[:1, :, first_key:end_key] for t in (key, value)))
        for_each.append(reference.attention(*(t.double() for t in alone), return_max_logit=True, **drawn)[2])
    torch.testing.assert_close(max_logit.double(), torch.stack(for_each).amax(0), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_pages(backend: str) -> None:
    query, key, value, _ = make(rows=40, keys=96)
    pages = [tensor.unflatten(2, (6, 16)).transpose(1, 2).flatten(0, 1).contiguous() for tensor in (key, value)]
    table = torch.arange(12, dtype=torch.int32, device=DEVICE).view(2, 6)
    packed = query.transpose(1, 2).flatten(0, 1).contiguous()
    out, max_logit = fastattn.attention_varlen(
        packed,
        *pages,
        offsets((40, 40)),
        offsets((96, 90)),
        40,
        96,
        block_table=table,
        causal=True,
        return_max_logit=True,
    )
    expected = [
        fastattn.attention(
            query[i : i + 1], key[i : i + 1, :, :n], value[i : i + 1, :, :n], causal=True, return_max_logit=True
        )
        for i, n in ((0, 96), (1, 90))
    ]
    torch.testing.assert_close(max_logit, torch.maximum(*(most for _, most in expected)), rtol=1e-6, atol=0)
    torch.testing.assert_close(out[:40], expected[0][0][0].transpose(0, 1), rtol=0, atol=2e-2)


@pytest.mark.slow
def test_what_nobody_sees_does_not_count(backend: str) -> None:
    """The largest products are masked, NaN counts as nothing, and a head may see nothing at all."""
    query, key, value, _ = make(rows=64, keys=128)
    clean = check((query, key, value), {"window": (10, 0)})
    key[:, :, :50] = 100.0  # left of the window of the first row, whose position is key 64
    torch.testing.assert_close(check((query, key, value), {"window": (10, 0)}), clean, rtol=0, atol=0)
    query[:, 0, 3] = math.nan
    results = fastattn.attention(query, key, value, window=(10, 0), return_max_logit=True)
    assert bool(results[1].isfinite().all()) and torch.equal(results[1][1:], clean[1:])
    nothing = torch.zeros(1, 4, 1, 1, dtype=torch.bool, device=DEVICE)
    nothing[:, 2] = True
    results = fastattn.attention(query, key, value, bias=nothing, return_max_logit=True)
    assert results[1].isneginf().tolist() == [True, True, False, True]


def test_a_sink_is_no_score_where_scores_are_minus_infinity(backend: str) -> None:
    query, key, value, _ = make(rows=64, keys=128)
    query, key = query * 0 + 1e20, key * 0 - 1e20
    sinks = torch.zeros(4, device=DEVICE)
    out, lse, max_logit = fastattn.attention(query, key, value, sinks=sinks, return_lse=True, return_max_logit=True)
    assert max_logit.isneginf().all() and bool((out == 0).all()) and bool((lse == 0).all())


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_without_rows_or_keys(rows: int, keys: int, backend: str) -> None:
    query, key, value, _ = make(rows=rows, keys=keys)
    _, max_logit = fastattn.attention(query, key, value, return_max_logit=True)
    assert max_logit.tolist() == [-math.inf] * 4


@pytest.mark.slow
def test_gradients_do_not_know_of_it(backend: str) -> None:
    query, key, value, _ = make(rows=33, keys=47)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out, lse, max_logit = fastattn.attention(*leaves, causal=True, return_lse=True, return_max_logit=True)
    assert out.requires_grad and lse.requires_grad and not max_logit.requires_grad
    gradients = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    out, lse = fastattn.attention(*leaves, causal=True, return_lse=True)
    for gradient, expected in zip(gradients, torch.autograd.grad(out.sum() + lse.sum(), leaves), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=2e-2)


def test_float64_has_a_float64_maximum() -> None:
    query, key, value, _ = make(rows=9, keys=12)
    _, max_logit = fastattn.attention(query.double(), key.double(), value.double(), return_max_logit=True)
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT / 8
    torch.testing.assert_close(max_logit, scores.amax((0, 2, 3)))


@pytest.mark.slow
def test_it_traces_and_maps(backend: str) -> None:
    query, key, value, _ = make(rows=9, keys=40)

    def attend(*tensors: Tensor) -> Any:
        return fastattn.attention(*tensors, causal=True, return_max_logit=True)

    out, max_logit = attend(query, key, value)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(query, key, value)
    torch.testing.assert_close(compiled, (out, max_logit), rtol=0, atol=0)
    mapped_out, mapped_max = torch.vmap(attend)(*(tensor.unsqueeze(1) for tensor in (query, key, value)))
    torch.testing.assert_close(mapped_out[:, 0], out, rtol=0, atol=2e-2)
    assert mapped_max.shape == (2, 4)
    leaves = [tensor.unsqueeze(1).clone().requires_grad_() for tensor in (query, key, value)]
    mapped_out, mapped_max = torch.vmap(attend)(*leaves)
    assert mapped_out.requires_grad and not mapped_max.requires_grad
    torch.testing.assert_close(mapped_max.amax(0), max_logit, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["sm_80", "sm_90", "triton"], indirect=True)
def test_opcheck(backend: str) -> None:
    query, key, value, _ = make(rows=9, keys=40)
    nothing = (None,) * 6
    options = (0, 0, 0.125, -1, 0, None, 0, 0, 0.0, 0.0, None, False, True)
    namespace = torch.ops.fastattn if backend == "cuda" else torch.ops.fastattn_triton
    torch.library.opcheck(
        namespace.attention_forward.default, (query, key, value, *nothing, *options), test_utils="test_faketensor"
    )


def test_bad_input() -> None:
    query, key, value, _ = make(rows=3, keys=3)
    with pytest.raises(TypeError, match="return_max_logit"):
        fastattn.attention(query, key, value, return_max_logit="yes")  # type: ignore[call-overload]
