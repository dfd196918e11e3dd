"""Tests the demo's generation on the CUDA C++ kernels: int8 layers, and the decoding kernel over each kind of cache.

They run on a GPU if there is one, else on the emulator, with all of its checks.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastattn
import fastattn.nn
from cuda_kernels import MARKS, checked, each_dtype
from kernel_device import DEVICE
from oracle import check_against_oracle, worst_error

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_decoder
from decoder import Decoder, DecoderConfig
from generate import CacheOptions, Generated, generate_cached, logits_uncached

pytestmark = MARKS

NUM_TOKENS, PROMPTS = 5, [b"a", b"hello", b"no token sees a later one"]
# Two query heads of 64 dims share one KV head. The vocabulary is a multiple of 8, as the kernel's rows must be.
CONFIG = DecoderConfig(264, dim=128, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=96, max_positions=64)
LINEARS = 7 * CONFIG.num_layers + 1  # four of attention, three of SwiGLU, the head

CACHES = {
    "dense": CacheOptions(),
    "int8": CacheOptions(quantized=True),
    "pages": CacheOptions(page_size=4),
    "int8 pages": CacheOptions(quantized=True, page_size=16),
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Returns an int8 model with weights larger than initial ones, so that attention is far from uniform."""
    torch.manual_seed(7)
    model = Decoder(CONFIG).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.4)
    fastattn.nn.quantize_model(model)
    return model


def generate(
    backend: str, model: Decoder, dtype: torch.dtype, cache: CacheOptions, follow: Tensor | None = None
) -> Generated:
    """Generates with autocast, as the demo does. ``follow`` are tokens to continue with instead of the chosen ones."""
    options = train_decoder.Options(device=torch.device(DEVICE), dtype=dtype)
    with fastattn.use_backend(backend), train_decoder.autocast(options), following(model, follow):
        return generate_cached(model, PROMPTS, NUM_TOKENS, dtype, cache)


@contextlib.contextmanager
def following(model: Decoder, tokens: Tensor | None) -> Iterator[None]:
    if tokens is None:
        yield
        return
    steps = iter([None, *tokens.unbind(1)])  # the first pass reads the prompts

    def replace(_: object, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        token = next(steps)
        return arguments if token is None else (token, *arguments[1:])

    with model.register_forward_pre_hook(replace):
        yield


@each_dtype
@pytest.mark.parametrize("name", CACHES)
def test_generation(name: str, model: Decoder, dtype: torch.dtype) -> None:
    """Each step's logits are as good as PyTorch's with the same cache, measured against float64 without any cache."""
    cache = CACHES[name]
    with checked(seed=3), fastattn.record() as calls:
        generated = generate("cuda", model, dtype, cache)

    kernels = {"int8_matmul": r"int8_matmul_sm80<\d+, {}>", "decode": "decode_split_sm80<64, {}(, 32 rows)?>"}
    if cache.quantized:
        kernels["decode"] = "decode_split_sm80<64, {}, int8(, 32 rows)?>"
    for call in calls:
        assert call.backend == "cuda"
        assert re.fullmatch(kernels[call.op].format(str(dtype).removeprefix("torch.")), call.kernel)
    ops = [call.op for call in calls]
    assert ops.count("decode") == CONFIG.num_layers * NUM_TOKENS and ops.count("int8_matmul") == LINEARS * NUM_TOKENS

    composite = generate("torch", model, dtype, cache, follow=generated.tokens)
    with fastattn.use_backend("torch"):
        oracle = logits_uncached(copy.deepcopy(model).double(), PROMPTS, generated.tokens)
    assert torch.equal(generated.tokens, generated.logits.argmax(-1)) and len(generated.tokens.unique()) > NUM_TOKENS
    # This bounds what both lose to rounding, int8's included: a cache that loses tokens moves logits by more.
    assert worst_error(composite.logits, oracle) < oracle.abs().max() / 10
    for step in range(NUM_TOKENS):
        logits = (each[:, step] for each in (generated.logits, oracle, composite.logits))
        check_against_oracle(f"logits of step {step}", *logits)


@each_dtype
def test_without_a_cache(model: Decoder, dtype: torch.dtype) -> None:
    """The attention kernel reads the whole text again for every token, as when the demo checks its generation."""
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9], [2, 6, 5]], device=DEVICE)
    options = train_decoder.Options(device=torch.device(DEVICE), dtype=dtype)
    found = []
    with train_decoder.autocast(options):
        for backend in ("cuda", "torch"):
            with checked(seed=3), fastattn.use_backend(backend), fastattn.record() as calls:
                found.append(logits_uncached(model, PROMPTS, tokens))
            assert {(call.op, call.backend) for call in calls} == {("attention", backend), ("int8_matmul", backend)}
    with fastattn.use_backend("torch"):
        oracle = logits_uncached(copy.deepcopy(model).double(), PROMPTS, tokens)
    check_against_oracle("logits", found[0], oracle, found[1])
