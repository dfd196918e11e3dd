"""Runs checks on two processes that have the emulator's kernels. Not a test module.

It imports nothing of fastattn: in a new process the library with kernels has to be the first.
"""

from __future__ import annotations

import importlib
import socket
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def run(module: str, *checks: str) -> None:
    """Call the functions ``checks`` of a test module with their rank and a mesh of two, on an emulated GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_run, (port, module, checks), nprocs=2)


def _run(rank: int, port: int, module: str, checks: tuple[str, ...]) -> None:
    import kernel_device  # noqa: F401
    from emulator import device

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    with device.emulated():
        for check in checks:
            getattr(importlib.import_module(module), check)(rank, mesh)
    dist.barrier()
    dist.destroy_process_group()
