"""Runs checks on several processes, each a rank of a gloo group.

This module does not import fastattn: in a new process, the library with kernels has to be imported first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

# Modules that every rank imports and that take seconds. Ranks are forks of a process that has imported just these.
_PRELOADED = ("torch.distributed.device_mesh", "torch._dynamo", "pytest")


def run(module: str, *checks: str, world_size: int = 2, emulated: bool = True) -> None:
    """Calls the functions ``checks`` of a test module with a rank and a mesh, on an emulated GPU if ``emulated``."""
    if emulated and torch.cuda.is_available():
        pytest.skip("the ranks have CPU tensors, and kernels run on the GPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(list(_PRELOADED))
    # The process that ranks are forked from keeps the environment of its start, perhaps of another test: pass this one.
    arguments = (port, module, checks, world_size, emulated, dict(os.environ))
    torch.multiprocessing.start_processes(_run, arguments, nprocs=world_size, start_method="forkserver")


def _run(
    rank: int,
    port: int,
    module: str,
    checks: tuple[str, ...],
    world_size: int,
    emulated: bool,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    faulthandler.enable()  # a rank that dies of a signal prints its stack
    with contextlib.ExitStack() as stack:
        if emulated:
            import kernel_device  # noqa: F401
            from emulator import device

            stack.enter_context(device.emulated())
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
        for check in checks:
            getattr(importlib.import_module(module), check)(rank, mesh)
        dist.barrier()
        dist.destroy_process_group()
