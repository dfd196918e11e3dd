"""Where the tests run kernels: on the GPU if there is one, else on CPU tensors, on the emulator (conftest.py)."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
