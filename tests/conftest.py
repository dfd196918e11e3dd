"""Without a GPU, kernels run as compiled PTX on the emulator, on CPU tensors: see the fixture ``emulated_gpu``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "support"), str(TESTS.parent)]
# Test modules whose functions other folders take.
sys.path += [str(TESTS / folder) for folder in ("attention", "decode", "int8")]
if not torch.cuda.is_available():
    from emulator import native_library

    # Read when Triton compiles first. Later runs find there what this one compiled.
    os.environ.setdefault("TRITON_CACHE_DIR", str(TESTS.parent / "build" / "emulator" / "triton"))
    # The native library of this process is the one that takes CPU tensors, where there is an nvcc to build it. What
    # tests say about the one that is installed, they say without loading it.
    native_library.import_fastattn()

import compile_ahead  # noqa: E402

_compiling: list[subprocess.Popen[bytes]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        compile_ahead.OPTION, action="store_true", help="launch no kernel: see tests/support/compile_ahead.py"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(compile_ahead.OPTION):
        compile_ahead.launch_nothing()
        items.reverse()


def pytest_collection_finish(session: pytest.Session) -> None:
    is_needed = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    is_asked = session.config.getoption(compile_ahead.OPTION) or session.config.option.collectonly
    if is_needed and not is_asked:
        _compiling.extend(compile_ahead.start(session))


def pytest_unconfigure() -> None:
    for process in _compiling:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def emulated_gpu() -> Iterator[None]:
    """Where there is no GPU: for the tests of a module, CPU tensors are on an emulated one."""
    if torch.cuda.is_available():
        yield
        return
    from emulator import device

    with device.emulated():
        yield


@pytest.fixture(scope="module")
def tracked_tensors() -> Iterator[None]:
    """On the emulated GPU: what torch allocates within the tests lies between red zones, and launches with ``tracked``
    may touch nothing else."""
    if torch.cuda.is_available():
        yield
        return
    from emulator import allocations

    with allocations.tracked():
        yield
