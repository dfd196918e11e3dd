"""Without a GPU, Triton kernels run in Triton's interpreter, on CPU tensors, for the whole test session.

Triton reads the variable when it is imported and when a kernel is defined, so it is set before any test module is. What
needs the compiler instead (test_triton_compile.py) runs in a process of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))  # oracle, aot, …
