"""Triton kernels on the emulator: compiled as for a GPU, in a process of their own, and launched on CPU tensors.

    with on_emulator(arch=80):
        kernel[grid](tensor, 3, BLOCK=64, num_warps=4)

runs any ``@triton.jit`` kernel so, and with it the launchers that call kernels. Triton's interpreter must be on (the
environment variable TRITON_INTERPRET=1 before Triton is imported), since that is when it lets kernels have CPU tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emulator.build import BUILD
from emulator.module import Module
from emulator.report import Report

TYPES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Compiled:
    """A kernel's PTX, parsed, and how it wants to be launched."""

    module: Module
    ptx: str
    name: str
    threads: int
    shared_bytes: int


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment["TRITON_CACHE_DIR"] = str(BUILD / "triton")
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("triton_server.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def stop() -> None:
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                pipe.close()
        server.wait()

    atexit.register(stop)
    return server


_compiled: dict[bytes, Compiled] = {}


def compile_kernel(
    module: str,
    name: str,
    signature: dict[str, Any],
    constexprs: dict[Any, Any],
    attributes: dict[tuple[int, ...], list[list[Any]]],
    options: dict[str, Any],
    arch: int = 80,
) -> Compiled:
    """The kernel ``name`` of an importable module; the arguments are those of ``triton.compiler.ASTSource``."""
    request = {
        "module": module,
        "name": name,
        "signature": signature,
        "constexprs": constexprs,
        "attributes": attributes,
        "options": options,
        "arch": arch,
    }
    key = pickle.dumps(request)
    if key not in _compiled:
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(key)
        server.stdin.flush()
        answer = pickle.load(server.stdout)
        if isinstance(answer, str):
            raise RuntimeError(f"compiling {module}.{name} failed:\n{answer}")
        if answer["scratch_bytes"]:
            raise RuntimeError(f"{module}.{name} needs scratch memory, which this launcher does not provide")
        _compiled[key] = Compiled(
            Module(answer["ptx"]), answer["ptx"], answer["name"], answer["threads"], answer["shared_bytes"]
        )
    return _compiled[key]


class _Specialized:
    """What Triton's own launcher makes of a call: types, which of them are multiples of 16, and what is passed."""

    def __init__(self, unspecialized: frozenset[Any]) -> None:
        self.unspecialized = unspecialized
        self.constexprs: dict[Any, Any] = {}
        self.attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        self.passed: list[Any] = []

    def add(self, name: str, value: Any, path: tuple[int, ...]) -> Any:
        """The type of one argument, in the signature's spelling; tuples' elements have paths of their own."""
        if isinstance(value, tuple):
            return tuple(self.add(name, element, (*path, i)) for i, element in enumerate(value))
        specialize = name not in self.unspecialized and path[0] not in self.unspecialized
        if value is None or (specialize and type(value) is int and value == 1):
            self.constexprs[path] = value
            return "constexpr"
        self.passed.append(value)
        if isinstance(value, torch.Tensor):
            if value.data_ptr() % 16 == 0:
                self.attributes[path] = [["tt.divisibility", 16]]
            return f"*{TYPES[value.dtype]}"
        if isinstance(value, bool):
            return "i1"
        if isinstance(value, int):
            if specialize and value % 16 == 0:
                self.attributes[path] = [["tt.divisibility", 16]]
            return "i32" if -(1 << 31) <= value < 1 << 31 else "i64" if value < 1 << 63 else "u64"
        if isinstance(value, float):
            return "fp32"
        raise TypeError(f"{name}: arguments of type {type(value).__name__} are not known")


def launch(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int, **machine: Any) -> Report:
    """One call ``kernel[grid](*args, **kwargs)``; ``machine``: options of `Module.launch`."""
    import inspect

    from triton.language import constexpr

    options = {name: kwargs[name] for name in OPTIONS if name in kwargs and name not in kernel.arg_names}
    kwargs = {name: value for name, value in kwargs.items() if name not in options}
    parameters = inspect.signature(kernel.fn)
    bound = parameters.bind(*args, **kwargs)
    bound.apply_defaults()
    specialized = _Specialized(frozenset(getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()))
    signature: dict[str, Any] = {}
    for index, (name, value) in enumerate(bound.arguments.items()):
        annotation = parameters.parameters[name].annotation
        if annotation is constexpr or str(annotation).endswith("constexpr"):
            signature[name] = "constexpr"
            specialized.constexprs[(index,)] = value.value if isinstance(value, constexpr) else value
        else:
            signature[name] = specialized.add(name, value, (index,))
    compiled = compile_kernel(
        kernel.fn.__module__,
        kernel.fn.__name__,
        signature,
        specialized.constexprs,
        specialized.attributes,
        options,
        arch,
    )
    size = grid(bound.arguments) if callable(grid) else grid
    parameter_count = len(compiled.module.parameters(compiled.name))
    # Triton's last parameters point to scratch memory, which kernels without any do not touch.
    arguments = specialized.passed + [None] * (parameter_count - len(specialized.passed))
    # What several warps hold, they all store.
    machine = {"replicated_stores": True} | machine
    return compiled.module.launch(compiled.name, size, (compiled.threads,), arguments, compiled.shared_bytes, **machine)


@contextlib.contextmanager
def on_emulator(arch: int = 80, after: Callable[[Report], None] | None = None, **machine: Any) -> Iterator[None]:
    """Within, Triton kernels run on the emulator; ``after`` is called with the report of each launch."""
    from triton.runtime.interpreter import InterpretedFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if warmup:
            return
        report = launch(self, grid, args, kwargs, arch, **machine)
        if after is not None:
            after(report)

    original = InterpretedFunction.run
    InterpretedFunction.run = run
    try:
        yield
    finally:
        InterpretedFunction.run = original
