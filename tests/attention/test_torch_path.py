"""Tests ``attention`` and ``attention_varlen`` through PyTorch's own attention: which calls go there, which stay with
the reference, and that all promises hold there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from by_hand import normal
from fastattn import reference
from fastattn.dispatch.request import Request
from fastattn.functional import composite, torch_sdpa
from fastattn.ops.describe import ATTENTION
from oracle import check_against_oracle

BATCH, HEADS, KV_HEADS, ROWS, DIM = 2, 4, 2, 9, 16
NO_BIAS = (BATCH, HEADS, ROWS, ROWS)


def inputs(
    rows: int = ROWS, keys: int = ROWS, value_dim: int = DIM, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [
        normal(1, BATCH, HEADS, rows, DIM, dtype=dtype, grad=True),
        normal(2, BATCH, KV_HEADS, keys, DIM, dtype=dtype, grad=True),
        normal(3, BATCH, KV_HEADS, keys, value_dim, dtype=dtype, grad=True),
    ]


def without_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [t.detach() for t in inputs(dtype=dtype)]


def mask(*shape: int) -> Tensor:
    """Returns a mask in which one row sees no key, and one row sees a single key."""
    visible = normal(4, *shape) > 0
    visible[..., 2, :] = False
    visible[..., 5, :] = False
    visible[..., 5, -1] = True
    return visible


def additive(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    bias = normal(5, *shape).masked_fill(~mask(*shape), -math.inf).to(dtype)
    bias[..., 7, :] = torch.finfo(dtype).min
    return bias


# Calls that PyTorch's function can express: query, key and value, and the options.
EXPRESSED: dict[str, tuple[Callable[[], list[Tensor]], Callable[[], dict[str, Any]]]] = {
    "nothing masked": (inputs, dict),
    "causal": (inputs, lambda: {"causal": True}),
    "causal, more keys than queries": (lambda: inputs(rows=4), lambda: {"causal": True}),
    "causal, more queries than keys": (lambda: inputs(keys=4), lambda: {"causal": True}),
    "causal, one query": (lambda: inputs(rows=1), lambda: {"causal": True}),
    "causal, by a window": (inputs, lambda: {"window": (-1, 0)}),
    "causal, another value dim": (lambda: inputs(value_dim=5), lambda: {"causal": True}),
    "causal, a scale": (inputs, lambda: {"causal": True, "scale": 0.5}),
    "causal, float64": (lambda: inputs(dtype=torch.float64), lambda: {"causal": True}),
    "causal, float16": (lambda: inputs(dtype=torch.float16), lambda: {"causal": True}),
    "causal, bfloat16": (lambda: inputs(dtype=torch.bfloat16), lambda: {"causal": True}),
    "window": (inputs, lambda: {"window": (2, 1)}),
    "window to the left": (lambda: inputs(rows=4), lambda: {"window": (2, -1)}),
    "window beyond the keys": (lambda: inputs(keys=3), lambda: {"window": (1, 1)}),
    "mask": (inputs, lambda: {"bias": mask(*NO_BIAS)}),
    "mask for all": (inputs, lambda: {"bias": mask(1, 1, ROWS, ROWS)}),
    "mask of keys": (inputs, lambda: {"bias": normal(6, BATCH, 1, 1, ROWS) > 0}),
    "mask of queries": (inputs, lambda: {"bias": mask(1, HEADS, ROWS, 1)}),
    "mask and causal": (lambda: inputs(rows=ROWS, keys=7), lambda: {"bias": mask(1, 1, ROWS, 7), "causal": True}),
    "mask, float64": (lambda: inputs(dtype=torch.float64), lambda: {"bias": mask(*NO_BIAS)}),
    "bias": (without_gradients, lambda: {"bias": additive(*NO_BIAS)}),
    "bias, float64": (
        lambda: without_gradients(torch.float64),
        lambda: {"bias": additive(1, 1, ROWS, ROWS, dtype=torch.float64)},
    ),
    "bias, float16": (
        lambda: without_gradients(torch.float16),
        lambda: {"bias": additive(1, HEADS, ROWS, ROWS, dtype=torch.float16)},
    ),
    "bias of keys": (without_gradients, lambda: {"bias": normal(6, BATCH, 1, 1, ROWS, dtype=torch.float32)}),
    "bias and causal": (without_gradients, lambda: {"bias": additive(1, 1, ROWS, ROWS), "causal": True}),
}


def with_gradients(function: Callable[..., Any], tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    out = function(*tensors, **options)
    out = out[0] if isinstance(out, tuple) else out
    sources = [t for t in tensors if t.requires_grad]
    if not sources:
        return [out]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), sources)]


def widened(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes the test fail if one of ``names`` is called: "the reference" or "torch"."""

    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("the call went the other way")

    for name in names:
        if name == "torch":
            monkeypatch.setattr(torch_sdpa, "torch_sdpa", called)
        else:
            monkeypatch.setattr(composite, "_attend_by_reference", called)
            monkeypatch.setattr(composite, "_attend_packed_by_reference", called)


@pytest.mark.parametrize("name", EXPRESSED)
def test_torch_computes_what_it_can_express(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = EXPRESSED[name]
    tensors, given = make(), options()
    wide = {
        key: part.double() if isinstance(part, Tensor) and part.dtype != torch.bool else part
        for key, part in given.items()
    }
    expected = with_gradients(reference.attention, widened(tensors), wide)
    composite = with_gradients(reference.attention, tensors, {**given, "compute_dtype": tensors[0].dtype})
    without(monkeypatch, "the reference")
    parts = ("out", "query's gradient", "key's gradient", "value's gradient", "bias's gradient")
    for part, got, want, rough in zip(
        parts, with_gradients(fastattn.attention, tensors, given), expected, composite, strict=False
    ):
        if tensors[0].dtype.itemsize > 2:
            torch.testing.assert_close(got, want.to(got.dtype))
        else:
            check_against_oracle(part, got, want, rough)


def test_minimal_biases_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of only finfo.min see every key equally."""
    without(monkeypatch, "the reference")
    query, key, value = without_gradients()
    bias = torch.full((1, 1, ROWS, ROWS), torch.finfo(torch.float32).min)
    out = fastattn.attention(query, key, value, bias=bias)
    mean = value.mean(2, keepdim=True).repeat_interleave(HEADS // KV_HEADS, 1).expand(BATCH, HEADS, ROWS, DIM)
    torch.testing.assert_close(out, mean)


def test_minimal_biases_are_numbers_to_the_gradients_too() -> None:
    bias = torch.full((1, 1, ROWS, ROWS), torch.finfo(torch.float32).min)
    query, key, value = inputs()
    out = fastattn.attention(query, key, value, bias=bias)
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(gradient, torch.full_like(value, HEADS / KV_HEADS))


class Watching(TorchDispatchMode):
    """A mode that records operators: under it the host may not read values, as on a GPU or under a tracer."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return function(*args, **(kwargs or {}))


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"causal": True},
    "window": lambda: {"window": (3, 2)},
    "mask": lambda: {"bias": mask(BATCH, 1, ROWS, ROWS)},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("readable", [True, False])
def test_what_is_masked_has_no_influence(name: str, readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see no NaN or infinity keep their results, and all other rows are NaN."""
    clean, options = inputs(), MASKS[name]()
    spoiled = [t.detach().clone() for t in clean]
    spoiled[1][0, 0, 6, 3] = spoiled[2][1, 1, 4, 2] = math.nan
    spoiled[2][0, 1, 8, 7] = math.inf
    spoiled = [t.requires_grad_() for t in spoiled]
    want = with_gradients(fastattn.attention, clean, options)
    oracle, _ = reference.attention(*spoiled, **options)
    without(monkeypatch, "the reference")
    if readable:
        got = with_gradients(fastattn.attention, spoiled, options)
    else:
        with Watching():
            got = with_gradients(fastattn.attention, spoiled, options)
    assert torch.equal(got[0].isnan(), oracle.isnan()) and bool(oracle.isnan().any())
    sees_none = ~oracle.isnan().any(-1, keepdim=True)
    assert bool(sees_none.any())
    for got_part, want_part in zip(got[:2], want[:2], strict=True):  # out, and the query's gradient
        torch.testing.assert_close(
            torch.where(sees_none, got_part, 0.0), torch.where(sees_none, want_part, 0.0), atol=1e-6, rtol=1e-5
        )
    assert bool(got[1].isnan().any()), "a NaN that is seen must not vanish from the gradients"


@pytest.mark.parametrize("readable", [True, False])
def test_keys_that_nobody_sees_have_no_influence_on_any_gradient(readable: bool) -> None:
    padding = torch.ones(BATCH, 1, 1, ROWS, dtype=torch.bool)
    padding[..., 6:] = False
    clean, spoiled = inputs(), inputs()
    with torch.no_grad():
        spoiled[1][:, :, 6:] = math.nan
        spoiled[2][:, :, 6:] = math.nan
    want = with_gradients(fastattn.attention, clean, {"bias": padding})
    if readable:
        got = with_gradients(fastattn.attention, spoiled, {"bias": padding})
    else:
        with Watching():
            got = with_gradients(fastattn.attention, spoiled, {"bias": padding})
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


# The promises that PyTorch's function would break; the docstring of torch_sdpa.py says how.
STAYS: dict[str, tuple[Callable[[], list[Tensor]], dict[str, Any]]] = {
    "the lse": (inputs, {"return_lse": True}),
    "softcap": (inputs, {"softcap": 5.0}),
    "ALiBi": (inputs, {"alibi_slopes": torch.ones(HEADS)}),
    "sinks": (inputs, {"sinks": torch.zeros(HEADS)}),
    "dropout's pattern": (inputs, {"dropout_p": 0.5, "dropout_seed": 3}),
    "no keys": (lambda: inputs(keys=0), {}),
    "a bias with gradients": (inputs, {"bias": additive(1, HEADS, ROWS, ROWS)}),
    "causal, a negative scale": (inputs, {"causal": True, "scale": -0.5}),
    "causal, a scale of zero": (inputs, {"causal": True, "scale": 0.0}),
    "a bias in another dtype": (
        lambda: inputs(dtype=torch.float16),
        {"bias": torch.full((1, 1, ROWS, ROWS), torch.finfo(torch.float32).min)},
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_the_reference_keeps_what_torch_would_break(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = STAYS[name]
    without(monkeypatch, "torch")
    tensors = make()
    given = {key: value for key, value in options.items() if key != "return_lse"}
    out, lse = reference.attention(*tensors, **given)
    got = fastattn.attention(*tensors, **options)
    if name == "the lse":
        torch.testing.assert_close(got, (out, lse))
    else:
        torch.testing.assert_close(got, out)
        assert not bool(out.isnan().any())


@pytest.mark.parametrize("feature", ["bias", "varlen"])
def test_on_a_gpu_the_reference_keeps_biases_and_packed_sequences(feature: str) -> None:
    """In PyTorch's memory-efficient kernel, ``finfo.min`` times log2(e) is -inf. Lengths are not read back."""
    bias = torch.zeros(1, 1, ROWS, ROWS) if feature == "bias" else None
    for device, expected in (("cpu", True), ("cuda", False)):
        call = Request(ATTENTION, torch.device(device), torch.float32, frozenset({feature}), DIM, DIM)
        assert torch_sdpa.can_express(call, ROWS, 0.25, bias) is expected


def test_on_a_gpu_the_reference_keeps_the_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's function runs only if PyTorch itself is told to be deterministic."""
    call = Request(ATTENTION, torch.device("cuda"), torch.float32, frozenset({"causal", "gradients"}), DIM, DIM)
    assert torch_sdpa.can_express_now(call, None) and not torch_sdpa.can_express_now(call, True)
    assert torch_sdpa.can_express_now(call._replace(features=frozenset({"causal"})), True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch_sdpa.can_express_now(call, True)


def test_forward_mode_has_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tuple(t.detach() for t in inputs(dtype=torch.float64))

    def attend(*parts: Tensor) -> Any:
        return fastattn.attention(*parts, causal=True)

    step = 1e-6
    later, earlier = (attend(*(t * (1 + sign * step) for t in tensors)) for sign in (1, -1))
    without(monkeypatch, "torch")
    _, tangent = torch.func.jvp(attend, tensors, tensors)
    torch.testing.assert_close(tangent, (later - earlier) / (2 * step), atol=1e-5, rtol=1e-5)


def test_second_derivatives_under_torch_func() -> None:
    query, key, value = (t.detach()[:1, :2, :3] for t in inputs(dtype=torch.float64))

    def loss(part: Tensor) -> Tensor:
        out = fastattn.attention(part, key, value, causal=True)
        return (out * out).sum()

    hessian = torch.func.jacrev(torch.func.grad(loss))(query)
    step = 1e-6
    nudge = torch.zeros_like(query)
    nudge[0, 0, 2, 1] = step
    gradient = torch.func.grad(loss)
    torch.testing.assert_close(
        hessian[..., 0, 0, 2, 1], (gradient(query + nudge) - gradient(query - nudge)) / (2 * step), atol=1e-5, rtol=1e-4
    )


def test_subclasses_that_lack_operators_keep_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Tensor):
        pass

    without(monkeypatch, "torch")
    tensors = [t.detach().as_subclass(Own) for t in inputs()]
    torch.testing.assert_close(
        fastattn.attention(*tensors, causal=True).as_subclass(Tensor),
        reference.attention(*(t.as_subclass(Tensor) for t in tensors), causal=True)[0],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "mask"])
def test_compiles_with_lengths_that_change(name: str) -> None:
    def attend(query: Tensor, key: Tensor, bias: Tensor) -> Any:
        return fastattn.attention(query, key, key, **({"causal": True} if name == "causal" else {"bias": bias}))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 8, 11):
        query, key = inputs(rows=rows, keys=rows)[:2]
        visible = mask(1, 1, 11, 11)[..., :rows, :rows]
        torch.testing.assert_close(compiled(query, key, visible), attend(query, key, visible))


# --- PyTorch's operators, for what its function lacks -----------------------------------------------------------------

SINKS, SLOPES = normal(8, HEADS, dtype=torch.float32), normal(9, HEADS, dtype=torch.float32).abs()

# Calls that composite.py computes: inputs and options, with gradients where they can have one.
COMPOSED: dict[str, tuple[Callable[[], list[Tensor]], dict[str, Any]]] = {
    "softcap": (inputs, {"softcap": 2.0}),
    "softcap, causal": (lambda: inputs(keys=4), {"softcap": 2.0, "causal": True}),  # some rows see no key
    "softcap, window": (lambda: inputs(rows=4, value_dim=5), {"softcap": 2.0, "window": (2, 1)}),
    "softcap, mask": (inputs, {"softcap": 2.0, "bias": mask(BATCH, HEADS, ROWS, ROWS)}),
    "softcap, float64": (lambda: inputs(dtype=torch.float64), {"softcap": 2.0, "causal": True}),
    "softcap, float16": (lambda: inputs(dtype=torch.float16), {"softcap": 2.0, "causal": True}),
    "softcap, bfloat16": (lambda: inputs(dtype=torch.bfloat16), {"softcap": 2.0, "causal": True}),
    "ALiBi": (lambda: inputs(rows=4), {"alibi_slopes": SLOPES, "causal": True}),
    "ALiBi of each sequence": (inputs, {"alibi_slopes": torch.stack([SLOPES, SLOPES / 2])}),
    "sinks": (inputs, {"sinks": SINKS}),
    "sinks, rows without a key": (lambda: inputs(keys=4), {"sinks": SINKS, "causal": True}),
    "a sink that is minus infinity": (inputs, {"sinks": torch.full((HEADS,), -math.inf)}),
    "bias": (inputs, {"bias": additive(1, HEADS, ROWS, ROWS)}),
    "bias of keys": (inputs, {"bias": normal(6, BATCH, 1, 1, ROWS, dtype=torch.float32), "softcap": 2.0}),
    "causal, a negative scale": (inputs, {"causal": True, "scale": -0.5}),
    "all": (
        inputs,
        {
            "softcap": 2.0,
            "alibi_slopes": SLOPES,
            "sinks": SINKS,
            "bias": additive(BATCH, 1, ROWS, ROWS),
            "window": (5, 0),
        },
    ),
}


def everything(function: Callable[..., Any], tensors: list[Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Returns output, lse, and the gradients of a sum of both."""
    leaves = {name: part for name, part in options.items() if isinstance(part, Tensor) and part.is_floating_point()}
    leaves = {name: part.clone().requires_grad_() for name, part in leaves.items()}
    out, lse = function(*tensors, **{**options, **leaves})
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    loss = (out * weights).sum().double() + lse.masked_fill(lse == -math.inf, 0.0).sum()
    sources = dict(zip(("query", "key", "value"), tensors, strict=True)) | leaves
    gradients = torch.autograd.grad(loss, list(sources.values()))
    return {"out": out, "lse": lse, **{f"{name}'s gradient": of for name, of in zip(sources, gradients, strict=True)}}


@pytest.mark.parametrize("name", COMPOSED)
def test_operators_compute_what_torch_cannot_express(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = COMPOSED[name]
    tensors = make()
    wide = {n: p.double() if isinstance(p, Tensor) and p.dtype != torch.bool else p for n, p in options.items()}
    oracle = everything(reference.attention, widened(tensors), wide)
    rough = everything(reference.attention, tensors, {**options, "compute_dtype": tensors[0].dtype})
    without(monkeypatch, "the reference", "torch")
    found = everything(lambda *t, **o: fastattn.attention(*t, **o, return_lse=True), tensors, options)
    for part, got in found.items():
        assert got.dtype == (torch.float64 if tensors[0].dtype == torch.float64 else rough[part].dtype)
        if tensors[0].dtype.itemsize > 2:
            torch.testing.assert_close(got, oracle[part].to(got.dtype))
        else:
            check_against_oracle(part, got, oracle[part], rough[part])


MASKS_OF_OPERATORS = MASKS | {"minus infinity": lambda: {"bias": additive(BATCH, 1, ROWS, ROWS)}}


@pytest.mark.parametrize("name", MASKS_OF_OPERATORS)
def test_what_is_masked_has_no_influence_on_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see no NaN or infinity keep their bits, and all other rows are NaN."""
    clean, options = inputs(), {**MASKS_OF_OPERATORS[name](), "softcap": 2.0}
    spoiled = [t.detach().clone() for t in clean]
    spoiled[1][0, 0, 6, 3] = spoiled[2][1, 1, 4, 2] = math.nan
    spoiled[2][0, 1, 8, 7] = math.inf
    spoiled = [t.requires_grad_() for t in spoiled]
    oracle, oracle_lse = reference.attention(*spoiled, **options)
    without(monkeypatch, "the reference", "torch")
    want, want_lse = fastattn.attention(*clean, **options, return_lse=True)
    got, lse = fastattn.attention(*spoiled, **options, return_lse=True)
    assert torch.equal(got.isnan(), oracle.isnan()) and torch.equal(lse.isnan(), oracle_lse.isnan())
    assert bool(oracle.isnan().any()) and not bool(oracle.isnan().all())
    assert torch.equal(got[~got.isnan()], want[~got.isnan()]) and torch.equal(lse[~lse.isnan()], want_lse[~lse.isnan()])
    (gradient,) = torch.autograd.grad(got.sum(), spoiled[0])
    assert bool(gradient.isnan().any()), "a NaN that is seen must not vanish from the gradients"


def test_the_default_device_may_be_another_one() -> None:
    tensors, cache = without_gradients(), normal(10, BATCH, KV_HEADS, 16, DIM, dtype=torch.float32)
    query, key, value = (t[:, :, :1] for t in tensors)
    lengths_of_cache, offsets = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([0, 4, 12], dtype=torch.int32)
    tokens, angles = packed(), torch.ones(16, DIM // 2)

    def compute() -> list[Tensor]:
        rotation = {"rotary_cos": angles, "rotary_sin": angles}
        caches = cache.clone(), cache.clone()
        return [
            fastattn.attention(*tensors, alibi_slopes=SLOPES, causal=True),
            fastattn.attention_varlen(*tokens, offsets, offsets, 8, 8),
            fastattn.attention_with_kv_cache(query, *caches, lengths_of_cache, k_new=key, v_new=value, **rotation),
        ]

    expected = compute()
    with torch.device("meta"):
        found = compute()
    torch.testing.assert_close(found, expected)


def test_nobody_is_watched_reading_values_for_operators() -> None:
    tensors, options = without_gradients(), {"softcap": 2.0, "causal": True}
    expected = fastattn.attention(*tensors, **options)
    with Watching():
        found = fastattn.attention(*tensors, **options)
    torch.testing.assert_close(found, expected)


# --- packed sequences -------------------------------------------------------------------------------------------------

# offsets of queries, offsets of keys
OFFSETS: dict[str, tuple[list[int], list[int]]] = {
    "one": ([0, 12], [0, 12]),
    "several": ([0, 3, 8, 12], [0, 5, 7, 12]),
    "alike": ([0, 4, 8, 12], [0, 4, 8, 12]),
    "some without queries or keys": ([0, 0, 5, 8, 12], [0, 4, 4, 9, 12]),
    "rows in none": ([1, 4, 10], [2, 6, 11]),
}


def packed(value_dim: int = DIM) -> list[Tensor]:
    sizes = ((12, HEADS, DIM), (12, KV_HEADS, DIM), (12, KV_HEADS, value_dim))
    return [normal(seed, *size, dtype=torch.float32, grad=True) for seed, size in enumerate(sizes)]


def lengths(offsets: tuple[list[int], list[int]]) -> dict[str, Any]:
    q, k = (torch.tensor(part, dtype=torch.int32) for part in offsets)
    return {
        "cu_seqlens_q": q,
        "cu_seqlens_k": k,
        "max_seqlen_q": int(q.diff().max()),
        "max_seqlen_k": int(k.diff().max()),
    }


PACKED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (1, 2)},
    "softcap": {"softcap": 2.0, "causal": True},
    "ALiBi and sinks": {"alibi_slopes": SLOPES, "sinks": SINKS},
}


@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED.keys())
@pytest.mark.parametrize("name", OFFSETS)
def test_packed_sequences(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**lengths(OFFSETS[name]), **options}
    want = with_gradients(reference.attention_varlen, packed(), given)
    without(monkeypatch, "the reference")
    got = with_gradients(fastattn.attention_varlen, packed(), given)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_packed_sequences_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "the reference")
    tensors = packed(value_dim=5)
    with torch.no_grad():
        for tensor in tensors:
            tensor[4:8] = math.nan
    out = fastattn.attention_varlen(*tensors, **lengths(OFFSETS["alike"]), causal=True)
    assert bool(out[4:8].isnan().all()) and not bool(out[:4].isnan().any()) and not bool(out[8:].isnan().any())
