"""Implements three stages: the native library, compute-sanitizer and the benchmarks."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from benchmarks.evidence.machine import missing
from benchmarks.evidence.processes import Command, run_together
from benchmarks.evidence.stages import FAILED, NOT_RUN, PASSED, TIMED_OUT, Result, Workplace, status_of

TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZER_CODE = 86  # compute-sanitizer's exit code if it found an error
BENCHMARKS = ("attention_forward", "decode", "int8_matmul", "attention_backward")
# A benchmark with a time limit of s seconds starts new cases during (s - _START_S) * _LAST_CASE_PART seconds. The rest
# is for starting the process and for finishing the last case.
_START_S, _LAST_CASE_PART = 12.0, 0.75

BUILD = """
import os, re, setup
version = re.search(r'^version = "(.+)"', open("pyproject.toml").read(), re.MULTILINE)[1]
print(setup.configure(version, os.environ).run())
"""


def run_library(workplace: Workplace, deadline: float) -> Result:
    """Loads the native library. Builds one if there is none, or if it does not load or lacks CUDA C++ kernels."""
    environment = workplace.environment
    given = environment.get("FASTATTN_LIBRARY")
    usual = [workplace.root / folder / "libfastattn.so" for folder in ("python/fastattn", "build/native")]
    said = "there was none"
    for carried in [Path(given)] if given else usual:
        if not carried.exists():
            continue
        environment["FASTATTN_LIBRARY"] = str(carried)
        outcome = workplace.run(deadline, "library", "-m", "fastattn", "--short")
        if not outcome.passed:
            said = f"{_shown(carried, workplace)} does not load ({' '.join(workplace.tail('library', 1))})"
        elif any("without CUDA C++ kernels" in line for line in workplace.tail("library", 20)):
            said = f"{_shown(carried, workplace)} has no CUDA C++ kernels"
        else:
            return Result(PASSED, f"{_shown(carried, workplace)}, already built", workplace.tail("library"))
    workplace.library_problem = said
    absent = missing(workplace.facts, "ninja", "setuptools")
    if absent:
        return Result(FAILED, f"{said}, and it cannot be built, {absent}")
    built = workplace.run(deadline, "build", "-c", BUILD)
    if not built.passed:
        status = TIMED_OUT if built.timed_out else FAILED
        return Result(status, f"{said}, and building it ended: {status}", workplace.tail("build"))
    library = Path(workplace.tail("build", 1)[0])
    environment["FASTATTN_LIBRARY"] = str(library)
    outcome = workplace.run(deadline, "library", "-m", "fastattn", "--short")
    if not outcome.passed:
        return Result(status_of([outcome]), f"{said}; the one built here does not load", workplace.tail("library"))
    workplace.library_problem = None
    return Result(PASSED, f"{_shown(library, workplace)}, built now: {said}", workplace.tail("library"))


def _shown(path: Path, workplace: Workplace) -> str:
    return str(path.relative_to(workplace.root)) if path.is_relative_to(workplace.root) else path.name


def find_sanitizer() -> str | None:
    """Returns the path of compute-sanitizer, from PATH or the CUDA toolkit, or None."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [folder for root in roots if root for folder in (f"{root}/bin", f"{root}/compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def run_sanitizer(workplace: Workplace, deadline: float) -> Result:
    """Runs the cases without a tool first, which compiles Triton's kernels, and then under all three tools at once."""
    cases = ("-m", "benchmarks.evidence.sanitizer_cases")
    plain = workplace.run(deadline, "sanitizer_cases", *cases)
    if not plain.passed:
        return Result(status_of([plain]), "the cases do not run without a tool", workplace.tail("sanitizer_cases"))
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return Result(NOT_RUN, "compute-sanitizer is not installed; its cases ran without it")
    # torch's caching allocator puts many tensors into one allocation: memcheck would miss accesses beyond a tensor.
    environment = {**workplace.environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--error-exitcode", str(SANITIZER_CODE), "--target-processes", "application-only"]
    commands = [
        Command(
            [sanitizer, "--tool", tool, *options, workplace.python, *cases],
            workplace.logs / f"sanitizer_{tool}.log",
            environment,
            workplace.root,
        )
        for tool in TOOLS
    ]
    outcomes = run_together(commands, deadline)
    texts = {tool: command.log.read_text(errors="replace") for tool, command in zip(TOOLS, commands, strict=True)}
    words, details = [], []
    refused = [line for text in texts.values() for line in text.splitlines() if "not supported" in line.lower()]
    for tool, outcome in zip(TOOLS, outcomes, strict=True):
        words.append(f"{tool}: {'out of time' if outcome.timed_out else sanitizer_verdict(texts[tool])}")
        if not outcome.passed:
            details += [f"{tool}: {line}" for line in sanitizer_errors(texts[tool])]
    if refused and not any(outcome.passed for outcome in outcomes):
        return Result(NOT_RUN, f"compute-sanitizer does not work here: {refused[0].strip()}", details)
    return Result(status_of(outcomes), "; ".join(words), details)


def sanitizer_verdict(text: str) -> str:
    """Returns the tool's last summary of what it found."""
    summaries = re.findall(r"=+ \w+ SUMMARY: (.+)", text)
    return summaries[-1].strip() if summaries else "ended without a summary"


def sanitizer_errors(text: str, most: int = 6) -> list[str]:
    """Returns the tool's first ``most`` messages, without its banner, host frames and empty lines."""
    lines = [line.lstrip("= ").strip() for line in text.splitlines() if line.startswith("=========")]
    said = [line for line in lines if line and not line.startswith(("COMPUTE-SANITIZER", "Host Frame", "Saved host"))]
    return [line[:240] for line in said[:most]]


def run_benchmarks(workplace: Workplace, deadline: float) -> Result:
    """Runs the quick grids of all benchmarks with all peers. The benchmarks share the remaining time equally."""
    absent = missing(workplace.facts, "tqdm", "matplotlib", "numpy", "tabulate")
    if absent:
        return Result(NOT_RUN, absent)
    outcomes, words, details = [], [], []
    for index, name in enumerate(BENCHMARKS):
        share_s = (deadline - time.monotonic()) / (len(BENCHMARKS) - index)
        minutes = max(0.05, (share_s - _START_S) * _LAST_CASE_PART / 60)
        options = ["--json", str(workplace.results), "--plot", str(workplace.results), "--minutes", f"{minutes:.3f}"]
        outcome = workplace.run(time.monotonic() + share_s, f"bench_{name}", "-m", "benchmarks", name, *options)
        outcomes.append(outcome)
        words.append(f"{name} {status_of([outcome])}")
        if not outcome.passed:
            details += [f"{name}: {line}" for line in workplace.tail(f"bench_{name}", 3)]
    prefix = "" if workplace.facts["gpu"] else "without a GPU, no figures: "
    return Result(status_of(outcomes), prefix + ", ".join(words), details)
