"""Compares the drop-in with torch's own function: results, gradients, dtype, shape, layout and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from cuda_kernels import HAS_KERNELS, needs_nested
from kernel_device import DEVICE
from oracle import check_against_oracle

pytestmark = pytest.mark.usefixtures("emulated_gpu")

SEED = 20
KERNELS = "cuda" if HAS_KERNELS else "triton"  # Triton compiles for seconds
torch_sdpa = F.scaled_dot_product_attention

# name: (query shape, key shape, value shape, mask shape or None, keyword arguments)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, dict[str, Any]]] = {
    "2d": ((5, 16), (7, 16), (7, 24), None, {}),
    "3d": ((2, 5, 16), (2, 7, 16), (2, 7, 16), None, {}),
    "3d-broadcast": ((3, 5, 16), (1, 7, 16), (1, 7, 16), None, {}),
    "4d": ((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16), None, {}),
    "4d-batch-and-heads-broadcast": ((2, 1, 5, 16), (1, 3, 7, 16), (1, 3, 7, 16), None, {}),
    "one-kv-head": ((2, 4, 5, 16), (2, 1, 7, 16), (2, 1, 7, 16), None, {}),
    "5d": ((2, 2, 3, 5, 16), (2, 2, 3, 7, 16), (2, 2, 3, 7, 16), None, {}),
    "5d-mask": ((2, 2, 3, 5, 16), (2, 2, 3, 7, 16), (2, 2, 3, 7, 16), (2, 1, 3, 5, 7), {}),
    "ranks-differ": ((2, 4, 5, 16), (4, 7, 16), (7, 16), None, {}),
    "value-dim": ((1, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 40), None, {}),
    "causal-square": ((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16), None, {"is_causal": True}),
    "causal-more-keys": ((1, 2, 5, 16), (1, 2, 9, 16), (1, 2, 9, 16), None, {"is_causal": True}),
    "causal-more-queries": ((1, 2, 9, 16), (1, 2, 4, 16), (1, 2, 4, 16), None, {"is_causal": True}),
    "mask-2d": ((2, 2, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), (5, 7), {}),
    "mask-batch": ((2, 2, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), (2, 1, 5, 7), {}),
    "mask-heads": ((2, 2, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), (2, 5, 7), {}),
    "mask-rows": ((2, 2, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), (2, 2, 1, 7), {}),
    "mask-columns": ((2, 2, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), (1, 1, 5, 1), {}),
    "gqa": ((1, 6, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16), None, {"enable_gqa": True}),
    "gqa-key-and-value-differ": ((1, 8, 5, 16), (1, 2, 7, 16), (1, 4, 7, 16), None, {"enable_gqa": True}),
    "gqa-3d": ((6, 5, 16), (2, 7, 16), (2, 7, 16), None, {"enable_gqa": True}),
    "gqa-mask": ((2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), (2, 4, 5, 7), {"enable_gqa": True}),
    "scale": ((1, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16), None, {"scale": 0.7}),
    "scale-zero": ((1, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16), None, {"scale": 0.0}),
    "scale-negative": ((1, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16), (5, 7), {"scale": -1.3}),
    "one-query": ((1, 2, 1, 16), (1, 2, 7, 16), (1, 2, 7, 16), None, {}),
    "no-keys": ((1, 2, 5, 16), (1, 2, 0, 16), (1, 2, 0, 16), None, {}),
    "no-queries": ((1, 2, 0, 16), (1, 2, 3, 16), (1, 2, 3, 16), None, {}),
    "no-batch": ((0, 2, 5, 16), (0, 2, 3, 16), (0, 2, 3, 16), None, {}),
}


CASES_AND_MASKS = [
    (case, kind) for case, (*_, mask, _) in CASES.items() for kind in (("none",) if mask is None else ("float", "bool"))
]


@pytest.fixture(autouse=True)
def on_the_kernels_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Returns the backend to force, so that no other can run in its place."""
    return str(request.param)


def draw(case: str, dtype: torch.dtype, mask_kind: str) -> tuple[list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(SEED)
    *shapes, mask_shape, _ = CASES[case]
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE, dtype) for shape in shapes
    ]
    if mask_shape is None:
        return tensors, None
    mask = torch.randn(mask_shape, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE)
    return tensors, mask > -0.5 if mask_kind == "bool" else mask.to(dtype)


def run(function: Any, tensors: list[Tensor], mask: Tensor | None, options: dict[str, Any]) -> list[Tensor]:
    """Returns the output and the gradient of every floating input."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().clone().requires_grad_()
        inputs.append(mask)
    out = function(*inputs[:3], attn_mask=mask, **options)
    weights = torch.linspace(-1, 1, max(out.numel(), 1), dtype=torch.float64)[: out.numel()].view(out.shape)
    grads = torch.autograd.grad((out.double() * weights).sum(), inputs, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True))]


def composite(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes torch's documented formula with intermediates in the inputs' dtype: its error is the kernels' bound."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0) @ value


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mask_kind"), CASES_AND_MASKS)
def test_kernels_equal_torch(case: str, mask_kind: str) -> None:
    options = CASES[case][4]
    tensors, mask = draw(case, torch.float16, mask_kind)
    wide = [t.double() for t in tensors]
    wide_mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    oracle = run(torch_sdpa, wide, wide_mask, options)
    measure = run(composite, tensors, mask, options)
    with fastattn.use_backend("triton"), fastattn.record() as calls:
        actual = run(fastattn.scaled_dot_product_attention, tensors, mask, options)
    assert calls[0].backend == "triton"
    assert actual[0].dtype == torch.float16
    names = ("out", "grad query", "grad key", "grad value", "grad mask")
    for name, result, expected, other in zip(names, actual, oracle, measure, strict=False):
        check_against_oracle(f"{case}: {name}", result, expected, other)


@pytest.mark.parametrize(("case", "mask_kind"), CASES_AND_MASKS)
def test_without_a_kernel_it_is_torch(case: str, mask_kind: str) -> None:
    options = CASES[case][4]
    tensors, mask = draw(case, torch.float32, mask_kind)
    for actual, expected in zip(
        run(fastattn.scaled_dot_product_attention, tensors, mask, options),
        run(torch_sdpa, tensors, mask, options),
        strict=True,
    ):
        assert torch.equal(actual, expected) and actual.stride() == expected.stride()


def test_layout_follows_the_query(backend: str) -> None:
    inputs = [torch.randn(2, 5, 4, 16, dtype=torch.float16).transpose(1, 2) for _ in range(3)]
    contiguous = [tensor.contiguous() for tensor in inputs]
    with fastattn.use_backend(backend):
        out = fastattn.scaled_dot_product_attention(*inputs)
        plain = fastattn.scaled_dot_product_attention(*contiguous)
    assert out.stride() == torch_sdpa(*inputs).stride() == inputs[0].stride()
    assert plain.stride() == (torch_sdpa(*contiguous) if backend == "torch" else contiguous[0]).stride()


@pytest.mark.parametrize("which", ["non-contiguous last dim", "misaligned", "expanded", "sliced"])
def test_views_of_any_kind(which: str, backend: str) -> None:
    torch.manual_seed(SEED)
    if which == "non-contiguous last dim":
        tensors = [torch.randn(1, 2, 16, 7, dtype=torch.float16).transpose(2, 3) for _ in range(3)]
    elif which == "misaligned":
        tensors = [torch.randn(1 + 2 * 7 * 16, dtype=torch.float16)[1:].view(1, 2, 7, 16) for _ in range(3)]
    elif which == "expanded":
        tensors = [torch.randn(1, 1, 1, 16, dtype=torch.float16).expand(2, 3, 7, 16) for _ in range(3)]
    else:
        tensors = [torch.randn(2, 7, 3, 3, 16, dtype=torch.float16)[:, :, i].transpose(1, 2) for i in range(3)]
    oracle = torch_sdpa(*(t.double() for t in tensors))
    with fastattn.use_backend(backend):
        actual = fastattn.scaled_dot_product_attention(*tensors)
    check_against_oracle(which, actual, oracle, torch_sdpa(*tensors))


def test_finite_mask_values_are_numbers(backend: str) -> None:
    """A row of ``finfo.min`` attends to all keys equally; it is not masked out.

    This needs bfloat16, whose ``finfo.min`` absorbs every score; float16's does not.
    """
    torch.manual_seed(SEED)
    query, key, value = (torch.randn(1, 1, 4, 16, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.zeros(4, 4, dtype=torch.bfloat16)
    mask[0] = torch.finfo(torch.bfloat16).min
    mask[1, 2:] = torch.finfo(torch.bfloat16).min
    with fastattn.use_backend(backend):
        out = fastattn.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(out[0, 0, 0], value[0, 0].mean(0))
    exact = torch_sdpa(query.float(), key.float(), value.float(), mask.float())  # it absorbs float32 scores, too
    check_against_oracle("out", out, exact.double(), torch_sdpa(query, key, value, mask))


def test_fully_masked_rows_are_zero_with_zero_gradients(backend: str) -> None:
    torch.manual_seed(SEED)
    inputs = [torch.randn(1, 2, 4, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    # On Hopper torch prefers cuDNN, which gives masked scores the least number instead of -inf.
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with fastattn.use_backend(backend), sdpa_kernel(others):
        out = fastattn.scaled_dot_product_attention(*inputs, attn_mask=mask)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert bool((out[:, :, 1] == 0).all())
    assert bool((grads[0][:, :, 1] == 0).all())
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("subset", range(8))
def test_gradients_of_any_subset(subset: int) -> None:
    torch.manual_seed(SEED)
    inputs = [torch.randn(1, 1, 3, 16, dtype=torch.float16, requires_grad=bool(subset >> i & 1)) for i in range(3)]
    expected = torch_sdpa(*inputs)
    with fastattn.use_backend(KERNELS):
        out = fastattn.scaled_dot_product_attention(*inputs)
    assert out.requires_grad == expected.requires_grad
    wanted = [t for t in inputs if t.requires_grad]
    if wanted:
        weights = torch.randn_like(out)
        wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
        exact = torch.autograd.grad((torch_sdpa(*wide) * weights).sum(), [t for t in wide if t.requires_grad])
        for got, want, other in zip(
            torch.autograd.grad((out * weights).sum(), wanted),
            exact,
            torch.autograd.grad((expected * weights).sum(), wanted),
            strict=True,
        ):
            check_against_oracle("gradient", got, want, other)


REJECTED: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "too few dimensions": ((torch.ones(16), torch.ones(16), torch.ones(16)), {}),
    "dtypes differ": ((torch.ones(1, 1, 2, 16), torch.ones(1, 1, 2, 16).double(), torch.ones(1, 1, 2, 16)), {}),
    "integers": ((torch.ones(1, 1, 2, 16, dtype=torch.int32),) * 3, {}),
    "head dims differ": ((torch.ones(1, 1, 2, 16), torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 16)), {}),
    "heads without gqa": ((torch.ones(1, 4, 2, 16), torch.ones(1, 2, 2, 16), torch.ones(1, 2, 2, 16)), {}),
    "heads that do not divide": (
        (torch.ones(1, 4, 2, 16), torch.ones(1, 3, 2, 16), torch.ones(1, 3, 2, 16)),
        {"enable_gqa": True},
    ),
    "batches that do not broadcast": ((torch.ones(3, 1, 2, 16), torch.ones(2, 1, 2, 16), torch.ones(2, 1, 2, 16)), {}),
    "mask dtype": ((torch.ones(1, 1, 2, 16),) * 3, {"attn_mask": torch.ones(2, 2, dtype=torch.int32)}),
    "mask shape": ((torch.ones(1, 1, 2, 16),) * 3, {"attn_mask": torch.ones(3, 3)}),
    "mask enlarges": ((torch.ones(1, 1, 2, 16),) * 3, {"attn_mask": torch.ones(2, 1, 2, 2)}),
    "dropout": ((torch.ones(1, 1, 2, 16),) * 3, {"dropout_p": 1.5}),
}


@pytest.mark.parametrize("what", REJECTED)
def test_rejects_what_torch_rejects(what: str) -> None:
    tensors, options = REJECTED[what]
    with pytest.raises(RuntimeError):
        torch_sdpa(*tensors, **options)
    with pytest.raises(RuntimeError):
        fastattn.scaled_dot_product_attention(*tensors, **options)
    with pytest.raises(RuntimeError), fastattn.use_backend("triton"):
        fastattn.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_on_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(SEED)
    tensors = [torch.randn(2, 2, 5, 20, device="cpu").to(dtype) for _ in range(3)]
    assert torch.equal(fastattn.scaled_dot_product_attention(*tensors), torch_sdpa(*tensors))


def test_dropout_zeroes_and_rescales() -> None:
    """With equal scores and the identity as values, the output is the dropped-out probability matrix."""
    size, p = 32, 0.25
    query = torch.zeros(1, 2, size, size, dtype=torch.float16)
    value = torch.eye(size, dtype=torch.float16).expand(1, 2, size, size)
    torch.manual_seed(SEED)
    with fastattn.use_backend(KERNELS):
        out = fastattn.scaled_dot_product_attention(query, query, value, dropout_p=p)
        again = fastattn.scaled_dot_product_attention(query, query, value, dropout_p=p)
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / size / (1 - p)))
    assert abs(kept.float().mean().item() - (1 - p)) < 0.05  # 2048 draws: five standard deviations
    assert not torch.equal(out, again)


@needs_nested
def test_nested_tensors_go_to_torch() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 16), torch.randn(5, 2, 16)], layout=torch.jagged)
    query = nested.transpose(1, 2)
    out = fastattn.scaled_dot_product_attention(query, query, query)
    assert out.is_nested and out.shape[0] == 2


@needs_nested
def test_strided_nested_tensors_go_to_torch_when_a_plan_is_made() -> None:
    query = torch.nested.nested_tensor([torch.randn(2, 3, 16), torch.randn(2, 5, 16)])
    with fastattn.record() as calls:
        out = fastattn.scaled_dot_product_attention(query, query, query)
    assert [call.backend for call in calls] == ["torch"]
    assert out.is_nested


WRONG_TYPES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "query": ((None, torch.ones(2, 16), torch.ones(2, 16)), {}),
    "key": ((torch.ones(2, 16), None, torch.ones(2, 16)), {}),
    "attn_mask": ((torch.ones(2, 16),) * 3, {"attn_mask": [1]}),
    "dropout_p": ((torch.ones(2, 16),) * 3, {"dropout_p": "a"}),
    "is_causal": ((torch.ones(2, 16),) * 3, {"is_causal": 1}),
    "scale": ((torch.ones(2, 16),) * 3, {"scale": "a"}),
    "enable_gqa": ((torch.ones(3, 2, 16),) * 3, {"enable_gqa": 1}),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_raise_torchs_error(name: str) -> None:
    arguments, options = WRONG_TYPES[name]
    with pytest.raises(TypeError, match=name):
        torch_sdpa(*arguments, **options)
    with fastattn.record(), pytest.raises(TypeError, match=name):
        fastattn.scaled_dot_product_attention(*arguments, **options)
