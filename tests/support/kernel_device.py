"""Where the tests run kernels: on the GPU if there is one, else on CPU tensors, on the emulator (conftest.py).

Without a GPU, importing this module imports fastattn with the library that takes CPU tensors, where there is an nvcc to
build it. Raises RuntimeError if fastattn was imported before with the library that is installed.
"""

from __future__ import annotations

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    from emulator import native_library, options

    native_library.import_fastattn()
    options.start(**options.STRICT)
# torch's CUDA build without a GPU (tests/cuda_torch): its launches have the emulator's checks and options, too.
IS_STAND_IN = "cuda_torch.autoload" in sys.modules
ON_EMULATOR = DEVICE == "cpu" or IS_STAND_IN
