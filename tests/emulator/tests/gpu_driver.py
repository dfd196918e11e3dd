"""Runs PTX on a GPU through the driver API, with the arguments of `emulator.Module.launch`. Not a test module."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emulator import Module, TensorMap
from emulator.module import convert

Handle, Unsigned, Pointers = ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)

# Argument types of functions of the CUDA driver API, all of which return a CUresult.
SIGNATURES: dict[str, list[Any]] = {
    "cuModuleLoadDataEx": [Pointers, ctypes.c_char_p, Unsigned, ctypes.POINTER(ctypes.c_int), Pointers],
    "cuModuleUnload": [Handle],
    "cuModuleGetFunction": [Pointers, Handle, ctypes.c_char_p],
    "cuFuncSetAttribute": [Handle, ctypes.c_int, ctypes.c_int],
    "cuLaunchKernel": [Handle, *[Unsigned] * 6, Unsigned, Handle, Pointers, Pointers],
    "cuTensorMapEncodeTiled": [
        *[ctypes.c_void_p, ctypes.c_int, Unsigned, ctypes.c_void_p],
        *[ctypes.POINTER(ctypes.c_uint64)] * 2,
        *[ctypes.POINTER(ctypes.c_uint32)] * 2,
        *[ctypes.c_int] * 4,
    ],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}
JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES = 5, 6  # values of CUjit_option
MOST_DYNAMIC_SHARED_BYTES = 8  # a value of CUfunction_attribute
PARAMETERS, PARAMETER_BYTES, END = 1, 2, 0  # CU_LAUNCH_PARAM_…, in the list ``extra`` of cuLaunchKernel


def relocated(packed: bytes, addresses: Mapping[int, int]) -> bytes:
    """Replaces each pointer to a tensor in a struct by the tensor's address on the GPU."""
    words = struct.iter_unpack("<Q", packed[: len(packed) // 8 * 8])
    moved = b"".join(struct.pack("<Q", addresses.get(word, word)) for (word,) in words)
    return moved + packed[len(moved) :]


class Driver:
    """The driver API. ``library``: libcuda or a fake. Torch must have created the context of ``device``."""

    def __init__(self, library: Any = None, device: str = "cuda") -> None:
        self.library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self.device = device
        for name, arguments in SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.library, name)(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(result, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({result})")

    def load(self, ptx: str) -> Handle:
        """Loads a module. Raises RuntimeError with the log of the driver's compiler."""
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        module = Handle()
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.value.decode()}") from None
        return module

    def launch(
        self,
        module: Module,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        *,
        memory: Sequence[Tensor] = (),
    ) -> None:
        """Copies the CPU tensors in ``args`` and ``memory`` to the GPU, runs the kernel, and copies them back.

        Pointers in structs (``bytes``) are host addresses of tensors in ``memory``.
        """
        mapped = [argument.tensor for argument in args if isinstance(argument, TensorMap)]
        tensors = [*memory, *mapped, *(argument for argument in args if isinstance(argument, Tensor))]
        copies = {tensor.data_ptr(): self.copy_of(tensor) for tensor in tensors}
        addresses = {host: copy.data_ptr() for host, copy in copies.items()}
        packed = bytearray()
        for index, (argument, parameter) in enumerate(zip(args, module.parameters(name), strict=True)):
            if isinstance(argument, Tensor):
                argument = addresses[argument.data_ptr()]
            elif isinstance(argument, TensorMap):
                argument = self.encoded(argument, addresses[argument.tensor.data_ptr()])
            elif isinstance(argument, bytes):
                argument = relocated(argument, addresses)
            _, _, offset, _, _ = parameter
            packed += bytes(offset - len(packed)) + convert(argument, index, parameter, name)
        self.launch_packed(module.ptx, name, grid, block, bytes(packed), shared_bytes)
        for tensor in tensors:
            tensor.copy_(copies[tensor.data_ptr()])

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the device with the same strides."""
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return copy.copy_(tensor)

    def encoded(self, map: TensorMap, address: int) -> bytes:
        """Returns the driver's encoding of the same box of the tensor's copy at ``address``."""
        fields = map.fields
        storage = ctypes.create_string_buffer(128 + 64)
        place = -(-ctypes.addressof(storage) // 64) * 64
        rank = len(fields.dims)
        lists = [
            (kind * len(values))(*values)
            for kind, values in (
                (ctypes.c_uint64, fields.dims),
                (ctypes.c_uint64, fields.strides),
                (ctypes.c_uint32, fields.box),
                (ctypes.c_uint32, fields.element_strides),
            )
        ]
        codes = (fields.interleave, fields.swizzle, fields.l2_promotion, fields.fill)
        self.call("cuTensorMapEncodeTiled", place, fields.data_type, rank, address, *lists, *codes)
        return ctypes.string_at(place, 128)

    def launch_packed(
        self, ptx: str, name: str, grid: Sequence[int], block: Sequence[int], packed: bytes, shared_bytes: int
    ) -> None:
        module, function = self.load(ptx), Handle()
        try:
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self.call("cuFuncSetAttribute", function, MOST_DYNAMIC_SHARED_BYTES, shared_bytes)
            size = ctypes.c_size_t(len(packed))
            buffer = ctypes.create_string_buffer(packed, len(packed))
            extra = (ctypes.c_void_p * 5)(
                PARAMETERS, ctypes.addressof(buffer), PARAMETER_BYTES, ctypes.addressof(size), END
            )
            stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
            sizes = [*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3]]
            self.call("cuLaunchKernel", function, *sizes, shared_bytes, stream, None, extra)
            if self.device == "cuda":
                torch.cuda.synchronize()
        finally:
            self.call("cuModuleUnload", module)


@functools.cache
def driver() -> Driver:
    """Returns the driver of this machine."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the context
    return Driver()


def has_gpu_for(target: str) -> bool:
    """Returns True if the machine's GPU can run a target: it is no older, or for ``sm_90a`` it is the same."""
    if not torch.cuda.is_available():
        return False
    needed, found = (int(target[3]), int(target[4])), torch.cuda.get_device_capability()
    return found == needed if target.endswith("a") else found >= needed
