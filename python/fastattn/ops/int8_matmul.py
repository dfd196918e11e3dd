"""The operators ``int8_matmul`` and ``int8_matmul_grad_input``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import native
from fastattn.activations import result_columns
from fastattn.checks import mapped_size
from fastattn.dispatch.device import kernel_facts
from fastattn.dispatch.recording import is_recording, note
from fastattn.layout import sum_over_tokens
from fastattn.ops.flops import matmul_flops
from fastattn.ops.registration import apply, call, call_in_backward, refuse_mapped, register


class Int8MatmulArguments(NamedTuple):
    """The arguments of ``int8_matmul``: ``activation(x @ dequantize(weight)^T + bias) + residual``.

    ``x`` is ``[..., K]``, ``weight [N, K]`` and ``scale`` ``[1, 1]``, ``[N, 1]`` or ``[N, K / group]``. With
    ``int8_activations``, rows of ``x`` are first rounded to int8.
    """

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str = "none"
    int8_activations: bool = False


class GradInputArguments(NamedTuple):
    """The arguments of ``int8_matmul_grad_input``; ``bias_grad`` says whether the bias's gradient is wanted too."""

    grad_out: Tensor
    weight: Tensor
    scale: Tensor
    bias_grad: bool


def int8_matmul(backend: str, arguments: Int8MatmulArguments) -> Tensor:
    """Returns ``[..., N]``, or half as many columns with a gated activation; not differentiable."""
    y: Tensor = call(backend, "int8_matmul", arguments)
    return y


def int8_matmul_grad_input(backend: str, arguments: GradInputArguments) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``x`` and of the bias, which is empty unless it is wanted; not differentiable."""
    gradients: tuple[Tensor, Tensor] = call(backend, "int8_matmul_grad_input", arguments)
    if is_recording():
        note("int8_matmul backward", backend, backward_kernel(backend, arguments))
    return gradients


def differentiable_int8_product(backend: str, arguments: Int8MatmulArguments) -> Tensor:
    """Returns ``x @ dequantize(weight)^T + bias``, without activation and residual, differentiable in x and bias.

    The gradient passes straight through the rounding of ``int8_activations``.
    """
    x, weight, scale, bias, _, _, int8_activations = arguments
    product: Tensor = apply(_Int8Product, backend, x, weight, scale, bias, int8_activations)
    return product


class _Int8Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        backend: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, int8_activations: bool
    ) -> Tensor:
        return int8_matmul(backend, Int8MatmulArguments(x, weight, scale, bias, int8_activations=int8_activations))

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
        arguments = GradInputArguments(grad_out, weight, scale, needs_bias)
        grad_x, grad_bias = call_in_backward(ctx.backend, "int8_matmul_grad_input", arguments)
        if is_recording():
            note("int8_matmul backward", ctx.backend, backward_kernel(ctx.backend, arguments))
        return None, grad_x, None, None, grad_bias if needs_bias else None, None


def backward_kernel(backend: str, arguments: GradInputArguments) -> str:
    """Returns the name of the kernel that ``int8_matmul_grad_input`` launches."""
    if backend == "triton":
        return "int8_matmul.grad_input_kernel"
    grad_out, (outputs, depth), gpu = arguments.grad_out, arguments.weight.shape, kernel_facts(arguments.weight.device)
    samples = mapped_size(grad_out)
    sizes = samples * math.prod(grad_out.shape[:-1]), depth, outputs
    traits = grad_out.dtype, arguments.scale.shape[1] > 1, arguments.bias_grad and samples == 1
    name = native.int8_matmul_kernel("int8_matmul_grad_input", gpu.arch, gpu.num_sms, *traits, *sizes)
    return name or "no kernel"


def _fake_matmul(*args: Any) -> Tensor:
    given = Int8MatmulArguments(*args)
    return given.x.new_empty((*given.x.shape[:-1], result_columns(given.activation, given.weight.shape[0])))


def _fake_grad_input(*args: Any) -> tuple[Tensor, Tensor]:
    grad_out, weight, _, bias_grad = GradInputArguments(*args)
    grad_bias = grad_out.new_empty(weight.shape[0] if bias_grad else 0)
    return grad_out.new_empty((*grad_out.shape[:-1], weight.shape[1])), grad_bias


def _flops(x: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Counts for both operators: ``x`` is the factor beside the weight, which may be the gradient of the result."""
    return matmul_flops(math.prod(x[:-1]), *weight)


# --- vmap: any leading dimensions of x are rows to the kernels ------------------------------------------------------


def _in_front(tensor: Tensor, mapped: int | None, size: int) -> Tensor:
    """Returns the tensor with the mapped dimension first; a tensor without one is repeated."""
    return tensor.unsqueeze(0).expand(size, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)


def _vmap_matmul(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        given, size = Int8MatmulArguments(*args), info.batch_size
        dims: Any = Int8MatmulArguments(*in_dims)  # type: ignore[arg-type]
        refuse_mapped(dims, "weight", "scale", "bias")
        x = _in_front(given.x, dims.x, size)
        residual = None if given.residual is None else _in_front(given.residual, dims.residual, size)
        return overload(*given._replace(x=x, residual=residual)), 0

    return rule


def _vmap_grad_input(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Makes a rule that sums the bias's gradient itself, as the operator would add up those of all samples."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        given = GradInputArguments(*args)
        dims: Any = GradInputArguments(*in_dims)  # type: ignore[arg-type]
        refuse_mapped(dims, "weight", "scale")
        grad_out = _in_front(given.grad_out, dims.grad_out, info.batch_size)
        grad_input, nothing = overload(*given._replace(grad_out=grad_out, bias_grad=False))
        grad_bias = sum_over_tokens(grad_out, samples=1) if given.bias_grad else nothing.expand(info.batch_size, 0)
        return (grad_input, grad_bias), (0, 0)

    return rule


register(
    "int8_matmul",
    arguments=Int8MatmulArguments,
    triton_module="int8_matmul",
    fake=_fake_matmul,
    flops=_flops,
    vmap=_vmap_matmul,
)
register(
    "int8_matmul_grad_input",
    arguments=GradInputArguments,
    triton_module="int8_matmul",
    fake=_fake_grad_input,
    flops=_flops,
    vmap=_vmap_grad_input,
)
