"""Prepares every process of ``.venv-cuda`` after it has imported torch (environment.py registers this module)."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from cuda_torch.environment import nvidia_folder, site_packages
from cuda_torch.stand_ins import DRIVER
from emulator import native_library
from emulator.build import BUILD
from native_build.library import LIBRARY_NAME

HERE = Path(__file__).parent
KIB = 1024
# (compute capability times ten, multiprocessors, shared memory of a CTA): an H100 and an A100.
DEVICES = [(90, 132, 227 * KIB), (80, 108, 163 * KIB)]
LIBRARY = native_library.OUTPUT / native_library.FOR_CUDA_TENSORS / LIBRARY_NAME


def install() -> None:
    """Gives the process its two devices, and overrides torch's operators to compute on them."""
    folder = nvidia_folder(site_packages(Path(sys.prefix)))
    ctypes.CDLL(str(folder / DRIVER))  # later loads by name find it, like a machine's driver
    from emulator import cuda_runtime, options  # noqa: F401 (cuda_runtime notes launches from its import on)
    from emulator.native import native

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    native.runtime.set_devices(DEVICES if visible is None else [DEVICES[int(i)] for i in visible.split(",") if i])
    options.start(tracked=True, uninitialised=True, **options.STRICT)
    os.environ.setdefault("TRITON_PTXAS_PATH", str(HERE / "ptxas_stand_in"))
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(BUILD / "cuda_torch" / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(BUILD / "cuda_torch" / "inductor"))
    os.environ.setdefault("FASTATTN_LIBRARY", str(LIBRARY))
    from cuda_torch import aten_on_host

    aten_on_host.install()
