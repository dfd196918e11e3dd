"""Tests misuse of the attention functions: errors name what the host can see; what it cannot see does no harm.

Tests of the other public functions have tables of their own (test_int8.py, test_nn.py, test_kv_cache.py).
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import InputError
from fastattn.integrations.flash_attn import flash_attn_with_kvcache
from kernel_device import DEVICE, ON_EMULATOR

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("emulated_gpu")]


def dense(**changes: Any) -> dict[str, Any]:
    usual = {"query": torch.zeros(2, 4, 5, 16), "key": torch.zeros(2, 2, 7, 16), "value": torch.zeros(2, 2, 7, 24)}
    return {**usual, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32)
    usual = {
        "query": torch.zeros(9, 4, 16),
        "key": torch.zeros(9, 2, 16),
        "value": torch.zeros(9, 2, 16),
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 6,
        "max_seqlen_k": 6,
    }
    return {**usual, **changes}


def cached(**changes: Any) -> dict[str, Any]:
    usual = {
        "query": torch.ones(2, 4, 1, 16),
        "k_cache": torch.ones(2, 2, 8, 16),
        "v_cache": torch.ones(2, 2, 8, 16),
        "cache_seqlens": torch.tensor([3, 8], dtype=torch.int32),
    }
    return {**usual, **changes}


A, V = fastattn.attention, fastattn.attention_varlen
# name: (function, arguments, words of the message: argument, expected, came)
Misuse = dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]]
INPUT_ERRORS: Misuse = {
    "query rank": (A, dense(query=torch.zeros(4, 5, 16)), ("query", "[B, Hq, Sq, D]", "[4, 5, 16]")),
    "value rank": (A, dense(value=torch.zeros(7, 24)), ("value", "[B, Hkv, Sk, Dv]", "[7, 24]")),
    "query dtype": (A, dense(query=torch.zeros(2, 4, 5, 16).int()), ("query", "float16", "int32")),
    "key dtype": (A, dense(key=torch.zeros(2, 2, 7, 16).half()), ("key", "float32", "float16")),
    "value device": (A, dense(value=torch.zeros(2, 2, 7, 24, device="meta")), ("value", "cpu", "meta")),
    "key head dim": (A, dense(key=torch.zeros(2, 2, 7, 8)), ("key", "16", "8")),
    "value length": (A, dense(value=torch.zeros(2, 2, 6, 24)), ("value", "[2, 2, 7]", "[2, 2, 6, 24]")),
    "key batch": (A, dense(key=torch.zeros(1, 2, 7, 16), value=torch.zeros(1, 2, 7, 24)), ("key", "2", "1")),
    "head counts": (
        A,
        dense(key=torch.zeros(2, 3, 7, 16), value=torch.zeros(2, 3, 7, 24)),
        ("query", "multiple of the 3 KV heads", "[B, Hq, Sq, D]", "[B, Hkv, Sk, D]", "4 heads"),
    ),
    "heads after rows": (
        A,
        dense(query=torch.zeros(2, 5, 4, 16), key=torch.zeros(2, 7, 2, 16), value=torch.zeros(2, 7, 2, 16)),
        ("query", "[2, 5, 4, 16]", "query.transpose(1, 2), key.transpose(1, 2)"),
    ),
    "packed heads before rows": (
        V,
        packed(query=torch.zeros(4, 9, 16), key=torch.zeros(2, 8, 16), value=torch.zeros(2, 8, 16)),
        ("query", "[total_q, Hq, D]", "query.transpose(0, 1), key.transpose(0, 1)"),
    ),
    "cache with heads after rows": (
        fastattn.attention_with_kv_cache,
        cached(k_cache=torch.zeros(2, 33, 2, 16), v_cache=torch.zeros(2, 33, 2, 16)),
        ("query", "[B, Hkv, capacity, D]", "pass k_cache.transpose(1, 2)"),
    ),
    "one query and a cache with heads after rows": (
        fastattn.attention_with_kv_cache,
        cached(query=torch.zeros(2, 1, 8, 16), k_cache=torch.zeros(2, 33, 2, 16), v_cache=torch.zeros(2, 33, 2, 16)),
        ("query", "got 1 head:", "pass query.transpose(1, 2), k_cache.transpose(1, 2)"),
    ),
    "no KV heads": (
        A,
        dense(key=torch.zeros(2, 0, 7, 16), value=torch.zeros(2, 0, 7, 24)),
        ("key", "at least one KV head", "0"),
    ),
    "window form": (A, dense(window=(1, 2, 3)), ("window", "(left, right)", "(1, 2, 3)")),
    "window of None": (A, dense(window=(None, 0)), ("window", "at least -1, which means unbounded", "(None, 0)")),
    "bias of three dims": (A, dense(bias=torch.ones(2, 5, 7).bool()), ("bias", "[2, 5, 7]", "pass bias[:, None]")),
    "window of one number": (A, dense(window=128), ("window", "(left, right), got 128; (127, 0) lets")),
    "no window": (A, dense(window=None), ("window", "(left, right), got None; for no window pass (-1, -1)")),
    "window values": (A, dense(window=(-2, 0)), ("window", "at least -1", "-2")),
    "softcap negative": (A, dense(softcap=-1.0), ("softcap", "at least 0", "-1")),
    "softcap NaN": (A, dense(softcap=float("nan")), ("softcap", "finite", "nan")),
    "an int past every float": (A, dense(scale=10**400), ("scale", "finite")),
    "dropout range": (A, dense(dropout_p=1.5), ("dropout_p", "from 0.0 to 1.0", "1.5")),
    "seed range": (A, dense(dropout_p=0.5, dropout_seed=2**64), ("dropout_seed", "2**64 - 1", str(2**64))),
    "seed dtype": (A, dense(dropout_p=0.5, dropout_seed=torch.zeros(1)), ("dropout_seed", "int64", "float32")),
    "seed size": (
        A,
        dense(dropout_p=0.5, dropout_seed=torch.zeros(2, dtype=torch.int64)),
        ("dropout_seed", "one element", "[2]"),
    ),
    "scale infinite": (A, dense(scale=float("inf")), ("scale", "finite", "inf")),
    "bias rank": (A, dense(bias=torch.zeros(5, 7)), ("bias", "[B or 1, Hq or 1", "[5, 7]")),
    "bias shape": (A, dense(bias=torch.zeros(2, 2, 5, 7)), ("bias", "[2, 4, 5, 7]", "[2, 2, 5, 7]")),
    "bias dtype": (A, dense(bias=torch.zeros(1, 1, 5, 7).int()), ("bias", "torch.bool", "int32")),
    "Hugging Face's mask": (
        A,
        dense(bias=torch.ones(2, 7).long()),
        ("bias", "torch.int64 [2, 7]", "pass bias[:, None, None, :].bool()"),
    ),
    "float padding mask": (
        A,
        dense(bias=torch.ones(2, 7)),
        ("bias", "padding mask [B, Sk]", "bias[:, None, None, :].bool()"),
    ),
    "bool padding mask": (
        A,
        dense(bias=torch.ones(2, 7) == 1),
        ("bias", "torch.bool [2, 7]", "pass bias[:, None, None, :]"),
    ),
    "mask of ints": (A, dense(bias=torch.ones(2, 1, 1, 7).long()), ("bias", "pass bias.bool()")),
    "bias device": (A, dense(bias=torch.zeros(1, 1, 5, 7, device="meta")), ("bias", "cpu", "meta")),
    "slopes shape": (A, dense(alibi_slopes=torch.zeros(3)), ("alibi_slopes", "[Hq] = [4]", "[3]")),
    "slopes dtype": (A, dense(alibi_slopes=torch.zeros(4).int()), ("alibi_slopes", "float32", "int32")),
    "sinks shape": (A, dense(sinks=torch.zeros(2)), ("sinks", "[Hq] = [4]", "[2]")),
    "packed query rank": (
        V,
        packed(query=torch.zeros(1, 9, 4, 16)),
        ("query", "[total_q, Hq, D]", "4", "for [B, S, H, D] pass query.flatten(0, 1)"),
    ),
    "packed key rank": (V, packed(key=torch.zeros(1, 9, 2, 16)), ("key", "pass key.flatten(0, 1)")),
    "query in fp8": (
        A,
        dense(query=torch.zeros(2, 4, 5, 16).to(torch.float8_e4m3fn)),
        ("query", "float8_e4m3fn; cast it with query.to(torch.bfloat16)"),
    ),
    "one length for all": (
        fastattn.attention_with_kv_cache,
        cached(cache_seqlens=torch.tensor(3, dtype=torch.int32)),
        ("cache_seqlens", "[B] = [2], got []; for equal lengths pass cache_seqlens.repeat(2)"),
    ),
    "offsets dtype": (
        V,
        packed(cu_seqlens_k=torch.tensor([0, 3, 9])),
        ("cu_seqlens_k", "torch.int32", "torch.int64; cast it with cu_seqlens_k.to(torch.int32)"),
    ),
    "offsets rank": (
        V,
        packed(cu_seqlens_q=torch.zeros(1, 3, dtype=torch.int32)),
        ("cu_seqlens_q", "[B + 1]", "[1, 3]"),
    ),
    "offsets empty": (
        V,
        packed(cu_seqlens_q=torch.zeros(0, dtype=torch.int32)),
        ("cu_seqlens_q", "[B + 1], at least", "none"),
    ),
    "batches differ": (
        V,
        packed(cu_seqlens_k=torch.tensor([0, 9], dtype=torch.int32)),
        ("cu_seqlens_k", "[B + 1] like cu_seqlens_q = [3]", "[2]"),
    ),
    "max length negative": (V, packed(max_seqlen_q=-1), ("max_seqlen_q", "at least 0", "-1")),
    "packed value length": (V, packed(value=torch.zeros(8, 2, 16)), ("value", "[9, 2]", "[8, 2, 16]")),
}
TYPE_ERRORS: Misuse = {
    "query is no tensor": (A, dense(query=[1.0]), ("query", "torch.Tensor", "list")),
    "key is no tensor": (A, dense(key=None), ("key", "torch.Tensor", "NoneType")),
    "causal": (A, dense(causal="yes"), ("causal", "bool", "str")),
    "window types": (A, dense(window=(1.5, 0)), ("window", "int", "float")),
    "dropout type": (A, dense(dropout_p="0.5"), ("dropout_p", "number", "str")),
    "seed type": (A, dense(dropout_p=0.5, dropout_seed=1.5), ("dropout_seed", "int", "float")),
    "scale type": (A, dense(scale="big"), ("scale", "number", "str")),
    "bias type": (A, dense(bias=0.5), ("bias", "torch.Tensor or None", "float")),
    "sinks type": (A, dense(sinks=[0.0] * 4), ("sinks", "torch.Tensor or None", "list")),
    "deterministic": (A, dense(deterministic="no"), ("deterministic", "bool", "str")),
    "return_lse": (A, dense(return_lse=1), ("return_lse", "bool", "int")),
    "offsets type": (
        V,
        packed(cu_seqlens_q=[0, 3, 9]),
        ("cu_seqlens_q", "torch.Tensor", "list; pass torch.tensor(cu_seqlens_q, dtype=torch.int32"),
    ),
    "offsets of numpy": (
        V,
        packed(cu_seqlens_q=numpy.array([0, 3, 9])),
        ("cu_seqlens_q", "numpy.ndarray; pass torch.tensor(cu_seqlens_q, dtype=torch.int32, device=query.device)"),
    ),
    "query of numpy": (A, dense(query=numpy.zeros(3)), ("query", "numpy.ndarray; pass torch.from_numpy(query)")),
    "ranges as a list": (
        A,
        dense(key_ranges=[[0, 1]]),
        ("key_ranges", "list; pass torch.tensor(key_ranges, dtype=torch.int32, device=query.device)"),
    ),
    "a number as lengths": (
        fastattn.attention_with_kv_cache,
        cached(cache_seqlens=4),
        ("cache_seqlens", "int 4", "pass torch.full(query.shape[:1], 4, dtype=torch.int32, device=query.device)"),
    ),
    "bias of packed": (V, packed(bias=torch.zeros(1)), ("bias", "packed sequences take key_ranges")),
    "offsets missing": (V, packed(cu_seqlens_k=None), ("cu_seqlens_k", "torch.Tensor", "NoneType")),
    "max length type": (V, packed(max_seqlen_k=torch.tensor(6)), ("max_seqlen_k", "int", "torch.Tensor", ".item()")),
    "numpy array": (A, dense(causal=numpy.array([True])), ("causal", "True or False, got numpy.ndarray")),
    "numpy bool as a number": (A, dense(softcap=numpy.bool_(True)), ("softcap", "a number, got")),
    "numpy float as an int": (A, dense(window=(numpy.float32(1), 0)), ("window", "an int, got")),
}


@pytest.mark.parametrize("what", INPUT_ERRORS | TYPE_ERRORS)
def test_misuse_is_named(what: str) -> None:
    function, arguments, words = (INPUT_ERRORS | TYPE_ERRORS)[what]
    error = InputError if what in INPUT_ERRORS else TypeError
    with pytest.raises(error) as raised:
        function(**arguments)
    for word in words:
        assert word in str(raised.value), f"{word!r} is missing in: {raised.value}"
    if error is InputError:
        assert isinstance(raised.value, ValueError) and isinstance(raised.value, RuntimeError)


TRUE, FALSE, TWO = numpy.bool_(True), numpy.bool_(False), numpy.int64(2)
# name: (function, arguments with numpy's scalars, the same arguments with Python's)
NUMPY: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "attention": (
        A,
        dense(causal=TRUE, window=(TWO, numpy.int32(-1)), softcap=numpy.float32(3), scale=numpy.float16(0.5)),
        dense(causal=True, window=(2, -1), softcap=3.0, scale=0.5),
    ),
    "dropout": (
        A,
        dense(dropout_p=numpy.float64(0.5), dropout_seed=numpy.uint8(7), deterministic=FALSE),
        dense(dropout_p=0.5, dropout_seed=7, deterministic=False),
    ),
    "return_lse": (A, dense(return_lse=TRUE), dense(return_lse=True)),
    "attention_varlen": (
        V,
        packed(max_seqlen_q=numpy.int64(6), max_seqlen_k=numpy.uint16(6), causal=TRUE),
        packed(causal=True),
    ),
    "attention_with_kv_cache": (
        fastattn.attention_with_kv_cache,
        cached(causal=FALSE, num_splits=TWO, batch_invariant=FALSE, return_lse=TRUE, softcap=numpy.float32(2)),
        cached(causal=False, num_splits=2, return_lse=True, softcap=2.0),
    ),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", NUMPY)
def test_numpy_scalars_are_taken(name: str, backend: str) -> None:
    function, given, same = NUMPY[name]
    with fastattn.use_backend(backend):
        torch.testing.assert_close(function(**for_kernels(given)), function(**for_kernels(same)))


def for_kernels(arguments: dict[str, Any]) -> dict[str, Any]:
    def converted(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.to(DEVICE, torch.float16) if part.is_floating_point() else part.to(DEVICE)

    return {name: converted(part) for name, part in arguments.items()}


def test_a_mask_in_floats_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastattn.functional.attention, "_has_warned_of_mask", False)
    mask = torch.ones(2, 1, 1, 7)
    mask[1, ..., 4:] = 0.0
    causal = torch.ones(1, 1, 5, 7).tril()
    monkeypatch.setattr(fastattn.checks, "is_emulated", lambda: False)  # masks of an emulated GPU are not read
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for taken in (mask.bool(), mask - 1, torch.ones_like(mask), torch.zeros_like(mask), mask.expand(2, 4, 5, 7)):
            A(**dense(bias=taken))
        A(**dense(bias=causal.log()))
    with pytest.warns(UserWarning, match=r"bias \[2, 1, 1, 7\] .* added to the scores .* bias=mask\.bool\(\)"):
        A(**dense(bias=mask))
    monkeypatch.setattr(fastattn.functional.attention, "_has_warned_of_mask", False)
    with pytest.warns(UserWarning, match=r"bias \[1, 1, 5, 7\] .* 1 where a query sees a key, pass bias=mask\.bool"):
        A(**dense(bias=causal))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        A(**dense(bias=mask))


def test_rows_before_the_first_offset_and_queries_without_a_token_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fastattn.checks, "is_emulated", lambda: False)  # lengths of an emulated GPU are not read
    x = torch.randn(9, 2, 8)
    ends = torch.tensor([2, 7, 9], dtype=torch.int32)
    with pytest.warns(UserWarning, match="cu_seqlens_q begins with 2, so the first 2 rows .*; offsets begin with 0"):
        fastattn.attention_varlen(x, x, x, ends, ends, 5, 5)
    query, cache = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 16, 8)
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    with pytest.warns(UserWarning, match="6 queries, but sequence 0 has 3 tokens .* first 3 rows see no key"):
        fastattn.attention_with_kv_cache(query, cache, cache, lengths)
    with pytest.warns(UserWarning, match="first 2 rows see no key"):
        fastattn.attention_with_kv_cache(query, cache, cache, lengths, causal=False, window=(-1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.attention_with_kv_cache(query, cache, cache, lengths, causal=False)  # each row sees all tokens
        fastattn.attention_with_kv_cache(query, cache, cache, lengths, causal=False, window=(-1, 3))


def test_one_tensor_for_both_caches_is_refused_in_every_call() -> None:
    arguments = cached()
    key, value = arguments["k_cache"], arguments["k_cache"].clone()
    new = torch.ones(key.shape[0], key.shape[1], 1, key.shape[3])
    arguments |= {"v_cache": value, "k_new": new, "v_new": 2 * new, "cache_seqlens": arguments["cache_seqlens"] * 0}
    fastattn.attention_with_kv_cache(**arguments)
    before = key.clone()
    with pytest.raises(InputError, match=r"v_cache: expected memory of its own, .* got k_cache itself"):
        fastattn.attention_with_kv_cache(**{**arguments, "v_cache": key})
    assert torch.equal(key, before)


def test_one_tensor_for_both_caches_is_refused_by_other_functions() -> None:
    cache, new, slots = torch.zeros(2, 2, 8, 16), torch.ones(3, 2, 16), torch.arange(3)
    fastattn.append_to_cache(new, 2 * new, cache.clone(), cache.clone(), slots)
    with pytest.raises(InputError, match="v_cache: expected memory of its own"):
        fastattn.append_to_cache(new, 2 * new, cache, cache, slots)
    assert not cache.any()
    cache, new = torch.zeros(1, 8, 2, 16), new[None]  # [B, capacity, Hk, D]
    flash_attn_with_kvcache(new, cache.clone(), cache.clone(), k=new, v=2 * new, cache_seqlens=0)
    with pytest.raises(InputError, match="v_cache: expected memory of its own"):
        flash_attn_with_kvcache(new, cache, cache, k=new, v=2 * new, cache_seqlens=0)
    assert not cache.any()


@pytest.mark.parametrize("keyword", ["cache_leftpad", "cache_batch_idx"])
def test_keywords_of_flash_attn_alone_name_its_function(keyword: str) -> None:
    with pytest.raises(TypeError, match=f"'{keyword}'; fastattn.integrations.flash_attn.flash_attn_with_kvcache takes"):
        fastattn.attention_with_kv_cache(**cached(), **{keyword: None})


def test_a_linear_layer_in_place_of_its_weight() -> None:
    layer = torch.nn.Linear(16, 8)
    with pytest.raises(TypeError, match=r"got .*Linear; pass fastattn.quantize_int8\(weight.weight\)"):
        fastattn.int8_linear(torch.zeros(2, 16), layer)
    with pytest.raises(TypeError, match=r"got .*Linear; pass fastattn.quantize_int8\(weight.weight\)"):
        fastattn.nn.Int8Linear.from_weight(layer)
    with pytest.raises(TypeError, match=r"got .*Linear; pass the layer's parameter, weight.weight"):
        fastattn.quantize_int8(layer)


@pytest.mark.parametrize("name", ["mask", "attn_mask", "bias"])
def test_functions_without_masks_say_what_restricts_keys(name: str) -> None:
    x, lengths = torch.randn(9, 2, 8), torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(TypeError, match="packed sequences take key_ranges"):
        fastattn.attention_varlen(x, x, x, lengths, lengths, 9, 9, **{name: x})
    with pytest.raises(TypeError, match="sees all tokens up to its own; window and tree_mask restrict them"):
        fastattn.attention_with_kv_cache(x, x, x, lengths, **{name: x})


def test_types_are_named_in_full() -> None:
    class bool_:
        pass

    with pytest.raises(TypeError, match=r"causal: expected a bool, True or False, got test_bad_input\..*bool_"):
        A(**dense(causal=bool_()))


def test_heads_are_only_said_to_come_after_rows_where_that_fits() -> None:
    shapes = [((1, 12, 4096, 8), (1, 5, 4096, 8)), ((1, 6, 9, 8), (1, 4, 7, 8)), ((2, 6, 5, 8), (2, 4, 0, 8))]
    for query, key in [*shapes, ((2, 8, 48, 64), (2, 3, 48, 64))]:
        with pytest.raises(InputError, match=r"multiple of the . KV heads") as raised:
            A(torch.zeros(query), torch.zeros(key), torch.zeros(key))
        assert "transpose" not in str(raised.value)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (A, dense()),
        (V, packed()),
        (fastattn.attention_with_kv_cache, cached()),
        (fastattn.scaled_dot_product_attention, dense()),
    ],
)
def test_unknown_options_are_refused(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    has_it = "window" in inspect.signature(function).parameters
    advice = r"; did you mean 'window'\?$" if has_it else ""
    with pytest.raises(TypeError, match=f"unexpected keyword argument 'windows'{advice}"):
        function(**arguments, windows=(1, 1))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("is_causal", "causal"),
        ("attn_mask", "bias"),
        ("softmax_scale", "scale"),
        ("window_size", "window"),
        ("dropout", "dropout_p"),
    ],
)
def test_keywords_of_other_libraries_are_named(theirs: str, ours: str) -> None:
    spread = fastattn.distributed.context_parallel_attention
    functions = ((A, dense()), (V, packed()), (fastattn.attention_with_kv_cache, cached()), (spread, dense()))
    for function, arguments in functions:
        has_it = ours in inspect.signature(function).parameters
        note = ", and aligns to the bottom right" if theirs == "is_causal" else ""
        advice = rf"(packed sequences take|each query sees|help\({function.__name__}\))"  # the first two: of masks
        if has_it:
            advice = f"it is called '{ours}' here{note}$"
        words = f"unexpected keyword argument '{theirs}'; {advice}"
        with pytest.raises(TypeError, match=words):
            function(**arguments, **{theirs: None})


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        ("causal", "it is called 'is_causal' here, and aligns to the top left"),
        ("bias", "it is called 'attn_mask' here"),
        ("attention_mask", "it is called 'attn_mask' here"),
        ("softmax_scale", "it is called 'scale' here"),
        ("window", r"fastattn\.attention takes it"),
        ("sinks", r"fastattn\.attention takes it"),
        ("colour", r"help\(scaled_dot_product_attention\) lists its arguments"),
    ],
)
def test_the_drop_in_names_what_it_calls_otherwise(theirs: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{theirs}'; {advice}$"):
        fastattn.scaled_dot_product_attention(**dense(), **{theirs: None})


@pytest.mark.parametrize("theirs", ["seqused_k", "seq_lens", "context_lens"])
def test_lengths_of_a_cache_by_another_name(theirs: str) -> None:
    arguments = cached()
    lengths = arguments["cache_seqlens"]
    with pytest.raises(TypeError, match=f"'{theirs}'; it is called 'cache_seqlens' here"):
        fastattn.attention_with_kv_cache(**arguments, **{theirs: lengths})
    del arguments["cache_seqlens"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cache_seqlens'"):
        fastattn.attention_with_kv_cache(**arguments, **{theirs: lengths})


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        ("enable_gqa", "keys and values can always have fewer heads than queries"),
        ("key_padding_mask", r"pass bias=~key_padding_mask\[:, None, None, :\]"),
        ("block_mask", r"pass key_ranges=fastattn\.masks\.from_block_mask\(block_mask\)"),
        ("score_mod", "use softcap, alibi_slopes or a bias"),
        ("return_attn_probs", "return_lse=True returns the lse"),
        ("cu_seqlens_q", "attention_varlen takes packed sequences"),
    ],
)
def test_what_attention_takes_in_another_form_is_said(theirs: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{theirs}'; .*{advice}$"):
        A(**dense(), **{theirs: None})


def test_of_several_unknown_keywords_one_with_another_name_here_is_named() -> None:
    with pytest.raises(TypeError, match=r"'is_causal'; it is called 'causal' here"):
        A(**dense(), windows=1, is_causal=True, softmax_scale=1.0)


@pytest.mark.parametrize("window", [(True, False), (1.0, 0), (1, False)])
def test_a_window_of_other_types_after_an_equal_one(window: Any) -> None:
    for function, arguments in ((A, dense()), (V, packed()), (fastattn.attention_with_kv_cache, cached())):
        function(**arguments, window=(1, 0))
        with pytest.raises(TypeError, match=r"window\[.\]: expected an int"):
            function(**arguments, window=window)


def test_a_good_call_after_a_bad_one_with_the_same_shapes() -> None:
    """Calls are checked once per signature: an error must not be cached, nor suppress the next check."""
    for _ in range(2):
        with pytest.raises(InputError, match="scale"):
            A(**dense(scale=float("inf")))
        A(**dense())


OFFSETS: dict[str, tuple[list[int], tuple[str, ...]]] = {
    "decreasing": ([0, 7, 3, 9], ("cu_seqlens_q", "do not decrease")),
    "not from 0": ([1, 3, 5, 9], ("cu_seqlens_q", "0 as the first")),
    "past the end": ([0, 3, 5, 2**31 - 1], ("cu_seqlens_q", "9 (the number of rows)")),
    "short of the end": ([0, 3, 5, 6], ("cu_seqlens_q", "9 (the number of rows)")),
    "negative": ([0, -5, 5, 9], ("cu_seqlens_q", "do not decrease")),
    "longer than the maximum": ([0, 1, 2, 9], ("max_seqlen_q", "at least 7", "6")),
}


def overlaps_allowed() -> contextlib.AbstractContextManager[None]:
    """Allows races: sequences that overlap write the same rows in any order, which is a race to the emulator."""
    if not ON_EMULATOR:
        return contextlib.nullcontext()
    from emulator import options

    return options.launching(races=False)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("what", OFFSETS)
def test_offsets_in_device_memory(what: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are checked on request. Otherwise nothing outside the tensors is touched, and all rows get results."""
    values, words = OFFSETS[what]
    offsets = torch.tensor(values, dtype=torch.int32, device=DEVICE)
    # The rows before and after the tensors are NaN.
    guarded = torch.full((3, 9, 2, 16), float("nan"), dtype=torch.float16, device=DEVICE)
    guarded[1].copy_(torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(0)))
    arguments = packed(query=guarded[1], key=guarded[1], value=guarded[1], cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    with fastattn.use_backend(backend), overlaps_allowed():
        out, lse = V(**arguments, return_lse=True)
        assert not bool(out.isnan().any()) and not bool(lse.isnan().any())
        in_no_sequence = lse[0] == -float("inf")
        assert bool((out[in_no_sequence] == 0).all())
        monkeypatch.setenv("FASTATTN_CHECK", "1")
        with pytest.raises(InputError, match=re.escape(words[0]) + ".*" + ".*".join(map(re.escape, words[1:]))):
            V(**arguments)


def test_good_offsets_pass_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    out = V(**packed())
    assert isinstance(out, Tensor)
