"""Decides where tests run kernels: on the GPU if there is one, else on the emulator with CPU tensors (conftest.py).

Without a GPU, importing this module imports fastattn with the library that takes CPU tensors, where there is an nvcc to
build it. Raises RuntimeError if fastattn was imported before with the installed library.
"""

from __future__ import annotations

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    from emulator import native_library, options

    native_library.import_fastattn()
    options.start(**options.STRICT)
# torch's CUDA build without a GPU (tests/cuda_torch) runs kernels on the emulator too, with its checks and options.
IS_STAND_IN = "cuda_torch.autoload" in sys.modules
ON_EMULATOR = DEVICE == "cpu" or IS_STAND_IN
