"""Tests commands with a deadline: what they print is kept, and no process that they started outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.processes import Command, descendants, run_together
from benchmarks.evidence.stages import FAILED, PASSED, TIMED_OUT, status_of


def command(folder: Path, code: str, log: str = "log", **options: Any) -> Command:
    return Command([sys.executable, "-c", code], folder / f"{log}.log", os.environ, folder, **options)


def have_ended(*pids: int) -> bool:
    """Waits up to 10 seconds until the processes have ended, as signals take time to arrive."""
    until = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_commands_run_at_once_and_their_output_is_kept(tmp_path: Path) -> None:
    """Each command waits for the other's file."""
    code = "import pathlib, time\npathlib.Path('{0}').touch()\nwhile not pathlib.Path('{1}').exists(): time.sleep(.01)"
    commands = [
        command(tmp_path, code.format("a", "b") + "\nprint('said')", "a"),
        command(tmp_path, code.format("b", "a") + "\nraise SystemExit(3)", "b"),
    ]
    outcomes = run_together(commands, time.monotonic() + 60)
    assert [outcome.returncode for outcome in outcomes] == [0, 3]
    assert (tmp_path / "a.log").read_text() == "said\n"
    assert status_of(outcomes) == FAILED and status_of(outcomes[:1]) == PASSED


# The children ignore SIGTERM: one is in the command's process group, one in a session of its own.
HANGS = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
children = [
    subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=new) for new in (0, 1)
]
for each in children:
    each.stdout.readline()
pathlib.Path("pids.new").write_text(" ".join(str(each.pid) for each in children))
pathlib.Path("pids.new").rename("pids")
time.sleep(600)
"""


@pytest.mark.slow
def test_at_the_deadline_all_children_are_killed(tmp_path: Path) -> None:
    start = time.monotonic()
    outcome = run_together([command(tmp_path, HANGS)], start + 8)[0]
    assert outcome.timed_out and status_of([outcome]) == TIMED_OUT
    assert 8 <= time.monotonic() - start < 30
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and have_ended(*pids)


def test_children_do_not_outlive_a_command_that_ends(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    assert run_together([command(tmp_path, code)], time.monotonic() + 60)[0].passed
    assert have_ended(int((tmp_path / "log.log").read_text()))


@pytest.mark.slow
def test_a_command_that_is_asked_to_end_may_write_and_is_out_of_time(tmp_path: Path) -> None:
    code = """
import signal, sys, time
def end(*_):
    print("written"); sys.exit(0)
signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""
    assert run_together([command(tmp_path, code)], time.monotonic() + 6)[0].timed_out
    assert (tmp_path / "log.log").read_text() == "written\n"


def test_a_crash_starts_it_again_where_that_is_wanted(tmp_path: Path) -> None:
    code = """
import os, pathlib
path = pathlib.Path("runs")
path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))
if path.read_text() != "3": os.abort()
"""
    assert run_together([command(tmp_path, code)], time.monotonic() + 60)[0].returncode == -signal.SIGABRT
    again = command(tmp_path, code, restart_after=lambda code: code < 0)
    assert run_together([again], time.monotonic() + 60)[0].passed
    assert again.log.read_text().count("started again") == 1


def test_no_time_left_starts_nothing(tmp_path: Path) -> None:
    assert run_together([command(tmp_path, "print(1)")] * 2, time.monotonic() - 1)[1].timed_out
    assert not (tmp_path / "log.log").exists()


def test_descendants() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True) as process:
        try:
            until = time.monotonic() + 10
            while not descendants(process.pid) and time.monotonic() < until:
                time.sleep(0.01)
            assert len(descendants(process.pid)) == 1 and process.pid in descendants(os.getpid())
        finally:
            os.killpg(process.pid, signal.SIGKILL)
