"""Describes builds of the native library that tests of the build look at, or run without nvcc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from native_build.cuda import CudaToolkit
from native_build.instances import all_instances
from native_build.library import ROOT, NativeBuild
from native_build.tools import find_cxx, find_torch

CSRC = ROOT / "csrc"


def without_kernels(output: Path = Path("out"), **changed: Any) -> NativeBuild:
    usual = {"version": "1.2.3", "cxx": find_cxx(os.environ), "torch": find_torch(), "toolkit": None, "instances": []}
    return NativeBuild(source=CSRC, output=output, **{**usual, **changed})


def with_kernels(**changed: Any) -> NativeBuild:
    """Returns a build of all kernels with a CUDA toolkit that does not exist."""
    toolkit = CudaToolkit(Path("nvcc"), "13.0.88", Path("include"), Path("lib64"))
    return without_kernels(**{"toolkit": toolkit, "instances": all_instances(CSRC), **changed})
