"""Computes linear layers over int8 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import quantization, reference, run
from fastattn.activations import ACTIVATIONS, GATED, result_columns
from fastattn.call import Int8Call
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
    shown,
    type_name,
)
from fastattn.dispatch.choose import choose
from fastattn.dispatch.reasons import only_torch_handles
from fastattn.dispatch.recording import note
from fastattn.dispatch.request import Request
from fastattn.errors import InputError
from fastattn.functional import (
    int8_on_cpu,
    int8_sharding,  # noqa: F401  (registers operators)
)
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.functional.checked_once import CheckedOnce
from fastattn.functional.distributed_tensors import redistributed_local
from fastattn.functional.int8_tensor import Int8Tensor, replaces_function, replaces_operator
from fastattn.functional.int8_weight import Int8Weight, advice_on_weight
from fastattn.ops.describe import Int8Details, describe_int8, request_for_int8
from fastattn.ops.int8_matmul import Int8Backward, int8_grad_input

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

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
    """Computes ``activation(x @ weight^T + bias) + residual`` with an int8 weight that is dequantised on the fly.

    Everything is computed in at least float32 and rounded once to the dtype of ``x``, at the end. If gradients are
    needed, the product with the bias is also rounded, before the activation and the residual. For many tokens, a weight
    with scales for groups is also rounded to the dtype of ``x`` on Hopper, and any weight is if cuBLAS computes a plain
    product; ``fastattn.explain`` names the kernel. cuBLAS also rounds partial sums if PyTorch's settings let it
    (docs/concepts.md). Autocast applies as to ``F.linear``.

    Args:
        x: floating ``[..., K]``.
        weight: ``[N, K]`` from ``quantize_int8``, or the ``weight`` of a ``fastattn.nn.Int8Linear``. If the weight's
            rows are sharded (by ``ColwiseParallel``, or for ``"swiglu"`` by
            ``fastattn.distributed.ColwiseParallel(fused=2)``), each rank computes with its own rows. In this case,
            ``x`` must be a DTensor, which ``PrepareModuleInput`` can make, and the result is a DTensor.
        bias: ``[N]`` in the dtype of ``x``.
        activation: None, ``"relu"``, ``"gelu"`` (exact), ``"gelu_tanh"``, ``"silu"`` or ``"swiglu"``. ``"swiglu"``
            takes a fused weight: the first N / 2 rows are the gate projection, the last N / 2 rows the up projection
            (as in Hugging Face's ``gate_up_proj``). The result ``silu(x @ gate^T + …) * (x @ up^T + …)`` has N / 2
            columns.
        residual: ``[..., N]`` (``[..., N / 2]`` with ``"swiglu"``) in the dtype of ``x``, added last.
        input_precision: ``"16bit"`` uses ``x`` as it is. ``"int8"`` first rounds each row of ``x`` to symmetric int8;
            the gradient ignores this rounding (straight-through estimator).

    Returns:
        ``[..., N]`` (``[..., N / 2]`` with ``"swiglu"``) in the dtype of ``x``, differentiable in ``x``, ``bias`` and
        ``residual``.

    Raises:
        InputError, TypeError: the host can see that an argument is wrong. With ``FASTATTN_CHECK=1``, scales that are
            not finite also raise.
    """
    if isinstance(weight, Int8Tensor):
        weight = weight.int8_weight
    if not isinstance(weight, Int8Weight):
        if is_distributed(weight):
            return _linear_over_sharded(x, weight, bias, activation, residual, input_precision)
        raise TypeError(f"weight: expected an Int8Weight, got {type_name(weight)}{advice_on_weight(weight)}")
    return linear_over(Int8Call(x, weight.data, weight.scale, bias, residual, activation, input_precision))


def linear_over(call: Int8Call) -> Tensor:
    """Checks and computes a call whose weight and scales are known to fit together."""
    x = call.x
    check_tensor("x", x)
    check_tensor("bias", call.bias, optional=True)
    check_tensor("residual", call.residual, optional=True)
    for name, option in (("activation", call.activation), ("input_precision", call.input_precision)):
        if not isinstance(option, str) and (option is not None or name == "input_precision"):
            names = INPUT_PRECISIONS if name == "input_precision" else ACTIVATION_CHOICES
            raise TypeError(f"{name}: expected one of {', '.join(map(repr, names))}, got {shown(option)}")
    cast = autocast_dtype(x.device.type)
    if cast is not None:
        x = autocast_to(cast, x)
        bias, residual = (autocast_to(cast, tensor) for tensor in (call.bias, call.residual))
        call = call._replace(x=x, bias=bias, residual=residual)
    if x.is_nested:
        return _nested_linear(call)
    call, request = _check_once(call)
    if device_checks_are_on():
        came = "NaN or infinity; quantize_int8 of a finite weight makes finite ones"
        expect(bool(call.scale.isfinite().all()), "weight.scale", "finite scales", came)

    choice = choose(request)
    if choice.backend == "torch":
        assert call.activation is not None
        with without_autocast(x.device.type):
            in_blocks = int8_on_cpu.can_multiply(call.scale, x, call.weight, call.bias, call.residual)
            y: Tensor = reference.int8_linear(
                *call[:4],
                call.activation,
                call.residual,
                call.input_precision,
                product=int8_on_cpu.product if in_blocks else None,
            )
    else:
        y = run.int8_linear(choice, call, "gradients" in request.features)
    note(request.op.name, choice.backend, choice.kernel)
    return y


@replaces_function(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``F.linear`` over an ``Int8Tensor``."""
    if not isinstance(weight, Int8Tensor):
        raise InputError("F.linear: expected a floating input and bias, got an int8 weight; pass its dequantize()")
    return int8_linear(input, weight, bias)


@replaces_operator(torch.ops.aten.linear.default)
def _linear_operator(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _linear(input, weight, bias)


@replaces_operator(torch.ops.aten.mm.default)
def _mm(op: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``x @ weight.t()``, to which DTensor decomposes a linear layer, and ``grad @ weight`` of its backward
    pass."""
    return _addmm(op, None, x, weight)


@replaces_operator(torch.ops.aten.addmm.default)
def _addmm(op: Any, bias: Tensor | None, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    is_plain = not isinstance(x, Int8Tensor) and not isinstance(bias, Int8Tensor)
    if not is_plain or not isinstance(weight, Int8Tensor) or weight.form == "flat":
        raise InputError(
            "matmul: expected x @ weight.t() with a floating x and an int8 weight, got an int8 weight as another "
            "argument; pass its dequantize()"
        )
    came = f"{beta} and {alpha}; scale x and the bias before the call, or pass weight.dequantize()"
    expect((beta, alpha) == (1, 1), "addmm", "beta=1 and alpha=1 over an int8 weight", came)
    if weight.form == "transposed":
        return linear_over(Int8Call(x, weight.int8_data, weight.int8_scale, bias))
    return _grad_input(x, weight.int8_data, weight.int8_scale)


def _grad_input(grad_out: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    """Returns ``grad_out [M, N] @ dequantize(weight [N, K])``."""
    rows, columns = data.shape
    uses = {"gradients": True, "group scales": scale.shape[1] > 1}
    details = Int8Details(grad_out.shape[0], columns, rows, is_input_gradient=True)
    choice = choose(request_for_int8(grad_out, uses, details, only_torch_handles(grad_out, data, scale)))
    if choice.backend == "torch":
        return grad_out @ quantization.dequantize_int8(data, scale, grad_out.dtype)
    return int8_grad_input(choice.backend, Int8Backward(grad_out, data, scale))


def _nested_linear(call: Int8Call) -> Tensor:
    """Runs a call with a nested ``x`` in PyTorch, because a nested tensor has no shape and few operators. ``F.linear``
    checks the shapes."""
    x, activation = call.x, call.activation
    check_dtype("x", x, FLOATING)
    check_choice("activation", activation, ACTIVATION_CHOICES)
    precision = call.input_precision
    came = f"{precision!r}; pass x.values() of a jagged one"
    expect(precision == "16bit", "input_precision", "'16bit' for a nested x", came)
    _check_gated(activation, call.weight.shape[0])
    request = request_for_int8(x, {}, None, only_torch_handles(x))
    choice = choose(request)
    y = F.linear(x, quantization.dequantize_int8(call.weight, call.scale, x.dtype), call.bias)
    y = ACTIVATIONS[activation or "none"](y)
    y = y if call.residual is None else y + call.residual
    note(request.op.name, choice.backend, choice.kernel)
    return y


def _check_gated(activation: str | None, rows: int) -> None:
    """Checks that the weight has an even number of rows if the activation is gated."""
    if activation in GATED:
        halves = f"an even N for {activation!r}: the gate's rows, then as many of the up projection"
        expect(rows % 2 == 0, "weight", halves, f"N = {rows}")


def _check_like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    cast_x = f"pass x.to({tensor.dtype}), or " if tensor.dtype in FLOATING else ""
    came = f"{tensor.dtype}; {cast_x}cast it with {name}.to({x.dtype})"
    expect(tensor.dtype == x.dtype, name, f"the dtype of x, {x.dtype}", came)
    check_same_device(name, tensor, x.device)


def _check(call: Int8Call) -> tuple[Int8Call, Request]:
    x, bias, residual, activation = call.x, call.bias, call.residual, call.activation
    rows, columns = call.weight.shape
    check_dtype("x", x, FLOATING)
    came = f"{list(x.shape)}; the weight [N, K] is {[rows, columns]}"
    expect(x.dim() >= 1 and x.shape[-1] == columns, "x", f"shape [..., K] with K = {columns}", came)
    device = call.weight.device
    came = f'one on {device}; pass weight.to("{x.device}")'
    expect(device == x.device, "weight", f"a weight on {x.device} like x", came)
    check_choice("activation", activation, ACTIVATION_CHOICES)
    _check_gated(activation, rows)
    if bias is not None:
        check_shape("bias", bias, (rows,), "[N]")
        _check_like_x("bias", bias, x)
    if residual is not None:
        result = result_columns(activation, rows)
        meaning = "[..., N]" if result == rows else "[..., N / 2]"
        check_shape("residual", residual, (*x.shape[:-1], result), meaning)
        _check_like_x("residual", residual, x)
    check_choice("input_precision", call.input_precision, INPUT_PRECISIONS)
    checked = call._replace(activation=activation or "none")
    return checked, describe_int8(checked)


_check_once = CheckedOnce(_check, Int8Call, first_option="activation")


# --- a weight whose rows are sharded: each rank computes the columns of its own rows ----------------------------------


def _linear_over_sharded(
    x: Tensor,
    weight: DTensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    input_precision: str,
) -> DTensor:
    """Runs ``int8_linear`` over DTensors. ``bias`` and ``residual`` can be plain tensors that are the same on each
    rank."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not isinstance(x, DTensor):
        # Do not convert x here: the weight might be sharded by FSDP, whose ranks have different x.
        advice = "pass DTensor.from_local(x, weight.device_mesh, [Replicate()])"
        raise TypeError(f"x: expected a DTensor, as the weight is one, got {type_name(x)}; {advice}")
    mesh = weight.device_mesh
    expect(x.device_mesh == mesh, "x", f"a DTensor on the weight's mesh, {mesh}", x.device_mesh)
    own = weight.to_local()
    rows, *others = weight.placements
    has_rows = not others and isinstance(rows, (Shard, _StridedShard)) and rows.dim == 0
    if not has_rows or not isinstance(own, Int8Tensor):
        raise InputError(
            f"weight: expected an int8 weight that is sharded by rows ([Shard(0)], as fastattn.distributed."
            f"ColwiseParallel does it), got {list(weight.placements)}; other layouts run in Int8Linear or F.linear"
        )
    columns: Any = Shard(0) if activation in GATED else rows  # the placement of the result's columns
    if activation in GATED:
        by = f"fastattn.distributed.ColwiseParallel(fused=2), as {activation!r} needs rows of both halves"
        expect(rows == _StridedShard(0, split_factor=2), "weight", f"one that is sharded by {by}", rows)
    last, is_strided = x.dim() - 1, type(columns) is _StridedShard
    columns = _StridedShard(last, split_factor=columns.split_factor) if is_strided else Shard(last)

    def own_part(tensor: Tensor | None, placement: Placement) -> Tensor | None:
        if tensor is None:
            return None
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        return redistributed_local(tensor, [placement], [placement])

    own_x, own_bias = redistributed_local(x, [Replicate()], [Partial()]), own_part(bias, rows)
    own_residual = own_part(residual, columns)
    y = linear_over(Int8Call(own_x, own.int8_data, own.int8_scale, own_bias, own_residual, activation, input_precision))
    shape = torch.Size((*x.shape[:-1], result_columns(activation, weight.shape[0])))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, [columns], run_check=False, shape=shape, stride=stride)
