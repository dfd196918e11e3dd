"""Tests attention over a cache with many queries (a prompt): the attention kernel runs it over the cache's pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import EMULATED, FAMILY, MARKS, checked, only_emulated
from fastattn import native, reference
from kernel_device import DEVICE
from oracle import check_against_oracle

if EMULATED:
    from emulator import device

pytestmark = MARKS
each_backend = pytest.mark.parametrize("backend", ["cuda", "triton"])
BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM, QUERIES, CAPACITY = 3, 4, 2, 40, 24, 70, 176


def arguments(paged: bool, num_new: int = QUERIES, num_queries: int = QUERIES, **options: Any) -> dict[str, Any]:
    """Returns arguments with ragged lengths, one of them 0. The last sequence has no room for its last tokens."""
    generator = torch.Generator().manual_seed(num_new)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, torch.float16)

    blocks, rows = (BATCH * CAPACITY // 16, 16) if paged else (BATCH, CAPACITY)
    made: dict[str, Any] = {
        "query": normal(BATCH, HEADS, num_queries, DIM),
        "k_cache": normal(blocks, KV_HEADS, rows, DIM),
        "v_cache": normal(blocks, KV_HEADS, rows, VALUE_DIM),
        "cache_seqlens": torch.tensor([0, 61, 110], dtype=torch.int32, device=DEVICE),
    }
    if num_new:
        made |= {"k_new": normal(BATCH, KV_HEADS, num_new, DIM), "v_new": normal(BATCH, KV_HEADS, num_new, VALUE_DIM)}
    if paged:
        order = torch.randperm(blocks, generator=generator).view(BATCH, -1)
        made["block_table"] = order.to(DEVICE, torch.int32)
    if options.pop("rotary", False):
        angles = torch.arange(CAPACITY)[:, None] / 100 ** (torch.arange(8) / 8)
        made |= {"rotary_cos": angles.cos().to(DEVICE), "rotary_sin": angles.sin().to(DEVICE)}
    return made | {name: o.clone().to(DEVICE) if isinstance(o, Tensor) else o for name, o in options.items()}


def exact(made: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        name: value.to(dtype, copy=True) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in made.items()
    }


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"rotary": True, "rotary_interleaved": True},
    {"rotary": True, "window": (30, 0), "softcap": 3.0, "scale": 0.4},
    {"sinks": torch.tensor([0.5, -1.0, 8.0, 2.0]), "alibi_slopes": torch.tensor([0.1, 0.2, 0.0, 0.5])},
    {"num_new": 5},
    {"num_new": 0},
]


def attention_kernel(options: dict[str, Any] | None = None, family: int = FAMILY) -> str:
    """Returns the kernel's name. Kernels for Hopper read a contiguous cache as one page per sequence."""
    if family == 80:
        return "attention_forward_options_sm80<64, float16, paged>"
    changes_scores = not {"softcap", "alibi_slopes"}.isdisjoint(options or {})
    return f"attention_forward_{'options_' if changes_scores else ''}sm90<64, float16>"


@each_backend
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_a_prompt(options: dict[str, Any], paged: bool, backend: str) -> None:
    check_prompt(options, paged, backend, attention_kernel(options) if backend == "cuda" else "attention_forward")


def check_prompt(options: dict[str, Any], paged: bool, backend: str, kernel: str) -> None:
    made = arguments(paged, **options)
    expected = exact(made)
    out, lse = reference.attention_with_kv_cache(**expected)
    composite, composite_lse = reference.attention_with_kv_cache(
        **exact(made, torch.float16), compute_dtype=torch.float16
    )
    with fastattn.record() as calls, fastattn.use_backend(backend), checked():
        found, found_lse = fastattn.attention_with_kv_cache(**made, return_lse=True)
    (call,) = calls
    assert call.op == "decode" and call.kernel.startswith(kernel)
    assert found.shape == out.shape and found_lse.shape == lse.shape
    check_against_oracle("out", found, out, composite)
    check_against_oracle("lse", found_lse, lse, composite_lse)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(made[name], expected[name].to(made[name].dtype), rtol=2e-3, atol=2e-3)


@only_emulated
@pytest.mark.skipif("90a" not in native.BUILD["archs"], reason="needs kernels for sm_90a")
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_a_prompt_on_hopper(options: dict[str, Any], paged: bool) -> None:
    kernel = attention_kernel(options, family=90)
    with device.emulated(90, num_sms=3):
        assert kernel_of(arguments(paged, **options)) == kernel
        check_prompt(options, paged, "cuda", kernel)


def kernel_of(made: dict[str, Any]) -> str:
    return fastattn.explain(fastattn.attention_with_kv_cache, **made).kernel


def test_what_stays_with_the_decoding_kernel() -> None:
    """The decoding kernel runs few queries, given splits, and few rows of a KV head over an 8-bit cache."""
    assert kernel_of(arguments(False)) == attention_kernel()
    assert kernel_of(arguments(False, num_queries=64)).startswith("decode_split_sm80")
    assert kernel_of(arguments(False, num_splits=2)).startswith("decode_split_sm80")
    for num_queries, prefills in ((130, True), (128, False)):
        made = arguments(False, num_queries=num_queries)
        for name in ("k", "v"):
            made[f"{name}_cache"], made[f"{name}_scale"] = reference.quantize_rows(made[f"{name}_cache"])
        assert kernel_of(made) == attention_kernel() if prefills else kernel_of(made).startswith("decode_split_sm80")


def test_a_prompt_compiles() -> None:
    made = arguments(True, rotary=True)
    cache = {name: made.pop(name) for name in ("k_cache", "v_cache")}

    def attend(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> Any:
        return fastattn.attention_with_kv_cache(**(made | {"query": query, "k_cache": k_cache, "v_cache": v_cache}))

    copies = {name: tensor.clone() for name, tensor in cache.items()}
    with fastattn.use_backend("cuda"), checked():
        expected = attend(made["query"], **copies)
        got = torch.compile(attend, fullgraph=True, backend="aot_eager")(made["query"], **cache)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(torch.equal(cache[name], copies[name]) for name in cache)
