"""Runs the int8 matmuls on each family of kernels: CUDA C++ for sm_80, CUDA C++ for Hopper, and Triton."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import int8_cases
from cuda_kernels import EMULATED, HAS_KERNELS, NEEDS_HOPPER, NO_KERNELS, checked
from fastattn import native

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import cuda_runtime, device, launches, options

FORWARD, GRADIENT, INT8_ACTIVATIONS = "int8_matmul", "int8_matmul_grad_input", "int8_matmul_s8"
ARCH = 100  # architecture of the GPU that is emulated for the kernels for sm_80
BEFORE = {INT8_ACTIVATIONS: ("int8_matmul_quantize_tokens_sm90",)}  # kernels that run before Hopper's matmul


@contextlib.contextmanager
def _launching(tile: tuple[int, int], arch: int, num_sms: int, changes: dict[str, Any]) -> Iterator[list[Any]]:
    """Forces a tile (architecture, tokens), turns the emulator's checks on, and yields the list of launches."""
    if not EMULATED:
        with native.forced_int8_tile(*tile):
            yield []
        return
    checks = options.launching(**{"tracked": True, "uninitialised": True, **changes})
    gpu = device.emulated(arch, num_sms=num_sms)
    with native.forced_int8_tile(*tile), gpu, cuda_runtime.raising_faults(), checks, launches.recorded() as found:
        yield found


@contextlib.contextmanager
def running_sm80(num_sms: int = 1, tokens: int = 0, **changes: Any) -> Iterator[list[Any]]:
    """Makes int8 matmuls run on the kernels for sm_80 with the emulator's checks; yields the launches.

    The emulated GPU has ``num_sms`` SMs, on which tile and splits depend; ``tokens`` forces a tile. ``changes`` are
    other options of launches. A B200 runs the kernels for sm_80, and its memory is so fast that splits pay on a few SMs
    already.
    """
    with _launching((80, tokens), ARCH, num_sms, {"seed": 5, **changes}) as found:
        yield found
    assert not EMULATED or any(FORWARD in launched.report.kernel for launched in found)


@contextlib.contextmanager
def running_sm90(op: str, tokens: int, num_sms: int = 2, **changes: Any) -> Iterator[list[Any]]:
    """Makes int8 matmuls run on Hopper's kernel for ``op`` with tiles of ``tokens`` tokens and the emulator's checks;
    yields the launches. ``changes`` are other options of launches."""
    with _launching((90, tokens), 90, num_sms, {"seed": 7, **changes}) as found:
        yield found
    kernels = (*BEFORE.get(op, ()), f"{op}_sm90ILi{tokens}E")
    assert not EMULATED or (found and len(found) % len(kernels) == 0)
    assert all(kernels[i % len(kernels)] in launched.report.kernel for i, launched in enumerate(found))


class Kernels:
    """One family of kernels. Hopper's run with tiles of ``tokens`` tokens; the others choose their own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: Any = torch.ops.fastattn_triton if name == "triton" else torch.ops.fastattn
        self.num_sms = 2 if name == "sm_90" else 1  # Hopper's kernels run in clusters of two CTAs

    def running(
        self, op: str, *, tokens: int = 64, num_sms: int = 0, **changes: Any
    ) -> contextlib.AbstractContextManager[Any]:
        """Turns the emulator's checks on, and says by an error if another kernel runs; gives the launches, if known."""
        if self.name == "triton":
            return checked(**changes)
        if self.name == "sm_80":
            return running_sm80(num_sms or self.num_sms, **changes)
        return running_sm90(op, tokens, num_sms or self.num_sms, **changes)

    def matmul(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        activation: str = "none",
        **how: Any,
    ) -> Tensor:
        with self.running(FORWARD, **how):
            out: Tensor = self.ops.int8_matmul(x, weight, scale, bias, residual, activation)
        return out

    def grad_input(self, grad_out: Tensor, weight: Tensor, scale: Tensor, **how: Any) -> Tensor:
        with self.running(GRADIENT, **how):
            gradient: Tensor = self.ops.int8_matmul_grad_input(grad_out, weight, scale, False)[0]
        return gradient

    def check_forward(self, *arguments: Any, how: dict[str, Any] | None = None, **named: Any) -> Tensor:
        """Compares a product with the oracle; ``how``: the arguments of `running`."""
        with self.running(FORWARD, **(how or {})):
            return int8_cases.check_forward(self.ops.int8_matmul, *arguments, **named)

    def check_gradients(self, *arguments: Tensor, **how: Any) -> Tensor:
        """Compares the gradients of the input and of a bias with the oracle, and returns the input's."""
        with self.running(GRADIENT, **how):
            return int8_cases.check_grad_input(self.ops.int8_matmul_grad_input, *arguments)

    def check_int8_activations(self, *arguments: Any, activation: str = "none", **how: Any) -> Tensor:
        """Compares a product of int8 tokens with the oracle."""
        x, weight, scale, bias, residual = (*arguments, None, None)[:5]
        with self.running(INT8_ACTIVATIONS, **how):
            out: Tensor = self.ops.int8_matmul(x, weight, scale, bias, residual, activation, True)
        int8_cases.assert_near_int8_oracle(out, x, weight, scale, bias, residual, activation)
        return out


_NEEDS_CUDA = pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
_MARKS = {"sm_80": (_NEEDS_CUDA,), "sm_90": (_NEEDS_CUDA, NEEDS_HOPPER), "triton": ()}


def on(*names: str, slow: tuple[str, ...] = ()) -> Any:
    """Runs a test on these families of kernels, and on those in ``slow`` where time allows."""
    given = [pytest.param(name, marks=_MARKS[name]) for name in names]
    given += [pytest.param(name, marks=(*_MARKS[name], pytest.mark.slow)) for name in slow]
    return pytest.mark.parametrize("kernels", given, indirect=True)
