"""Defines int8 weights with their scales, and quantises floating weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fastattn import quantization
from fastattn.checks import (
    FLOATING,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    check_torch_dtype,
    device_checks_are_on,
    expect,
    shown,
)
from fastattn.errors import InputError
from fastattn.layout import has_aligned_rows, with_aligned_rows
from fastattn.namespace import PACKAGE

GROUP_SIZES = (32, 64, 128)
GRANULARITIES: tuple[str | int, ...] = ("tensor", "channel", *GROUP_SIZES)


@dataclass(frozen=True, eq=False, repr=False)
class Int8Weight:
    """Holds a weight ``[N, K]`` as int8 numbers with scales.

    Element ``(n, k)`` is ``data[n, k] * scale[n or 0, k // group or 0]``.

    Args:
        data: int8 ``[N, K]`` from -127 to 127, with contiguous rows. ``quantize_int8`` pads rows so that each starts at
            a multiple of 16 bytes. If rows do not, each call of a CUDA C++ kernel copies the data to padded rows.
        scale: float32: ``[1, 1]`` for granularity ``"tensor"``, ``[N, 1]`` for ``"channel"``, ``[N, K / group]`` for
            groups.
        granularity: ``"tensor"``, ``"channel"`` or the size of a group along K: 32, 64 or 128.

    Raises:
        InputError, TypeError: an argument is wrong, or the arguments do not fit together.
    """

    data: Tensor
    scale: Tensor
    granularity: str | int = "channel"

    def __post_init__(self) -> None:
        check_tensor("data", self.data)
        check_rank("data", self.data, "[N, K]")
        advice = "; fastattn.quantize_int8(weight) makes an Int8Weight of a floating tensor"
        check_dtype("data", self.data, (torch.int8,), advice)
        has_rows = self.data.stride(1) == 1 or self.data.shape[1] <= 1
        came = f"strides {self.data.stride()}; pass data.contiguous()"
        expect(has_rows, "data", "contiguous rows", came)
        check_granularity(self.granularity, self.data.shape[1])
        check_tensor("scale", self.scale)
        check_dtype("scale", self.scale, (torch.float32,))
        check_same_device("scale", self.scale, self.data.device)
        check_shape(
            "scale", self.scale, scale_shape(self.data.shape, self.granularity), f"for granularity {self.granularity!r}"
        )

    @property
    def shape(self) -> torch.Size:
        """Returns the shape ``[N, K]``, as of ``nn.Linear.weight``."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes of the int8 data and the scales, without the padding of rows."""
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight ``[N, K]`` in ``dtype``."""
        check_torch_dtype(dtype)
        return quantization.dequantize_int8(self.data, self.scale, dtype)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Int8Weight:
        """Returns the same weight on ``device``. The dtypes cannot be changed, because kernels read int8 data and
        float32 scales."""
        if isinstance(device, (torch.dtype, Tensor)):
            came = shown(device) if isinstance(device, Tensor) else device
            raise TypeError(f"device: expected a device, got {came}; dequantize(dtype) gives a floating weight")
        data, scale = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.data, self.scale))
        return self if data is self.data else Int8Weight(laid_out_like(self.data, data), scale, self.granularity)

    def __repr__(self) -> str:
        return f"Int8Weight({list(self.shape)}, granularity={self.granularity!r}, device={str(self.device)!r})"


def laid_out_like(old: Tensor, new: Tensor) -> Tensor:
    """Returns ``new``, a copy of ``old``, with aligned rows if ``old`` has aligned rows: torch's copies lose the
    padding."""
    return with_aligned_rows(new) if has_aligned_rows(old) else new


def _unflatten(leaves: Any, granularity: Any) -> Int8Weight:
    """Makes a weight without checks, because the leaves of a pytree are not always tensors."""
    weight = object.__new__(Int8Weight)
    for name, leaf in zip(("data", "scale", "granularity"), (*leaves, granularity), strict=True):
        object.__setattr__(weight, name, leaf)
    return weight


# As a pytree node, a weight can be an argument under torch.compile, torch.export and torch.func.
pytree.register_pytree_node(
    Int8Weight,
    lambda weight: ([weight.data, weight.scale], weight.granularity),
    _unflatten,
    serialized_type_name=f"{PACKAGE}.Int8Weight",
    to_dumpable_context=lambda granularity: granularity,
    from_dumpable_context=lambda granularity: granularity,
    flatten_with_keys_fn=lambda weight: (
        [(pytree.GetAttrKey("data"), weight.data), (pytree.GetAttrKey("scale"), weight.scale)],
        weight.granularity,
    ),
)
Int8Weight.__module__ = PACKAGE  # the public name, which saved files contain
torch.serialization.add_safe_globals([Int8Weight])  # so that torch.load(weights_only=True) takes it


def check_granularity(granularity: Any, columns: int | torch.SymInt) -> None:
    """Checks that ``granularity`` is ``"tensor"``, ``"channel"`` or a group size that divides ``columns``."""
    known = isinstance(granularity, (str, int)) and not isinstance(granularity, bool) and granularity in GRANULARITIES
    choices = ", ".join(map(repr, GRANULARITIES))
    expect(known, "granularity", f"one of {choices}", repr(granularity))
    if isinstance(granularity, int) and columns % granularity != 0:
        fitting = [repr(each) for each in GRANULARITIES if isinstance(each, str) or columns % each == 0]
        expect(False, "granularity", f"one of {', '.join(fitting)}, which suit K = {columns}", granularity)


def scale_shape(shape: torch.Size, granularity: str | int) -> tuple[int, int]:
    """Returns the shape of the scales of a weight of ``shape [N, K]``."""
    rows, columns = shape
    if isinstance(granularity, str):
        return (1, 1) if granularity == "tensor" else (rows, 1)
    return rows, columns // granularity


def advice_on_weight(weight: Any) -> str:
    """Returns what to pass instead of ``weight`` where an `Int8Weight` is expected, or an empty string."""
    if hasattr(type(weight), "int8_weight"):  # an Int8Linear, whose class cannot be imported here
        return "; pass weight.int8_weight"
    if isinstance(weight, nn.Linear):
        return "; pass fastattn.quantize_int8(weight.weight)"
    if isinstance(weight, Tensor) and weight.dtype == torch.int8:
        return "; pass fastattn.Int8Weight(data, scale, granularity), because int8 numbers need their scales"
    return "; pass fastattn.quantize_int8(weight)" if isinstance(weight, Tensor) else ""


def quantize_int8(weight: Tensor, granularity: str | int = "channel") -> Int8Weight:
    """Quantises a weight to symmetric int8: ``round(weight / scale)``, ties to even, with ``scale = absmax / 127``.

    Args:
        weight: floating ``[N, K]``, as ``nn.Linear.weight``. Gradients do not flow through the rounding.
        granularity: which values share one scale: the whole ``"tensor"``, each row (``"channel"``), or each group of
            32, 64 or 128 along K. Values that are all zero have scale 1.

    Raises:
        InputError, TypeError: the host can see that an argument is wrong. With ``FASTATTN_CHECK=1``, a weight that is
            not finite also raises.
    """
    if isinstance(weight, Int8Weight) or hasattr(type(weight), "int8_weight"):
        came = "an int8 weight, which is quantised already; dequantize() returns a floating tensor"
        raise TypeError(f"weight: expected a floating tensor, got {came}")
    check_tensor("weight", weight)
    if weight.dtype == torch.int8:
        came = "torch.int8; if it is quantised already, pass fastattn.Int8Weight(data, scale, granularity)"
        raise InputError(f"weight: expected a floating tensor, got {came}")
    check_dtype("weight", weight, FLOATING)
    check_rank("weight", weight, "[N, K]")
    check_granularity(granularity, weight.shape[1])
    if device_checks_are_on():
        expect(bool(weight.isfinite().all()), "weight", "finite values", "NaN or infinity")
    data, scale = quantization.quantize_int8(weight.detach(), granularity)
    return Int8Weight(with_aligned_rows(data.contiguous()), scale.contiguous(), granularity)
