"""Tests fp8 caches of every backend: each number and each rounding, each kind of scale, and the cache classes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import append_cases
import decode_cases
import fastattn
from cuda_kernels import DTYPES
from decode_cases import FP8_SCALES, Case, comparable, make_arguments, run_public
from fastattn import InputError, reference
from fastattn.quantization import FP8
from kernel_device import DEVICE
from turns import in_turn

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
each_scales = pytest.mark.parametrize("whose", FP8_SCALES)
BACKENDS = ("torch", "triton", "cuda", "cuda on sm_90")  # the last has an instruction that decodes fp8
each_decoding = pytest.mark.parametrize("backend", BACKENDS, indirect=True, ids=lambda name: name.replace(" ", "_"))
NAN_CODES = (0x7F, 0xFF)


def check(case: Case) -> None:
    decode_cases.check(case, run_public)


def codes() -> Tensor:
    """Returns all 256 codes as the values of one token."""
    return torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 1, 1, 256)


# --- Every code -------------------------------------------------------------------------------------------------------


@each_decoding
@each_dtype
def test_every_value_is_exact(dtype: torch.dtype, backend: str) -> None:
    """One key has all of the softmax's weight, so the output is its value."""
    values = codes().view(FP8)
    keys = torch.zeros(1, 1, 1, 256, device=DEVICE).to(FP8)
    query = torch.ones(1, 1, 1, 256, dtype=dtype, device=DEVICE)
    out = fastattn.attention_with_kv_cache(query, keys, values, torch.ones(1, dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(out, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert int(out.isnan().sum()) == 2


@each_decoding
@each_dtype
def test_every_key_is_exact(dtype: torch.dtype, backend: str) -> None:
    """A query that is 1 in one dim has the key's number there as its score; with a single key, the score is the lse."""
    finite = torch.where((codes() & 0x7F) == 0x7F, 0, codes()).view(FP8)
    length = torch.ones(1, dtype=torch.int32, device=DEVICE)
    query = torch.eye(256, dtype=dtype, device=DEVICE)[None, None]
    options: Any = {"scale": 1.0, "causal": False, "return_lse": True, "num_splits": 1}
    _, lse = fastattn.attention_with_kv_cache(query, finite, finite.clone(), length, **options)
    torch.testing.assert_close(lse.flatten(), finite.float().flatten(), rtol=0, atol=0)
    for code in NAN_CODES:
        keys = finite.clone()
        keys.view(torch.uint8)[..., 77] = code
        _, lse = fastattn.attention_with_kv_cache(query, keys, finite, length, **options)
        assert bool(lse.isnan().all())


@pytest.mark.parametrize("scale", (None, 1.0, 0.37, 1e-3, 3e38))
@each_dtype
def test_every_number_is_rounded_as_pytorch_does(dtype: torch.dtype, scale: float | None, backend: str) -> None:
    """The numbers are all of 16 bits: ties, subnormal results, results that saturate, infinity and NaN."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(256, 1, 256).to(DEVICE)
    k_cache, v_cache = (torch.zeros(16, 1, 16, 256, device=DEVICE).to(FP8) for _ in range(2))
    given = None if scale is None else torch.tensor([scale], device=DEVICE)
    slots = torch.arange(256, device=DEVICE)
    fastattn.append_to_cache(numbers, numbers, k_cache, v_cache, slots, k_scale=given, v_scale=given)
    wanted = (numbers.float() / (1.0 if scale is None else given)).clamp(-448, 448).to(FP8)
    for cache in (k_cache, v_cache):
        found = cache.transpose(1, 2).reshape(256, 1, 256)
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
        is_nan = wanted.float().isnan()
        assert torch.equal(found.view(torch.uint8)[~is_nan], wanted.view(torch.uint8)[~is_nan])  # zeros keep their sign


# --- The append -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "dtype", "whose"),
    in_turn(itertools.product([(64, 64), (128, 128), (80, 72), (256, 256), (8, 136)], DTYPES), FP8_SCALES, each=2),
    ids=str,
)
def test_tokens_go_to_their_slots(dims: tuple[int, int], dtype: torch.dtype, whose: str, backend: str) -> None:
    case = append_cases.Case("fp8", dims=dims, dtype=dtype, fp8=whose, tokens=11, absent=(-1, 80), seed=3)
    arguments = append_cases.make_arguments(case)
    wanted = append_cases.expected(arguments)
    assert fastattn.append_to_cache(**arguments) is None
    append_cases.check_caches(arguments, wanted)


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_what_is_not_finite(value: float, backend: str) -> None:
    """A head's own scale becomes NaN. Divided by a given scale, NaN stays NaN, and infinity becomes 448."""
    case = append_cases.Case("not-finite", tokens=4, page_size=4, num_pages=1)
    arguments = append_cases.make_arguments(replace(case, fp8="tokens"))
    arguments["k_new"][1, 0, 5] = value
    fastattn.append_to_cache(**arguments)
    row = int(arguments["slot_mapping"][1])
    is_spoiled = arguments["k_scale"].isnan()
    assert bool(is_spoiled[0, 0, row]) and int(is_spoiled.sum()) == 1
    assert bool((arguments["k_cache"][0, 0, row].float() == 0).all())

    arguments = append_cases.make_arguments(replace(case, fp8="tensor"))
    arguments["k_new"][1, 0, 5] = value
    scale = arguments["k_scale"].clone()
    fastattn.append_to_cache(**arguments)
    stored = arguments["k_cache"][0, 0, row].float()
    assert torch.equal(arguments["k_scale"], scale)
    if math.isnan(value):
        assert bool(stored[5].isnan()) and int(stored.isnan().sum()) == 1
    else:
        assert stored[5].item() == math.copysign(448, value)


@pytest.mark.parametrize("magnitude", (0.0, 1e-7, 300.0, 1e30))
def test_scales_of_any_magnitude(magnitude: float, backend: str) -> None:
    """Zeros have the scale 1. So do numbers so small that the division underflows, which exist in bfloat16."""
    case = append_cases.Case("magnitude", fp8="tokens", dtype=torch.bfloat16, magnitude=magnitude)
    arguments = append_cases.make_arguments(case)
    arguments["k_new"][0] = 1e-40
    wanted = append_cases.expected(arguments)
    fastattn.append_to_cache(**arguments)
    append_cases.check_caches(arguments, wanted)


# --- Attention --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_decoding
@pytest.mark.parametrize(
    ("dims", "dtype", "whose"),
    in_turn(itertools.product([(64, 64), (128, 128), (256, 256), (16, 128), (192, 16)], DTYPES), FP8_SCALES),
    ids=str,
)
def test_each_instance(dims: tuple[int, int], dtype: torch.dtype, whose: str, backend: str) -> None:
    case = Case("dims", dims=dims, dtype=dtype, fp8=whose, lengths=(90, 150, 0), queries=2, new=2, heads=(4, 2))
    check(case)


@pytest.mark.parametrize(("page_size", "whose"), in_turn([(1,), (16,), (24,), (64,)], FP8_SCALES, each=2))
def test_pages(page_size: int, whose: str, backend: str) -> None:
    check(Case("pages", page_size=page_size, capacity=192, lengths=(100, 3, 189), new=3, fp8=whose, dims=(64, 40)))


@each_decoding
@pytest.mark.parametrize(
    ("queries", "window", "dtype", "code"),
    in_turn([(*rows, dtype) for rows in [(4, (-1, -1)), (7, (20, 1))] for dtype in DTYPES], NAN_CODES),
    ids=str,
)
def test_nan_reaches_only_rows_that_see_it(
    code: int, queries: int, window: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    """Some rows see the spoiled values, which lie in one tile with all others. Everything else keeps its bits."""
    case = Case("nan", fp8="heads", queries=queries, window=window, causal=window[1] < 0, lengths=(70,), dtype=dtype)
    clean, spoiled = make_arguments(case), make_arguments(case)
    positions, dims = [66, 67, 68, 69], [0, 5, 14, 31]
    for position, dim in zip(positions, dims, strict=True):
        spoiled["v_cache"].view(torch.uint8)[:, :, position, dim] = code
    (out, lse), (expected, expected_lse) = run_public(case, spoiled), run_public(case, clean)
    row = torch.arange(70 - queries, 70)[:, None]
    key, (left, right) = torch.tensor(positions), window
    sees = (key <= row + (0 if case.causal else right)) & ((key >= row - left) | (left < 0))
    is_nan = torch.zeros(queries, 32, dtype=torch.bool)
    is_nan[:, dims] = sees
    assert 0 < int(is_nan.sum()) < queries * len(dims)
    found = out.isnan().cpu()
    assert torch.equal(found, is_nan.expand_as(found))
    rest = ~is_nan.expand_as(found).to(DEVICE)
    assert torch.equal(out[rest], expected[rest]) and torch.equal(lse, expected_lse)


@each_decoding
@each_dtype
def test_values_are_as_far_apart_as_their_scales(dtype: torch.dtype, backend: str) -> None:
    case = Case("scales", fp8="tokens", lengths=(150,), dtype=dtype, splits=1, scale=0.01)
    arguments = make_arguments(case)
    arguments["v_scale"][:, :, :150] *= torch.logspace(-6, 2, 150, device=DEVICE)
    decode_cases.check(case, run_public, arguments)


@pytest.mark.parametrize("magnitude", (1e-35, 1e-6, 1.0, 1e5, 1e35))
@each_decoding
def test_queries_of_any_magnitude(magnitude: float, backend: str) -> None:
    """The rows of one tile differ as well: each is half as large as the one before."""
    generator = torch.Generator(DEVICE).manual_seed(17)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device=DEVICE)

    halves = 0.5 ** torch.arange(16, dtype=torch.float64, device=DEVICE)
    query = (noise(1, 16, 1, 64) * magnitude * halves.view(16, 1, 1)).bfloat16()
    caches = [noise(1, 1, 40, 64).to(FP8) for _ in range(2)]
    scores = (query.double() / magnitude) @ caches[0].double().mT
    length = torch.full((1,), 40, dtype=torch.int32, device=DEVICE)
    out, lse = fastattn.attention_with_kv_cache(query, *caches, length, scale=1 / magnitude, return_lse=True)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    expected = scores.softmax(-1) @ caches[1].double()
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf, 1e30))
@each_decoding
def test_a_query_that_is_not_finite_spoils_its_row_alone(value: float, backend: str) -> None:
    case = Case("query", heads=(8, 2), queries=2, fp8="tokens", dtype=torch.bfloat16)
    arguments = make_arguments(case)
    expected, expected_lse = run_public(case, arguments)
    arguments = make_arguments(case)
    arguments["query"][0, 1, 1, 3] = value
    out, lse = run_public(case, arguments)
    rest = torch.ones_like(lse, dtype=torch.bool)
    rest[0, 1, 1] = False
    assert torch.equal(out[rest], expected[rest]) and torch.equal(lse[rest], expected_lse[rest])
    assert bool(lse[~rest].isfinite().all()) == (value == 1e30)


def test_fp8_caches_are_close_to_float_ones(backend: str) -> None:
    """With three bits of mantissa, half a unit in the last place is 1/16 of a number, and the softmax averages."""
    exact, rounded = Case("exact", dims=(64, 64)), Case("fp8", dims=(64, 64), fp8="tokens")
    out, expected = run_public(rounded, make_arguments(rounded))[0], run_public(exact, make_arguments(exact))[0]
    assert 0 < (out - expected).abs().max().item() < expected.abs().max().item() / 16


@pytest.mark.slow
@each_scales
def test_many_queries_are_decoded(whose: str, backend: str) -> None:
    """This holds for few rows of a KV head: see test_eight_bit_prefill."""
    case = Case("prompt", queries=70, new=70, lengths=(0, 5), capacity=96, heads=(4, 2), rotary_dim=32, fp8=whose)
    check(case)


# --- As PyTorch sees it -----------------------------------------------------------------------------------------------


@each_scales
def test_it_is_known_by_name(whose: str, backend: str) -> None:
    arguments = {name: value for name, value in make_arguments(Case("named", fp8=whose)).items() if value is not None}
    kernels = {"torch": "PyTorch", "triton": "decode.split_kernel", "cuda": "decode_split_sm80<64, float16, fp8>"}
    assert fastattn.explain(fastattn.attention_with_kv_cache, **arguments).kernel == kernels[backend]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "cuda"], indirect=True)
@each_scales
def test_opcheck(whose: str, backend: str) -> None:
    ops = {"cuda": torch.ops.fastattn, "triton": torch.ops.fastattn_triton}[backend]
    case = Case("opcheck", lengths=(20, 9), new=1, page_size=16, capacity=32, fp8=whose)
    checks = "test_faketensor"  # other checks compare tensors, which torch cannot do in fp8
    arguments = decode_cases.op_arguments(case, make_arguments(case))
    torch.library.opcheck(ops.attention_decode.default, (), arguments, test_utils=checks)


@pytest.mark.slow
@each_scales
def test_it_compiles(whose: str, backend: str) -> None:
    torch._dynamo.reset()
    case = Case("compiled", new=2, queries=2, fp8=whose, lengths=(20, 9), capacity=32)
    compiled = torch.compile(run_public, fullgraph=True, backend="aot_eager")
    decode_cases.check(case, compiled)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_caches_store_it(paged: bool, backend: str) -> None:
    """Steps over either cache, with a fork and a reordering, give the reference's result over the same tokens."""
    generator = torch.Generator().manual_seed(11)
    layout: Any = {"dtype": torch.float16, "device": DEVICE, "quantized": FP8}
    tokens = [torch.randn(2, 2, new, 32, generator=generator).half().to(DEVICE) for new in (9, 1)]
    query = torch.randn(2, 4, 1, 32, generator=generator).half().to(DEVICE)
    rows = torch.cat(tokens, 2)
    if paged:
        pool = fastattn.PagedKVCache(1, 12, 2, 32, page_size=4, **layout)
        first = pool.add()
        prompt = tokens[0][:1]
        pool.step([first], num_new=9).attend(0, query[:1], prompt, prompt)
        assert "float8_e4m3fn" in repr(pool)
        rows = torch.cat([tokens[0][:1].expand(2, -1, -1, -1), tokens[1]], 2)
        out = pool.step([first, pool.fork(first)], num_new=1).attend(0, query, tokens[1], tokens[1])
        with pytest.raises(InputError, match="quantized"):
            pool.chunk([first], [1])
    else:
        cache = fastattn.KVCache(1, 2, 2, 32, capacity=9, **layout)
        cache.attend(0, query, tokens[0], tokens[0])
        cache.reorder(torch.tensor([1, 0], device=DEVICE))
        out = cache.attend(0, query, tokens[1].flip(0), tokens[1].flip(0))  # the cache grows here
        rows = rows.flip(0)
    numbers, scales = reference.quantize_rows_fp8(rows)
    exact = (numbers.float() * scales[..., None]).double()
    expected = reference.attention(query.double(), exact, exact, causal=True)[0]
    assert (out - expected).abs().max().item() < 2e-3


# --- Errors -----------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "int8 scales for all": ({"int8": True, "k_scale": torch.ones(())}, "k_scale: expected shape of the cache"),
    "int8 without": ({"int8": True, "k_scale": None}, "k_scale: expected a float32 tensor .* an int8 cache"),
    "heads": (
        {"fp8": "heads", "k_scale": torch.ones(3)},
        r"k_scale: expected shape of one scale .* = \[2\], got \[3\]",
    ),
    "tokens": ({"fp8": "tokens", "v_scale": torch.ones(3, 2, 149)}, r"v_scale: expected .* = \[3, 2, 150\]"),
    "rank": ({"fp8": "heads", "v_scale": torch.ones(2, 2)}, "v_scale: expected shape of one scale"),
    "dtype": ({"fp8": "heads", "k_scale": torch.ones(2).half()}, "k_scale: expected torch.float32"),
    "16-bit": ({"k_scale": torch.ones(2)}, "k_scale: expected None with a cache of torch.float16"),
    "other fp8": (
        {"fp8": "heads", "k_cache": torch.zeros(3, 2, 150, 32).to(torch.float8_e5m2)},
        "k_cache: expected torch.float16 like the query and new tokens, torch.int8 or torch.float8_e4m3fn, got "
        "torch.float8_e5m2",
    ),
    "one of each": ({"fp8": "heads", "v_cache": torch.zeros(3, 2, 150, 32).char()}, "v_cache: expected torch.float8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str, backend: str) -> None:
    changes, words = BAD[name]
    changes = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in changes.items()}
    case = replace(Case("bad"), **{key: changes.pop(key) for key in ("int8", "fp8") if key in changes})
    arguments = make_arguments(case) | changes
    before = comparable(arguments["k_cache"]).clone()
    with pytest.raises(InputError, match=words):
        run_public(case, arguments)
    torch.testing.assert_close(comparable(arguments["k_cache"]), before, rtol=0, atol=0, equal_nan=True)


def test_fastattn_check_finds_scales_that_are_not_finite(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    case = Case("checked", fp8="heads")
    arguments = make_arguments(case)
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    run_public(case, arguments)
    arguments["v_scale"][1] = math.nan
    with pytest.raises(InputError, match="v_scale: expected finite scales"):
        run_public(case, arguments)


@pytest.mark.parametrize("quantized", ("fp4", torch.float16, 1))
def test_a_cache_is_quantized_to_what_there_is(quantized: Any) -> None:
    with pytest.raises((InputError, TypeError), match="quantized"):
        fastattn.KVCache(1, 2, 2, 32, quantized=quantized)
