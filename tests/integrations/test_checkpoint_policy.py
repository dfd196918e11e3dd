"""Tests selective activation checkpointing with the names of fastattn's operators (docs/integrations.md)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastattn
from kernel_device import DEVICE

pytestmark = pytest.mark.usefixtures("emulated_gpu")

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def documented() -> dict[str, Any]:
    """Returns the names that the page's snippet defines."""
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (snippet,) = [snippet for snippet in snippets if "CheckpointPolicy" in snippet]
    names: dict[str, Any] = {}
    exec(snippet, names)
    return names


class Launches(TorchDispatchMode):
    """A mode below the policy, which answers from saved results: it records the operators that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "fastattn" in operator.namespace:
            self.names.append(operator._schema.name.split("::")[1])
        return operator(*args, **(kwargs or {}))


def forcing(backend: str, *contexts: AbstractContextManager[Any]) -> tuple[AbstractContextManager[None], ...]:
    """Returns contexts that also force a backend, even where autograd has a thread of its own."""

    @contextlib.contextmanager
    def with_backend(context: AbstractContextManager[Any]) -> Iterator[None]:
        with fastattn.use_backend(backend), context:
            yield

    return tuple(map(with_backend, contexts))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_policy_saves_what_attention_computed(backend: str, dropout_p: float) -> None:
    if backend == "cuda" and "80" not in fastattn.native.BUILD["archs"]:
        pytest.skip("needs kernels: no nvcc")
    with fastattn.use_backend("torch"):
        contexts = documented()["contexts"]
    x = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0)).half().to(DEVICE).requires_grad_()

    def block(x: Tensor) -> Tensor:
        return fastattn.attention(x * 2, x, x, causal=True, dropout_p=dropout_p) * 3

    def gradient_of(context_fn: Callable[[], Any]) -> Tensor:
        torch.manual_seed(0)
        out = checkpoint(block, x, use_reentrant=False, context_fn=lambda: forcing(backend, *context_fn()))
        return torch.autograd.grad(out.float().square().sum(), x)[0]

    with fastattn.use_backend(backend):
        with Launches() as launches:
            plain = gradient_of(lambda: (contextlib.nullcontext(), contextlib.nullcontext()))
        assert launches.names == ["attention_forward", "attention_forward", "attention_backward"]
        with Launches() as launches:
            selective = gradient_of(contexts)
        assert launches.names == ["attention_forward", "attention_backward"]
        assert torch.equal(selective, plain)
        if dropout_p == 0:
            compiled = torch.compile(
                lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts),
                backend="aot_eager",
                fullgraph=True,
            )
            assert torch.equal(torch.autograd.grad(compiled(x).float().square().sum(), x)[0], plain)
