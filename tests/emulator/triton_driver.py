"""A driver for Triton that runs ``kernel[grid](…)`` with CPU tensors on the emulator. `active` installs it.

Triton itself specialises, compiles for ``GPUTarget("cuda", arch, 32)`` and caches; only the last stage, from PTX to
machine code, is left out. `Launcher` replaces Triton's launcher. Autotuned kernels use their first configuration. Works
with Triton 3.6 to 3.9.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import _allocation
from triton.runtime.autotuner import Autotuner

from emulator import options
from emulator.errors import EmulatorError
from emulator.module import Module
from emulator.native import native

MOST_THREADS = 1024  # per CTA, on every GPU so far
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Gpu:
    """The GPU that Triton compiles for. ``arch`` is the compute capability times ten; shared memory is per CTA."""

    arch: int
    num_sms: int
    shared_memory_bytes: int


class Backend(CUDABackend):
    """Triton's compiler for NVIDIA GPUs without the stage after PTX, so that a launch gets PTX."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "ptx"

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        super().add_stages(stages, options, language)
        del stages["cubin"]

    def hash(self) -> str:
        return f"{super().hash()}-ptx"


@functools.lru_cache(maxsize=12)
def _module(ptx: bytes) -> Module:
    """Parses a module. Keeps the last 12 only, because a parsed module takes seven times the memory of its text."""
    return Module(ptx.decode(), is_tritons=True)


class Utilities:
    """The functions that Triton expects in ``driver.active.utils``."""

    def __init__(self, gpu: Gpu) -> None:
        self._properties = {
            "max_shared_mem": gpu.shared_memory_bytes,
            "multiprocessor_count": gpu.num_sms,
            "max_num_regs": 1 << 16,
            "warpSize": 32,
        }

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self._properties

    def load_binary(self, name: str, ptx: bytes, shared_bytes: int, device: int) -> tuple[bytes, bytes, int, int, int]:
        """Returns (module, function, registers, spills, most threads); registers and spills, unknown here, are 0."""
        _module(ptx)  # checks its syntax
        return ptx, ptx, 0, 0, MOST_THREADS

    def unload_module(self, ptx: bytes) -> None:
        pass

    def set_printf_fifo_size(self, size: int) -> None:
        pass

    def fill_tma_descriptor_tiled(
        self,
        address: int,
        swizzle: int,
        element_bytes: int,
        element_type: int,
        box: Sequence[int],
        shape: Sequence[int],
        strides: Sequence[int],
        padding: int,
    ) -> bytes:
        """Returns the 128 bytes of a tensor map. Lists have the outermost dimension first, strides are in elements."""
        descriptor = torch.zeros(TENSOR_MAP_BYTES, dtype=torch.uint8)  # aligned to 64 bytes, as the encoder requires
        try:
            native.encode_tiled(
                descriptor.data_ptr(),
                element_type,
                address,
                list(shape[::-1]),
                [element_bytes * stride for stride in strides[-2::-1]],
                list(box[::-1]),
                [1] * len(box),
                0,  # no interleaving
                swizzle,
                2,  # L2 promotion of 128 bytes, as in Triton's own code
                padding,
            )
        except native.Fault as fault:
            raise EmulatorError.of(fault) from None
        return bytes(descriptor.numpy())

    fill_tma_descriptor = fill_tma_descriptor_tiled  # the name in Triton 3.6


class Launcher:
    """The launcher of one compiled kernel. Triton creates it at the kernel's first launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = tuple(source.signature.values())
        self.metadata = metadata
        self.descriptors = tuple(getattr(metadata, "tensordesc_meta", None) or ())
        if hasattr(source, "fn"):  # a Python function, not a file of Triton IR
            _compiled[id(source.fn)] = source.fn

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        ptx: bytes,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *args: Any,
    ) -> None:
        if x * y * z == 0:
            return
        metadata = self.metadata
        if enter_hook is not None:
            enter_hook(launch_metadata)
        values, memory = self._flatten(args)
        scratch = []
        for kind, allocator in (("global", _allocation._allocator), ("profile", _allocation._profile_allocator)):
            size = getattr(metadata, f"{kind}_scratch_size") * x * y * z * metadata.num_ctas
            alignment = getattr(metadata, f"{kind}_scratch_align")
            scratch.append(allocator.get()(size, alignment, stream) if size else None)
        _module(ptx).launch(
            metadata.name,
            grid=(x * metadata.num_ctas, y, z),
            block=(32 * metadata.num_warps,),
            args=[*values, *scratch],
            shared_bytes=metadata.shared,
            cluster=(metadata.num_ctas, 1, 1) if metadata.num_ctas > 1 else None,
            num_sms=active_gpu().num_sms,
            memory=memory,
            replicated_stores=True,  # Triton lets all warps that hold a value store it
            cooperative=metadata.launch_cooperative_grid,
            **asdict(options.current()),
        )
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _flatten(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the values of the kernel's parameters, and the tensors that its tensor descriptors point to."""
        values: list[Any] = []
        memory: list[Any] = []
        descriptors = iter(self.descriptors)

        def add(value: Any, kind: Any) -> None:
            if isinstance(kind, tuple):
                for element, element_kind in zip(value, kind, strict=True):
                    add(element, element_kind)
            elif kind.startswith("tensordesc"):
                parts = tensor_descriptor(value, next(descriptors, None))
                memory.append(value.base)
                values.extend(scalar(part, None) for part in parts)
            elif kind != "constexpr":
                if kind.startswith("*") and hasattr(value, "base"):  # triton.reinterpret
                    value = value.base
                values.append(scalar(value, kind))

        for value, kind in zip(args, self.signature, strict=True):
            add(value, kind)
        return values, memory


def tensor_descriptor(value: Any, metadata: Any) -> list[Any]:
    """Expands a host's tensor descriptor to the kernel's parameters for it, with Triton's own function."""
    make = nvidia.make_tensordesc_arg
    arguments = (value, metadata, None)
    parts: list[Any] = make(*arguments[: len(inspect.signature(make).parameters)])
    return parts


FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}


def scalar(value: Any, kind: str | None) -> Any:
    """Converts a value of Triton's type ``kind`` to an argument of `Module.launch`."""
    if kind == "bf16":
        return struct.pack("<h", torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item())
    if kind in FLOATS:
        return struct.pack(FLOATS[kind], value)
    return int(value) if isinstance(value, bool) else value


class Driver(GPUDriver):
    """The driver of an emulated GPU. Each `Gpu` has its own device number, by which Triton caches compiled kernels."""

    _known: ClassVar[list[Gpu]] = []

    def __init__(self, gpu: Gpu) -> None:
        if gpu not in self._known:
            self._known.append(gpu)
        self.gpu = gpu
        self.utils = Utilities(gpu)
        self.launcher_cls = Launcher
        number = -1 - self._known.index(gpu)  # negative, unlike the numbers of real GPUs
        self.get_current_device = lambda: number
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device=None: divmod(gpu.arch, 10)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        return str(nvidia.ty_to_cpp(kind))

    def get_benchmarker(self) -> Any:
        raise RuntimeError("the emulator knows nothing of time: there is nothing to benchmark")

    def get_empty_cache_for_benchmark(self) -> Any:
        return self.get_benchmarker()


def active_gpu() -> Gpu:
    """Returns the GPU that `active` has installed."""
    driver = triton.runtime.driver.active
    assert isinstance(driver, Driver)
    return driver.gpu


def _first_configuration(self: Autotuner, *args: Any, config: Any, **meta: Any) -> list[float]:
    """Replaces the benchmark by equal times, of which Triton takes the first."""
    return [0.0, 0.0, 0.0]


_compiled: dict[int, Any] = {}  # functions for which Triton holds compiled kernels, by id


def _forget_kernels() -> None:
    """Drops Triton's compiled kernels, which take gigabytes in a process that runs many; its cache on disk stays."""
    for function in _compiled.values():
        for number in [number for number in function.device_caches if number < 0]:  # see `Driver`
            kernels, *_ = function.device_caches.pop(number)
            for kernel in kernels.values():
                kernel.module = kernel._run = None  # so that no other driver tries to unload it
    _compiled.clear()
    _module.cache_clear()


@contextlib.contextmanager
def active(gpu: Gpu) -> Iterator[None]:
    """Makes Triton compile for ``gpu`` and launch on the emulator within the block. May be nested; the outermost block
    drops the compiled kernels at its end."""
    config = triton.runtime.driver
    before = config._active, backends["nvidia"], Autotuner._bench
    config.set_active(Driver(gpu))
    backends["nvidia"] = type(backends["nvidia"])(compiler=Backend, driver=backends["nvidia"].driver)
    Autotuner._bench = _first_configuration
    try:
        yield
    finally:
        config._active, backends["nvidia"], Autotuner._bench = before
        if not isinstance(config._active, Driver):
            _forget_kernels()
