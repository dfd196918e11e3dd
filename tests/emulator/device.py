"""The emulated GPU of this process, on which Triton, native libraries and fastattn run with CPU tensors."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from emulator import cuda_runtime

KIB = 1024
# Compute capability times ten → (multiprocessors, opt-in shared memory of one block in bytes) of an A100, an H200 and a
# B200. On the B200, native kernels run in their version for sm_80.
USUAL = {80: (108, 163 * KIB), 90: (132, 227 * KIB), 100: (148, 227 * KIB)}


@contextlib.contextmanager
def emulated(arch: int = 80, num_sms: int | None = None, shared_memory_bytes: int | None = None) -> Iterator[None]:
    """Emulates a GPU in the whole process within the block. May be nested.

    Triton's kernels and fastattn's dispatcher take CPU tensors for tensors on this GPU, which the emulated CUDA runtime
    has too. Defaults are in `USUAL`. Raises ValueError for an unknown ``arch`` or numbers below 1.
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
