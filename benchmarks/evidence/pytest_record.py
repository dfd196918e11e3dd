"""A pytest plugin that runs every n-th test and records each outcome at once, in case the process is killed.

It writes JSON lines to ``--record FILE``: ``{"collected": n}``, ``{"start": test}``, ``{"test", "outcome", "seconds",
"reason"}``. Started again with the same file, pytest skips all tests that were started before. A test that takes longer
than ``--seconds-per-test``, or leaves the GPU in an error state, ends the process: no later outcome would be valid.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.pytest_codes import GPU_LOST, read

_REASON_CHARACTERS = 2000


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("record")
    group.addoption("--record", type=Path, required=False, help="JSON lines with every outcome")
    group.addoption("--share", default="0/1", help="which part of the tests, of how many: 0/4 to 3/4")
    group.addoption("--seconds-per-test", type=float, default=60.0, help="after which the process ends")


def pytest_configure(config: Any) -> None:
    if config.getoption("--record"):
        config.pluginmanager.register(_Recorder(config), "record")


class _Recorder:
    def __init__(self, config: Any) -> None:
        self.path = config.getoption("--record")
        self.index, self.count = map(int, config.getoption("--share").split("/"))
        self.seconds_per_test = config.getoption("--seconds-per-test")
        self.terminal = os.dup(2)  # keep stderr: pytest captures it from here on
        self.before = {line["start"] for line in read(self.path) if "start" in line}
        self.has_started_before = self.path.exists()

    def write(self, **line: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        mine = items[self.index :: self.count]
        if not self.has_started_before:
            self.write(collected=len(mine))
        items[:] = [item for item in mine if item.nodeid not in self.before]

    def pytest_collectreport(self, report: Any) -> None:
        # All processes collect the same files, so only the first one reports collection errors.
        if report.failed and self.index == 0 and not self.has_started_before:
            self.write(test=report.nodeid, outcome="error", seconds=0.0, reason=_reason(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> None:
        self.write(start=item.nodeid)
        faulthandler.dump_traceback_later(self.seconds_per_test, exit=True, file=self.terminal)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            reason = _reason(report) if outcome != "passed" else None
            self.write(test=report.nodeid, outcome=outcome, seconds=round(report.duration, 3), reason=reason)
        if report.failed and _gpu_is_lost():
            os.write(self.terminal, f"\nthe GPU is in an error after {report.nodeid}:\n{report.longrepr}\n".encode())
            os._exit(GPU_LOST)  # skip the clean-up, which needs the GPU

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):  # a skip: (file, line, reason)
        return str(report.longrepr[2])
    text = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or report.longrepr)
    return text[:_REASON_CHARACTERS]


def _gpu_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
