"""int8 weights and the linear layer over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import quantization, reference, run
from fastattn.activations import ACTIVATIONS, GATED, result_columns
from fastattn.checks import (
    FLOATING,
    check_choice,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    device_checks_are_on,
    expect,
    is_distributed,
    mapped_size,
    needs_gradient,
)
from fastattn.dispatch.call import Call
from fastattn.dispatch.choose import choose
from fastattn.dispatch.reasons import only_torch_handles
from fastattn.dispatch.recording import note
from fastattn.errors import InputError
from fastattn.functional import int8_on_cpu
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.functional.checked_once import CheckedOnce
from fastattn.functional.int8_tensor import Int8Tensor, replaces_function, replaces_operator
from fastattn.functional.int8_weight import Int8Weight
from fastattn.ops.int8_matmul import GradInputArguments, Int8MatmulArguments

ACTIVATION_CHOICES = (None, *(name for name in ACTIVATIONS if name != "none"))
INPUT_PRECISIONS = ("16bit", "int8")


def int8_linear(
    x: Tensor,
    weight: Int8Weight | Int8Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    input_precision: str = "16bit",
) -> Tensor:
    """Returns ``activation(x @ weight^T + bias) + residual``; the int8 weight is dequantised on the fly.

    Everything is computed in at least float32 and rounded to the dtype of ``x`` once, at the end (with gradients, once
    more before the activation and the residual). cuBLAS may compute a plain product of many tokens, as
    ``fastattn.explain`` tells. Then the weight is first rounded, as by ``weight.dequantize``, and so are partial sums
    where PyTorch lets cuBLAS round them (docs/concepts.md). Autocast is honoured as by ``F.linear``.

    Args:
        x: floating ``[..., K]``.
        weight: from ``quantize_int8``, ``[N, K]``, or the ``weight`` of an ``fastattn.nn.Int8Linear``. If its rows are
            sharded (by ``ColwiseParallel``; with ``"swiglu"`` by that of ``fastattn.distributed``, ``fused=2``), each
            rank takes its own rows. Then ``x`` is a DTensor, as ``PrepareModuleInput`` makes it, and so is the result.
        bias: ``[N]`` in the dtype of ``x``.
        activation: None, ``"relu"``, ``"gelu"`` (exact), ``"gelu_tanh"``, ``"silu"`` or ``"swiglu"``. The last is gated
            and takes a fused weight, whose first N / 2 rows are the gate's and the others the up projection's (as
            ``gate_up_proj`` of Hugging Face's models): ``silu(x @ gate^T + …) * (x @ up^T + …)``, N / 2 columns.
        residual: ``[..., N]`` (``[..., N / 2]`` with ``"swiglu"``) in the dtype of ``x``, added last.
        input_precision: ``"16bit"`` computes with ``x`` as it is; ``"int8"`` first rounds each row of it to symmetric
            int8 (the gradient passes straight through).

    Returns:
        ``[..., N]`` (``[..., N / 2]`` with ``"swiglu"``) in the dtype of ``x``, differentiable in ``x``, ``bias`` and
        ``residual``.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong; with ``FASTATTN_CHECK=1`` also scales that
            are not finite.
    """
    if isinstance(weight, Int8Tensor):
        weight = weight.int8_weight
    if not isinstance(weight, Int8Weight):
        if is_distributed(weight):
            from fastattn.functional.int8_sharded import linear_over_sharded

            return linear_over_sharded(x, weight, bias, activation, residual, input_precision)
        raise TypeError(f"weight: expected an Int8Weight (see quantize_int8), got {type(weight).__name__}")
    return linear_over(x, weight.data, weight.scale, bias, activation, residual, input_precision)


def linear_over(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    input_precision: str = "16bit",
) -> Tensor:
    """Like ``int8_linear``, over the data and scales of a weight that is known to be sound."""
    check_tensor("x", x)
    check_tensor("bias", bias, optional=True)
    check_tensor("residual", residual, optional=True)
    for name, option in (("activation", activation), ("input_precision", input_precision)):
        if not isinstance(option, str) and (option is not None or name == "input_precision"):
            raise TypeError(f"{name}: expected a str, got {type(option).__name__}")
    cast = autocast_dtype(x.device.type)
    if cast is not None:
        x = autocast_to(cast, x)
        bias = None if bias is None else autocast_to(cast, bias)
        residual = None if residual is None else autocast_to(cast, residual)
    if x.is_nested:
        return _nested_linear(x, data, scale, bias, activation, residual, input_precision)
    call = _checked_calls.get((x, data, scale, bias, residual), (activation, input_precision))
    if device_checks_are_on():
        expect(bool(scale.isfinite().all()), "weight.scale", "finite scales", "NaN or infinity")

    choice = choose(call)
    activation = activation or "none"
    if choice.backend == "torch":
        with without_autocast(x.device.type):
            in_blocks = int8_on_cpu.can_multiply(scale, x, data, bias, residual)
            y = reference.int8_linear(
                x,
                data,
                scale,
                bias,
                activation,
                residual,
                input_precision,
                product=int8_on_cpu.product if in_blocks else None,
            )
    else:
        arguments = Int8MatmulArguments(x, data, scale, bias, residual, activation, input_precision == "int8")
        y = run.int8_linear(choice, arguments, "gradients" in call.features)
    note(call.op, choice.backend, choice.kernel)
    return y


@replaces_function(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replaces ``F.linear`` over an ``Int8Tensor``."""
    if not isinstance(weight, Int8Tensor):
        raise InputError("F.linear: expected an int8 weight as weight only, got one as input or bias")
    return int8_linear(input, weight, bias)


@replaces_operator(torch.ops.aten.linear.default)
def _linear_operator(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _linear(input, weight, bias)


@replaces_operator(torch.ops.aten.mm.default)
def _mm(op: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``x @ weight.t()``, as DTensor spells a linear layer, and ``grad @ weight`` in its backward pass."""
    return _addmm(op, None, x, weight)


@replaces_operator(torch.ops.aten.addmm.default)
def _addmm(op: Any, bias: Tensor | None, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    is_plain = not isinstance(x, Int8Tensor) and not isinstance(bias, Int8Tensor) and (beta, alpha) == (1, 1)
    if not is_plain or not isinstance(weight, Int8Tensor) or weight.form == "flat":
        raise InputError(f"{op}: expected an int8 weight as the last factor only; dequantize() gives a floating tensor")
    if weight.form == "transposed":
        return linear_over(x, weight.int8_data, weight.int8_scale, bias)
    return _grad_input(x, weight.int8_data, weight.int8_scale)


def _grad_input(grad_out: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    """Returns ``grad_out [M, N] @ dequantize(weight [N, K])``."""
    (rows, columns), groups = data.shape, scale.shape[1]
    features = frozenset({"gradients", "group scales"} if groups > 1 else {"gradients"})
    sizes = (grad_out.shape[0], rows, columns, columns // groups if groups > 1 else 0)
    only_torch = only_torch_handles(grad_out, data, scale)
    parts = "int8_matmul", grad_out.device, grad_out.dtype, 0, 0, features, sizes, only_torch
    choice = choose(Call(*parts, is_input_gradient=True))
    if choice.backend == "torch":
        return grad_out @ quantization.dequantize_int8(data, scale, grad_out.dtype)
    return run.int8_grad_input(choice, GradInputArguments(grad_out, data, scale, bias_grad=False))


def _nested_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    input_precision: str,
) -> Tensor:
    """Runs nested tensors through PyTorch's linear layer, which checks them: they lack shapes and most operators."""
    check_dtype("x", x, FLOATING)
    check_choice("activation", activation, ACTIVATION_CHOICES)
    expect(input_precision == "16bit", "input_precision", "'16bit' for a nested x", repr(input_precision))
    _check_gated(activation, data.shape[0])
    call = Call("int8_matmul", x.device, x.dtype, 0, 0, frozenset(), (), only_torch_handles(x))
    choice = choose(call)
    y = F.linear(x, quantization.dequantize_int8(data, scale, x.dtype), bias)
    y = ACTIVATIONS[activation or "none"](y)
    y = y if residual is None else y + residual
    note(call.op, choice.backend, choice.kernel)
    return y


def _check_gated(activation: str | None, rows: int) -> None:
    """Checks that the weight of a gated activation has two equal halves."""
    if activation in GATED:
        halves = "the gate's rows, then as many of the up projection"
        expect(rows % 2 == 0, "weight", f"an even N for {activation!r}, {halves}", f"N = {rows}")


def _check_call(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Call:
    x, data, scale, bias, residual = tensors
    activation, input_precision = options
    rows, columns = data.shape
    check_dtype("x", x, FLOATING)
    expect(x.dim() >= 1 and x.shape[-1] == columns, "x", f"shape [..., K] with K = {columns}", list(x.shape))
    expect(data.device == x.device, "weight", f"a weight on {x.device} like x", f"one on {data.device}")
    check_choice("activation", activation, ACTIVATION_CHOICES)
    _check_gated(activation, rows)
    features = set()
    if bias is not None:
        check_shape("bias", bias, (rows,), "[N]")
        check_dtype("bias", bias, (x.dtype,))
        check_same_device("bias", bias, x.device)
        features.add("bias")
    if residual is not None:
        columns_of_y = result_columns(activation, rows)
        meaning = "[..., N]" if columns_of_y == rows else "[..., N / 2]"
        check_shape("residual", residual, (*x.shape[:-1], columns_of_y), meaning)
        check_dtype("residual", residual, (x.dtype,))
        check_same_device("residual", residual, x.device)
        features.add("residual")
    if activation is not None:
        features.add(activation if activation in GATED else "activation")
    check_choice("input_precision", input_precision, INPUT_PRECISIONS)
    if input_precision == "int8":
        features.add("int8 activations")
    if scale.shape[1] > 1:
        features.add("group scales")
    if torch.is_grad_enabled() and any(map(needs_gradient, (x, bias, residual))):
        features.add("gradients")
    into_the_kernel = (x,) if "gradients" in features else (x, residual)
    rows_of_x = x.shape[:-1].numel() * mapped_size(*into_the_kernel)
    return Call(
        "int8_matmul",
        x.device,
        x.dtype,
        0,
        0,
        frozenset(features),
        (rows_of_x, rows, columns, columns // scale.shape[1] if scale.shape[1] > 1 else 0),
        only_torch_handles(x, data, scale, bias, residual),
    )


_checked_calls = CheckedOnce(_check_call)
