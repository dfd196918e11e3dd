"""Tests head dims of 257 to 512, as in Gemma's global layers: Triton's kernels take them, without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import decode_cases
import fastattn
from cuda_kernels import DTYPES, checked
from decode_cases import Case
from fastattn import reference
from kernel_device import DEVICE
from oracle import check_against_oracle

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

FORWARD, DECODE = "attention_forward.attention_forward_kernel", "decode.split_kernel"


def drawn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def expect_kernel(calls: list[Any], kernel: str) -> None:
    assert [(call.backend, call.kernel) for call in calls] == [("triton", kernel)]


OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"window": (9, 3), "softcap": 5.0, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "sinks": torch.ones(4)},
]


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(512, 512), (257, 300), (64, 320)], ids=str)
@pytest.mark.parametrize("options, dtype", list(zip(OPTIONS, DTYPES, strict=True)), ids=["f16", "bf16"])
def test_attention(dims: tuple[int, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {name: o.to(DEVICE) if isinstance(o, Tensor) else o for name, o in options.items()}
    shapes = (2, 4, 37, dims[0]), (2, 2, 45, dims[0]), (2, 2, 45, dims[1])
    inputs = [drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    with fastattn.record() as calls, checked():
        found = fastattn.attention(*inputs, **options, return_lse=True)
    expect_kernel(calls, FORWARD)
    exact = reference.attention(*(tensor.double() for tensor in inputs), **options)
    composite = reference.attention(*inputs, **options, compute_dtype=dtype)
    for name, *results in zip(("out", "lse"), found, exact, composite, strict=True):
        check_against_oracle(name, *results)


DECODED = [
    Case("gemma", dims=(512, 512), heads=(8, 2), new=2, queries=2, rotary_dim=512, splits=3),
    Case("pages", dims=(512, 512), heads=(4, 1), page_size=16, capacity=160, queries=8, dtype=torch.bfloat16),
    Case("int8", dims=(512, 320), int8=True, new=1, page_size=16, capacity=160),
    Case("fp8", dims=(264, 512), fp8="heads", new=3, queries=3, softcap=8.0, alibi="batch", sinks=True),
    Case("sinks", dims=(512, 64), heads=(16, 1), queries=3, sinks=True, window=(90, -1), splits=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", DECODED, ids=str)
def test_decoding(case: Case) -> None:
    def run(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with fastattn.record() as calls, checked():
            result = decode_cases.run_public(case, arguments)
        expect_kernel(calls, DECODE)
        return result

    decode_cases.check(case, run)


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True], ids=["16-bit", "int8"])
def test_a_prompt_and_steps(quantized: bool) -> None:
    """A cache of all tokens gives the result of attention over them. The prompt runs on the attention kernel."""
    length, total = 80, 83
    key, value = (drawn(1, 2, total, 512, seed=seed) for seed in (1, 2))
    query = drawn(1, 8, total, 512)
    cache = fastattn.KVCache(1, 1, 2, 512, capacity=96, dtype=torch.float16, device=query.device, quantized=quantized)
    parts = [slice(0, length), *(slice(i, i + 1) for i in range(length, total))]
    with fastattn.record() as calls, checked():
        out = torch.cat([cache.attend(0, *(t[:, :, part] for t in (query, key, value))) for part in parts], dim=2)
    assert [call.kernel for call in calls] == [FORWARD] + [DECODE] * 3
    exact = reference.attention(query.double(), key.double(), value.double(), causal=True)[0]
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.05 if quantized else 4e-3)


def test_tokens_go_to_their_slots() -> None:
    k_new, v_new = drawn(5, 2, 512), drawn(5, 2, 264, seed=1)
    k_cache, v_cache = (torch.zeros(4, 2, 16, dim, dtype=torch.float16, device=DEVICE) for dim in (512, 264))
    slots = torch.tensor([33, -1, 7, 0, 63], device=DEVICE)
    with fastattn.record() as calls, checked():
        fastattn.append_to_cache(k_new, v_new, k_cache, v_cache, slots)
    expect_kernel(calls, "decode_append.append_to_slots_kernel")
    for new, cache in ((k_new, k_cache), (v_new, v_cache)):
        expected = torch.zeros_like(cache)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // 16, :, slot % 16] = new[token]
        assert torch.equal(cache, expected)


def test_gradients_are_those_of_pytorch() -> None:
    """The warning's reason also says what would run a kernel."""
    inputs = [drawn(1, 2, 9, 320, seed=seed).requires_grad_() for seed in range(3)]
    with pytest.warns(RuntimeWarning, match="gradients up to 256; under torch.no_grad"):
        out = fastattn.attention(*inputs)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in inputs)
    explained = fastattn.explain(fastattn.attention, *inputs)
    assert explained.backend == "torch" and "take up to 256" in explained.rejected["cuda"]
    with torch.no_grad():
        assert fastattn.explain(fastattn.attention, *inputs).kernel == FORWARD
