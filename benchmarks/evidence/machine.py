"""Finds out which Python, torch and GPU this machine has, in a separate process: importing torch may fail or hang."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import ROOT
from benchmarks.measure.environment import driver_version

OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 10)
# Packages that only some stages need.
OPTIONAL = (
    *("pytest", "hypothesis", "pybind11", "ninja", "setuptools"),
    *("tqdm", "matplotlib", "numpy", "tabulate", "transformers"),
)

Facts = dict[str, Any]


def look(environment: Mapping[str, str]) -> Facts:
    """Returns the facts about this Python and its machine. Raises RuntimeError if the process fails or hangs."""
    command = [sys.executable, "-m", "benchmarks.evidence.machine"]
    try:
        done = subprocess.run(command, cwd=ROOT, env=dict(environment), capture_output=True, text=True, timeout=60)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        said = done.stderr.strip()[-500:] if not isinstance(error, subprocess.TimeoutExpired) else str(error)
        raise RuntimeError(
            f"torch cannot report this machine's GPUs; `python -m torch.utils.collect_env` may say why: {said}"
        ) from None


def obstacle(facts: Facts) -> str | None:
    """Returns one line that says why no GPU can be used here, or None if one can."""
    if tuple(facts["python_version"]) < OLDEST_PYTHON:
        return f"Python {facts['python']} is too old: run this with Python 3.10 or later"
    if facts["torch"] is None:
        return (
            f"{facts['executable']} has no torch: {facts['torch_error']}; install it, or run this with another Python"
        )
    if tuple(facts["torch_version"]) < OLDEST_TORCH:
        return f"torch {facts['torch']} is too old: 2.10 or later is needed; run `pip install -U torch`"
    if facts["cuda"] is None:
        return f"no NVIDIA GPU can be used: torch {facts['torch']} is built without CUDA; install a CUDA build of torch"
    if facts["gpu"] is None:
        return f"no NVIDIA GPU found by torch {facts['torch']}: {facts['gpu_error']}"
    return None


def missing(facts: Facts, *packages: str) -> str | None:
    """Returns a reason that names the packages that are not installed, or None if all are installed."""
    absent = [package for package in packages if not facts["packages"].get(package)]
    return f"not installed: {', '.join(absent)}" if absent else None


def find_facts() -> Facts:
    """Returns the facts about this Python and its machine. It imports torch, so call it in a separate process."""
    facts: Facts = {
        "executable": sys.executable,
        "python": platform.python_version(),
        "python_version": list(sys.version_info[:2]),
        "host_cpus": len(os.sched_getaffinity(0)),
        "packages": {name: importlib.util.find_spec(name) is not None for name in OPTIONAL},
        **dict.fromkeys(("torch", "torch_error", "cuda", "triton", "gpu", "gpu_error", "compute_capability", "driver")),
    }
    try:
        import torch
    except Exception as error:  # not only ImportError: a shared library of torch may be missing
        facts["torch_error"] = _line(error)
        return facts
    facts["torch"], facts["cuda"] = torch.__version__, torch.version.cuda
    facts["torch_version"] = [int(part) for part in torch.__version__.split(".")[:2]]
    with contextlib.suppress(Exception):
        import triton

        facts["triton"] = triton.__version__
    if facts["cuda"] is None:
        return facts
    try:
        torch.cuda.init()
        properties = torch.cuda.get_device_properties(0)
    except Exception as error:
        facts["gpu_error"] = _line(error)
        return facts
    facts["gpu"] = properties.name
    facts["compute_capability"] = f"{properties.major}.{properties.minor}"
    facts["num_sms"], facts["memory_bytes"] = properties.multi_processor_count, properties.total_memory
    facts["driver"] = driver_version()
    return facts


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    print(json.dumps(find_facts()))
