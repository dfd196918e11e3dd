"""int8 weights and the linear layer over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from fastattn import reference
from fastattn.activations import ACTIVATIONS, GATED, result_columns
from fastattn.checks import (
    FLOATING,
    check_choice,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    device_checks_are_on,
    expect,
)
from fastattn.dispatch.choose import Call, choose, only_torch_handles
from fastattn.dispatch.plans import Plans
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.ops import operators as ops
from fastattn.run.layout import has_aligned_rows, with_aligned_rows

GROUP_SIZES = (32, 64, 128)
GRANULARITIES: tuple[str | int, ...] = ("tensor", "channel", *GROUP_SIZES)
ACTIVATION_CHOICES = (None, *(name for name in ACTIVATIONS if name != "none"))
ACTIVATION_PRECISIONS = ("16bit", "int8")


@dataclass(frozen=True, eq=False, repr=False)
class Int8Weight:
    """A weight ``[N, K]`` as int8 and scales: element ``(n, k)`` is ``data[n, k] * scale[n or 0, k // group or 0]``.

    Args:
        data: int8 ``[N, K]``, rows contiguous, from -127 to 127. Those of ``quantize_int8`` start at multiples of 16
            bytes, with room behind each; other data is copied so at each call of a CUDA C++ kernel.
        scale: float32: ``[1, 1]`` for granularity ``"tensor"``, ``[N, 1]`` for ``"channel"``, ``[N, K / group]`` for a
            group.
        granularity: ``"tensor"``, ``"channel"`` or the size of a group along K: 32, 64 or 128.

    Raises:
        InputError, TypeError: the three do not fit together.
    """

    data: Tensor
    scale: Tensor
    granularity: str | int = "channel"

    def __post_init__(self) -> None:
        check_tensor("data", self.data)
        check_rank("data", self.data, "[N, K]")
        check_dtype("data", self.data, (torch.int8,))
        has_rows = self.data.stride(1) == 1 or self.data.shape[1] <= 1
        expect(has_rows, "data", "contiguous rows", f"strides {self.data.stride()}")
        check_granularity(self.granularity, self.data.shape[1])
        check_tensor("scale", self.scale)
        check_dtype("scale", self.scale, (torch.float32,))
        check_same_device("scale", self.scale, self.data.device)
        check_shape("scale", self.scale, scale_shape(self.data.shape, self.granularity), f"for {self.granularity!r}")

    @property
    def shape(self) -> torch.Size:
        """``[N, K]``, as ``nn.Linear.weight.shape``."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """What the int8 data and the scales take, in bytes, without room behind rows."""
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]`` in ``dtype``."""
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: expected a torch.dtype, got {type(dtype).__name__}")
        check_choice("dtype", dtype, FLOATING)
        return reference.dequantize_int8(self.data, self.scale, dtype)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Int8Weight:
        """The same weight on ``device``. The dtypes stay: int8 and float32 scales are what the kernels read."""
        if isinstance(device, (torch.dtype, Tensor)):
            raise TypeError(f"device: expected a device, got {device!r}; dequantize(dtype) gives a floating weight")
        data, scale = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.data, self.scale))
        return self if data is self.data else Int8Weight(_laid_out_like(self.data, data), scale, self.granularity)

    def __repr__(self) -> str:
        return f"Int8Weight({list(self.shape)}, granularity={self.granularity!r}, device={str(self.device)!r})"


def _laid_out_like(old: Tensor, new: Tensor) -> Tensor:
    """``new``, a copy of ``old``, with aligned rows if ``old`` has them: torch leaves no room behind rows of a copy."""
    return with_aligned_rows(new) if has_aligned_rows(old) else new


def _unflatten(leaves: Any, granularity: Any) -> Int8Weight:
    """Without the checks: the leaves of a tree may be anything for a while."""
    weight = object.__new__(Int8Weight)
    for name, leaf in zip(("data", "scale", "granularity"), (*leaves, granularity), strict=True):
        object.__setattr__(weight, name, leaf)
    return weight


# torch.compile, torch.export and torch.func see through a weight that is an argument.
pytree.register_pytree_node(
    Int8Weight,
    lambda weight: ([weight.data, weight.scale], weight.granularity),
    _unflatten,
    serialized_type_name="fastattn.Int8Weight",
    to_dumpable_context=lambda granularity: granularity,
    from_dumpable_context=lambda granularity: granularity,
    flatten_with_keys_fn=lambda weight: (
        [(pytree.GetAttrKey("data"), weight.data), (pytree.GetAttrKey("scale"), weight.scale)],
        weight.granularity,
    ),
)
torch.serialization.add_safe_globals([Int8Weight])  # torch.load takes saved weights without being told to trust them


def check_granularity(granularity: Any, columns: int | torch.SymInt) -> None:
    """``"tensor"``, ``"channel"`` or a group that divides ``columns``."""
    known = isinstance(granularity, (str, int)) and not isinstance(granularity, bool) and granularity in GRANULARITIES
    choices = ", ".join(map(repr, GRANULARITIES))
    expect(known, "granularity", f"one of {choices}", repr(granularity))
    if isinstance(granularity, int):
        expect(columns % granularity == 0, "granularity", f"a group that divides K = {columns}", granularity)


def scale_shape(shape: torch.Size, granularity: str | int) -> tuple[int, int]:
    """The shape of the scales of a weight of ``shape [N, K]``."""
    rows, columns = shape
    if isinstance(granularity, str):
        return (1, 1) if granularity == "tensor" else (rows, 1)
    return rows, columns // granularity


def quantize_int8(weight: Tensor, granularity: str | int = "channel") -> Int8Weight:
    """Symmetric int8: ``round(weight / scale)`` with ``scale = absmax / 127``, to nearest, ties to even.

    Args:
        weight: floating ``[N, K]``, as ``nn.Linear.weight``. Gradients do not flow through.
        granularity: what shares one scale: the whole ``"tensor"``, each row (``"channel"``), or each group of 32, 64 or
            128 along K. What is all zeros has scale 1.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong; with ``FASTATTN_CHECK=1`` also a weight that
            is not finite.
    """
    check_tensor("weight", weight)
    check_dtype("weight", weight, FLOATING)
    check_rank("weight", weight, "[N, K]")
    check_granularity(granularity, weight.shape[1])
    if device_checks_are_on():
        expect(bool(weight.isfinite().all()), "weight", "finite values", "NaN or infinity")
    data, scale = reference.quantize_int8(weight.detach(), granularity)
    return Int8Weight(with_aligned_rows(data.contiguous()), scale.contiguous(), granularity)


def int8_linear(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    activations: str = "16bit",
) -> Tensor:
    """``activation(x @ weight^T + bias) + residual``, the int8 weight being dequantised on the fly.

    Everything is computed in at least float32 and rounded to the dtype of ``x`` once, at the end (with gradients, once
    more before the activation and the residual). Autocast is honoured as by ``F.linear``.

    Args:
        x: floating ``[..., K]``.
        weight: from ``quantize_int8``, ``[N, K]``.
        bias: ``[N]`` in the dtype of ``x``.
        activation: None, ``"relu"``, ``"gelu"`` (exact), ``"gelu_tanh"``, ``"silu"`` or ``"swiglu"``. The last is gated
            and takes a fused weight, whose first N / 2 rows are the gate's and the others the up projection's (as
            ``gate_up_proj`` of Hugging Face's models): ``silu(x @ gate^T + …) * (x @ up^T + …)``, N / 2 columns.
        residual: ``[..., N]`` (``[..., N / 2]`` with ``"swiglu"``) in the dtype of ``x``, added last.
        activations: ``"16bit"`` computes with ``x`` as it is; ``"int8"`` first rounds each row of it to symmetric int8
            (the gradient passes straight through).

    Returns:
        ``[..., N]`` (``[..., N / 2]`` with ``"swiglu"``) in the dtype of ``x``, differentiable in ``x``, ``bias`` and
        ``residual``.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong; with ``FASTATTN_CHECK=1`` also scales that
            are not finite.
    """
    if not isinstance(weight, Int8Weight):
        raise TypeError(f"weight: expected an Int8Weight (see quantize_int8), got {type(weight).__name__}")
    return linear_over(x, weight.data, weight.scale, bias, activation, residual, activations)


def linear_over(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    activations: str = "16bit",
) -> Tensor:
    """``int8_linear`` over the parts of a weight that is known to be sound."""
    check_tensor("x", x)
    check_tensor("bias", bias, optional=True)
    check_tensor("residual", residual, optional=True)
    for name, option in (("activation", activation), ("activations", activations)):
        if not isinstance(option, str) and (option is not None or name == "activations"):
            raise TypeError(f"{name}: expected a str, got {type(option).__name__}")
    cast = autocast_dtype(x.device.type)
    if cast is not None:
        x = autocast_to(cast, x)
        bias = None if bias is None else autocast_to(cast, bias)
        residual = None if residual is None else autocast_to(cast, residual)
    if x.is_nested:
        return _nested_linear(x, data, scale, bias, activation, residual, activations)
    call = _plans.get((x, data, scale, bias, residual), (activation, activations))
    if device_checks_are_on():
        expect(bool(scale.isfinite().all()), "weight.scale", "finite scales", "NaN or infinity")

    choice = choose(call)
    activation = activation or "none"
    if choice.backend == "torch":
        with without_autocast(x.device.type):
            return reference.int8_linear(x, data, scale, bias, activation, residual, activations)
    return ops.int8_matmul(choice.backend, x, data, scale, bias, residual, activation, activations == "int8")


def _nested_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    activations: str,
) -> Tensor:
    """Nested tensors have neither shapes nor most operators: PyTorch's linear layer takes them, and judges them."""
    check_dtype("x", x, FLOATING)
    check_choice("activation", activation, ACTIVATION_CHOICES)
    expect(activations == "16bit", "activations", "'16bit' for a nested x", repr(activations))
    _check_gated(activation, data.shape[0])
    choose(Call("int8_matmul", x.device, x.dtype, 0, 0, frozenset(), (), only_torch_handles(x)))
    y = F.linear(x, reference.dequantize_int8(data, scale, x.dtype), bias)
    y = ACTIVATIONS[activation or "none"](y)
    return y if residual is None else y + residual


def _check_gated(activation: str | None, rows: int) -> None:
    """A gated activation takes a weight of two halves."""
    if activation in GATED:
        halves = "the gate's rows, then as many of the up projection"
        expect(rows % 2 == 0, "weight", f"an even N for {activation!r}, {halves}", f"N = {rows}")


def _check_and_plan(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Call:
    x, data, scale, bias, residual = tensors
    activation, activations = options
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
    check_choice("activations", activations, ACTIVATION_PRECISIONS)
    if activations == "int8":
        features.add("int8 activations")
    if scale.shape[1] > 1:
        features.add("group scales")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias, residual)):
        features.add("gradients")
    rows_of_x = x.shape[:-1].numel()
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


_plans = Plans(_check_and_plan)
