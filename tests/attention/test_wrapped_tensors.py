"""Tests nested tensors and DTensor: they are computed, or refused with messages that name them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastattn
from cuda_kernels import needs_nested
from fastattn import InputError
from fastattn.call import AttentionCall
from fastattn.functional.nested import unpack
from fastattn.functional.torch_sdpa import torch_sdpa
from kernel_device import DEVICE

pytestmark = [
    pytest.mark.usefixtures("emulated_gpu"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

LENGTHS = (3, 0, 5)


def jagged(heads: int, lengths: tuple[int, ...] = LENGTHS, dim: int = 16, like: Tensor | None = None) -> Tensor:
    """Returns a jagged tensor ``[B, H, j, D]``; ``like``: one whose ``j`` it takes."""
    rows = torch.randn(sum(lengths), heads, dim, generator=torch.Generator().manual_seed(heads)).half().to(DEVICE)
    rows.requires_grad_()
    offsets = torch.tensor((0, *lengths), device=DEVICE).cumsum(0) if like is None else like.offsets()
    return torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_jagged_tensors_are_packed_sequences(backend: str) -> None:
    query = jagged(4)
    key, value = jagged(2, like=query), jagged(2, like=query, dim=24)
    slopes = torch.linspace(0.1, 0.5, 4, device=DEVICE)
    with fastattn.use_backend(backend), fastattn.record() as calls:
        out, lse = fastattn.attention(query, key, value, causal=True, alibi_slopes=slopes, return_lse=True)
        assert not isinstance(out, tuple)
        rows = [t.transpose(1, 2).values() for t in (query, key, value)]
        gradients = torch.autograd.grad(out.transpose(1, 2).values().float().square().sum(), (query, key, value))
        offsets = query.offsets().to(torch.int32)
        expected, expected_lse = fastattn.attention_varlen(
            *rows, offsets, offsets, 5, 5, causal=True, alibi_slopes=slopes, return_lse=True
        )
        expected_gradients = torch.autograd.grad(expected.float().square().sum(), rows)
    assert {call.backend for call in calls} == {backend}
    assert out.shape[:3] == query.shape[:3] and out.shape[3] == 24 and lse.shape == query.shape[:3]
    assert out.offsets() is query.offsets()
    assert torch.equal(out.transpose(1, 2).values(), expected)
    assert torch.equal(lse.transpose(1, 2).values(), expected_lse.transpose(0, 1))
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(got.transpose(1, 2).values(), want)


def test_jagged_queries_may_see_other_sequences() -> None:
    query, key = jagged(2), jagged(2, lengths=(4, 2, 1))
    with fastattn.use_backend("torch"):
        out = fastattn.attention(query, key, key)
        parts = [fastattn.attention(query[i][None], key[i][None], key[i][None]) for i in (0, 2)]
    for index, part in zip((0, 2), parts, strict=True):
        torch.testing.assert_close(out[index], part[0])


def test_the_longest_sequence_is_known_without_reading_the_gpu() -> None:
    """The tensor knows the length, or the number of rows bounds it."""
    rows = torch.zeros(8, 2, 16, dtype=torch.float16, device=DEVICE)
    offsets = torch.tensor([0, 3, 8], device=DEVICE)
    known = torch.nested.nested_tensor_from_jagged(rows, offsets, min_seqlen=3, max_seqlen=6).transpose(1, 2)
    unknown = torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
    for tensor, longest in ((known, 6), (unknown, 5 if DEVICE == "cpu" else 8)):
        packed = unpack(AttentionCall(tensor, tensor, tensor)).call
        assert (packed.max_seqlen_q, packed.max_seqlen_k) == (longest, longest)
    assert unknown._maybe_max_seqlen is None  # type: ignore[attr-defined]


def test_explain_takes_jagged_tensors() -> None:
    query = jagged(2)
    with fastattn.use_backend("triton"):
        explanation = fastattn.explain(fastattn.attention, query, query, query)
    assert explanation.backend == "triton" and explanation.copied == {}


# --- the drop-in ------------------------------------------------------------------------------------------------------


def sdpa_of_parts(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> list[Tensor]:
    """Returns torch's result for each sequence alone, in float32."""
    parts = zip(*(tensor.detach().float().unbind() for tensor in (query, key, value)), strict=True)
    return [torch_sdpa(*(part[None] for part in each), **options)[0] for each in parts]


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_drop_in_sends_jagged_tensors_to_kernels(kv_heads: int, is_causal: bool) -> None:
    query = jagged(4)
    key, value = jagged(kv_heads, like=query), jagged(kv_heads, like=query, dim=24)
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": kv_heads < 4, "scale": 0.3}
    with fastattn.use_backend("triton"), fastattn.record() as calls:
        out = fastattn.scaled_dot_product_attention(query, key, value, **options)
        gradients = torch.autograd.grad(out.transpose(1, 2).values().float().square().sum(), (query, key, value))
        rows = [t.transpose(1, 2).values() for t in (query, key, value)]
        offsets = query.offsets().to(torch.int32)
        expected = fastattn.attention_varlen(*rows, offsets, offsets, 5, 5, causal=is_causal, scale=0.3)
        expected_gradients = torch.autograd.grad(expected.float().square().sum(), rows)
    assert {call.backend for call in calls} == {"triton"} and len(calls) == 4
    assert out.shape[:3] == query.shape[:3] and out.offsets() is query.offsets()
    for got, part in zip(out.unbind(), sdpa_of_parts(query, key, value, **options), strict=True):
        torch.testing.assert_close(got.float(), part, rtol=1e-2, atol=1e-2)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(got.transpose(1, 2).values(), want)


@pytest.mark.slow
def test_the_drop_in_draws_dropout_over_jagged_tensors() -> None:
    query = jagged(2)
    rows, offsets = query.transpose(1, 2).values(), query.offsets().to(torch.int32)
    with fastattn.use_backend("triton"):
        torch.manual_seed(1)
        out = fastattn.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        torch.manual_seed(1)
        expected = fastattn.attention_varlen(rows, rows, rows, offsets, offsets, 5, 5, dropout_p=0.5)
    assert torch.equal(out.transpose(1, 2).values(), expected)


def other_lengths() -> tuple[Tensor, ...]:
    return jagged(2), *(jagged(2, lengths=(4, 2, 1)),) * 2


# Calls whose meaning torch alone defines, or whose errors are torch's.
TO_TORCH: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "strided": (lambda: (strided(),) * 3, {}),
    "causal over other lengths": (other_lengths, {"is_causal": True}),
    "with a mask": (lambda: (jagged(2),) * 3, {"attn_mask": torch.zeros(1, 1, 5, 5)}),
    "fewer KV heads unasked": (lambda: (jagged(4), *(jagged(2),) * 2), {}),
    "jagged heads": (lambda: (jagged(2).transpose(1, 2),) * 3, {}),
    "dense keys": (lambda: (jagged(2), DENSE, DENSE), {}),
}


@pytest.mark.parametrize("what", TO_TORCH)
def test_the_drop_in_leaves_other_structures_to_torch(what: str) -> None:
    make, options = TO_TORCH[what]
    tensors = make()

    def result_of(function: Callable[..., Any]) -> Any:
        try:
            return function(*tensors, **options)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return type(error)

    with fastattn.record() as calls, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        came, wanted = result_of(fastattn.scaled_dot_product_attention), result_of(torch_sdpa)
    assert {call.backend for call in calls} <= {"torch"}
    if isinstance(wanted, type):
        assert came is wanted
    else:
        for got, want in zip(came.unbind(), wanted.unbind(), strict=True):
            assert torch.equal(got, want)


@needs_nested
def test_torchs_selected_backend_gets_jagged_tensors() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = jagged(2)
    with sdpa_kernel(SDPBackend.MATH), fastattn.record() as calls:
        fastattn.scaled_dot_product_attention(query, query, query)
    assert [call.backend for call in calls] == ["torch"]


@needs_nested
def test_compiled_the_drop_in_leaves_jagged_tensors_to_torch() -> None:
    query = jagged(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.compile(fastattn.scaled_dot_product_attention, backend="eager")(query, query, query)
        wanted = torch_sdpa(query, query, query)
    assert torch.equal(out.transpose(1, 2).values(), wanted.transpose(1, 2).values())


def strided(heads: int = 2) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(heads, rows, 16, device=DEVICE) for rows in (3, 5)])


@needs_nested
@pytest.mark.parametrize("scale", [None, 0.5])
def test_strided_nested_tensors_go_to_torch(scale: float | None) -> None:
    nested = strided().requires_grad_()
    with fastattn.use_backend("torch"):
        out = fastattn.attention(nested, nested, nested, scale=scale)
        assert isinstance(out, Tensor)
        for got, part in zip(out.unbind(), nested.unbind(), strict=True):
            torch.testing.assert_close(got, fastattn.attention(part[None], part[None], part[None], scale=scale)[0])
    torch.nested.to_padded_tensor(out, 0.0).sum().backward()
    assert nested.grad is not None


DENSE, OFFSETS = torch.zeros(3, 2, 5, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
A, V, C = fastattn.attention, fastattn.attention_varlen, fastattn.attention_with_kv_cache


def holes() -> Tensor:
    offsets = torch.tensor([0, 3, 8])
    nested = torch.nested.nested_tensor_from_jagged(torch.zeros(8, 2, 16), offsets, lengths=torch.tensor([2, 4]))
    return nested.transpose(1, 2)


# name: (function, arguments, options, words of the message)
REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], dict[str, Any], tuple[str, ...]]] = {
    "jagged, not transposed": (
        A,
        lambda: (jagged(2).transpose(1, 2),) * 3,
        {},
        ("query", "[B, j, *, *]; pass query.transpose(1, 2)"),
    ),
    "jagged, heads not split": (
        A,
        lambda: (jagged(2).transpose(1, 2).flatten(2),) * 3,
        {},
        ("query", "[B, j, *]; pass query.unflatten(-1, (heads, -1)).transpose(1, 2)"),
    ),
    "jagged query, dense key": (
        A,
        lambda: (jagged(2), DENSE, DENSE),
        {},
        ("key", "jagged", "dense tensor [3, 2, 5, 16]; pass torch.nested.as_nested_tensor([x.transpose(0, 1) for x in"),
    ),
    "jagged query, list of keys": (A, lambda: (jagged(2), [DENSE], DENSE), {}, ("key", "got list")),
    "dense query, jagged key": (A, lambda: (DENSE, jagged(2), jagged(2)), {}, ("key", "a dense tensor", "jagged")),
    "jagged with holes": (A, lambda: (holes(),) * 3, {}, ("query", "without holes", "contiguous()")),
    "jagged, other batch": (A, lambda: (jagged(2), *(jagged(2, (3, 5)),) * 2), {}, ("key", "batch size", "3", "2")),
    "jagged, other values": (
        A,
        lambda: (jagged(2), jagged(2), jagged(2, (5, 3, 1))),
        {},
        ("value", "as long as the key's"),
    ),
    "jagged with a bias": (A, lambda: (jagged(2),) * 3, {"bias": torch.zeros(1, 1, 5, 5)}, ("bias", "None", "jagged")),
    "jagged heads": (A, lambda: (jagged(2), jagged(3), jagged(3)), {}, ("query", "multiple of the 3 KV heads")),
    "strided and causal": (
        A,
        lambda: (strided(),) * 3,
        {"causal": True},
        ("query", "jagged", "strided", "pass torch.nested.as_nested_tensor([x.transpose(0, 1) for x in query.unb"),
    ),
    "strided, of other heads": (A, lambda: (strided(), strided(3), strided(3)), {}, ("query", "as_nested_tensor(")),
    "strided and jagged": (A, lambda: (strided(), jagged(2), jagged(2)), {}, ("key", "three strided ones, or three")),
    "strided with the lse": (A, lambda: (strided(),) * 3, {"return_lse": True}, ("query", "jagged", "strided")),
    "strided and dense": (A, lambda: (strided(), DENSE, DENSE), {}, ("key", "strided nested", "dense")),
    "packed, jagged": (V, lambda: (jagged(2),) * 3 + (OFFSETS,) * 2 + (5, 5), {}, ("query", "jagged", "values()")),
    "packed, strided": (V, lambda: (strided(),) * 3 + (OFFSETS,) * 2 + (5, 5), {}, ("query", "nested", "strided")),
    "jagged cache": (C, lambda: (DENSE, jagged(2), jagged(2), OFFSETS), {}, ("k_cache", "dense tensor", "jagged")),
    "jagged query of a cache": (C, lambda: (jagged(2), DENSE, DENSE, OFFSETS), {}, ("query", "dense", "jagged")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_nested_tensors_cannot_do_is_named(what: str) -> None:
    function, arguments, options, words = REFUSED[what]
    with pytest.raises(InputError) as raised, fastattn.use_backend("torch"):
        function(*arguments(), **options)
    for word in words:
        assert word in str(raised.value), f"{word!r} is missing in: {raised.value}"


@needs_nested
def test_what_the_errors_advise_works() -> None:
    whole, query = jagged(2), strided()
    heads_in_one = whole.transpose(1, 2).flatten(2)
    with fastattn.use_backend("torch"):
        split = heads_in_one.unflatten(-1, (2, -1)).transpose(1, 2)
        assert torch.equal(A(split, split, split).values(), A(whole, whole, whole).values())
        rows = [x.transpose(0, 1) for x in query.unbind()]
        query = torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
        assert [out.shape[-2] for out in A(query, query, query, causal=True).unbind()] == [3, 5]


# --- DTensor ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def distributed(mesh: Any, placement: Any, *shape: int) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return distribute_tensor(tensor, mesh, [placement]).requires_grad_()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 3.0, "window": (2, 1)}, {"sinks": torch.ones(4)}]
)
@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_each_rank_attends_over_its_batch_and_heads(mesh: Any, dim: int | None, options: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement = Replicate() if dim is None else Shard(dim)
    shapes = ((2, 4, 6, 16), (2, 2, 7, 16), (2, 2, 7, 16))
    tensors = [distributed(mesh, placement, *shape) for shape in shapes]
    plain = [t.detach().full_tensor().requires_grad_() for t in tensors]  # type: ignore[attr-defined]
    with fastattn.use_backend("torch"):
        out = fastattn.attention(*tensors, **options)
        expected = fastattn.attention(*plain, **options)
    assert isinstance(out, DTensor)
    stays = dim in (0, 1)
    assert out.placements == (placement if stays else Replicate(),)
    torch.testing.assert_close(out.full_tensor(), expected)
    got = torch.autograd.grad(out.sum(), tensors)
    for part, want in zip(got, torch.autograd.grad(expected.sum(), plain), strict=True):
        torch.testing.assert_close(part.full_tensor(), want)


def test_what_dtensors_cannot_do_is_named(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate

    sharded = distributed(mesh, Replicate(), 3, 2, 5, 16)
    calls: dict[str, Callable[[], Any]] = {
        r"key: expected a DTensor.*got torch.Tensor": lambda: A(sharded, DENSE, DENSE),
        r"key: expected a plain tensor, got a DTensor": lambda: A(DENSE, sharded, sharded),
        r"dropout_seed: expected an int": lambda: A(sharded, sharded, sharded, dropout_p=0.5),
        r"key: .*DTensor.*to_local": lambda: V(DENSE[0], sharded[0], sharded[0], OFFSETS, OFFSETS, 5, 5),
        r"k_cache: .*DTensor.*to_local": lambda: C(DENSE, sharded, sharded, OFFSETS),
        r"softcap: expected": lambda: A(sharded, sharded, sharded, softcap=-1.0),
    }
    for words, call in calls.items():
        with pytest.raises(InputError, match=words), fastattn.use_backend("torch"):
            call()
