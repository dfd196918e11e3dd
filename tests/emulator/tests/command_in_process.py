"""Runs ``python -m emulator``, also in this process: that saves the import of torch for calls that run no script."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from emulator import __main__


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in another process, and returns its output and exit code."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "emulator", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command, and returns its output and exit code."""
    words = [str(argument) for argument in arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = mock.patch.object(sys, "argv", ["emulator", *words])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            __main__.main()
        except SystemExit as end:
            code = end.code
    if isinstance(code, str):  # Python would print it and exit with 1
        err.write(code)
        code = 1
    return subprocess.CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())
