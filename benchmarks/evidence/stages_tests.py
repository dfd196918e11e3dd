"""Runs pytest in two stages: the kernel tests on the GPU, and the tests that compare the emulator with the GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.evidence import pytest_codes
from benchmarks.evidence.machine import missing
from benchmarks.evidence.processes import run_together
from benchmarks.evidence.stages import FAILED, NOT_RUN, PASSED, TIMED_OUT, Result, Workplace

# A test module runs on the GPU, as a whole or in part, if it uses support/kernel_device.py, a fixture of
# tests/conftest.py or the mark "gpu", or looks for a GPU itself.
_ON_GPU = re.compile(r"kernel_device|emulated_gpu|mark\.gpu|not torch\.cuda\.is_available")
_SHOWN = 12


def kernel_test_modules(tests: Path) -> list[str]:
    """Returns the test modules that run kernels, as paths from ``tests``, the most informative first.

    Tests for Hopper, whose kernels no other GPU runs, come first, then tests of the other kernels, then the rest.
    """
    modules = [path for path in sorted(tests.rglob("test_*.py")) if tests / "emulator" not in path.parents]
    chosen = [path for path in modules if _ON_GPU.search(path.read_text())]
    chosen.sort(
        key=lambda path: (not path.stem.endswith("_sm90"), not path.name.startswith(("test_cuda_", "test_triton_")))
    )
    return [path.relative_to(tests).as_posix() for path in chosen]


def run_tests(workplace: Workplace, deadline: float) -> Result:
    """Runs the kernel tests in several processes, because most of their time is spent compiling Triton kernels."""
    modules = [f"tests/{name}" for name in kernel_test_modules(workplace.root / "tests")]
    return _pytest(workplace, deadline, "tests", modules, workplace.jobs)


def run_emulator(workplace: Workplace, deadline: float) -> Result:
    """Runs the same PTX on the emulator and on the GPU. The first process builds the emulator."""
    absent = missing(workplace.facts, "pybind11", "ninja", "setuptools")
    if absent:
        return Result(NOT_RUN, f"the emulator cannot be built, {absent}")
    modules = [f"tests/emulator/tests/{name}.py" for name in ("test_gpu", "test_gpu_hopper")]
    return _pytest(workplace, deadline, "emulator", [*modules, "-m", "gpu"], max(1, workplace.jobs // 2))


def _pytest(workplace: Workplace, deadline: float, name: str, arguments: list[str], shares: int) -> Result:
    absent = missing(workplace.facts, "pytest")
    if absent:
        return Result(NOT_RUN, absent)
    records = [workplace.logs / f"{name}_{share}.jsonl" for share in range(shares)]
    options = ["-q", "--tb=short", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    commands = [
        workplace.command(
            f"{name}_{share}",
            *("-m", "pytest", *options, "-p", "benchmarks.evidence.pytest_record"),
            *("--record", str(record), "--share", f"{share}/{shares}", *arguments),
            restart_after=partial(pytest_codes.was_cut_off, record=record),
        )
        for share, record in enumerate(records)
    ]
    for record in records:
        record.unlink(missing_ok=True)
    outcomes = run_together(commands, deadline)
    result = judge([pytest_codes.read(record) for record in records], [outcome.timed_out for outcome in outcomes])
    if result.status == FAILED and not result.details:
        result.details = workplace.tail(f"{name}_0")
    return result


def judge(records: Sequence[Sequence[pytest_codes.Line]], timed_out: Sequence[bool]) -> Result:
    """Returns the result of several pytest processes, from their records and from whether each ran out of time.

    A test that started and did not end was still running if it is the last one of a process that ran out of time;
    otherwise it crashed or hung.
    """
    lines = [line for record in records for line in record]
    ended = {line["test"] for line in lines if "test" in line}
    started = [[line["start"] for line in record if "start" in line] for record in records]
    cut_off = [test for tests in started for test in tests if test not in ended]
    running = {tests[-1] for tests, late in zip(started, timed_out, strict=True) if late and tests} & set(cut_off)
    crashed = [test for test in cut_off if test not in running]
    outcomes = Counter(line["outcome"] for line in lines if "test" in line)
    collected = sum(line.get("collected", 0) for line in lines)
    counts = {
        "passed": outcomes["passed"],
        "failed": outcomes["failed"],
        "errors": outcomes["error"],
        "crashed or hung": len(crashed),
        "skipped": outcomes["skipped"],
        "not finished in time": max(0, collected - sum(map(len, started))) + len(running),
    }
    headline = ", ".join(f"{number} {word}" for word, number in counts.items() if number) or "no test ran"
    bad = [line for line in lines if line.get("outcome") in ("failed", "error")]
    details = [f"{test}: crashed or hung, see the log" for test in crashed]
    details += [f"{line['test']}: {_first_line(line['reason'])}" for line in bad]
    if len(details) > _SHOWN:
        details[_SHOWN:] = [f"… and {len(details) - _SHOWN} more: see the records in logs.tar.gz"]
    skips = Counter(line["reason"] for line in lines if line.get("outcome") == "skipped")
    details += [f"skipped {number} times: {reason}" for reason, number in skips.most_common(4)]
    if bad or crashed:
        status = FAILED
    elif any(timed_out):
        status = TIMED_OUT
    else:
        status = PASSED if outcomes["passed"] else FAILED
    return Result(status, headline, details)


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    errors = [line[1:].strip() for line in lines if line.startswith("E  ")]  # as pytest writes import errors
    return (errors or lines)[0][:240]
