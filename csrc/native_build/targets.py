"""Reads FASTATTN_ARCHS, which says for which GPUs machine code is embedded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from native_build.errors import WITHOUT_CUDA, BuildError


@dataclass(frozen=True)
class Target:
    """Holds a name for FASTATTN_ARCHS, and the code that it embeds; each kernel adds the part that is made for it."""

    name: str
    code: tuple[str, ...]


TARGETS = (
    # The driver compiles the PTX for GPUs without machine code of their own.
    Target("80", ("sm_80", "compute_80", "compute_90")),
    # The instructions of "a" targets exist only on that GPU, so PTX would help no other GPU.
    Target("90a", ("sm_90", "sm_90a")),
)


def compute_capabilities(environ: Mapping[str, str]) -> list[int]:
    """Returns the compute capabilities of this machine's GPUs, times ten, from nvidia-smi; raises BuildError."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        raise BuildError("FASTATTN_ARCHS=native: there is no nvidia-smi here to ask for this machine's GPUs.")
    asked = subprocess.run([tool, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True)
    found = re.findall(r"^(\d+)\.(\d)\s*$", asked.stdout, re.MULTILINE)
    if asked.returncode or not found:
        said = (asked.stderr or asked.stdout).strip() or "nothing"
        raise BuildError(f"FASTATTN_ARCHS=native: nvidia-smi names no GPU; it says: {said}")
    return sorted({10 * int(major) + int(minor) for major, minor in found})


def native_target(environ: Mapping[str, str]) -> Target:
    """Returns a target for this machine's GPUs: machine code, or PTX if there is none for a GPU; raises BuildError."""
    code: list[str] = []
    for gpu in compute_capabilities(environ):
        if gpu < 80:
            raise BuildError(
                f"FASTATTN_ARCHS=native: a GPU here has compute capability {gpu / 10}, and the kernels need 8.0 or "
                f"later; {WITHOUT_CUDA}."
            )
        code += ["sm_90", "sm_90a"] if gpu == 90 else ["sm_80"] if gpu < 90 else ["compute_80", "compute_90"]
    return Target("native", tuple(dict.fromkeys(code)))


def parse_targets(text: str, environ: Mapping[str, str] = os.environ) -> list[Target]:
    """Returns the targets that ``text`` (FASTATTN_ARCHS) names, in the order of ``TARGETS``; raises BuildError."""
    names = [name for name in re.split(r"[;,\s]+", text) if name]
    if names == ["none"]:
        return []
    if names == ["native"]:
        return [native_target(environ)]
    known = [target.name for target in TARGETS]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise BuildError(
            f"FASTATTN_ARCHS={text!r}: expected one or more of {', '.join(known)}, separated by semicolons, or native, "
            f"or none; got {', '.join(unknown) or 'nothing'}. Code for 80 also runs on every later GPU."
        )
    return [target for target in TARGETS if target.name in names]
