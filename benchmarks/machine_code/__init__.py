"""Inspects kernels without a GPU: their machine code, what they execute, and how launches distribute their work.

Each module is a tool that prints a table, such as ``python -m benchmarks.machine_code.kernels``. The tools load the
native library of the tests' emulator, which has every CUDA C++ kernel as PTX.
"""

import sys

from benchmarks import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from emulator import native_library

if "fastattn" not in sys.modules:
    native_library.import_fastattn()

from fastattn import native

HAS_NATIVE = native.BUILD["version"] == "0+emulated"  # False without nvcc: the emulator's library is then missing
