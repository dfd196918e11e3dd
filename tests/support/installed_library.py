"""Finds the installed native library, for tests of it: a session without a GPU has loaded the emulator's library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastattn import native


def _look_up() -> tuple[Path, dict[str, Any]]:
    if not native.TAKES_CPU_TENSORS:
        return native.LIBRARY_PATH, native.BUILD
    code = "import json; from fastattn import native; print(json.dumps([str(native.LIBRARY_PATH), native.BUILD]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, build = json.loads(done.stdout)
    return Path(path), build


# The values of `fastattn.native` in a process that loads the installed library.
LIBRARY_PATH, BUILD = _look_up()
