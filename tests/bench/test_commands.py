"""Tests that every command in README, CONTRIBUTING and ``make help`` runs somewhere: in CI, or shortened in a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()

# The place where each command runs: CI, or a test.
CI = ".ci/run"
WITHOUT_A_GPU = "bench/test_benchmark_harness.py::test_without_a_gpu_a_script_says_so_and_lists_the_least_work"
RUNS_IN = {
    "make lint": CI,
    "make test": CI,
    "make test-cuda": CI,
    "make demo": CI,
    "make docs": CI,
    "make install": "bench/test_commands.py::test_install_is_what_brings_the_tests_their_package",
    "make test-all": "bench/test_commands.py::test_library_and_the_tests_build_what_they_need_in_sight",
    "make library": "bench/test_commands.py::test_library_and_the_tests_build_what_they_need_in_sight",
    "make help": "bench/test_commands.py::test_help_lists_every_target",
    "make bench": "bench/test_commands.py::test_bench_is_made_of_commands_that_run_in_tests",
    "make clean": "bench/test_commands.py::test_clean_leaves_what_was_not_built",
    "make clean-cache": "bench/test_commands.py::test_clean_cache_leaves_what_is_not_from_the_build",
    "make gpu-check": "bench/test_gpu_check.py::test_without_a_gpu_it_says_so_and_does_nothing",
    "make hub-kernel": "packages/test_hub_kernel.py::repository",
    "pip install": "packages/test_packaging.py::wheel",
    "python -m fastattn": "packages/test_packaging.py::test_the_report_names_versions_and_ends_in_the_support_table",
    "python -m benchmarks": "bench/test_benchmarks.py::test_every_command_is_there_and_an_unknown_one_is_refused",
    "python -m benchmarks attention_backward": WITHOUT_A_GPU,
    "python -m benchmarks attention_forward": WITHOUT_A_GPU,
    "python -m benchmarks decode": WITHOUT_A_GPU,
    "python -m benchmarks emulator": "bench/test_emulator_speed.py::test_figures_are_of_every_backend",
    "python -m benchmarks fit-int8": "bench/test_int8_fit.py::test_without_a_gpu_nothing_is_written",
    "python -m benchmarks int8_matmul": WITHOUT_A_GPU,
    "python -m benchmarks overhead": "bench/test_commands.py::test_what_a_call_costs_on_the_host",
    "python -m benchmarks.machine_code.backward_schedule": (
        "bench/test_backward_schedule.py::test_the_command_compares_whole_tiles_with_splits"
    ),
    "python -m benchmarks.machine_code.geometry": "bench/test_machine_code.py::test_geometry_of_a_case",
    "python -m benchmarks.machine_code.kernels": "bench/test_machine_code.py::test_both_tables",
}


def run(*command: str, cwd: Path = ROOT) -> str:
    """Returns what the command printed. It removes the variables of a make that runs these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands_of_bench() -> set[str]:
    """Returns the commands that `make bench` runs without a GPU."""
    (names,) = re.findall(r"^BENCHMARKS := (.+)$", MAKEFILE, re.MULTILINE)
    (recipe,) = re.findall(r"^bench:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    return {*names.split(), *re.findall(r"-m benchmarks ([a-z0-9_-]+)", recipe)}


def test_every_command_that_is_named_runs_somewhere() -> None:
    pages = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = {f"make {target}" for target in re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)}
    named |= {f"make {target}" for target in re.findall(r"(?:^|`)make ([a-z-]+)", pages, re.MULTILINE)}
    names = r"(?:^|`)python -m (fastattn|benchmarks [a-z0-9_-]+|benchmarks\.machine_code\.[a-z_]+)"
    named |= {f"python -m {words}" for words in re.findall(names, pages, re.MULTILINE)}
    named |= {f"python -m benchmarks {name}" for name in commands_of_bench()}
    assert named | {"pip install", "python -m benchmarks"} == RUNS_IN.keys()
    for command, place in RUNS_IN.items():
        if place == CI:
            assert command in (ROOT / CI).read_text().splitlines()
        else:
            module, name = place.split("::")
            assert f"\ndef {name}(" in (ROOT / "tests" / module).read_text()


def test_install_is_what_brings_the_tests_their_package() -> None:
    """`make test` builds by the same recipe if something has changed; `make install` always builds."""
    recipes = dict(re.findall(r"^(install|\$\(BUILT\)):.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE))
    assert recipes["install"] == recipes["$(BUILT)"]


@pytest.mark.parametrize(
    ("script", "given", "archs"),
    [
        ("echo 9.0; echo 8.6", "", "native"),
        ("echo 12.0", "", "native"),
        ("echo 7.5", "", "none"),
        ("echo 'No devices were found'; exit 6", "", "none"),
        ("echo 9.0", "80;90a", "80;90a"),
    ],
)
def test_make_builds_for_the_gpus_here_unless_others_are_named(
    tmp_path: Path, script: str, given: str, archs: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    path = f"PATH={tmp_path}:{os.environ['PATH']}"
    assert f'FASTATTN_ARCHS="{archs}"' in run("env", path, f"FASTATTN_ARCHS={given}", "make", "-n", "install")


def test_library_and_the_tests_build_what_they_need_in_sight() -> None:
    assert "-m native_build.library" in run("make", "-n", "library")
    printed = run("make", "-n", "test-all")
    assert printed.index("-m native_build.library") < printed.index("-m emulator build") < printed.index("-m pytest")
    printed = run("make", "-n", "test")
    assert printed.index("-m emulator build") < printed.index("--core")
    assert "-m native_build.library" not in printed


def test_clean_cache_leaves_what_is_not_from_the_build(tmp_path: Path) -> None:
    for name in ("objects/ab/abc", "triton/x", "other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    run("make", "clean-cache", f"FASTATTN_CACHE={tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_help_lists_every_target() -> None:
    printed = run("make", "help")
    for target, summary in re.findall(r"^([a-z-]+):.*## (.+)$", MAKEFILE, re.MULTILINE):
        assert re.search(rf"^  make {target} +{re.escape(summary)}$", printed, re.MULTILINE)


def test_bench_is_made_of_commands_that_run_in_tests() -> None:
    assert commands_of_bench() <= COMMANDS.keys() & {command.split()[-1] for command in RUNS_IN}
    planned = run("make", "-n", "bench", "BENCH_ARGS=--full --save")
    assert "machine_code.kernels --full;" in planned, "of BENCH_ARGS it takes --full alone"
    assert re.search(r"for name in attention_forward .*; do .*-m benchmarks \$name --full --save; done", planned)


def test_clean_leaves_what_was_not_built(tmp_path: Path) -> None:
    for place in ("build/native/a.o", "python/fastattn/libfastattn.so", "tests/__pycache__/a.pyc", ".ruff_cache/a"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    kept = ("csrc/a.cu", "python/fastattn/a.py", ".venv/lib/__pycache__/a.pyc")
    for place in kept:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    run("make", "-f", str(ROOT / "Makefile"), "clean", cwd=tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == set(kept)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its stand-ins are for a CPU")
@pytest.mark.slow
def test_what_a_call_costs_on_the_host() -> None:
    """It runs in another process, because it replaces the kernels by stand-ins."""
    printed = run(sys.executable, "-m", "benchmarks", "overhead", "--calls", "2", "--repeats", "1")
    for name in ("scaled_dot_product_attention", "attention, forward + backward", "int8_linear"):
        assert re.search(rf"{re.escape(name)} +[0-9.]+ ", printed)
