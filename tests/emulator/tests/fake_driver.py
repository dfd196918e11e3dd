"""A fake CUDA driver with the C signatures of the real one, which runs kernels on the emulator. Not a test module."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from typing import Any

import pytest

import gpu_driver
from emulator import Module, allocations
from emulator.native import native
from gpu_driver import Driver


class FakeDriver:
    """The driver's functions as ctypes callbacks. Kernels run on the emulator."""

    def __init__(self) -> None:
        self.modules: dict[int, Module] = {}
        self.functions: dict[int, tuple[Module, str]] = {}
        self.launches: list[tuple[int, ...]] = []
        self.shared_bytes = 0
        for name, arguments in gpu_driver.SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(getattr(self, f"_{name}")))

    def _cuModuleLoadDataEx(self, module: Any, image: bytes, count: int, options: Any, values: Any) -> int:
        assert list(options[:count]) == [gpu_driver.JIT_ERROR_LOG, gpu_driver.JIT_ERROR_LOG_BYTES]
        if b"nonsense" in image:
            ctypes.memmove(values[0], b"line 1: nonsense\0", 17)
            return 218
        module[0] = len(self.modules) + 1
        self.modules[module[0]] = Module(image.decode())
        return 0

    def _cuModuleUnload(self, module: int) -> int:
        return 0 if self.modules.pop(module, None) else 400

    def _cuModuleGetFunction(self, function: Any, module: int, name: bytes) -> int:
        function[0] = 100 + len(self.functions)
        self.functions[function[0]] = (self.modules[module], name.decode())
        return 0

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:
        assert attribute == gpu_driver.MOST_DYNAMIC_SHARED_BYTES
        self.shared_bytes = value
        return 0

    def _cuLaunchKernel(self, function: int, *rest: Any) -> int:
        gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra = rest
        assert not parameters and extra[0] == gpu_driver.PARAMETERS and extra[2] == gpu_driver.PARAMETER_BYTES
        assert shared_bytes <= self.shared_bytes and not extra[4] and not stream
        packed = ctypes.string_at(extra[1], ctypes.c_size_t.from_address(extra[3]).value)
        module, name = self.functions[function]
        values: list[Any] = []
        for _, _, offset, size, is_array in module.parameters(name):
            part = packed[offset : offset + size]
            values.append(part if is_array else int.from_bytes(part, "little"))
        module.launch(name, (gx, gy, gz), (bx, by, bz), values, shared_bytes, tracked=True)
        self.launches.append((gx, gy, gz, bx, by, bz, shared_bytes))
        return 0

    def _cuGetErrorString(self, error: int, text: Any) -> int:
        text[0] = b"a PTX JIT compilation failed"
        return 0

    def _cuTensorMapEncodeTiled(self, map: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        dims, strides, box, steps, *codes = rest
        lists = [list(dims[:rank]), list(strides[: rank - 1]), list(box[:rank]), list(steps[:rank])]
        native.encode_tiled(map, kind, address, *lists, *codes)
        return 0


@pytest.fixture
def fake() -> Iterator[tuple[Driver, FakeDriver]]:
    library = FakeDriver()
    with allocations.tracked():  # tracked memory stands for device memory
        yield Driver(types.SimpleNamespace(**vars(library)), device="cpu"), library
