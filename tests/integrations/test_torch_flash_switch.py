"""Tests the switch of ``torch_flash``: calls that no kernel takes, refusals, and the state after ``disable()``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import MARKS
from fastattn.dispatch.thread_state import thread
from fastattn.integrations import torch_flash
from fastattn.integrations.torch_flash.switch import Overrides
from kernel_device import DEVICE
from torch_flash_cases import DIM, HEADS, NEAR, check_kernels, leaves, packed_sizes, packed_tensors, random

if not torch_flash.is_available():
    pytest.skip("needs torch 2.13 or later", allow_module_level=True)


pytestmark = [*MARKS, pytest.mark.usefixtures("flash_overrides")]

aten = torch.ops.aten


# --- what was there before --------------------------------------------------------------------------------------------


@pytest.fixture
def before() -> Iterator[list[str]]:
    """Installs another implementation under ours. It records its calls, and runs torch's function as installed."""
    names: list[str] = []
    library = torch.library.Library("aten", "IMPL", DEVICE.upper())

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        names.append("forward")
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        lse = torch.full(query.shape[:3], -math.inf)
        state = torch.zeros(2, dtype=torch.int64).view(torch.uint64)
        return out, lse, None, None, query.shape[2], key.shape[2], state, state[0], query.new_empty(0)

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        names.append(f"backward, lse {args[5].flatten()[0]}")
        return args[1] * 0, args[2] * 0, args[3] * 0

    library.impl("_scaled_dot_product_flash_attention", forward, allow_override=True)
    library.impl("_scaled_dot_product_flash_attention_backward", backward, allow_override=True)
    yield names
    library._destroy()


@pytest.mark.skipif(DEVICE != "cpu", reason="would replace what a GPU has")
def test_what_no_kernel_takes_goes_to_what_was_there(before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_FALLBACK", "silent")
    overrides = Overrides("CPU")
    try:
        query = torch.randn(1, 2, 3, 8, requires_grad=True)  # float32
        wide = random(1, 2, 3, 264).requires_grad_()
        for tensor, backend in ((query, None), (wide, None), (random(1, 2, 3, DIM).requires_grad_(), "torch")):
            monkeypatch.setattr(thread, "forced", backend)
            out, *_ = aten._scaled_dot_product_flash_attention(tensor, tensor, tensor)
            torch.testing.assert_close(out, torch._C._nn.scaled_dot_product_attention(tensor, tensor, tensor))
            monkeypatch.setattr(thread, "forced", None)
            out.sum().backward()
        assert before == ["forward", "backward, lse inf"] * 3
        monkeypatch.setattr(thread, "forced", None)
        fastattn.install()  # with both switches on, the lower calls the upper
        try:
            with fastattn.record() as calls:
                aten._scaled_dot_product_flash_attention(query, query, query)
                monkeypatch.setattr(thread, "forced", "cuda")
                half = random(1, 2, 3, DIM)
                aten._scaled_dot_product_flash_attention(half, half, half)
        finally:
            fastattn.uninstall()
        assert before[6:] == ["forward"]
        assert [call.backend for call in calls] == ["torch", "cuda"]
    finally:
        overrides.remove()
    half = random(1, 2, 3, DIM)
    aten._scaled_dot_product_flash_attention(half, half, half)
    assert before[7:] == ["forward"]


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has kernels of torch's")
def test_where_nothing_was_there_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "forced", None)
    monkeypatch.setenv("FASTATTN_FALLBACK", "silent")
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(fastattn.InputError, match=r"aten::_scaled_dot_product_flash_attention: no kernel.*on cpu"):
        aten._scaled_dot_product_flash_attention(query, query, query)


def test_a_detour_is_announced(before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "forced", None)
    monkeypatch.setenv("FASTATTN_FALLBACK", "error")
    overrides = Overrides(DEVICE.upper())
    try:
        with pytest.raises(fastattn.InputError, match=r"would run in PyTorch.*float32"):
            aten._scaled_dot_product_flash_attention(*(torch.zeros(1, 1, 1, 8, device=DEVICE),) * 3)
    finally:
        overrides.remove()
    assert before == []


def test_explain_names_the_kernel_of_varlen_attn() -> None:
    explanation = fastattn.explain(torch_flash.varlen_attn, *packed_tensors(), *packed_sizes(), enable_gqa=True)
    assert explanation.backend == "cuda"


def test_torchs_choice_of_backends_does_not_stop_us() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = random(1, 2, 3, DIM)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), fastattn.record() as calls:
        aten._scaled_dot_product_flash_attention(query, query, query)
    assert [call.backend for call in calls] == ["cuda"]


@pytest.mark.skipif(DEVICE == "cpu", reason="torch chooses its flash operators on a GPU alone")
def test_torchs_function_reaches_the_kernels() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch_sdpa = torch._C._nn.scaled_dot_product_attention
    inputs = leaves(*(random(2, HEADS, 64, 64, seed=seed) for seed in range(3)))
    torch_flash.enable()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), fastattn.record() as calls:
            out = torch_sdpa(*inputs, is_causal=True)
            grads = torch.autograd.grad(out.float().sum(), inputs)
        check_kernels(calls)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), fastattn.record() as calls:
            with fastattn.use_backend("torch"):
                wanted = torch_sdpa(*inputs, is_causal=True)
                dropped = torch_sdpa(*inputs, dropout_p=0.5)
            wanted_grads = torch.autograd.grad(wanted.float().sum(), inputs)
            torch.autograd.grad(dropped.float().sum(), inputs)
        assert calls == []
    finally:
        torch_flash.disable()
    torch.testing.assert_close((out, *grads), (wanted, *wanted_grads), **NEAR)


# --- the switch -------------------------------------------------------------------------------------------------------


class _Other:
    active = 0

    def __init__(self) -> None:
        _Other.active += 1

    def remove(self) -> None:
        _Other.active -= 1


def test_disable_restores_what_was_there() -> None:
    from torch.nn.attention import _registry as registry

    name = "aten::_scaled_dot_product_flash_attention"
    try:
        registry.register_flash_attention_impl("other", register_fn=_Other)
        registry.activate_flash_attention_impl("other")
        dumped = torch._C._dispatch_dump(name)
        torch_flash.enable()
        torch_flash.enable()
        assert registry.current_flash_attention_impl() == "fastattn" and _Other.active == 0
        assert torch._C._dispatch_dump(name) != dumped
        torch_flash.disable()
        assert registry.current_flash_attention_impl() == "other" and _Other.active == 1
        assert torch._C._dispatch_dump(name) == dumped
        torch_flash.disable()
        assert registry.current_flash_attention_impl() == "other"

        torch_flash.enable()
        registry.activate_flash_attention_impl("other")  # another package's decision
        torch_flash.disable()
        assert registry.current_flash_attention_impl() == "other" and _Other.active == 1
        assert torch._C._dispatch_dump(name) == dumped
    finally:
        registry.restore_flash_attention_impl(_raise_warn=False)
        registry._FLASH_ATTENTION_IMPLS.pop("other", None)


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(RuntimeError, match=r"needs torch 2\.13 or later, got 2\.12\.1"):
        torch_flash.enable()


# --- refused ----------------------------------------------------------------------------------------------------------


def dense() -> tuple[Any, ...]:
    return (*(random(1, 3, HEADS, DIM) for _ in range(3)), None, None, 3, 3, 0.0, False)


def packed(**changes: Any) -> tuple[Any, ...]:
    return *packed_tensors(), *packed_sizes(), 0.0, False


def used() -> Tensor:
    return torch.tensor([4, 4, 10], dtype=torch.int32, device=DEVICE)


REFUSED: dict[str, Callable[[], Any]] = {
    r"return_debug_mask: expected False": lambda: aten._flash_attention_forward(*dense(), True),
    r"seqused_k: expected None with tensors \[B": lambda: aten._flash_attention_forward(
        *dense(), False, seqused_k=used()
    ),
    r"seqused_k: expected None if query, key or value requires": lambda: aten._flash_attention_forward(
        packed()[0].requires_grad_(), *packed()[1:], False, seqused_k=used()
    ),
    r"alibi_slopes: expected None if query, key or value requires": lambda: aten._flash_attention_forward(
        packed()[0].requires_grad_(), *packed()[1:], False, alibi_slopes=torch.ones(HEADS, device=DEVICE)
    ),
    r"cum_seq_k: expected the offsets": lambda: aten._flash_attention_forward(
        *packed()[:4], None, *packed()[5:], False
    ),
    r"dropout_p: expected 0": lambda: aten._flash_attention_forward_no_dropout_inplace(
        packed()[0], *packed()[:7], 0.5, False, False
    ),
    r"out: expected the query's shape": lambda: aten._flash_attention_forward_no_dropout_inplace(
        packed()[1], *packed(), False
    ),
    r"key: expected the query's 4 heads": lambda: torch_flash.varlen_attn(*packed()[:7]),
    r"value: expected the query's head dim 16": lambda: aten._scaled_dot_product_flash_attention(
        random(1, 2, 3, DIM), random(1, 2, 3, DIM), random(1, 2, 3, 8)
    ),
    r"query: expected .*\[total_q, Hq, D\]": lambda: torch_flash.varlen_attn(packed()[0][0], *packed()[1:7]),
    r"key: expected .*\[num_pages, page_size, Hkv, D\]": lambda: torch_flash.varlen_attn(
        *packed()[:7], seqused_k=used(), block_table=used()[:, None]
    ),
    r"seqused_k: expected .*int32": lambda: torch_flash.varlen_attn(*packed()[:7], seqused_k=used().long()),
    r"seqused_k: expected .*\[B\]": lambda: torch_flash.varlen_attn(*packed()[:7], seqused_k=used()[:2]),
    r"the dtype is torch.float32": lambda: aten._scaled_dot_product_flash_attention(*(torch.zeros(1, 1, 1, 8),) * 3),
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.skipif(DEVICE != "cpu", reason="what torch itself refuses, it words itself")
def test_what_is_refused_is_named(words: str) -> None:
    with pytest.raises(fastattn.InputError, match=words):
        REFUSED[words]()
