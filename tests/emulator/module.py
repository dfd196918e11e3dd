"""PTX modules, and launches of their kernels with tensors in host memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from emulator import launches
from emulator.errors import EmulatorError
from emulator.native import native as _native
from emulator.options import LaunchOptions
from emulator.report import Report
from emulator.tensor_map import TensorMap

INTEGER_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
FLOAT_FORMATS = {"f32": "<f", "f64": "<d", "f16": "<e"}
Memory = tuple[int, int, str]  # address, bytes, name


def span(array: Any) -> tuple[int, int]:
    """Returns (address, bytes) of the range from the first to the last element of a CPU tensor or numpy array.
    Raises TypeError for a tensor on another device and for negative strides."""
    if isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise TypeError(f"the emulator takes tensors in the host's memory, got one on {array.device}")
        address, item, shape = array.data_ptr(), array.element_size(), array.shape
        steps = [stride * item for stride in array.stride()]
    else:
        address, item, shape = array.__array_interface__["data"][0], array.itemsize, array.shape
        steps = list(array.strides)
    if 0 in shape:
        return address, 0
    if min(steps, default=0) < 0:
        raise TypeError("arrays with negative strides are not supported")
    return address, sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) + item


def describe(array: Any) -> str:
    """Returns a text such as ``bfloat16 [2, 3]``."""
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"


def spans(argument: Any, name: str) -> list[Memory]:
    """Returns the memory that a kernel may touch because of an argument; ``name`` is a prefix for its names."""
    if isinstance(argument, TensorMap):
        return [(argument.address, 128, f"{name}a tensor map"), *spans(argument.tensor, f"{name}the tensor of a map, ")]
    if isinstance(argument, torch.Tensor) or hasattr(argument, "__array_interface__"):
        return [(*span(argument), f"{name}{describe(argument)}")]
    return []


class Module:
    """A PTX module. ``kernels`` lists the names of its entry points.

    ``is_tritons``: Triton compiled it, and relies on the address of shared memory. Invalid PTX raises `EmulatorError`;
    an unsupported instruction does so at the first launch of its kernel.
    """

    def __init__(self, ptx: str, is_tritons: bool = False) -> None:
        try:
            self._module = _native.Module(ptx, is_tritons)
        except _native.Fault as fault:
            raise EmulatorError.of(fault) from None
        self.ptx = ptx
        self.kernels: list[str] = self._module.kernels()

    def parameters(self, name: str) -> list[tuple[str, str, int, int, bool]]:
        """Returns (name, PTX type, offset, bytes, True for an array) of each parameter of a kernel."""
        try:
            found: list[tuple[str, str, int, int, bool]] = self._module.parameters(name)[0]
        except _native.Fault as fault:
            raise EmulatorError.of(fault) from None
        return found

    def launch(
        self,
        name: str,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (32, 1, 1),
        args: Sequence[Any] = (),
        shared_bytes: int = 0,
        cluster: Sequence[int] | None = None,
        *,
        memory: Iterable[Any] = (),
        replicated_stores: bool = False,
        num_sms: int = 132,
        cooperative: bool = False,
        dependent: bool = False,
        **options: Any,
    ) -> Report:
        """Runs a kernel to its end. ``options`` are fields of `LaunchOptions`.

        ``args``: CPU tensors and numpy arrays (passed as pointers), None (a null pointer), ints and floats (converted
        to the parameter's type), ``bytes`` (structs), `TensorMap`. The kernel may touch the memory of ``args`` and of
        the tensors in ``memory`` (those that structs point to), from each one's first element to its last;
        with ``tracked`` also the whole storage of a tensor that `allocations` tracks. ``shared_bytes``: dynamic shared
        memory of a CTA. ``cluster``: its size in CTAs (None: what the kernel requires, else 1). ``num_sms`` limits how
        many CTAs run at the same time. ``replicated_stores``: several warps may store the same value by the same
        instruction without a race, as Triton's kernels do. ``cooperative``: the grid may synchronise; all of its CTAs
        must fit on the device. ``dependent``: the kernel begins before the previous launch of a `Module` has ended
        (programmatic stream serialization), so that only ``griddepcontrol.wait`` orders their accesses. The kernel's
        output goes to ``sys.stdout`` at its end.

        Raises `EmulatorError` for a mistake of the kernel or of the launch.
        """
        grid, block = (tuple(int(n) for n in (*size, 1, 1, 1)[:3]) for size in (grid, block))
        try:
            parameters, total = self._module.parameters(name)
            if len(args) != len(parameters):
                raise EmulatorError("arguments", f"{len(parameters)} are needed, got {len(args)}", name)
            packed, allowed = bytearray(total), [found for array in memory for found in spans(array, "")]
            for index, (argument, parameter) in enumerate(zip(args, parameters, strict=True)):
                _, _, offset, size, _ = parameter
                packed[offset : offset + size] = convert(argument, index, parameter, name)
                allowed += spans(argument, f"argument {index}, ")
            counted = self._module.launch(
                name,
                grid,
                block,
                bytes(packed),
                allowed,
                shared_bytes,
                (0, 0, 0) if cluster is None else tuple(int(n) for n in (*cluster, 1, 1, 1)[:3]),
                num_sms,
                replicated_stores,
                cooperative,
                dependent,
                LaunchOptions(**options).resolved(),
            )
        except _native.Fault as fault:
            raise EmulatorError.of(fault) from None
        report = Report.of(name, counted)
        launches.note(launches.Launched(report, self.ptx, grid, block))
        return report


def convert(argument: Any, index: int, parameter: tuple[str, str, int, int, bool], kernel: str) -> bytes:
    """Returns the bytes of an argument in its parameter's type. Raises `EmulatorError` if it does not fit."""
    _, kind, _, size, is_array = parameter
    expected = f"argument {index} of type .{kind}{f' with {size} bytes' if is_array else ''}"
    if isinstance(argument, bytes | bytearray):
        if len(argument) != size:
            raise EmulatorError("arguments", f"{expected}: got {len(argument)} bytes", kernel)
        return bytes(argument)
    if isinstance(argument, TensorMap):
        if is_array and size == 128:
            return bytes(argument)
        if size == 8 and kind in ("u64", "b64", "s64"):
            return struct.pack("<Q", argument.address)
        raise EmulatorError("arguments", f"{expected}: got a tensor map", kernel)
    if is_array:
        raise EmulatorError("arguments", f"{expected}: pass bytes, not {type(argument).__name__}", kernel)
    if argument is None or isinstance(argument, torch.Tensor | np.ndarray):
        if size != 8 or kind not in ("u64", "b64", "s64"):
            raise EmulatorError("arguments", f"{expected}: got a tensor", kernel)
        return struct.pack("<Q", 0 if argument is None else span(argument)[0])
    if kind in FLOAT_FORMATS and isinstance(argument, int | float):
        return struct.pack(FLOAT_FORMATS[kind], argument)
    if kind in ("b32", "b64") and isinstance(argument, float):
        return struct.pack("<f" if kind == "b32" else "<d", argument)
    if isinstance(argument, int | np.integer) and kind[1:] in INTEGER_BYTES:
        value = int(argument)
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise EmulatorError("arguments", f"{expected}: {value} does not fit", kernel)
        return (value % (1 << (8 * size))).to_bytes(size, "little")
    raise EmulatorError("arguments", f"{expected}: got {type(argument).__name__}", kernel)
