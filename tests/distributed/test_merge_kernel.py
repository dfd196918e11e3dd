"""Tests ``merge_attention`` and its gradients by Triton's kernels, on the GPU or on the emulator."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import EMULATED, checked
from fastattn import reference
from fastattn.distributed import merge_attention
from fastattn.distributed.merge import merge_into
from kernel_device import DEVICE
from merge_cases import BF16, F16, F32, KERNEL, Merged, check, drawn, problem, results

if EMULATED:
    from emulator import allocations

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

OPS = torch.ops.fastattn_triton


@pytest.fixture(autouse=True)
def by_the_kernel() -> Iterator[None]:
    with checked(), fastattn.use_backend("triton"):
        yield


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, F16), (BF16, F32), (BF16, F16)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 37, 64), (53, 3, 64)], ids=["dense", "packed"])
def test_results_and_gradients(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check(problem(shape, dtypes))


@pytest.mark.parametrize("dim", [1, 5, 72, 128, 600])
def test_any_head_dim(dim: int) -> None:
    """The kernel takes the widest rows in two steps."""
    check(problem((1, 2, 9, dim)))


@pytest.mark.parametrize("length", [1, 31, 32, 33])
def test_lengths_around_tiles(length: int) -> None:
    check(problem((2, 9, length, 64)))


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 0, 5, 64), (2, 2, 0, 64), (2, 2, 5, 0), (0, 2, 64)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    tensors = problem(shape)
    expected = results(reference.merge_attention, tensors)
    torch.testing.assert_close(results(merge_attention, tensors), expected)


def test_an_lse_of_16_bits() -> None:
    out_a, lse_a, out_b, lse_b = problem()
    check((out_a, lse_a.half(), out_b, lse_b.bfloat16()))


def test_rows_that_see_nothing() -> None:
    """Such rows take the other result bit for bit, whatever their output holds, and their gradients are finite or 0."""
    out_a, lse_a, out_b, lse_b = problem()
    lse_a[..., :8], lse_b[..., 4:12] = -math.inf, -math.inf
    out_a[:, :, :8], out_b[:, :, 4:12] = math.nan, math.inf
    out, lse, *grads = results(merge_attention, (out_a, lse_a, out_b, lse_b))
    assert torch.equal(out[:, :, :4], out_b[:, :, :4].float()) and torch.equal(lse[..., :4], lse_b[..., :4])
    assert torch.equal(out[:, :, 8:12], out_a[:, :, 8:12]) and torch.equal(lse[..., 8:12], lse_a[..., 8:12])
    assert bool((out[:, :, 4:8] == 0).all()) and bool((lse[..., 4:8] == -math.inf).all())
    assert all(bool(grad.isfinite().all()) and bool((grad[:, :, 4:8] == 0).all()) for grad in grads)
    assert all(bool((grad[:, :, rows] == 0).all()) for grad, rows in zip(grads, (slice(8),) * 2, strict=False))
    assert all(bool((grad[:, :, 4:12] == 0).all()) for grad in grads[2:])
    check((out_a, lse_a, out_b, lse_b))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_lse_that_is_no_number_is_seen(value: float) -> None:
    out_a, lse_a, out_b, lse_b = problem((1, 2, 6, 64))
    lse_a[..., 0], lse_b[..., 1], lse_a[..., 2], lse_b[..., 2] = value, value, value, -math.inf
    expected = results(reference.merge_attention, (out_a, lse_a, out_b, lse_b))
    for actual, wanted in zip(results(merge_attention, (out_a, lse_a, out_b, lse_b)), expected, strict=True):
        assert torch.equal(actual.isnan(), wanted.isnan())
    assert bool(expected[0][:, :, :3].isnan().all()) and bool(expected[0][:, :, 3:].isfinite().all())


def test_only_some_need_gradients() -> None:
    out_a, lse_a, out_b, lse_b = problem()
    expected = results(merge_attention, (out_a, lse_a, out_b, lse_b))
    _, lse = merge_attention(out_a, lse_a, out_b, lse_b.requires_grad_())
    assert lse.requires_grad
    (alone,) = torch.autograd.grad(lse.sum(), lse_b)  # without a gradient of the output
    torch.testing.assert_close(alone, (lse_b - expected[1]).exp().detach())


# --- Layouts ----------------------------------------------------------------------------------------------------------


def heads_after_rows(tensors: Merged) -> Merged:
    out_a, lse_a, out_b, lse_b = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)
    return out_a, lse_a, out_b, lse_b


def one_of_each(tensors: Merged) -> Merged:
    """Gives the first output another order of dims, and makes the second a misaligned view of a larger tensor."""
    out_a, lse_a, out_b, lse_b = tensors
    wider = torch.full((*out_b.shape[:3], out_b.shape[3] + 3), math.nan, device=DEVICE, dtype=out_b.dtype)
    wider[..., 1:-2] = out_b
    return out_a.transpose(0, 2).contiguous().transpose(0, 2), lse_a, wider[..., 1:-2], lse_b


def dims_anywhere(tensors: Merged) -> Merged:
    out_a, lse_a, out_b, lse_b = tensors
    return out_a.transpose(2, 3).contiguous().transpose(2, 3), lse_a, out_b.repeat(1, 1, 1, 2)[..., ::2], lse_b


def one_for_all_rows(tensors: Merged) -> Merged:
    """Makes the second result a sink per head: a logit without a value."""
    out_a, lse_a, out_b, lse_b = tensors
    return out_a, lse_a, out_b.new_zeros(()).expand_as(out_b), lse_b[:1, :, :1].expand_as(lse_b)


LAYOUTS = (heads_after_rows, one_of_each, dims_anywhere, one_for_all_rows)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.slow
@each_layout
def test_layouts(layout: Callable[[Merged], Merged]) -> None:
    check(layout(problem()))


def test_the_order_of_dimensions_stays() -> None:
    out, lse = merge_attention(*heads_after_rows(problem()))
    assert out.transpose(1, 2).is_contiguous() and lse.transpose(1, 2).is_contiguous()


@contextlib.contextmanager
def far_apart(rows: Tensor) -> Iterator[Tensor]:
    """Yields ``rows [2, S, D]``, with 2**31 elements from the first head to the second."""
    heads, length, dim = rows.shape
    size, strides = 2**31 + length * dim, (2**31, dim, 1)
    if EMULATED:
        import numpy

        memory = numpy.empty(size, numpy.float16)  # only touched pages take memory
        with allocations.allow(memory, "far apart"):
            yield torch.from_numpy(memory).as_strided((heads, length, dim), strides).copy_(rows)
    else:
        yield torch.empty(size, dtype=rows.dtype, device=DEVICE).as_strided((heads, length, dim), strides).copy_(rows)


def test_offsets_beyond_32_bits() -> None:
    tensors = problem((1, 2, 5, 16), (F16, F16))
    expected = merge_attention(*tensors)
    with far_apart(tensors[0][0]) as rows, checked(uninitialised=False):
        found = merge_attention(rows[None], *tensors[1:])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


# --- In place ---------------------------------------------------------------------------------------------------------


@each_layout
def test_a_block_is_merged_into_some_rows_of_a_larger_output(layout: Callable[[Merged], Merged]) -> None:
    """The result equals a merge that is not in place, and nothing else changes."""
    out_a, lse_a, out_b, lse_b = layout(problem())
    expected = merge_attention(out_a, lse_a, out_b, lse_b)
    rows = slice(4, 41)
    for is_transposed in (False, True):
        shape = (2, 3, 50, 64)
        out = torch.full((2, 50, 3, 64) if is_transposed else shape, 7.0, device=DEVICE)
        out = out.transpose(1, 2) if is_transposed else out
        lse = torch.full(shape[:3], 7.0, device=DEVICE)
        out[:, :, rows], lse[:, :, rows] = out_a, lse_a
        merge_into(out[:, :, rows], lse[:, :, rows], out_b, lse_b)
        torch.testing.assert_close((out[:, :, rows], lse[:, :, rows]), expected, rtol=1e-6, atol=1e-6)
        for outside in (slice(0, 4), slice(41, None)):
            assert bool((out[:, :, outside] == 7).all()) and bool((lse[:, :, outside] == 7).all())


def test_blocks_merged_into_nothing_are_the_whole() -> None:
    """A ring merges so: it starts from zeros and -inf, and merges block after block."""
    query, key, value = (drawn(1, 2, length, 32, seed=seed) for seed, length in enumerate((20, 64, 64)))
    exact = reference.attention(*(tensor.double() for tensor in (query, key, value)))
    out, lse = torch.zeros(1, 2, 20, 32, device=DEVICE), torch.full((1, 2, 20), -math.inf, device=DEVICE)
    for keys, values in zip(key.split(16, 2), value.split(16, 2), strict=True):
        merge_into(out, lse, *reference.attention(query, keys, values))
    torch.testing.assert_close(out.double(), exact[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-6)


def test_in_place_by_pytorch_where_no_kernel_may_run() -> None:
    """As a step of a larger call, it accepts a forced backend that has no kernel for it."""
    for backend, dtype in (("torch", F32), ("cuda", F32), ("triton", torch.float64)):
        out_a, lse_a, out_b, lse_b = (tensor.to(dtype) for tensor in problem())
        expected = reference.merge_attention(out_a, lse_a, out_b, lse_b)
        with fastattn.use_backend(backend):
            merge_into(out_a, lse_a, out_b, lse_b)
        assert torch.equal(out_a, expected[0]) and torch.equal(lse_a, expected[1])


# --- As PyTorch and the dispatcher see it -----------------------------------------------------------------------------


def test_it_is_explained() -> None:
    tensors = problem()
    explained = fastattn.explain(merge_attention, *tensors)
    assert (explained.backend, explained.kernel, explained.copied) == ("triton", KERNEL, {})
    with (
        fastattn.use_backend("cuda"),
        pytest.raises(fastattn.InputError, match=r"merge_attention has no CUDA C\+\+ kernel"),
    ):
        merge_attention(*tensors)
    with pytest.raises(fastattn.InputError, match=r"the dtype is torch\.float64"):
        merge_attention(tensors[0].double(), *tensors[1:])
    with fastattn.use_backend("torch"), fastattn.record() as calls:
        merge_attention(*tensors)
    assert calls == [("merge", "torch", "PyTorch")]


OP_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "merge_attention": problem,
    "merge_attention_into": problem,
    "merge_attention_backward": lambda: (drawn(2, 3, 37, 64), drawn(2, 3, 37), *heads_after_rows(problem())),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, OP_CALLS[name]())


def test_the_raw_operator_refuses_to_differentiate() -> None:
    out_a, *others = problem()
    with pytest.raises(RuntimeError, match="raw operator has no gradient"):
        OPS.merge_attention(out_a.requires_grad_(), *others)


@pytest.mark.parametrize("with_itself", [False, True])
def test_compiles_without_graph_breaks(with_itself: bool) -> None:
    def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        return merge_attention(out_a, lse_a, *((out_a, lse_a) if with_itself else (out_b, lse_b)))

    compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
    leaves = [tensor.requires_grad_() for tensor in problem()]
    found, expected = compiled(*leaves), merged(*leaves)
    gradients = [torch.autograd.grad((out.sum(), lse.sum()), leaves[:2]) for out, lse in (found, expected)]
    torch.testing.assert_close((*found, *gradients[0]), (*expected, *gradients[1]))


@pytest.mark.parametrize("shape", [(3, 2, 3, 7, 64), (3, 9, 3, 64)], ids=["dense", "packed"])
def test_vmap_over_gradients_equals_a_loop(shape: tuple[int, ...]) -> None:
    """One argument is shared by all samples."""
    samples = [problem(shape[1:]) for _ in range(shape[0])]
    out_a, lse_a, out_b, lse_b = (torch.stack(tensors) for tensors in zip(*samples, strict=True))
    out_a = out_a * torch.arange(1, shape[0] + 1, device=DEVICE).view(-1, *(1,) * (len(shape) - 1))

    def loss(out_a: Tensor, lse_a: Tensor, out_b: Tensor) -> Tensor:
        out, lse = merge_attention(out_a, lse_a, out_b, lse_b[0])
        return (out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)).sum() + lse.square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    mapped = torch.vmap(gradient, in_dims=(0, 0, 0))(out_a, lse_a, out_b)
    for i in range(shape[0]):
        torch.testing.assert_close(tuple(each[i] for each in mapped), gradient(out_a[i], lse_a[i], out_b[i]))


def test_double_backward_is_refused() -> None:
    leaves = [tensor.requires_grad_() for tensor in problem()]
    (gradient,) = torch.autograd.grad(merge_attention(*leaves)[0].square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()
