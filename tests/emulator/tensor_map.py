"""Tensor maps, which cuTensorMapEncodeTiled encodes on the host for kernels that copy boxes of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from emulator.errors import EmulatorError
from emulator.native import native as _native

# Values of CUtensorMapDataType.
TYPES = {
    "uint8": 0,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float32_ftz": 10,
    "tfloat32": 11,
    "tfloat32_ftz": 12,
}
# Types that the driver lacks, by the type of the same size that copies their bits.
ALIASES = {
    "int8": "uint8",
    "bool": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "int16": "uint16",
}
INTERLEAVES = {"none": 0, "16B": 1, "32B": 2}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
FILLS = {"zero": 0, "nan": 1}


class EncodeFields(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled after the map and the address, with the innermost dimension first."""

    data_type: int
    dims: list[int]
    strides: list[int]
    box: list[int]
    element_strides: list[int]
    interleave: int
    swizzle: int
    l2_promotion: int
    fill: int


class TensorMap:
    """A tensor map of a CPU tensor or numpy array, as an argument for `Module.launch` or in memory that one points to.

    ``box`` and ``element_strides`` are in the order of the tensor's dimensions, the contiguous one last, while PTX
    begins with it. ``dtype`` is one of `TYPES`, by default the tensor's own. `Module.launch` passes the map by value if
    the kernel's parameter is a struct of 128 bytes, else as a pointer to ``address``. Raises `EmulatorError` for
    arguments that the driver rejects, and warns of strides that its documentation excludes.
    """

    def __init__(
        self,
        tensor: Any,
        box: Sequence[int],
        swizzle: str = "none",
        *,
        element_strides: Sequence[int] | None = None,
        fill: str = "zero",
        dtype: str | None = None,
        l2_promotion: str = "none",
        interleave: str = "none",
    ) -> None:
        self.tensor = tensor
        rank = len(tensor.shape)
        name = str(tensor.dtype).removeprefix("torch.")
        kind = dtype or ALIASES.get(name, name)
        for known, value in ((TYPES, kind), (SWIZZLES, swizzle), (FILLS, fill), (PROMOTIONS, l2_promotion)):
            if value not in known:
                raise EmulatorError("arguments", f"a tensor map: {value!r} is none of {', '.join(known)}")
        if isinstance(tensor, torch.Tensor):
            address, item = tensor.data_ptr(), tensor.element_size()
            strides = [stride * item for stride in tensor.stride()]
        else:
            address, item = tensor.__array_interface__["data"][0], tensor.itemsize
            strides = list(tensor.strides)
        if rank > 0 and tensor.shape[-1] > 1 and strides[-1] != item:
            raise EmulatorError("arguments", "a tensor map: the last dimension is not contiguous")
        spanned = -(-item * tensor.shape[-1] // 16) * 16 if rank > 0 else 0
        for i in reversed(range(rank - 1)):  # gives dimensions of size 1, whose stride has no meaning, a valid stride
            if tensor.shape[i] == 1:
                strides[i] = spanned
            spanned = max(spanned, strides[i] * tensor.shape[i])
        self._storage = np.zeros(128 + 64, np.uint8)
        self.address = -(-self._storage.ctypes.data // 64) * 64
        self.fields = EncodeFields(
            TYPES[kind],
            list(tensor.shape[::-1]),
            strides[-2::-1],
            list(box[::-1]),
            list(element_strides[::-1]) if element_strides is not None else [1] * rank,
            INTERLEAVES[interleave],
            SWIZZLES[swizzle],
            PROMOTIONS[l2_promotion],
            FILLS[fill],
        )
        try:
            unusual = _native.encode_tiled(self.address, self.fields.data_type, address, *self.fields[1:])
        except _native.Fault as fault:
            raise EmulatorError.of(fault) from None
        if unusual:
            warnings.warn(f"a tensor map: {unusual}", stacklevel=2)

    def __bytes__(self) -> bytes:
        start = self.address - self._storage.ctypes.data
        return self._storage[start : start + 128].tobytes()
