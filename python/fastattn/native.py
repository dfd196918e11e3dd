"""Loads the native library, which defines ``torch.ops.fastattn``, and queries it about its kernels.

``LIBRARY_PATH``  the loaded library: the file next to this one, or the file that FASTATTN_LIBRARY names
``OPS``           the library's operators in ``torch.ops``
``BUILD``         how the library was built: "version", "archs" (the GPU architectures of its CUDA C++ kernels;
                  empty if there are none), "code" (architecture → the machine code and PTX of its kernels, as nvcc
                  names them: "sm_80", "compute_80"), "cuda" and "nvcc" (versions, or None), "torch" (the version that
                  the library was compiled against)
``KERNELS``       each kernel's name → its tile, {"block_m", "block_n", "num_warps", …}, or None
``TAKES_CPU_TENSORS``  whether the library is built for an emulator, which runs kernels in the host's memory

The library chooses the kernel of a call: the functions ``*_kernel`` return the name of the kernel that a launch would
run, or None where no kernel runs. ``arch`` is a compute capability times ten, and ``widest`` the larger of a call's two
head dims.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastattn.namespace import NAMESPACE

# A kernel repository of the Hub ignores FASTATTN_LIBRARY, because only its own library defines operators in its
# namespace.
_other_library = os.environ.get("FASTATTN_LIBRARY") if NAMESPACE == "fastattn" else None
LIBRARY_PATH = Path(_other_library or Path(__file__).with_name("libfastattn.so"))


class LaunchSchedule(ctypes.Structure):
    """Describes how a launch distributes its main-loop steps over CTAs.

    Attributes:
        ctas: the number of CTAs.
        longest_steps: the number of steps of the CTA with the most steps.
        block_m: the rows of a tile.
        slots: the number of workspace slots, each for one partial result.
        steps_of_full_gpu: for an int8 matmul, the predicted time of the slowest CTA. The unit is the time of a step
            when all CTAs that fit on the GPU run and share the memory bandwidth.
    """

    ctas: int
    longest_steps: int
    block_m: int
    slots: int
    steps_of_full_gpu: float
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("ctas", "longest_steps", "block_m", "slots")),
        ("steps_of_full_gpu", ctypes.c_double),
    )


class Int8Ways(ctypes.Structure):
    """Names the fastest kernel of an int8 matmul and its predicted time, and predicts the time of dequantising the
    weights for cuBLAS."""

    kernel: bytes | None
    kernel_microseconds: float
    dequantised_microseconds: float
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("kernel_microseconds", ctypes.c_double),
        ("dequantised_microseconds", ctypes.c_double),
    )


class Int8Limits(ctypes.Structure):
    """Holds limits of the kernels for int8 activations: ``sum_depth`` is the largest K for which a sum of products fits
    in int32, and ``launch_count`` the number at which the counters of a launch overflow."""

    sum_depth: int
    launch_count: int
    _fields_ = tuple((name, ctypes.c_int64) for name in ("sum_depth", "launch_count"))


class BackwardSchedule(ctypes.Structure):
    """Describes how the backward kernel for dK and dV is scheduled: a CTA takes a tile of ``block_n`` keys and loops
    over tiles of ``block_m`` query rows.

    From tile ``first_tile`` on, the work of each tile of keys is split into ``over_heads`` parts by its query heads,
    and each of these parts into ``over_rows`` parts by its query rows. ``heads_per_group`` is the number of KV heads
    whose tiles are scheduled together. All fields are zero if the call runs no kernel for Hopper.
    """

    first_tile: int
    over_heads: int
    over_rows: int
    heads_per_group: int
    block_m: int
    block_n: int
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("first_tile", "over_heads", "over_rows", "heads_per_group", "block_m", "block_n")
    )


class NativeDeviceFacts(ctypes.Structure):
    """Mirrors the struct DeviceFacts of csrc/host/device_facts.h; ``arch`` is a compute capability times ten."""

    arch: int
    num_sms: int
    l2_bytes: int
    shared_bytes_per_cta: int
    _fields_ = (
        ("arch", ctypes.c_int32),
        ("num_sms", ctypes.c_int32),
        ("l2_bytes", ctypes.c_int64),
        ("shared_bytes_per_cta", ctypes.c_int32),
    )


# The functions that a library with kernels exports → their result types.
_QUERIES: dict[str, Any] = {
    "fastattn_device_facts": NativeDeviceFacts,
    "fastattn_kernels": ctypes.c_char_p,
    "fastattn_attention_forward_kernel": ctypes.c_char_p,
    "fastattn_attention_backward_kernels": ctypes.c_int32,
    "fastattn_backward_schedule": BackwardSchedule,
    "fastattn_decode_kernel": ctypes.c_char_p,
    "fastattn_append_kernel": ctypes.c_char_p,
    "fastattn_int8_matmul_kernel": ctypes.c_char_p,
    "fastattn_int8_matmul_schedule": LaunchSchedule,
    "fastattn_int8_limits": Int8Limits,
    "fastattn_int8_ways": Int8Ways,
    "fastattn_cublas_microseconds": ctypes.c_double,
    "fastattn_force_int8_tile": None,
    "fastattn_decode_schedule": LaunchSchedule,
}


_INSTALL = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _load(path: Path) -> tuple[ctypes.CDLL, dict[str, Any], dict[str, Any]]:
    """Loads the library at ``path`` into torch, and returns it with BUILD and KERNELS. Raises ImportError."""
    if not path.exists():
        raise ImportError(
            f"fastattn's native library is missing: {path} does not exist. In fastattn's clone, run `make install`, or "
            f"`{_INSTALL}` in another environment."
        )
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
        library.fastattn_build_info.restype = ctypes.c_char_p
        build = json.loads(library.fastattn_build_info())
        if not build["archs"]:
            return library, build, {}
        for name, result in _QUERIES.items():
            getattr(library, name).restype = result
        return library, build, json.loads(library.fastattn_kernels())
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"fastattn's native library {path} does not load into torch {torch.__version__} (2.10 or later is needed): "
            f"{error}. Build it again: in fastattn's clone, run `make install`, or `{_INSTALL}` in another environment."
        ) from error


_LIBRARY, BUILD, KERNELS = _load(LIBRARY_PATH)
OPS = getattr(torch.ops, NAMESPACE)
_INT8_LIMITS = _LIBRARY.fastattn_int8_limits() if BUILD["archs"] else Int8Limits()
INT8_SUM_DEPTH: int = _INT8_LIMITS.sum_depth
INT8_LAUNCH_COUNT: int = _INT8_LIMITS.launch_count
TAKES_CPU_TENSORS: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::attention_forward", "CPU")


def code_for(arch: int) -> tuple[str, ...]:
    """Returns the names of the library's code that a GPU of ``arch`` runs, the newest first.

    The result has a name for each architecture whose kernels the GPU can run: the best machine code ("sm_90a", "sm_90",
    "sm_80"), or "PTX", which the driver compiles. The result is empty if the GPU can run none of the code.
    """
    own = [f"sm_{arch}a", *(f"sm_{each}" for each in range(arch, arch // 10 * 10 - 1, -1))]  # same major version
    found = []
    for _, code in sorted(BUILD["code"].items(), key=lambda of: int(of[0].rstrip("a")), reverse=True):
        best = next((name for name in own if name in code), None)
        if best is None and arch >= 80 and "compute_80" in code:
            best = "PTX"
        if best is not None:
            found.append(best)
    return tuple(found)


def device_facts() -> NativeDeviceFacts:
    """Returns the properties of the current CUDA device that schedules depend on; zeros if there is no device."""
    return _LIBRARY.fastattn_device_facts()


def _text(name: bytes | None) -> str | None:
    return None if name is None else name.decode()


def attention_forward_kernel(
    arch: int,
    shared_bytes_per_cta: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    changes_scores: bool = False,
    paged: bool = False,
) -> str | None:
    """Returns the kernel's name. ``shared_bytes_per_cta`` is the most shared memory that a CTA can have on the GPU.
    ``changes_scores``: the call has a bias, mask, ALiBi, dropout, softcap or key ranges."""
    traits = dtype == torch.bfloat16, changes_scores, paged
    return _text(_LIBRARY.fastattn_attention_forward_kernel(arch, shared_bytes_per_cta, head_dim, value_dim, *traits))


def attention_backward_kernels(
    arch: int,
    shared_bytes_per_cta: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    changes_scores: bool = False,
    key_ranges: bool = False,
    bias_gradient: bool = False,
    sinks: bool = False,
    slopes_gradient: bool = False,
) -> tuple[str, ...]:
    """Returns the kernels' names in launch order. ``shared_bytes_per_cta``: as for `attention_forward_kernel`."""
    names = (ctypes.c_char_p * 8)()
    traits = changes_scores, key_ranges, bias_gradient, sinks, slopes_gradient
    count = _LIBRARY.fastattn_attention_backward_kernels(
        arch, shared_bytes_per_cta, head_dim, value_dim, dtype == torch.bfloat16, *traits, names
    )
    return tuple(name.decode() for name in names[:count] if name is not None)


def backward_schedule(
    facts: NativeDeviceFacts,
    widest: int,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    rows: int,
    keys: int,
    total_keys: int | None = None,
    window: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> BackwardSchedule:
    """Returns the schedule of the kernel for dK and dV in a call without options.

    For packed sequences, ``total_keys`` is the number of all keys, and ``rows`` and ``keys`` are the longest lengths.
    ``window`` is how many keys a row sees before and after its own position; -1 means all.
    """
    total = -1 if total_keys is None else total_keys
    shape = (batch, heads, kv_heads, rows, keys, total)
    return _LIBRARY.fastattn_backward_schedule(ctypes.byref(facts), widest, *shape, *window, deterministic)


# The formats of a cache, in the order of the C++ enum CacheFormat.
CACHE_FORMATS = ("16-bit", "int8", "fp8")


def decode_kernel(arch: int, shared_bytes: int, widest: int, dtype: torch.dtype, cache: str, rows: int) -> str | None:
    """Returns the decoding kernel's name; ``cache`` is one of ``CACHE_FORMATS``, and ``rows`` is the number of queries
    times query heads per KV head."""
    is_bfloat16, cache_format = dtype == torch.bfloat16, CACHE_FORMATS.index(cache)
    return _text(_LIBRARY.fastattn_decode_kernel(arch, shared_bytes, widest, is_bfloat16, cache_format, rows))


def append_kernel(arch: int, widest: int, dtype: torch.dtype, cache: str) -> str | None:
    """Returns the name of the kernel that appends to a cache; ``cache`` is one of ``CACHE_FORMATS``."""
    return _text(_LIBRARY.fastattn_append_kernel(arch, widest, dtype == torch.bfloat16, CACHE_FORMATS.index(cache)))


when_forced: list[Callable[[], None]] = []  # forced_int8_tile() calls these after each change
DEQUANTISED = "dequantise + cuBLAS"  # instead of a kernel's name
# The index of a name is the library's number for the operation.
_INT8_OPS = ("int8_matmul", "int8_matmul_grad_input", "int8_matmul_s8")


class Int8Product(NamedTuple):
    """Describes a matmul with int8 weights: its result is ``[tokens, outputs]``, and it sums over ``depth``."""

    op: str
    """One of ``_INT8_OPS``; ``int8_matmul_s8`` is the matmul with int8 activations."""
    dtype: torch.dtype
    has_groups: bool
    """The weights have scales for groups along K."""
    has_epilogue: bool
    """A bias, activation or residual follows the product, or the bias's gradient comes with the input gradient."""
    tokens: int
    outputs: int
    depth: int

    def arguments(self, arch: int, num_sms: int) -> tuple[int, ...]:
        """Returns the library's arguments: operation, GPU, Int8Traits of csrc/api/kernel_choice.h, sizes."""
        is_gradient = self.op == "int8_matmul_grad_input"
        is_plain = is_gradient or (self.op == "int8_matmul" and not self.has_epilogue)
        traits = self.dtype == torch.bfloat16, self.has_groups, is_plain, is_gradient and self.has_epilogue
        return _INT8_OPS.index(self.op), arch, num_sms, *traits, self.tokens, self.outputs, self.depth


def int8_matmul_kernel(product: Int8Product, arch: int, num_sms: int) -> str | None:
    """Returns the name of the kernel that computes the product, or ``DEQUANTISED``."""
    return _text(_LIBRARY.fastattn_int8_matmul_kernel(*product.arguments(arch, num_sms)))


def int8_ways(product: Int8Product, arch: int, num_sms: int) -> dict[str, float]:
    """Returns the predicted microseconds of each way to compute the product; `int8_matmul_kernel` names the fastest."""
    ways = _LIBRARY.fastattn_int8_ways(*product.arguments(arch, num_sms))
    if ways.kernel is None:
        return {}
    found = {ways.kernel.decode(): ways.kernel_microseconds}
    if math.isfinite(ways.dequantised_microseconds):
        found[DEQUANTISED] = ways.dequantised_microseconds
    return found


def cublas_microseconds(arch: int, num_sms: int, tokens: int, outputs: int, depth: int) -> float:
    """Returns the predicted microseconds of a cuBLAS matmul with 16-bit weights, to compare `int8_ways` with."""
    return _LIBRARY.fastattn_cublas_microseconds(arch, num_sms, tokens, outputs, depth)


def int8_matmul_schedule(
    op: str, arch: int, num_sms: int, has_groups: bool, tokens: int, outputs: int, depth: int
) -> LaunchSchedule:
    """Returns the schedule of the fastest kernel for the matmul, even where dequantising for cuBLAS is faster."""
    return _LIBRARY.fastattn_int8_matmul_schedule(
        _INT8_OPS.index(op), arch, num_sms, has_groups, tokens, outputs, depth
    )


@contextlib.contextmanager
def forced_int8_tile(arch: int = 0, tokens: int = 0) -> Iterator[None]:
    """Makes this process's int8 matmuls inside the block use kernels for ``arch`` with tiles of ``tokens`` tokens; 0
    means any.

    Tests and benchmarks use it to compare kernels. A call that no such kernel supports raises an error. With ``arch``
    -1, weights are dequantised for cuBLAS wherever that gives the same result.
    """
    before = _forced
    _force_int8_tile(arch, tokens)
    try:
        yield
    finally:
        _force_int8_tile(*before)


_forced = (0, 0)


def _force_int8_tile(arch: int, tokens: int) -> None:
    global _forced
    _forced = arch, tokens
    _LIBRARY.fastattn_force_int8_tile(arch, tokens)
    for forget in when_forced:
        forget()


def decode_schedule(
    facts: NativeDeviceFacts, widest: int, cache: str, batch: int, kv_heads: int, rows: int, capacity: int
) -> LaunchSchedule:
    """Returns the schedule of the kernel that `decode_kernel` names, for ``rows`` rows of queries per KV head and
    ``capacity`` tokens per sequence."""
    cache_format = CACHE_FORMATS.index(cache)
    return _LIBRARY.fastattn_decode_schedule(ctypes.byref(facts), widest, cache_format, batch, kv_heads, rows, capacity)
