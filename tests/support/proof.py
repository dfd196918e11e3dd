"""Records what has been proven: the kernels and options that ran in a test which met the oracle.

A run of ``make test`` or ``make test-all`` fails if no such test covers a CUDA C++ kernel, a Triton kernel, or a cell
of the support table (an operation's option on a backend). Only the emulator, which reports every launch, keeps this
record.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from kernel_symbols import name_of

num_comparisons = 0  # comparisons with the oracle, in this process


def compared() -> None:
    """Counts a comparison with the oracle. Every function that compares a kernel's result with the oracle calls it."""
    global num_comparisons
    num_comparisons += 1


def triton_kernels(folder: Path) -> set[str]:
    """Returns the names of the Triton kernels: the functions in ``folder`` whose names end in ``_kernel``."""
    return {
        f"triton {node.name}"
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


def wanted(folder: Path) -> set[str]:
    """Returns the names of all that must be proven. ``folder`` has the Triton kernels."""
    from fastattn import native
    from fastattn.dispatch.support import SUPPORT

    cells = {
        f"{op} with {feature} ({backend})"
        for op, backends in SUPPORT.items()
        for backend, support in backends.items()
        for feature in support.features
    }
    kernels = {*native.KERNELS, *triton_kernels(folder), *cells}
    return kernels if native.KERNELS else {name for name in kernels if not name.endswith("(cuda)")}


class _NotedChoices(dict[Any, Any]):
    """A dictionary for the dispatcher's cache of choices that notes each choice which is looked up or stored."""

    def __init__(self, seen: set[str]) -> None:
        self.seen = seen

    def get(self, key: Any, default: Any = None) -> Any:
        choice = super().get(key, default)
        if choice is not None:
            self._note(key, choice)
        return choice

    def __setitem__(self, key: Any, choice: Any) -> None:
        super().__setitem__(key, choice)
        self._note(key, choice)

    def _note(self, key: Any, choice: Any) -> None:
        request = key[0]
        self.seen.update(f"{request.op.name} with {feature} ({choice.backend})" for feature in request.features)


class Gate:
    """A pytest plugin that fails a whole run of `core_of` or `few_of` unless its tests prove all that is `wanted`.

    ``folder`` has the Triton kernels. Each worker of pytest-xdist reports what it has proven to the main process.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        narrowing = "keyword", "markexpr", "deselect", "maxfail", "lf", "failedfirst"
        self.is_whole = config.args == config.getini("testpaths") and not any(
            config.getoption(name, None) for name in narrowing
        )
        self.output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self.folder = folder
        self.proven: set[str] = set()
        self.wanted: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Counts what ran in a test as proven, if the test passed and met the oracle."""
        if "kernel_device" not in sys.modules:  # a process without kernels
            return (yield)
        from emulator.native import native
        from fastattn.dispatch import choose

        seen: set[str] = set()
        comparisons, choices = num_comparisons, choose._choices
        choose._choices = _NotedChoices(seen)
        native.take_kernels_that_ran()
        try:
            result = yield
        finally:
            choose._choices = choices
        if num_comparisons > comparisons:
            self.proven |= seen | set(map(_name_of_kernel, native.take_kernels_that_ran()))
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "kernel_device" in sys.modules:
            self.wanted = wanted(self.folder)
        if self.output is not None:
            self.output["proven"], self.output["wanted"] = sorted(self.proven), sorted(self.wanted)
        elif self.missing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})  # a process that was killed has none
        self.proven.update(output.get("proven", ()))
        self.wanted.update(output.get("wanted", ()))

    def missing(self) -> list[str]:
        return sorted(self.wanted - self.proven) if self.is_whole else []

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.missing():
            terminalreporter.section("not proven", red=True)
            terminalreporter.line("No test of this run launches these and meets the oracle (tests/support/proof.py):")
            for name in self.missing():
                terminalreporter.line(f"  {name}")
        elif self.is_whole and self.wanted:
            terminalreporter.line(f"Proven: {len(self.wanted)} kernels and options of backends.")


def _name_of_kernel(symbol: str) -> str:
    return name_of(symbol) if symbol.startswith("_ZN8fastattn") else f"triton {symbol}"
