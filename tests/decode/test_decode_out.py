"""Tests ``out=`` of ``attention_with_kv_cache``: every backend writes its result there, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fastattn
from cuda_kernels import HAS_KERNELS, NO_KERNELS
from decode_cases import Case, clone, make_arguments, op_arguments
from kernel_device import DEVICE

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

OPS = {"cuda": torch.ops.fastattn, "triton": torch.ops.fastattn_triton}


def decode(case: Case, arguments: dict[str, Any], **more: Any) -> Any:
    options = {"causal": case.causal, "window": case.window, "num_splits": case.splits}
    return fastattn.attention_with_kv_cache(**arguments, **options, **more)


def shape_of(case: Case) -> tuple[int, ...]:
    return len(case.lengths), case.heads[0], case.queries, case.dims[1]


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


def heads_after_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    batch, heads, rows, dim = shape
    return contiguous((batch, rows, heads, dim), dtype).transpose(1, 2)


def view_of_more(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a view of a buffer with more sequences, more heads and longer rows."""
    batch, heads, rows, dim = shape
    return contiguous((batch + 2, heads + 3, rows, dim + 16), dtype)[1:-1, 2:-1, :, 8:-8]


CASES = [
    Case("one-query", new=1),
    Case("split", lengths=(300, 0, 1), capacity=320, splits=3, sinks=True, queries=2),
    Case("pages", page_size=16, capacity=160, new=2, queries=2, dims=(64, 40), dtype=torch.bfloat16),
    Case("int8", int8=True, new=1, rotary_dim=16),
    Case("prompt", queries=70, new=70, lengths=(0, 5), capacity=96, page_size=16, dims=(64, 64)),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [contiguous, heads_after_rows, view_of_more])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_result_is_there(case: Case, layout: Callable[..., Tensor], backend: str) -> None:
    arguments = make_arguments(case)
    expected, expected_lse = decode(case, clone(arguments), return_lse=True)
    out = layout(shape_of(case), case.dtype)
    strides = out.stride()
    result, lse = decode(case, clone(arguments), return_lse=True, out=out)
    assert result is out and out.stride() == strides
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    if out._base is not None and layout is view_of_more:
        assert int(out._base.isfinite().sum()) == out.numel()  # nothing outside of the view was written


@pytest.mark.slow
def test_the_caches_are_written_too(backend: str) -> None:
    case = Case("append", new=2, queries=2, int8=True)
    arguments = make_arguments(case)
    with_out, without = clone(arguments), clone(arguments)
    decode(case, without)
    decode(case, with_out, out=contiguous(shape_of(case), case.dtype))
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        torch.testing.assert_close(with_out[name], without[name], rtol=0, atol=0, equal_nan=True)


def test_no_queries(backend: str) -> None:
    case = Case("none", queries=0, new=2)
    out = contiguous(shape_of(case), case.dtype)
    assert decode(case, make_arguments(case), out=out) is out


def test_the_kernel_is_the_same(backend: str) -> None:
    case = Case("kernel")
    arguments = make_arguments(case)
    with fastattn.record() as calls:
        decode(case, clone(arguments))
        decode(case, clone(arguments), out=contiguous(shape_of(case), case.dtype))
    assert calls[0] == calls[1]


def test_compile(backend: str) -> None:
    """Returns the given tensor object; the graph writes to any ``out`` that it is given."""
    torch._dynamo.reset()

    def step(out: Tensor, arguments: dict[str, Any]) -> Any:
        return fastattn.attention_with_kv_cache(**arguments, out=out)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        case = Case("compiled", new=1, seed=seed, dtype=torch.float32 if backend == "torch" else torch.float16)
        arguments = make_arguments(case)
        expected = fastattn.attention_with_kv_cache(**clone(arguments))
        out = contiguous(shape_of(case), case.dtype)
        assert compiled(out, clone(arguments)) is out
        # In a graph on a CPU, PyTorch's operators get the whole capacity, which rounds differently.
        torch.testing.assert_close(out, expected, **({} if backend == "torch" else {"rtol": 0, "atol": 0}))


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True], ids=["16-bit", "int8"])
def test_opcheck(int8: bool, backend: str) -> None:
    if backend == "torch":
        pytest.skip("this backend has no such operator")
    case = Case("opcheck", lengths=(3, 70), new=2, queries=2, sinks=True, splits=2, int8=int8)
    arguments = {**op_arguments(case, make_arguments(case)), "out": contiguous(shape_of(case), case.dtype)}
    torch.library.opcheck(OPS[backend].attention_decode_out.default, (), arguments)


def test_autocast_decides_the_dtype(backend: str) -> None:
    case = Case("autocast", dtype=torch.bfloat16)
    arguments = make_arguments(case)
    out = contiguous(shape_of(case), torch.bfloat16)
    expected = decode(case, clone(arguments))
    arguments["query"] = arguments["query"].float()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert decode(case, arguments, out=out) is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


# --- Errors -----------------------------------------------------------------------------------------------------------

CASE = Case("bad", lengths=(5, 7), heads=(4, 2), dims=(32, 32), capacity=16)
SHAPE = (2, 4, 1, 32)


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16, device=DEVICE)


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "type": (lambda _: [1], TypeError, "out: expected a torch.Tensor or None, got list"),
    "shape": (
        lambda _: half(2, 4, 2, 32),
        ValueError,
        r"out: expected shape \[B, Hq, Sq, Dv\] = \[2, 4, 1, 32\], got \[2, 4, 2, 32\]",
    ),
    "dtype": (lambda _: half(*SHAPE).float(), ValueError, "out: expected torch.float16, got torch.float32"),
    "device": (lambda _: half(*SHAPE).to("meta"), ValueError, "out: expected a tensor on .* got one on meta"),
    "gradient": (lambda _: half(*SHAPE).requires_grad_(), ValueError, "out: expected a tensor that needs no gradient"),
    "last dimension": (
        lambda _: half(32, 4, 1, 2).permute(3, 1, 2, 0),
        ValueError,
        "out: expected a contiguous last dimension",
    ),
    "expanded": (
        lambda _: half(1, 4, 1, 32).expand(SHAPE),
        ValueError,
        "out: expected separate memory for each element",
    ),
    "overlapping": (
        lambda _: half(300).as_strided(SHAPE, (64, 16, 16, 1)),
        ValueError,
        "out: expected separate memory",
    ),
    "the query": (
        lambda a: a["query"],
        ValueError,
        "out: expected memory of its own, .* got memory among the elements of query",
    ),
    "a cache": (lambda a: a["v_cache"][:, 0, 2:6, None], ValueError, "got memory among the elements of v_cache"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_written_is_an_error(name: str, backend: str) -> None:
    make, kind, words = BAD[name]
    arguments = make_arguments(CASE)
    before = clone(arguments)
    with pytest.raises(kind, match=words):
        decode(CASE, arguments, out=make(arguments))
    for cache in ("k_cache", "v_cache"):
        torch.testing.assert_close(arguments[cache], before[cache], rtol=0, atol=0, equal_nan=True)


def test_alignment_is_what_a_kernel_needs(backend: str) -> None:
    arguments, out = make_arguments(CASE), half(2, 4, 1, 33)[..., 1:]
    if backend == "torch":
        torch.testing.assert_close(decode(CASE, arguments, out=out), decode(CASE, arguments), rtol=0, atol=0)
        return
    with pytest.raises(fastattn.InputError, match=r"out: expected a contiguous last dimension, and base.*16 bytes"):
        decode(CASE, arguments, out=out)


@pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda: half(2, 4, 1, 40), r"out must have shape \[2, 4, 1, 32\], got \[2, 4, 1, 40\]"),
        (lambda: half(*SHAPE).bfloat16(), "out must have the dtype of query"),
        (lambda: half(2, 4, 1, 33)[..., 1:], "out is written in place: its last dim must be contiguous"),
    ],
)
def test_the_operator_checks_for_itself(out: Callable[[], Tensor], words: str) -> None:
    with pytest.raises(RuntimeError, match=f"fastattn.attention_decode: {words}"):
        torch.ops.fastattn.attention_decode_out(**op_arguments(CASE, make_arguments(CASE)), out=out())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graphs_write_to_it_at_every_replay(backend: str) -> None:
    case = replace(CASE, splits=2)
    arguments, out = make_arguments(case), half(*SHAPE)
    expected = decode(case, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(case, arguments, out=out)
    for _ in range(2):
        out.fill_(math.nan)
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_fake_tensors_have_no_addresses_to_compare(backend: str) -> None:
    with FakeTensorMode() as mode:
        given = make_arguments(CASE).items()
        arguments = {name: mode.from_tensor(t) if isinstance(t, Tensor) else t for name, t in given}
        out = torch.empty(shape_of(CASE), dtype=CASE.dtype, device=DEVICE)
        assert decode(CASE, arguments, out=out) is out
