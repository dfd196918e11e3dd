"""Describes the commit, the time, the GPU and the software with which figures are taken. It imports without torch."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import ROOT

if TYPE_CHECKING:
    import torch


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> str:
    """Returns the checked-out commit, followed by ``+changes`` if files differ from it.

    Outside git it returns the value of FASTATTN_COMMIT, or ``unknown``.
    """
    described = _output("git", "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*")
    return described or os.environ.get("FASTATTN_COMMIT") or "unknown"


def now() -> str:
    """Returns the date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat()


def driver_version() -> str:
    """Returns the version of the NVIDIA driver, or ``unknown``."""
    listed = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if listed:
        return listed.splitlines()[0]
    loaded = Path("/sys/module/nvidia/version")
    return loaded.read_text().strip() if loaded.exists() else "unknown"


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Returns the GPU, its driver and the versions of the software, with the fields of ``results.ENVIRONMENT``."""
    import torch

    import fastattn
    from benchmarks.measure.implementations import version_of

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver_version(),
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "fastattn": fastattn.native.BUILD["version"],
        "nvcc": fastattn.native.BUILD["nvcc"] or "none",
    }
