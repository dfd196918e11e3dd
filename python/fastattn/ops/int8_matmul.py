"""Defines the operators ``int8_matmul`` and ``int8_matmul_grad_input``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import native
from fastattn.activations import result_columns
from fastattn.call import Int8Call
from fastattn.checks import mapped_size
from fastattn.dispatch.device import kernel_facts
from fastattn.dispatch.recording import is_recording, note
from fastattn.layout import sum_over_tokens
from fastattn.ops.flops import matmul_flops
from fastattn.ops.registration import apply, in_front, refuse_mapped, register


class Int8Backward(NamedTuple):
    """Holds a call of ``int8_matmul_grad_input``; ``bias_grad`` says whether the bias's gradient is wanted too."""

    grad_out: Tensor
    weight: Tensor
    scale: Tensor
    bias_grad: bool = False


def int8_grad_input(backend: str, backward: Int8Backward) -> Tensor:
    """Returns ``grad_out @ dequantize(weight)``, for ``Int8Tensor`` and DTensor, whose backward pass calls ``mm``."""
    grad_input: Tensor = int8_matmul_grad_input(backend, backward)[0]
    _note_backward(backend, backward)
    return grad_input


def _note_backward(backend: str, backward: Int8Backward) -> None:
    if is_recording():
        note("int8_matmul backward", backend, backward_kernel(backend, backward))


def differentiable_int8_product(backend: str, call: Int8Call) -> Tensor:
    """Returns ``x @ dequantize(weight)^T + bias``, without activation and residual, differentiable in x and bias.

    The gradient passes straight through the rounding of ``int8_activations``.
    """
    return apply(_Int8Product, backend, *call[:4], call.input_precision)


class _Int8Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        backend: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, input_precision: str
    ) -> Tensor:
        return int8_matmul(backend, Int8Call(x, weight, scale, bias, None, "none", input_precision))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backend, _, weight, scale, bias, _ = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(weight, scale)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        weight, scale = ctx.saved_tensors
        _, needs_x, _, _, needs_bias, _ = ctx.needs_input_grad
        needs_bias = ctx.has_bias and needs_bias
        if not needs_x:
            return None, None, None, None, sum_over_tokens(grad_out) if needs_bias else None, None
        backward = Int8Backward(grad_out, weight, scale, needs_bias)
        grad_x, grad_bias = int8_matmul_grad_input.run_in_backward(ctx.backend, backward)
        _note_backward(ctx.backend, backward)
        return None, grad_x, None, None, grad_bias if needs_bias else None, None


def backward_kernel(backend: str, backward: Int8Backward) -> str:
    """Returns the name of the kernel that ``int8_matmul_grad_input`` launches."""
    if backend == "triton":
        return "int8_matmul.grad_input_kernel"
    grad_out, (outputs, depth), gpu = backward.grad_out, backward.weight.shape, kernel_facts(backward.weight.device)
    samples = mapped_size(grad_out)
    product = native.Int8Product(
        "int8_matmul_grad_input",
        grad_out.dtype,
        has_groups=backward.scale.shape[1] > 1,
        has_epilogue=backward.bias_grad and samples == 1,
        tokens=samples * math.prod(grad_out.shape[:-1]),
        outputs=depth,
        depth=outputs,
    )
    return native.int8_matmul_kernel(product, gpu.arch, gpu.num_sms) or "no kernel"


def _fake_grad_input(given: Any) -> tuple[Tensor, Tensor]:
    grad_out, (rows, columns) = given.grad_out, given.weight.shape
    return grad_out.new_empty((*grad_out.shape[:-1], columns)), grad_out.new_empty(rows if given.bias_grad else 0)


def _flops(given: Any) -> int:
    """Counts the FLOPs of either operator, which multiplies its first argument by the weight."""
    return matmul_flops(math.prod(given[0][:-1]), *given.weight)


# --- vmap: any leading dimensions of x are rows to the kernels ------------------------------------------------------


def _vmap_matmul(overload: torch._ops.OpOverload, given: Any, dims: Any, size: int) -> Any:
    refuse_mapped(dims, "weight", "scale", "bias")
    x = in_front(given.x, dims.x, size)
    residual = None if given.residual is None else in_front(given.residual, dims.residual, size)
    return overload(*given._replace(x=x, residual=residual)), 0


def _vmap_grad_input(overload: torch._ops.OpOverload, given: Any, dims: Any, size: int) -> Any:
    """Computes the bias's gradient outside the operator, which would sum it over all samples."""
    refuse_mapped(dims, "weight", "scale")
    grad_out = in_front(given.grad_out, dims.grad_out, size)
    grad_input, nothing = overload(*given._replace(grad_out=grad_out, bias_grad=False))
    grad_bias = sum_over_tokens(grad_out, samples=1) if given.bias_grad else nothing.expand(size, 0)
    return (grad_input, grad_bias), (0, 0)


# Returns ``[..., N]``, or half as many columns with a gated activation; not differentiable.
int8_matmul = register(
    "int8_matmul",
    Int8Call,
    triton_module="int8_matmul",
    fake=lambda given: given.x.new_empty(
        (*given.x.shape[:-1], result_columns(given.activation, given.weight.shape[0]))
    ),
    flops=_flops,
    vmap=_vmap_matmul,
)
# Returns the gradients of ``x`` and of the bias (empty unless it is wanted); not differentiable.
int8_matmul_grad_input = register(
    "int8_matmul_grad_input",
    Int8Backward,
    triton_module="int8_matmul",
    fake=_fake_grad_input,
    flops=_flops,
    vmap=_vmap_grad_input,
)
