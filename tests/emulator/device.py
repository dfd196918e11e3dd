"""The emulated GPU of this process: what Triton, a native library and fastattn take CPU tensors to be on."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from emulator import cuda_runtime

KIB = 1024
# Compute capability times ten → (multiprocessors, opt-in shared memory of one block) of an A100, of an H200, and of a
# B200, which runs the native kernels for sm_80 here.
USUAL = {80: (108, 163 * KIB), 90: (132, 227 * KIB), 100: (148, 227 * KIB)}


@contextlib.contextmanager
def emulated(arch: int = 80, num_sms: int | None = None, shared_memory_bytes: int | None = None) -> Iterator[None]:
    """Within, in the whole process: Triton's kernels take CPU tensors, and so does what asks fastattn's dispatcher, and
    the emulated CUDA runtime has this GPU.

    May be nested. How launches run: `emulator.options`.
    """
    if arch not in USUAL:
        raise ValueError(f"arch: expected one of {', '.join(map(str, USUAL))}, got {arch}")
    usual_sms, usual_bytes = USUAL[arch]
    num_sms = usual_sms if num_sms is None else num_sms
    shared_memory_bytes = usual_bytes if shared_memory_bytes is None else shared_memory_bytes
    for name, value in (("num_sms", num_sms), ("shared_memory_bytes", shared_memory_bytes)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("triton") is not None:
            from emulator import triton_driver

            stack.enter_context(triton_driver.active(triton_driver.Gpu(arch, num_sms, shared_memory_bytes)))
        if cuda_runtime.is_available:
            stack.enter_context(cuda_runtime.pretend(arch, num_sms, shared_memory_bytes))
        if importlib.util.find_spec("fastattn") is not None:
            from fastattn.dispatch.device import DeviceFacts, emulate_on_cpu

            before = emulate_on_cpu(DeviceFacts(arch, num_sms, shared_memory_bytes, driver_cuda=13000))
            stack.callback(emulate_on_cpu, before)
        yield
