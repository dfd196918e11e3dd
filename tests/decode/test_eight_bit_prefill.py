"""Tests a prompt over an 8-bit cache: its tokens are converted to 16-bit floats for the attention kernel."""

from __future__ import annotations

import importlib
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import proof
from cuda_kernels import DTYPES, EMULATED, checked, only_emulated
from decode_cases import FP8_SCALES, HUGE, Case, check, clone, comparable, make_arguments
from fastattn import native
from fastattn.ops.decode import Dequantization, dequantize_cache
from fastattn.ops.registration import NAMESPACES
from fastattn.quantization import as_numbers
from kernel_device import DEVICE

if EMULATED:
    from emulator import device

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

run_module = importlib.import_module("fastattn.run.kv_cache_attention")  # the package also has a function of this name
BACKENDS = ("triton", "cuda")
each_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
FORMATS = [{"int8": True}, *({"fp8": whose} for whose in FP8_SCALES)]
each_format = pytest.mark.parametrize("cache", FORMATS, ids=lambda cache: "-".join(map(str, *cache.items())))

# 280 rows of a KV head are more than the decoding kernel gets.
PROMPT = Case("prompt", queries=70, new=70, lengths=(0, 31, 99), heads=(8, 2), dims=(40, 24), capacity=144)
PAGES = replace(PROMPT, page_size=16)


def run_prompt(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    named = {name: value for name, value in arguments.items() if value is not None}
    if case.alibi == "heads":
        named["alibi_slopes"] = named["alibi_slopes"][0]
    with fastattn.record() as calls:
        result = fastattn.attention_with_kv_cache(**named, causal=case.causal, window=case.window, return_lse=True)
    assert [call.kernel.startswith("attention_forward") for call in calls] == [True]
    return result


@pytest.mark.slow
@each_format
@pytest.mark.parametrize("case", [PROMPT, PAGES], ids=["dense", "paged"])
@each_backend
def test_a_prompt(case: Case, cache: dict[str, Any], backend: str) -> None:
    check(replace(case, **cache), run_prompt)


OPTIONS = [
    replace(PAGES, dtype=torch.bfloat16, rotary_dim=16, interleaved=True, window=(30, 0), softcap=3.0, new=5),
    replace(PROMPT, dtype=torch.bfloat16, alibi="batch", sinks=True, causal=False, dims=(64, 64), new=0),
    replace(PROMPT, alibi="heads", sinks=True, page_size=48, scale=0.4, lengths=(144, HUGE, -5)),
]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [{"int8": True}, {"fp8": "heads"}], ids=["int8", "fp8"])
@pytest.mark.parametrize("case", OPTIONS, ids=["rotary", "alibi-of-batch", "lengths"])
@each_backend
def test_options(case: Case, cache: dict[str, Any], backend: str) -> None:
    check(replace(case, **cache), run_prompt)


@pytest.mark.slow
@only_emulated
@pytest.mark.skipif("90a" not in native.BUILD["archs"], reason="needs kernels for sm_90a")
@pytest.mark.parametrize("case", [PROMPT, PAGES], ids=["dense", "paged"])
def test_hopper(case: Case) -> None:
    with device.emulated(90, num_sms=3), fastattn.use_backend("cuda"), checked():
        check(replace(case, dims=(64, 64), int8=True), run_prompt)
        check(replace(case, dims=(64, 64), fp8="tokens", dtype=torch.bfloat16), run_prompt)


@pytest.mark.slow
@pytest.mark.parametrize("case", [replace(PAGES, int8=True), replace(PROMPT, fp8="heads")], ids=["int8", "fp8"])
@pytest.mark.parametrize("heads_at_once", [1, 3])
@each_backend
def test_the_memory_of_the_copy_is_bounded(
    case: Case, heads_at_once: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converting one KV head at a time, or both heads of some sequences, gives the bits of converting all at once."""
    arguments = make_arguments(replace(case, alibi="batch", sinks=True))
    expected = run_prompt(case, clone(arguments))
    sizes, launch = [], run_module.dequantize_cache

    def seen(backend: str, given: Dequantization) -> None:
        sizes.append(given.k_out.nbytes + given.v_out.nbytes)
        launch(backend, given)

    of_head = case.capacity * sum(case.dims) * 2
    monkeypatch.setattr(run_module, "dequantize_cache", seen)
    monkeypatch.setattr(run_module, "_DEQUANTISED_BYTES", heads_at_once * of_head)
    found = run_prompt(case, clone(arguments))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert sizes == [of_head] * 6 if heads_at_once == 1 else [2 * of_head] * 3


@each_backend
def test_absent_pages_stay_absent(backend: str) -> None:
    case = replace(PAGES, int8=True, new=0)
    arguments = make_arguments(replace(case, lengths=(144, 144, 144)))
    arguments["block_table"][0, 2], arguments["block_table"][1, 8] = -1, HUGE
    arguments["block_table"][2] = arguments["k_cache"].shape[0]
    out, lse = check(case, run_prompt, arguments)
    assert bool((out[2] == 0).all()) and bool((lse[2] == -math.inf).all())


@each_backend
def test_nan_reaches_only_rows_that_see_it(backend: str) -> None:
    """NaN is in the scale of a key, or of a value, that only the last query sees."""
    case = replace(PROMPT, int8=True, new=0, lengths=(140, 80, 100))
    arguments = make_arguments(case)
    arguments["k_scale"][0, 0, 139] = arguments["v_scale"][1, :, 79] = math.nan
    out, lse = check(case, run_prompt, arguments)
    assert bool(out[0, :4, 69].isnan().all()) and bool(lse[0, :4, 69].isnan().all())
    assert bool(out[1, :, 69].isnan().all()) and not bool(lse[1].isnan().any())
    assert not bool(out[:, :, :69].isnan().any() | out[0, 4:].isnan().any() | out[2].isnan().any())


@each_backend
def test_a_prompt_compiles(backend: str) -> None:
    case = replace(PAGES, int8=True)
    arguments = {name: value for name, value in make_arguments(case).items() if value is not None}
    written = ("k_cache", "v_cache", "k_scale", "v_scale")

    def attend(query: Tensor, *caches: Tensor) -> Any:
        return fastattn.attention_with_kv_cache(
            **(arguments | {"query": query} | dict(zip(written, caches, strict=True)))
        )

    copies, caches = ([clone(arguments)[name] for name in written] for _ in range(2))
    expected = attend(arguments["query"], *copies)
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(arguments["query"], *caches)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for found, wanted in zip(caches, copies, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


# --- The operator -----------------------------------------------------------------------------------------------------


def dequantize_arguments(case: Case) -> Dequantization:
    """Returns the op's arguments for a case's caches, with outputs that hold 7."""
    made = make_arguments(case)
    table = made["block_table"]
    blocks = len(case.lengths) * (1 if table is None else table.shape[1])
    outs = (
        torch.full((blocks, *made[name].shape[1:]), 7.0, dtype=case.dtype, device=DEVICE)
        for name in ("k_cache", "v_cache")
    )
    names = ("k_cache", "v_cache", "k_scale", "v_scale", "cache_seqlens", "block_table")
    return Dequantization(*(made[name] for name in names), *outs)


@pytest.mark.parametrize("case", [PROMPT, PAGES], ids=["dense", "paged"])
@each_backend
@pytest.mark.parametrize(("cache", "dtype"), list(itertools.product(FORMATS, DTYPES)), ids=str)
def test_each_instance_rounds_each_token_once_and_writes_nothing_else(
    case: Case, dtype: torch.dtype, cache: dict[str, Any], backend: str
) -> None:
    case = replace(case, **cache, dtype=dtype, lengths=(0, 31, 144, HUGE, -3), dims=(128, 40))
    given = dequantize_arguments(case)
    with checked():
        assert dequantize_cache(backend, given) is None
    proof.compared()
    for stored, scales, found in ((given[0], given[2], given[6]), (given[1], given[3], given[7])):
        expected = torch.full_like(found, 7.0)
        for sequence, length in enumerate(given.seqlens.clamp(0, case.capacity).tolist()):
            for token in range(length):
                page, row = divmod(token, case.page_size or case.capacity)
                block = sequence if given.block_table is None else int(given.block_table[sequence, page])
                scale: Any = 1.0 if scales is None else scales[block, :, row] if scales.dim() == 3 else scales
                value = comparable(stored[block, :, row]).float() * (
                    scale[..., None] if isinstance(scale, Tensor) else scale
                )
                expected[sequence * (len(found) // len(case.lengths)) + page, :, row] = value.to(dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_backend
def test_opcheck(backend: str) -> None:
    op = getattr(torch.ops, NAMESPACES[backend]).dequantize_cache.default
    torch.library.opcheck(op, tuple(dequantize_arguments(replace(PAGES, int8=True, dims=(48, 32)))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": lambda t: t.float()}, "k_cache must be int8 or float8_e4m3fn, or have the dtype of k_out"),
        ({"v_cache": lambda t: t[..., :4]}, r"v_cache must have a last dim \(head dim\) that is a multiple of 8"),
        ({"k_scale": lambda t: None}, "k_scale must be a float32 tensor for an int8 cache"),
        ({"seqlens": lambda t: t.long()}, "seqlens must be int32"),
        ({"block_table": lambda t: t[:2]}, "block_table must have shape"),
        ({"k_out": lambda t: t[1:]}, "k_out must have shape"),
        ({"v_out": lambda t: t.bfloat16()}, "v_out must have the dtype of k_out"),
        ({"v_out": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, "v_out is written in place"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given = dequantize_arguments(replace(PAGES, int8=True))
    changed = given._replace(**{name: function(getattr(given, name)) for name, function in change.items()})
    with pytest.raises(RuntimeError, match=f"fastattn.dequantize_cache: {message}"):
        dequantize_cache("cuda", changed)
    assert bool((given.k_out == 7).all()) and bool((as_numbers(given.v_out) == 7).all())
