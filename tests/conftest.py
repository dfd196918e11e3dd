"""Chooses the native library of a test process, and holds the options and fixtures of all tests.

On a machine with a GPU, kernels run there. Without one, they run as compiled PTX on the emulator, on CPU tensors (see
the fixture ``emulated_gpu``), and the package needs the native library that is built for the emulator. A process loads
either that library or the installed one, at the first import of fastattn, so conftest.py decides before the first test
module is imported. If the text of any module to be collected matches ``_KERNELS``, the process builds and loads the
emulator's library. Otherwise it loads the installed one, and no emulator is built. A module that runs kernels without
matching ``_KERNELS`` fails: it imports `kernel_device` too late.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# torch reads these at its first matrix product. By default it keeps oneDNN's kernels for a thousand shapes: 500 MB.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")

import torch

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "support"), str(TESTS.parent), str(TESTS.parent / "csrc")]

from native_build import cached  # noqa: E402

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt()
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Triton reads this at its first compilation. Other processes and later runs share the folder.
    os.environ.setdefault("TRITON_CACHE_DIR", str((cached.folder() or TESTS.parent / "build" / "emulator") / "triton"))

# Matches a test module that runs fastattn's kernels: it imports one of these modules or uses ``emulated_gpu``.
_KERNELS = re.compile(
    r"^(from|import) .*\b(kernel_device|cuda_kernels|(append|attention|decode|int8|merge|paged)_cases)\b"
    r"|^from benchmarks\.machine_code\b|\bemulated_gpu\b",
    re.MULTILINE,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastattn")
    group.addoption("--few", action="store_true", help="few cases of each test, slow ones too")
    group.addoption("--core", action="store_true", help="the cheapest of these, which prove every kernel")
    group.addoption("--rest", metavar="K/N", help="what --core or --few leaves out: the K-th of N parts of it")
    group.addoption(
        "--kernels",
        metavar="PATTERN,…",
        help="without a GPU: compile only these CUDA C++ kernels, by the beginning of a name or with *, such as "
        "split_sm80.HEAD_DIM_64 (default: all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # torch's sums on the CPU depend on its number of threads: with one thread they are equal on every machine. It also
    # leaves the other cores to the other test processes.
    torch.set_num_threads(1)
    # Each emulated launch takes and frees megabytes: glibc keeps up to 64 MB of them for the next launch.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_TRIM_THRESHOLD, 1 << 26)
        mallopt(M_MMAP_THRESHOLD, 1 << 25)
    if (config.option.core or config.option.few) and not config.option.rest and not HAS_GPU:
        from proof import Gate

        config.pluginmanager.register(Gate(config, TESTS.parent / "triton_kernels"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Returns what ``-n auto`` means: a process per core, or per 2.5 GB of free memory if those are fewer."""
    memory = Path("/proc/meminfo")
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ or not memory.exists():
        return None  # pytest-xdist's own number
    available = re.search(r"^MemAvailable:\s*(\d+) kB", memory.read_text(), re.MULTILINE)
    assert available is not None
    return max(1, min(len(os.sched_getaffinity(0)), int(available[1]) // (5 << 19)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    # pytest-xdist's first process collects nothing.
    only_deals_tests = session.config.pluginmanager.hasplugin("dsession")
    if not HAS_GPU and not only_deals_tests and any(_runs_kernels(path) for path in _modules(session.config)):
        _import_kernels(session.config.option.kernels)


def _import_kernels(patterns: str | None) -> None:
    from emulator import native_library

    try:
        native_library.import_fastattn(patterns.split(",") if patterns else ())
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    import kernel_device  # noqa: F401  (before the test modules, which import it)


def _modules(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = config.invocation_params.dir / argument.split("::")[0]
        yield from path.rglob("test_*.py") if path.is_dir() else [path]


@functools.cache
def _runs_kernels(module: Path) -> bool:
    return module.is_file() and _KERNELS.search(module.read_text()) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not _runs_kernels(item.path) and item.get_closest_marker("slow") is None:
            item.add_marker("quick")
    if config.option.core or config.option.few or config.option.rest:
        from covering import core_of, few_of, part_of

        kept = set(few_of(items) if config.option.few else core_of(items))
        if config.option.rest:
            kept = set(part_of([item for item in items if item not in kept], config.option.rest))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    # Modules and test items live to the end of the run: searching them for garbage would take a tenth of its time.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # the interpreter's exit collects them


@pytest.fixture(scope="module", autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Drops a module's compiled graphs at its end, and returns the memory that its kernels took to the system."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)


@pytest.fixture(scope="module")
def emulated_gpu() -> Iterator[None]:
    """Puts CPU tensors on an emulated GPU for the tests of a module, unless there is a real GPU."""
    if HAS_GPU:
        yield
        return
    from emulator import device

    with device.emulated():
        yield


@pytest.fixture(scope="module")
def tracked_tensors() -> Iterator[None]:
    """Puts red zones around torch's allocations on the emulated GPU; launches with ``tracked`` must not touch them."""
    if HAS_GPU:
        yield
        return
    from emulator import allocations

    with allocations.tracked():
        yield
