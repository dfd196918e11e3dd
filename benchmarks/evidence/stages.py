"""Defines stages, and runs them in order, each with a time limit. A failed stage does not stop the next ones."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.evidence.machine import Facts
from benchmarks.evidence.processes import Command, Outcome, run_together

PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"


@dataclass
class Result:
    """Says how a stage ended: ``headline`` sums it up in one line, ``details`` has the first failures."""

    status: str
    headline: str
    details: list[str] = field(default_factory=list)
    stage: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0


@dataclass
class Workplace:
    """Holds the folders, the Python and the environment with which the stages run their commands.

    Args:
        root: the repository.
        scratch: the folder under build/ in which everything is written.
        python: the Python that runs all commands.
        environment: the environment variables of all commands.
        facts: the facts about the machine.
        jobs: how many processes may run at once.
        library_problem: why there is no native library, or None if there is one.
    """

    root: Path
    scratch: Path
    python: str
    environment: dict[str, str]
    facts: Facts
    jobs: int
    library_problem: str | None = None

    @property
    def logs(self) -> Path:
        return self.scratch / "logs"

    @property
    def results(self) -> Path:
        """Returns the folder for the JSON and the plots of the benchmarks."""
        return self.scratch / "results"

    def command(self, log: str, *arguments: str, restart_after: Callable[[int], bool] = lambda code: False) -> Command:
        """Returns the command that runs Python with ``arguments`` and logs to ``log``."""
        return Command([self.python, *arguments], self.logs / f"{log}.log", self.environment, self.root, restart_after)

    def run(self, deadline: float, log: str, *arguments: str) -> Outcome:
        return run_together([self.command(log, *arguments)], deadline)[0]

    def tail(self, log: str, lines: int = 8) -> list[str]:
        """Returns the last ``lines`` lines of a log that are not blank."""
        text = (self.logs / f"{log}.log").read_text(errors="replace")
        return [line[:300] for line in text.splitlines() if line.strip()][-lines:]


@dataclass(frozen=True)
class Stage:
    """A stage: ``run`` takes a workplace and a deadline (of ``time.monotonic``); ``limit_s`` is its default limit."""

    name: str
    limit_s: float
    run: Callable[[Workplace, float], Result]
    needs_gpu: bool = True
    needs_library: bool = True


def status_of(outcomes: Sequence[Outcome]) -> str:
    """Returns the worst status of the outcomes: failed, else timed out, else passed."""
    if any(not outcome.passed and not outcome.timed_out for outcome in outcomes):
        return FAILED
    return TIMED_OUT if any(outcome.timed_out for outcome in outcomes) else PASSED


def run_stages(
    stages: Sequence[Stage],
    limits: Mapping[str, float],
    workplace: Workplace,
    after_each: Callable[[list[Result]], object],
) -> list[Result]:
    """Runs every stage. ``after_each`` gets the results so far, so that they survive if this process is killed."""
    results: list[Result] = []
    for stage in stages:
        limit_s = limits.get(stage.name, stage.limit_s)
        print(f"{stage.name} (at most {limit_s:g} s) ...", flush=True)
        start = time.monotonic()
        result = _run(stage, workplace, start + limit_s)
        result.stage, result.limit_s, result.seconds = stage.name, limit_s, time.monotonic() - start
        results.append(result)
        print(f"{stage.name}: {result.status} in {result.seconds:.0f} s: {result.headline}", flush=True)
        after_each(results)
    return results


def _run(stage: Stage, workplace: Workplace, deadline: float) -> Result:
    if stage.needs_gpu and workplace.facts.get("gpu") is None:
        return Result(NOT_RUN, "needs a GPU")
    if stage.needs_library and workplace.library_problem:
        return Result(NOT_RUN, f"no native library: {workplace.library_problem}")
    try:
        return stage.run(workplace, deadline)
    except Exception as error:  # an error in one stage must not stop the others
        return Result(FAILED, f"{type(error).__name__}: {error}", traceback.format_exc().splitlines()[-6:])
