"""Loads the native library, which defines ``torch.ops.fastattn``, and asks it about its kernels.

``LIBRARY_PATH``  the library that was loaded: the one beside this file, or the one that FASTATTN_LIBRARY names
``OPS``           its operators, as they are in ``torch.ops``
``BUILD``         how it was built: "version", "archs" (the GPU architectures that its CUDA C++ kernels are written for;
                  empty if it has none), "code" (architecture → what is embedded for its kernels, as nvcc names it),
                  "cuda" and "nvcc" (versions, or None), "torch" (the one whose headers it was compiled with)
``KERNELS``       the name of every kernel → its tile, {"block_m", "block_n", "num_warps", …}, or None
``TILES``         the same tiles: kernel → head dim ("192, 128" where that of values differs), or block_m → tile
``TAKES_CPU_TENSORS``  whether it is a build for an emulator, whose kernels run in the host's memory

Which kernel runs a call is the library's choice: ``*_kernel`` give the name that a launch would have, None where no
kernel runs. ``arch`` is a compute capability times ten, and ``widest`` the larger one of the two head dims of a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastattn.namespace import NAMESPACE

# The variable speaks of the installed package: a kernel repository's own library alone has its namespace.
_other_library = os.environ.get("FASTATTN_LIBRARY") if NAMESPACE == "fastattn" else None
LIBRARY_PATH = Path(_other_library or Path(__file__).with_name("libfastattn.so"))


class Dealt(ctypes.Structure):
    """How a launch deals the steps of its main loop: the number of CTAs, and the steps of the longest.

    ``block_m``: rows of a tile; ``parts``: how many parts of tiles pass through a workspace, at most.
    ``steps_of_full_gpu``: of an int8 matmul, so many steps as are predicted to take as long as the longest CTA's where
    all CTAs run that can, among which the GPU's memory is divided.
    """

    ctas: int
    longest_steps: int
    block_m: int
    parts: int
    steps_of_full_gpu: float
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("ctas", "longest_steps", "block_m", "parts")),
        ("steps_of_full_gpu", ctypes.c_double),
    )


class Int8Ways(ctypes.Structure):
    """The fastest kernel of an int8 matmul, and predicted microseconds: of it, and of dequantising for cuBLAS."""

    kernel: bytes | None
    kernel_microseconds: float
    dequantised_microseconds: float
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("kernel_microseconds", ctypes.c_double),
        ("dequantised_microseconds", ctypes.c_double),
    )


class DealtBackward(ctypes.Structure):
    """How the backward pass deals tiles of ``block_n`` keys, each a walk over tiles of ``block_m`` rows, to CTAs.

    From tile ``first_tile`` on, the query heads of a tile are divided into ``of_heads`` parts, and the rows of each
    into ``of_rows``. ``heads_per_group``: KV heads whose tiles are claimed in turn. Zeros where no tiles are shared.
    """

    first_tile: int
    of_heads: int
    of_rows: int
    heads_per_group: int
    block_m: int
    block_n: int
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("first_tile", "of_heads", "of_rows", "heads_per_group", "block_m", "block_n")
    )


class NativeDeviceFacts(ctypes.Structure):
    """DeviceFacts of csrc/host/device_facts.h; ``arch`` is a compute capability times ten."""

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


class _ForwardTraits(ctypes.Structure):
    """ForwardTraits of csrc/api/kernel_choice.h."""

    _fields_ = tuple((name, ctypes.c_bool) for name in ("changes_scores", "is_paged"))


# What the library exports, where it has kernels: its result.
_QUERIES: dict[str, Any] = {
    "fastattn_device_facts": NativeDeviceFacts,
    "fastattn_kernels": ctypes.c_char_p,
    "fastattn_attention_forward_kernel": ctypes.c_char_p,
    "fastattn_attention_backward_kernels": ctypes.c_int32,
    "fastattn_dealt_backward": DealtBackward,
    "fastattn_decode_kernel": ctypes.c_char_p,
    "fastattn_append_kernel": ctypes.c_char_p,
    "fastattn_int8_matmul_kernel": ctypes.c_char_p,
    "fastattn_dealt_int8_matmul": Dealt,
    "fastattn_int8_ways": Int8Ways,
    "fastattn_cublas_microseconds": ctypes.c_double,
    "fastattn_force_int8_tile": None,
    "fastattn_dealt_decode": Dealt,
}


def _load(path: Path) -> tuple[ctypes.CDLL, dict[str, Any], dict[str, Any]]:
    """Loads the library at ``path`` into torch and returns it, BUILD and KERNELS. Raises ImportError."""
    if not path.exists():
        raise ImportError(
            f"fastattn's native library is missing: {path} does not exist. In a clone, run `make install`; elsewhere "
            "install fastattn again with `pip install --no-build-isolation --force-reinstall --no-deps`."
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
            f"{error}. Build it again: in a clone, run `make install`."
        ) from error


_LIBRARY, BUILD, KERNELS = _load(LIBRARY_PATH)
OPS = getattr(torch.ops, NAMESPACE)
TAKES_CPU_TENSORS: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::attention_forward", "CPU")


def _tiles_by_size() -> dict[str, dict[str, Any]]:
    tiles: dict[str, dict[str, Any]] = {}
    for name, tile in KERNELS.items():
        kernel, _, arguments = name.rstrip(">").partition("<")
        sizes = [text for text in arguments.split(", ") if text[:1].isdigit()]
        for variant in {"options", "int8", "fp8", "groups"} & set(arguments.split(", ")):
            kernel = kernel.replace("_sm", f"_{variant}_sm")
        if tile is not None:
            tiles.setdefault(kernel, {})[", ".join(sizes)] = tile
    return tiles


TILES = _tiles_by_size()


def code_for(arch: int) -> tuple[str, ...]:
    """What a GPU runs of the library, the newest first: of the kernels for each architecture the best machine code
    ("sm_90a", "sm_90", "sm_80"), or "PTX" that the driver compiles. Empty where nothing of it runs there."""
    own = [f"sm_{arch}a", *(f"sm_{each}" for each in range(arch, arch // 10 * 10 - 1, -1))]  # of the same major version
    found = []
    for _, code in sorted(BUILD["code"].items(), key=lambda of: int(of[0].rstrip("a")), reverse=True):
        best = next((name for name in own if name in code), None)
        if best is None and arch >= 80 and "compute_80" in code:
            best = "PTX"
        if best is not None:
            found.append(best)
    return tuple(found)


def device_facts() -> NativeDeviceFacts:
    """Of the current CUDA device, as launches deal their work by them; zeros where there is none."""
    return _LIBRARY.fastattn_device_facts()


def _text(name: bytes | None) -> str | None:
    return None if name is None else name.decode()


def attention_forward_kernel(
    arch: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    changes_scores: bool = False,
    paged: bool = False,
) -> str | None:
    """``changes_scores``: by a bias or mask, ALiBi, dropout or softcap."""
    traits = _ForwardTraits(changes_scores, paged)
    is_bfloat16 = dtype == torch.bfloat16
    return _text(
        _LIBRARY.fastattn_attention_forward_kernel(arch, head_dim, value_dim, is_bfloat16, ctypes.byref(traits))
    )


def attention_backward_kernels(
    arch: int,
    shared_bytes_per_cta: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    changes_scores: bool = False,
    bias_gradient: bool = False,
    sinks: bool = False,
    slopes_gradient: bool = False,
) -> tuple[str, ...]:
    """In the order in which they run. ``shared_bytes_per_cta``: the most that the GPU has for a CTA."""
    names = (ctypes.c_char_p * 7)()
    is_bfloat16 = dtype == torch.bfloat16
    count = _LIBRARY.fastattn_attention_backward_kernels(
        arch,
        shared_bytes_per_cta,
        head_dim,
        value_dim,
        is_bfloat16,
        changes_scores,
        bias_gradient,
        sinks,
        slopes_gradient,
        names,
    )
    return tuple(name.decode() for name in names[:count] if name is not None)


def dealt_backward(
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
) -> DealtBackward:
    """By the kernel for dK and dV of a call without options. ``total_keys``: of packed sequences, of which ``rows`` and
    ``keys`` are the longest; ``window``: keys that a row sees before and after its own, -1: all."""
    total = -1 if total_keys is None else total_keys
    shape = (batch, heads, kv_heads, rows, keys, total)
    return _LIBRARY.fastattn_dealt_backward(ctypes.byref(facts), widest, *shape, *window, deterministic)


# What a cache holds, in the order of the C++ enum CacheFormat.
CACHE_FORMATS = ("16-bit", "int8", "fp8")


def decode_kernel(arch: int, shared_bytes: int, widest: int, dtype: torch.dtype, cache: str, rows: int) -> str | None:
    """``cache``: one of ``CACHE_FORMATS``; ``rows``: queries times query heads of a KV head."""
    is_bfloat16 = dtype == torch.bfloat16
    cache_format = CACHE_FORMATS.index(cache)
    return _text(_LIBRARY.fastattn_decode_kernel(arch, shared_bytes, widest, is_bfloat16, cache_format, rows))


def append_kernel(arch: int, widest: int, dtype: torch.dtype, cache: str) -> str | None:
    """``cache``: one of ``CACHE_FORMATS``."""
    is_bfloat16 = dtype == torch.bfloat16
    return _text(_LIBRARY.fastattn_append_kernel(arch, widest, is_bfloat16, CACHE_FORMATS.index(cache)))


when_forced: list[Callable[[], None]] = []  # what is to be called when other kernels are forced than before
DEQUANTISED = "dequantise + cuBLAS"  # a way without a kernel of ours for the product
# In the order of the library's numbers for them.
_INT8_OPS = ("int8_matmul", "int8_matmul_grad_input", "int8_matmul_s8")


def int8_matmul_kernel(
    op: str,
    arch: int,
    num_sms: int,
    dtype: torch.dtype,
    has_groups: bool,
    has_epilogue: bool,
    tokens: int,
    outputs: int,
    depth: int,
) -> str | None:
    """What computes one of ``_INT8_OPS``, for sums ``[tokens, outputs]``, each of ``depth``: a kernel's name, or
    ``DEQUANTISED``.

    ``int8_matmul_s8`` is the matmul with int8 activations. ``has_groups``: the weights' scales are of groups along K;
    ``has_epilogue``: something follows the product; beside the input gradient, that of a bias is wanted.
    """
    traits = _int8_traits(op, dtype, has_groups, has_epilogue)
    sizes = tokens, outputs, depth
    return _text(_LIBRARY.fastattn_int8_matmul_kernel(_INT8_OPS.index(op), arch, num_sms, *traits, *sizes))


def _int8_traits(op: str, dtype: torch.dtype, has_groups: bool, has_epilogue: bool) -> tuple[bool, bool, bool, bool]:
    """Int8Traits of csrc/api/kernel_choice.h: is it bfloat16, has it groups, is it plain, sums it tokens."""
    is_gradient = op == "int8_matmul_grad_input"
    is_plain = is_gradient or (op == "int8_matmul" and not has_epilogue)
    return dtype == torch.bfloat16, has_groups, is_plain, is_gradient and has_epilogue


def int8_ways(
    op: str,
    arch: int,
    num_sms: int,
    dtype: torch.dtype,
    has_groups: bool,
    has_epilogue: bool,
    tokens: int,
    outputs: int,
    depth: int,
) -> dict[str, float]:
    """Predicted microseconds of the ways among which `int8_matmul_kernel` chooses the fastest: not measurements."""
    traits = _int8_traits(op, dtype, has_groups, has_epilogue)
    ways = _LIBRARY.fastattn_int8_ways(_INT8_OPS.index(op), arch, num_sms, *traits, tokens, outputs, depth)
    if ways.kernel is None:
        return {}
    found = {ways.kernel.decode(): ways.kernel_microseconds}
    if math.isfinite(ways.dequantised_microseconds):
        found[DEQUANTISED] = ways.dequantised_microseconds
    return found


def cublas_microseconds(arch: int, num_sms: int, tokens: int, outputs: int, depth: int) -> float:
    """Predicted, of a matmul by cuBLAS whose weights are 16-bit numbers already: what `int8_ways` stand beside."""
    found: float = _LIBRARY.fastattn_cublas_microseconds(arch, num_sms, tokens, outputs, depth)
    return found


def dealt_int8_matmul(
    op: str, arch: int, num_sms: int, has_groups: bool, tokens: int, outputs: int, depth: int
) -> Dealt:
    """By the fastest of our kernels, also where dequantising is faster."""
    return _LIBRARY.fastattn_dealt_int8_matmul(_INT8_OPS.index(op), arch, num_sms, has_groups, tokens, outputs, depth)


@contextlib.contextmanager
def forced_int8_tile(arch: int = 0, tokens: int = 0) -> Iterator[None]:
    """Within, int8 matmuls of this process are computed by kernels for ``arch`` with tiles of so many tokens; 0: any.

    For tests and benchmarks, which compare them. A call for which there is none raises. ``arch`` of -1: weights are
    dequantised for cuBLAS wherever that computes the same.
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


def dealt_decode(
    facts: NativeDeviceFacts, widest: int, cache: str, batch: int, kv_heads: int, rows: int, capacity: int
) -> Dealt:
    """By the kernel that `decode_kernel` names: ``rows`` of queries a KV head, and ``capacity`` tokens a sequence."""
    cache_format = CACHE_FORMATS.index(cache)
    return _LIBRARY.fastattn_dealt_decode(ctypes.byref(facts), widest, cache_format, batch, kv_heads, rows, capacity)
