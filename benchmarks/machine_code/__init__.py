"""Shows kernels without a GPU: what they are compiled to, what they execute, and how launches deal their work.

Each module is a tool that prints a table: ``python -m benchmarks.machine_code.kernels``. fastattn's library is then the
one of the tests' emulator, which has every CUDA C++ kernel as PTX.
"""

import sys

from benchmarks import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from emulator import native_library

if "fastattn" not in sys.modules:
    native_library.import_fastattn()

from fastattn import native

HAS_NATIVE = native.BUILD["version"] == "0+emulated"  # whether that is the library: without nvcc there is none
