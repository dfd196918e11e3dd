"""Loads the native library, which defines ``torch.ops.fastattn``, and says what it was built from.

``LIBRARY_PATH``  the library that was loaded: the one beside this file, or the one that FASTATTN_LIBRARY names
``TILES``         the tiles of its kernels: kernel → head dim, or block_m → {"block_m", "block_n", "num_warps", …}
``BUILD``         how it was built: "version", "archs" (the GPU architectures of its CUDA C++ kernels; empty if it has
                  none), "cuda" and "nvcc" (versions, or None), "torch" (the one whose headers it was compiled with)
``TAKES_CPU_TENSORS``  whether it is a build for an emulator, whose kernels run in the host's memory
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import torch

LIBRARY_PATH = Path(os.environ.get("FASTATTN_LIBRARY") or Path(__file__).with_name("libfastattn.so"))


class Dealt(ctypes.Structure):
    """How a launch deals the steps of its main loop: the number of CTAs, and the steps of the longest.

    ``block_m``: rows of a tile; ``parts``: how many parts of tiles pass through a workspace, at most.
    """

    ctas: int
    longest_steps: int
    block_m: int
    parts: int
    _fields_ = tuple((name, ctypes.c_int64) for name in ("ctas", "longest_steps", "block_m", "parts"))


def _load(path: Path) -> tuple[ctypes.CDLL, dict[str, Any], dict[str, Any]]:
    """Loads the library at ``path`` into torch and returns it, BUILD and TILES. Raises ImportError."""
    if not path.exists():
        raise ImportError(
            f"fastattn's native library is missing: {path} does not exist. In a clone, run `make install`; elsewhere "
            "install fastattn again with `pip install --no-build-isolation --force-reinstall --no-deps`."
        )
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
        texts = library.fastattn_build_info, library.fastattn_tiles
        dealt = library.fastattn_dealt_int8_matmul, library.fastattn_dealt_decode
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"fastattn's native library {path} does not load into torch {torch.__version__} (2.10 or later is needed): "
            f"{error}. Build it again: in a clone, run `make install`."
        ) from error
    for function in texts:
        function.restype = ctypes.c_char_p
    for function in dealt:
        function.restype = Dealt
    build, tiles = (json.loads(function()) for function in texts)
    return library, build, tiles


_LIBRARY, BUILD, TILES = _load(LIBRARY_PATH)
TAKES_CPU_TENSORS: bool = torch._C._dispatch_has_kernel_for_dispatch_key("fastattn::attention_forward", "CPU")


_INT8_KERNELS = ("int8_matmul_sm80", "int8_matmul_grad_input_sm80", "int8_matmul_s8_sm80")


def dealt_int8_matmul(kernel: str, tokens: int, outputs: int, depth: int, arch: int, num_sms: int) -> Dealt:
    """By one of ``_INT8_KERNELS``, for sums ``[tokens, outputs]``, each of ``depth``, on a GPU of compute capability
    ``arch`` (times ten)."""
    return _LIBRARY.fastattn_dealt_int8_matmul(_INT8_KERNELS.index(kernel), tokens, outputs, depth, arch, num_sms)


def dealt_decode(
    head_dim: int, is_int8: bool, batch: int, kv_heads: int, rows: int, capacity: int, num_sms: int
) -> Dealt:
    """By ``decode_split_sm80``, for ``rows`` of queries a KV head, and sequences of ``capacity`` tokens."""
    return _LIBRARY.fastattn_dealt_decode(head_dim, is_int8, batch, kv_heads, rows, capacity, num_sms)
