"""Tests interfaces of other packages on CUDA tensors: flash-attn's, transformers', and torch's own flash operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import fastattn.integrations.flash_attn as flash_attn
import fastattn.integrations.transformers as integration
from fastattn import reference
from oracle import check_against_oracle
from tiny_models import make_model, tokens

pytestmark = pytest.mark.filterwarnings("error:fastattn runs this call in PyTorch")


def draw(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half().cuda().requires_grad_(grad)


def check(name: str, out: Tensor, tensors: list[Tensor], **options: Any) -> None:
    """Compares with the oracle; ``out`` and the tensors are ``[B, S, H, D]``."""
    narrow = [tensor.detach().cpu().transpose(1, 2) for tensor in tensors]
    exact = reference.attention(*(tensor.double() for tensor in narrow), **options)[0]
    check_against_oracle(name, out.transpose(1, 2), exact, reference.attention(*narrow, **options)[0])


def test_flash_attn_functions() -> None:
    q, k, v = draw(2, 30, 4, 64, grad=True), draw(2, 40, 2, 64, grad=True), draw(2, 40, 2, 64, grad=True)
    out = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(20, 0))
    check("func", out, [q, k, v], window=(20, 0))
    out.float().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v))
    offsets = torch.tensor([0, 12, 30], dtype=torch.int32, device="cuda")
    packed = flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, 18, 18, causal=True)
    check("varlen", packed[None, :12], [q[:1, :12]] * 3, window=(-1, 0))


def test_flash_attn_with_kvcache_over_pages() -> None:
    q, new = draw(2, 1, 4, 64), draw(2, 1, 2, 64)
    pages = [draw(8, 16, 2, 64), draw(8, 16, 2, 64) * 0.5]
    table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([20, 7], dtype=torch.int32, device="cuda")
    out = flash_attn.flash_attn_with_kvcache(
        q, *pages, k=new, v=new, cache_seqlens=lengths, block_table=table, causal=True
    )
    for i, length in enumerate((21, 8)):
        keys, values = (cache[table[i].long()].flatten(0, 1)[None, :length] for cache in pages)
        assert torch.equal(keys[0, -1], new[i, 0])
        check(f"sequence {i}", out[i : i + 1], [q[i : i + 1], keys, values])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_transformers_generates(family: str) -> None:
    """Greedy tokens equal eager's for a padded batch. fastattn's int8 cache works, too. No call runs in PyTorch."""
    integration.register()
    eager, ours = (
        make_model(family, name, head_dim=16).eval().to("cuda", torch.float16) for name in ("eager", "fastattn")
    )
    inputs = {name: tensor.cuda() for name, tensor in tokens("left").items()}
    options = {"max_new_tokens": 4, "do_sample": False}
    with fastattn.record() as calls:
        got = ours.generate(**inputs, **options)
    assert calls and {call.backend for call in calls} <= {"cuda", "triton"}
    expected = eager.generate(**inputs, **options)
    assert torch.equal(got, expected)
    batch, length = inputs["input_ids"].shape
    cache = integration.Cache(ours.config, batch_size=batch, max_length=length + 8, dtype="int8")
    assert ours.generate(**inputs, past_key_values=cache, **options).shape == expected.shape


@pytest.fixture
def _torch_flash() -> Iterator[None]:
    from fastattn.integrations import torch_flash

    torch_flash.enable()
    yield
    torch_flash.disable()


HAS_HOOK = [int(part) for part in torch.__version__.split(".")[:2]] >= [2, 13]


@pytest.mark.skipif(HAS_HOOK, reason="torch 2.13 has the hook")
def test_torch_without_the_hook_is_refused() -> None:
    from fastattn.integrations import torch_flash

    with pytest.raises(RuntimeError, match=r"needs torch 2\.13 or later"):
        torch_flash.enable()


@pytest.mark.skipif(not HAS_HOOK, reason="torch_flash needs torch 2.13")
@pytest.mark.usefixtures("_torch_flash")
def test_torchs_flash_operators() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (draw(1, 2, 40, 64, grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), fastattn.record() as calls:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.sum().backward()
    assert calls
    check("sdpa", out.transpose(1, 2), [tensor.transpose(1, 2) for tensor in (q, k, v)], window=(-1, 0))
