"""Tests attention_with_kv_cache on the PyTorch path: full attention, memory that it may not write, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from by_hand import normal
from fastattn import InputError, reference
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from kernel_device import DEVICE

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("emulated_gpu")]

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 16, 8
CAPACITY, PAGE_SIZE = 16, 4
LENGTHS = (3, 9)


@pytest.fixture(autouse=True)
def _on_the_torch_path() -> Iterator[None]:
    with fastattn.use_backend("torch"):
        yield


def call(paged: bool = False, int8: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """Returns the arguments of a call with one query and one new token per sequence; the values are always the same."""
    blocks, rows = (2 * BATCH * CAPACITY // PAGE_SIZE, PAGE_SIZE) if paged else (BATCH, CAPACITY)
    arguments: dict[str, Any] = {
        "query": normal(1, BATCH, HEADS, 1, DIM, dtype=dtype),
        "k_cache": normal(2, blocks, KV_HEADS, rows, DIM, dtype=dtype),
        "v_cache": normal(3, blocks, KV_HEADS, rows, VALUE_DIM, dtype=dtype),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
        "k_new": normal(4, BATCH, KV_HEADS, 1, DIM, dtype=dtype),
        "v_new": normal(5, BATCH, KV_HEADS, 1, VALUE_DIM, dtype=dtype),
    }
    if paged:
        pages = torch.randperm(blocks, generator=torch.Generator().manual_seed(6))[: BATCH * CAPACITY // PAGE_SIZE]
        arguments["block_table"] = pages.view(BATCH, -1).int()
    if int8:
        for name in ("k", "v"):
            quantized, scale = reference.quantize_rows(arguments[f"{name}_cache"].float())
            arguments |= {f"{name}_cache": quantized, f"{name}_scale": scale}
    return {**arguments, **changes}


def attend(*tensors: Tensor, **arguments: Any) -> Any:
    return attention_with_kv_cache(*tensors, **arguments)


def written(arguments: dict[str, Any]) -> list[Tensor]:
    """Returns copies of the tensors that a call may write to."""
    return [arguments[n].clone() for n in ("k_cache", "v_cache", "k_scale", "v_scale") if arguments.get(n) is not None]


def tables(positions: int = CAPACITY, half: int = DIM // 2) -> dict[str, Any]:
    angle = torch.arange(positions)[:, None] * torch.logspace(0, -1, half)
    return {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (2, 0)},
    "not causal, window": {"causal": False, "window": (-1, 3)},
    "softcap, alibi, sinks": {
        "softcap": 5.0,
        "alibi_slopes": normal(7, HEADS, dtype=torch.float32).abs(),
        "sinks": normal(8, HEADS, dtype=torch.float32),
        "scale": 0.3,
    },
    "rotary": tables(),
    "interleaved rotary": {**tables(half=4), "rotary_interleaved": True},
}


@pytest.mark.parametrize("int8", [False, True], ids=["float cache", "int8 cache"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_reference(name: str, paged: bool, int8: bool) -> None:
    actual, expected = call(paged, int8, **OPTIONS[name]), call(paged, int8, **OPTIONS[name])
    result = attend(**actual, return_lse=True, num_splits=3, batch_invariant=True)
    for a, e in zip(result, reference.attention_with_kv_cache(**expected), strict=True):
        torch.testing.assert_close(a, e)
    for a, e in zip(written(actual), written(expected), strict=True):
        assert torch.equal(a, e)
    assert actual["cache_seqlens"].tolist() == list(LENGTHS)
    out = attend(**call(paged, int8, **OPTIONS[name]))
    assert isinstance(out, Tensor)
    assert torch.equal(out, result[0])


@pytest.mark.parametrize("chunks", [(1,) * 11, (5, 1, 1, 4), (11,)], ids=["tokens", "chunks", "prompt"])
@pytest.mark.parametrize("name", ["plain", "window", "softcap, alibi, sinks", "rotary"])
def test_chunk_after_chunk_is_attention_over_all(name: str, chunks: tuple[int, ...]) -> None:
    total = sum(chunks)
    query = normal(1, 1, HEADS, total, DIM)
    key, value = normal(2, 1, KV_HEADS, total, DIM), normal(3, 1, KV_HEADS, total, VALUE_DIM)
    caches = (
        torch.full((1, KV_HEADS, CAPACITY, DIM), torch.nan).double(),
        torch.zeros(1, KV_HEADS, CAPACITY, VALUE_DIM).double(),
    )
    lengths = torch.zeros(1, dtype=torch.int32)
    outputs = []
    for chunk in chunks:
        part = slice(int(lengths), int(lengths) + chunk)
        new: dict[str, Any] = {"k_new": key[:, :, part], "v_new": value[:, :, part]}
        outputs.append(attend(query[:, :, part], *caches, lengths, **new, **OPTIONS[name]))
        lengths += chunk
    options = dict(OPTIONS[name])
    if "rotary_cos" in options:
        cos, sin = (options.pop(n)[None, :total] for n in ("rotary_cos", "rotary_sin"))
        query, key = reference.rotary(query, cos, sin), reference.rotary(key, cos, sin)
    expected = fastattn.attention(query, key, value, causal=True, **options)
    torch.testing.assert_close(torch.cat(outputs, dim=2), expected)


def test_int8_caches_are_close_to_float_ones() -> None:
    exact, rounded = attend(**call()), attend(**call(int8=True))
    difference = (exact - rounded).abs().max().item()
    assert 0 < difference < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_it_compiles(paged: bool) -> None:
    compiled = torch.compile(attention_with_kv_cache, fullgraph=True, backend="aot_eager")
    eager, traced = call(paged, int8=True, **tables()), call(paged, int8=True, **tables())
    torch.testing.assert_close(compiled(**traced), attend(**eager))
    for a, e in zip(written(traced), written(eager), strict=True):
        assert torch.equal(a, e)


def test_autocast_casts_queries_and_new_tokens() -> None:
    arguments = call(dtype=torch.bfloat16)
    mixed = {**call(dtype=torch.bfloat16), "query": arguments["query"].float(), "k_new": arguments["k_new"].float()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(**mixed)
    assert torch.equal(out, attend(**arguments))


@pytest.mark.parametrize("name", ["query", "k_cache", "v_new", "sinks"])
def test_it_is_for_inference_only(name: str) -> None:
    arguments = call(sinks=torch.zeros(HEADS))
    before = written(arguments)
    arguments[name].requires_grad_()
    with pytest.raises(
        InputError, match=f"{name}: expected a tensor that needs no gradient.*got one with requires_grad"
    ):
        attend(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(written(arguments), before, strict=True))
    with torch.no_grad():
        attend(**arguments)


def test_explain_does_not_append() -> None:
    arguments = call()
    before = written(arguments)
    assert fastattn.explain(attention_with_kv_cache, **arguments).backend == "torch"
    assert all(torch.equal(a, b) for a, b in zip(written(arguments), before, strict=True))


@pytest.mark.parametrize(
    ("name", "dim", "expected"), [("k_cache", DIM, "16 bytes"), ("v_cache", VALUE_DIM, "16 bytes")]
)
def test_kernels_refuse_caches_that_they_would_have_to_copy(name: str, dim: int, expected: str) -> None:
    arguments = {
        n: t.to(DEVICE)
        for n, t in call(dtype=torch.float16, v_cache=torch.zeros(BATCH, KV_HEADS, CAPACITY, DIM).half()).items()
    }
    arguments["v_new"] = arguments["k_new"].clone()
    shape = arguments[name].shape
    misplaced = {
        "base": torch.zeros(arguments[name].numel() + 1, device=DEVICE, dtype=torch.float16)[1:].view(shape),
        "strides": torch.zeros(*shape[:3], DIM + 1, device=DEVICE, dtype=torch.float16)[..., :DIM],
        "last dimension": torch.zeros(*shape[:2], DIM, CAPACITY, device=DEVICE, dtype=torch.float16).mT,
    }
    for cache in misplaced.values():
        with (
            fastattn.use_backend("triton"),
            pytest.raises(InputError, match=f"{name}: expected .*{expected}.*got strides"),
        ):
            attend(**{**arguments, name: cache})
        if DEVICE == "cpu":  # PyTorch takes such caches
            attend(**{**arguments, name: cache})


TENSORS = tuple(n for n in call() if n != "query")
# name: (changes to a valid call, words of the message: argument, expected, came)
WRONG_TYPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{f"{n} type": ({**call(), n: 1}, (n, "torch.Tensor", "int")) for n in ("query", *TENSORS)},
    "interleaved": (call(rotary_interleaved=1), ("rotary_interleaved", "bool", "int")),
    "causal": (call(causal="yes"), ("causal", "bool", "str")),
    "softcap type": (call(softcap=[1.0]), ("softcap", "number", "list")),
    "return_lse": (call(return_lse=None), ("return_lse", "bool", "NoneType")),
    "num_splits type": (call(num_splits=2.0), ("num_splits", "int", "float")),
    "batch_invariant": (call(batch_invariant=0), ("batch_invariant", "bool", "int")),
}
WRONG_VALUES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{f"{n} device": ({**call(), n: call()[n].to("meta")}, (n, "cpu", "meta")) for n in TENSORS},
    **{
        f"{n} rank": ({**call(), n: torch.zeros(3, 3)}, (n, "4 dimensions", "[3, 3]"))
        for n in ("query", "k_cache", "v_cache", "k_new")
    },
    "query dtype": (call(query=torch.zeros(2, 4, 1, 16).int()), ("query", "float16", "int32")),
    "k_cache dtype": (
        call(k_cache=call()["k_cache"].half()),
        ("k_cache", "float32", "torch.int8", "float16"),
    ),
    "v_cache dtype": (call(v_cache=call()["v_cache"].half()), ("v_cache", "float32", "float16")),
    "k_cache head dim": (call(k_cache=torch.zeros(2, 2, 16, 8)), ("k_cache", "16", "8")),
    "k_cache batch": (
        call(k_cache=torch.zeros(3, 2, 16, 16), v_cache=torch.zeros(3, 2, 16, 8)),
        ("k_cache", "batch size 2", "3"),
    ),
    "v_cache capacity": (call(v_cache=torch.zeros(2, 2, 15, 8)), ("v_cache", "[2, 2, 16]", "[2, 2, 15, 8]")),
    "head counts": (
        call(k_cache=torch.zeros(2, 3, 16, 16), v_cache=torch.zeros(2, 3, 16, 8)),
        ("query", "multiple of the 3 KV heads", "4 heads"),
    ),
    "lengths shape": (call(cache_seqlens=torch.zeros(3).int()), ("cache_seqlens", "[2]", "[3]")),
    "lengths dtype": (call(cache_seqlens=torch.zeros(2).long()), ("cache_seqlens", "int32", "int64")),
    "k_new alone": (call(v_new=None), ("v_new", "a tensor", "k_new", "None")),
    "v_new alone": (call(k_new=None), ("k_new", "a tensor", "v_new", "None")),
    "k_new heads": (call(k_new=torch.zeros(2, 4, 1, 16)), ("k_new", "[2, 2, 1, 16]", "[2, 4, 1, 16]")),
    "v_new count": (call(v_new=torch.zeros(2, 2, 2, 8)), ("v_new", "[2, 2, 1, 8]", "[2, 2, 2, 8]")),
    "k_new dtype": (call(k_new=call()["k_new"].half()), ("k_new", "float32", "float16")),
    "v_new dtype": (call(v_new=call()["v_new"].half()), ("v_new", "float32", "float16")),
    "one tensor for both caches": (
        {
            **call(),
            **dict.fromkeys(("k_cache", "v_cache"), torch.zeros(2, 2, 16, 16)),
            "v_new": torch.ones(2, 2, 1, 16),
        },
        ("v_cache", "memory of its own", "k_cache itself"),
    ),
    "int8 without scales": (call(int8=True, k_scale=None), ("k_scale", "float32", "None")),
    "int8 without v_scale": (call(int8=True, v_scale=None), ("v_scale", "float32", "None")),
    "scales without int8": (call(k_scale=torch.ones(2, 2, 16)), ("k_scale", "None", "a tensor")),
    "scale shape": (call(int8=True, k_scale=torch.ones(2, 2, 15)), ("k_scale", "[2, 2, 16]", "[2, 2, 15]")),
    "scale dtype": (call(int8=True, v_scale=torch.ones(2, 2, 16).half()), ("v_scale", "float32", "float16")),
    "one cache int8": (call(int8=True, v_cache=torch.zeros(2, 2, 16, 8)), ("v_cache", "int8", "float32")),
    "table rank": (call(True, block_table=torch.zeros(2).int()), ("block_table", "[B, max_pages]", "[2]")),
    "table rows": (call(True, block_table=torch.zeros(3, 4).int()), ("block_table", "batch size 2", "[3, 4]")),
    "table dtype": (call(True, block_table=torch.zeros(2, 4)), ("block_table", "int32", "float32")),
    "cos alone": (call(rotary_cos=torch.ones(16, 8)), ("rotary_sin", "a tensor", "None")),
    "sin alone": (call(rotary_sin=torch.ones(16, 8)), ("rotary_cos", "a tensor", "None")),
    "sin shape": (call(**{**tables(), "rotary_sin": torch.ones(16, 4)}), ("rotary_sin", "[16, 8]", "[16, 4]")),
    "cos rank": (call(**{**tables(), "rotary_cos": torch.ones(16)}), ("rotary_cos", "positions", "[16]")),
    "cos dtype": (
        call(rotary_cos=torch.ones(16, 8).int(), rotary_sin=torch.ones(16, 8)),
        ("rotary_cos", "float32", "int32"),
    ),
    "rotary too wide": (call(**tables(half=9)), ("rotary_cos", "8", "9")),
    "rotary empty": (call(**tables(positions=0)), ("rotary_cos", "at least one position", "0")),
    "window": (call(window=(1, -2)), ("window", "at least -1", "-2")),
    "window type": (call(window=3), ("window", "(left, right)", "3")),
    "softcap": (call(softcap=-1.0), ("softcap", "at least 0", "-1")),
    "scale": (call(scale=float("inf")), ("scale", "finite", "inf")),
    "slopes": (call(alibi_slopes=torch.ones(3)), ("alibi_slopes", "[4]", "[3]")),
    "sinks": (call(sinks=torch.ones(2, 4)), ("sinks", "[4]", "[2, 4]")),
    "num_splits": (call(num_splits=-1), ("num_splits", "at least 0", "-1")),
}


@pytest.mark.parametrize("case", [*WRONG_TYPES, *WRONG_VALUES])
def test_bad_input_is_refused_and_nothing_is_written(case: str) -> None:
    kind = TypeError if case in WRONG_TYPES else InputError
    arguments, words = (WRONG_TYPES | WRONG_VALUES)[case]
    tensors = [t for t in arguments.values() if isinstance(t, Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    for _ in range(2):  # a refused call must not be remembered as checked
        with pytest.raises(kind) as caught:
            attend(**arguments)
        assert type(caught.value) is kind
        for word in words:
            assert word in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_entry(row: int, page: int, entry: int) -> dict[str, Any]:
    arguments = call(True)
    arguments["block_table"][row, page] = entry
    return arguments


def with_nan_scale(name: str, position: int) -> dict[str, Any]:
    arguments = call(int8=True)
    arguments[name][0, 1, position] = torch.nan
    return arguments


CHECKED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "negative length": (call(cache_seqlens=lengths(3, -1)), ("cache_seqlens", "at least 0", "-1 for sequence 1")),
    "no room": (call(cache_seqlens=lengths(16, 3)), ("cache_seqlens", "at most 15", "16 for sequence 0")),
    "no room in pages": (
        call(True, cache_seqlens=lengths(3, 16)),
        ("cache_seqlens", "at most 15", "16 for sequence 1"),
    ),
    "page too large": (with_entry(1, 2, 99), ("block_table", "0 to 15", "99 as page 2 of sequence 1")),
    "page negative": (with_entry(0, 0, -1), ("block_table", "0 to 15", "-1 as page 0 of sequence 0")),
    "NaN k_scale": (with_nan_scale("k_scale", 2), ("k_scale", "finite", "nan as the scale of token 2 of sequence")),
    "NaN v_scale": (with_nan_scale("v_scale", 0), ("v_scale", "finite", "nan as the scale of token 0 of sequence")),
    "positions": (call(**tables(positions=9)), ("rotary_cos", "at least 10 rows", "9")),
}


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize("case", CHECKED)
def test_fastattn_check_finds_what_lies_in_device_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, words = on_device(CHECKED[case][0]), CHECKED[case][1]
    before = written(arguments)
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    with pytest.raises(InputError) as caught:
        attend(**arguments)
    for word in words:
        assert word in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(written(arguments), before, strict=True) if not a.isnan().any())
    monkeypatch.delenv("FASTATTN_CHECK")
    attend(**arguments)  # harmless without the check


@pytest.mark.parametrize("arguments", [call(), call(True, True), with_entry(0, 1, 10**6), with_nan_scale("k_scale", 4)])
def test_fastattn_check_lets_sound_calls_pass(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused table entries and scales of absent tokens may hold anything."""
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    out = attend(**on_device(arguments))
    assert bool(out.isfinite().all())
