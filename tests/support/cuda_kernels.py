"""Says when the tests of the CUDA C++ kernels run, and with which checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastattn import native
from kernel_device import DEVICE, IS_STAND_IN, ON_EMULATOR

EMULATED = DEVICE == "cpu"  # then a test may choose which GPU is emulated
if ON_EMULATOR:  # on a machine with a GPU, the emulator is not built
    from emulator import cuda_runtime, launches, options

    launches.leave_out("outside_rows")  # every call on packed sequences launches it, and only its own tests want it

DTYPES = (torch.float16, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
only_emulated = pytest.mark.skipif(not EMULATED, reason="looks into the emulator")

HAS_KERNELS = "80" in native.BUILD["archs"] and native.TAKES_CPU_TENSORS is EMULATED
NO_KERNELS = "needs kernels: no nvcc"

needs_nested = pytest.mark.skipif(IS_STAND_IN, reason="torch's kernels for nested tensors have no stand-in")

# `pytestmark` of a module that tests CUDA C++ kernels.
MARKS = [
    pytest.mark.usefixtures("emulated_gpu", "tracked_tensors"),
    pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS),
]
# `HOPPER_MARKS` is `pytestmark` of a module that tests Hopper kernels: see the fixture in tests/attention/conftest.py.
IS_HOPPER = EMULATED or torch.cuda.get_device_capability() == (9, 0)
NEEDS_HOPPER = pytest.mark.skipif(
    not IS_HOPPER or "90a" not in native.BUILD["archs"], reason="needs kernels for sm_90a"
)
# The architecture whose kernels run unless a test chooses another GPU.
FAMILY = 90 if not EMULATED and IS_HOPPER and "90a" in native.BUILD["archs"] else 80
HOPPER_MARKS = [*MARKS, pytest.mark.usefixtures("hopper"), NEEDS_HOPPER]
# The fixture in tests/attention/conftest.py emulates a GPU for these.
on_both = pytest.mark.parametrize("kernels", ["sm_80", "sm_90"], indirect=True)


@contextlib.contextmanager
def checked(**changes: Any) -> Iterator[None]:
    """Turns on every check of the emulator; ``changes`` are other options of launches."""
    if not ON_EMULATOR:
        yield
        return
    with (
        cuda_runtime.raising_faults(),
        options.launching(**{"tracked": True, "uninitialised": True, **changes}),
    ):
        yield
