"""Compiles the tests' Triton kernels on another core, while tests that come earlier run.

Compiling is what takes time in those tests: hundreds of builds of half a second each, and the emulator runs one in
milliseconds. Another pytest process goes through them from the last to the first, launching nothing, and leaves what it
compiles in Triton's cache. Whatever becomes of it, the tests compile what they do not find.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

MODULES = (
    "test_triton_attention",
    "test_triton_decode",
    "test_triton_int8",
    "test_triton_sm90",
    "test_sdpa",
    "test_three_backends",
)
FEWEST = 20  # tests for which a process pays
OPTION = "--compile-only"


def start(session: pytest.Session) -> list[subprocess.Popen[bytes]]:
    """The process, where there is enough to do for one."""
    chosen = [item.nodeid for item in session.items if item.path.stem in MODULES]
    if len(chosen) < FEWEST:
        return []
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(session.config.rootpath), OPTION]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *chosen],
        cwd=session.config.invocation_params.dir,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return [process]


def launch_nothing() -> None:
    """In that process: kernels are compiled and do nothing. The tests' assertions fail, and nobody looks."""
    from emulator import triton_driver

    def skip(self: triton_driver.Launcher, *args: Any) -> None:
        pass

    triton_driver.Launcher.__call__ = skip  # type: ignore[method-assign]
