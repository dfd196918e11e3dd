"""Where the tests run kernels: on the GPU if there is one, else on CPU tensors, in Triton's interpreter."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What kernels take there besides float16. The interpreter has float32, and computes bfloat16 wrongly.
WIDEST_DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32
