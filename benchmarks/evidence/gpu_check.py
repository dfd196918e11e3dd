"""Gathers all evidence that a GPU can give in under 8 minutes: ``make gpu-check OUT=dir``.

The check needs Python 3.10 or later, torch 2.10 or later with CUDA, triton and a driver. A stage that needs more
(pytest, the benchmarks' packages, compute-sanitizer, a compiler for the emulator) names what is missing. ``make
gpu-check PYTHON=python3`` uses that Python as it is, without a .venv. fastattn need not be installed: the check uses
this tree's package. Its native library is the one that ``FASTATTN_LIBRARY`` names, else ``libfastattn.so`` in
``python/fastattn`` or ``build/native``, which may come from a machine without a GPU.

Each stage has a limit in seconds, after which its processes and all their children are killed:

    library     loads the native library, or builds it in build/native
    tests       the kernel tests, those for Hopper first, in several processes; a crash or hang fails its test only
    sanitizer   every kernel of both backends on small shapes, under compute-sanitizer's memcheck, racecheck, synccheck
    emulator    the same PTX on the tests' emulator and on the GPU
    benchmarks  the quick benchmarks with the peers that are found
    summary     the page, which is also written after every stage

A stage that fails or runs out of time is reported, and the next one runs. ``--stages tests,benchmarks`` chooses stages,
``--limits benchmarks=300`` changes a limit.

OUT receives ``summary.md``, ``gpu_check.json``, ``logs.tar.gz``, ``results.tar.gz`` (JSON and plots of the benchmarks)
and up to 3 of the plots: at most 8 files of less than 16 MB. All other files are written below build/. Outside git,
``FASTATTN_COMMIT`` names the commit.

Exit code: 0 if no stage failed or ran out of time, 1 if one did, 2 without a usable GPU or for wrong options. Without a
GPU, ``--dry-run`` runs the stages that need none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.evidence import bundle, machine, summary
from benchmarks.evidence.stages import FAILED, PASSED, TIMED_OUT, Result, Stage, Workplace, run_stages
from benchmarks.evidence.stages_kernels import run_benchmarks, run_library, run_sanitizer
from benchmarks.evidence.stages_tests import run_emulator, run_tests
from benchmarks.measure import environment

SCRATCH = ROOT / "build" / "gpu_check"
NO_GPU = 2
PLOTS = ("attention_forward.png", "decode.png", "int8_matmul.png")


def run_summary(workplace: Workplace, deadline: float) -> Result:
    """Names the benchmarks that have figures. The page itself is written after every stage."""
    names = [document["benchmark"] for document in summary.documents(workplace.results)]
    return Result(PASSED, f"figures of {', '.join(names)}" if names else "no figures were taken")


# The stages, in their order. The limits add up to 470 s, which leaves 10 s of the 8 minutes for the start.
STAGES = (
    Stage("library", 45, run_library, needs_gpu=False, needs_library=False),
    Stage("tests", 130, run_tests),
    Stage("sanitizer", 60, run_sanitizer),
    Stage("emulator", 45, run_emulator, needs_library=False),
    Stage("benchmarks", 180, run_benchmarks, needs_gpu=False),
    Stage("summary", 10, run_summary, needs_gpu=False, needs_library=False),
)


def chosen_stages(text: str | None) -> list[Stage]:
    """Returns the stages that ``text`` names (None: all), in the order of ``STAGES``. Raises ValueError for others."""
    names = [stage.name for stage in STAGES] if text is None else [name for name in text.split(",") if name]
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown or not names:
        raise ValueError(f"--stages: expected some of {', '.join(s.name for s in STAGES)}, got {text!r}")
    # Other stages need the library, and the page is always wanted.
    return [stage for stage in STAGES if stage.name in {*names, "library", "summary"}]


def chosen_limits(text: str | None) -> dict[str, float]:
    """Returns the limits in ``text``, which reads ``name=seconds,…``. Raises ValueError for any other text."""
    limits = {}
    for part in text.split(",") if text else []:
        name, _, seconds = part.partition("=")
        try:
            limits[name] = float(seconds)
        except ValueError:
            limits[name] = -1.0
        if name not in {stage.name for stage in STAGES} or not 0 < limits[name] < float("inf"):
            raise ValueError(f"--limits: expected stage=seconds, such as tests=300, got {part!r}")
    return limits


def make_environment(scratch: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of all commands: they import this tree's package and keep their caches in ``scratch``."""
    package = scratch / "site" / "fastattn"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for part in (*(ROOT / "python" / "fastattn").iterdir(), ROOT / "triton_kernels"):
        if part.name != "__pycache__":
            (package / part.name).symlink_to(part)
    caches = {
        "TMPDIR": "tmp",
        "PYTHONPYCACHEPREFIX": "pycache",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
        "XDG_CACHE_HOME": "cache",
        "MPLCONFIGDIR": "cache/matplotlib",
        "FLASHINFER_WORKSPACE_BASE": "cache/flashinfer",
        "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis",
    }
    for folder in caches.values():
        (scratch / folder).mkdir(parents=True, exist_ok=True)
    paths = [str(package.parent), str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    return {
        **given,
        **{name: str(scratch / folder) for name, folder in caches.items()},
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "FASTATTN_COMMIT": given.get("FASTATTN_COMMIT") or environment.commit(),
    }


def bring_out(out: Path, workplace: Workplace, results: Sequence[Result]) -> str:
    """Writes the evidence gathered so far into ``out`` and returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    archives = {
        "logs.tar.gz": bundle.files_below(workplace.logs, "logs"),
        "results.tar.gz": bundle.files_below(workplace.results, "results"),
    }
    left_out: list[str] = []
    for name, members in archives.items():
        (out / name).unlink(missing_ok=True)
        if members:
            left_out += bundle.pack(members, out / name)
    for name in PLOTS:
        (out / name).unlink(missing_ok=True)
        plot = workplace.results / name
        if plot.exists() and plot.stat().st_size <= bundle.MOST_BYTES:
            shutil.copyfile(plot, out / name)
    commit = workplace.environment["FASTATTN_COMMIT"]
    document = summary.as_document(results, workplace.facts, commit, environment.now(), left_out)
    page = summary.as_markdown(document, summary.documents(workplace.results))
    (out / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "summary.md").write_text(page)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SCRATCH / "out", help="the folder that receives the files")
    parser.add_argument("--stages", help="names with commas between; by default all")
    parser.add_argument("--limits", help="other limits: stage=seconds,stage=seconds")
    parser.add_argument("--jobs", type=int, help="processes at once; by default half the cores, at most 8")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU too: run the stages that need none")
    options = parser.parse_args(arguments)
    try:
        stages, limits = chosen_stages(options.stages), chosen_limits(options.limits)
    except ValueError as error:
        parser.error(str(error))
    try:
        facts = machine.look(os.environ)
        obstacle = machine.obstacle(facts)
    except RuntimeError as error:
        obstacle = str(error)
        facts = {}
    if obstacle is not None and not (options.dry_run and facts.get("torch")):
        print(f"gpu-check: {obstacle}", file=sys.stderr)
        return NO_GPU
    jobs = options.jobs or max(1, min(8, facts["host_cpus"] // 2))
    workplace = Workplace(ROOT, SCRATCH, sys.executable, make_environment(SCRATCH, os.environ), facts, jobs)
    for folder in (workplace.logs, workplace.results):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    out = options.out.resolve()
    results = run_stages(stages, limits, workplace, lambda so_far: bring_out(out, workplace, so_far))
    print(f"\n{bring_out(out, workplace, results)}\nAll files: {options.out}")
    return 1 if any(result.status in (FAILED, TIMED_OUT) for result in results) else 0
