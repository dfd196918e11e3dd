"""Runs commands until a deadline, and kills all processes that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5.0  # between SIGTERM and SIGKILL
MOST_RESTARTS = 20
_POLL_S = 0.02


@dataclass(frozen=True)
class Command:
    """A command that runs in ``folder`` and logs to ``log``. It runs again if ``restart_after(exit code)`` is true."""

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    folder: Path
    restart_after: Callable[[int], bool] = lambda code: False


@dataclass(frozen=True)
class Outcome:
    """Says how a command ended: ``returncode`` is the exit code, as `subprocess` has it, or None after a time-out."""

    returncode: int | None
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    @property
    def passed(self) -> bool:
        return self.returncode == 0


class _Running:
    def __init__(self, command: Command) -> None:
        self.command = command
        self.restarts = 0
        self.started = time.monotonic()
        self.outcome: Outcome | None = None
        command.log.parent.mkdir(parents=True, exist_ok=True)
        command.log.write_bytes(b"")
        self.start()

    def start(self) -> None:
        with open(self.command.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command.arguments,
                cwd=self.command.folder,
                env=dict(self.command.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own process group, so that it can be killed as a whole
            )

    def has_exited(self) -> bool:
        """Returns whether the process has exited. Does not reap it, so the ids of process and group are not reused."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def poll(self) -> None:
        if self.outcome is not None or not self.has_exited():
            return
        _kill(os.killpg, self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        if self.restarts < MOST_RESTARTS and self.command.restart_after(code):
            self.restarts += 1
            with open(self.command.log, "a") as log:
                log.write(f"\n--- ended with code {code}; started again ---\n")
            self.start()
            return
        self.outcome = Outcome(code, time.monotonic() - self.started)

    def kill(self) -> None:
        """Kills the process and all its descendants, also those that have started a new session."""
        below = descendants(self.process.pid)
        _kill(os.killpg, self.process.pid, signal.SIGKILL)
        for child in below:
            _kill(os.kill, child, signal.SIGKILL)
        self.process.wait()
        self.outcome = Outcome(None, time.monotonic() - self.started)


def run_together(commands: Sequence[Command], deadline: float) -> list[Outcome]:
    """Runs all commands at once. Sends SIGTERM shortly before the deadline (by ``time.monotonic``), SIGKILL at it."""
    grace = min(GRACE_S, (deadline - time.monotonic()) / 4)
    running = [_Running(command) for command in commands] if grace > 0 else []
    try:
        _wait(running, deadline - grace)
        for each in running:
            if each.outcome is None:
                each.restarts = MOST_RESTARTS
                _kill(os.killpg, each.process.pid, signal.SIGTERM)
        asked = [each for each in running if each.outcome is None]
        _wait(asked, deadline)
        for each in asked:  # a command that ended after SIGTERM has run out of time too
            if each.outcome is not None:
                each.outcome = Outcome(None, each.outcome.seconds)
    finally:
        for each in running:
            if each.outcome is None:
                each.kill()
    return [each.outcome or Outcome(None, 0.0) for each in running] or [Outcome(None, 0.0) for _ in commands]


def _wait(running: Sequence[_Running], until: float) -> None:
    while time.monotonic() < until and any(each.outcome is None for each in running):
        for each in running:
            each.poll()
        time.sleep(_POLL_S)


def descendants(pid: int) -> list[int]:
    """Returns the ids of all descendants of process ``pid``, as /proc lists them now."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])  # "id (name) state parent …"
        except (OSError, ValueError, IndexError):  # the process has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _kill(kill: Callable[[int, int], None], target: int, sent: signal.Signals) -> None:
    """Sends the signal with `os.kill` or `os.killpg`. Ignores that the target has ended or is another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(target, sent)
