"""Tests `make gpu-check`: stages that pass, fail, hang or crash; what leaves the machine; runs without a GPU."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_cases import document, row_of
from benchmarks.evidence import bundle, gpu_check, machine, pytest_codes, stages_kernels, summary
from benchmarks.evidence.processes import Command, run_together
from benchmarks.evidence.stages import (
    FAILED,
    NOT_RUN,
    PASSED,
    TIMED_OUT,
    Result,
    Stage,
    Workplace,
    run_stages,
    status_of,
)
from benchmarks.evidence.stages_tests import judge, kernel_test_modules
from benchmarks.measure.cases.attention import AttentionCase
from fastattn.profiler.work import Work

ROOT = Path(__file__).parents[2]
FACTS: machine.Facts = {
    "executable": "python3",
    "python": "3.12.3",
    "python_version": [3, 12],
    "torch": "2.13.0+cu130",
    "torch_version": [2, 13],
    "cuda": "13.0",
    "triton": "3.9.0",
    "gpu": "NVIDIA H200",
    "gpu_error": None,
    "compute_capability": "9.0",
    "driver": "580.1",
    "host_cpus": 4,
    "packages": dict.fromkeys(machine.OPTIONAL, True),
}


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(ROOT, tmp_path, sys.executable, {**os.environ, "FASTATTN_COMMIT": "abc"}, dict(FACTS), 2)


# --- Stages -----------------------------------------------------------------------------------------------------------


def stage(name: str, code: str, **options: Any) -> Stage:
    def run(workplace: Workplace, deadline: float) -> Result:
        outcome = workplace.run(deadline, name, "-c", code)
        return Result(status_of([outcome]), f"code {outcome.returncode}", workplace.tail(name))

    return Stage(name, 60, run, **options)


def broken(workplace: Workplace, deadline: float) -> Result:
    raise OSError("disk full")


@pytest.mark.slow
def test_each_stage_runs_whatever_became_of_the_others(workplace: Workplace, capsys: pytest.CaptureFixture) -> None:
    stages = [
        stage("bad", "import sys; print('what went wrong'); sys.exit(1)"),
        stage("slow", "import time; print('began', flush=True); time.sleep(600)"),
        Stage("broken", 60, broken),
        stage("good", "print('fine')"),
    ]
    seen: list[int] = []
    results = run_stages(stages, {"slow": 4.0}, workplace, lambda so_far: seen.append(len(so_far)))
    assert [(result.stage, result.status) for result in results] == [
        ("bad", FAILED),
        ("slow", TIMED_OUT),
        ("broken", FAILED),
        ("good", PASSED),
    ]
    assert seen == [1, 2, 3, 4]
    assert results[0].details == ["what went wrong"] and results[2].headline == "OSError: disk full"
    assert results[1].limit_s == 4.0 and 3.0 <= results[1].seconds < 20
    assert "slow: timed out" in capsys.readouterr().out


def test_stages_that_need_what_is_missing_are_not_run(workplace: Workplace) -> None:
    workplace.library_problem = "it does not load"
    (result,) = run_stages([stage("a", "print(1)")], {}, workplace, lambda so_far: None)
    assert (result.status, result.headline) == (NOT_RUN, "no native library: it does not load")
    workplace.facts["gpu"] = None
    (result,) = run_stages([stage("a", "print(1)", needs_library=False)], {}, workplace, lambda so_far: None)
    assert (result.status, result.headline) == (NOT_RUN, "needs a GPU")
    workplace.facts["packages"]["pytest"] = False
    assert gpu_check.run_tests(workplace, time.monotonic() + 5).headline == "not installed: pytest"


def test_benchmarks_need_what_their_modules_import(workplace: Workplace) -> None:
    imported: set[str] = set()
    for module in ROOT.glob("benchmarks/measure/**/*.py"):
        for statement in ast.parse(module.read_text()).body:
            if isinstance(statement, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom):
                imported.add(str(statement.module).partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"benchmarks", "emulator", "fastattn", "torch"}
    assert {"matplotlib", "tabulate", "tqdm"} <= others
    for package in others:
        without = dataclasses.replace(workplace, facts={**FACTS, "packages": {**FACTS["packages"], package: False}})
        assert stages_kernels.run_benchmarks(without, time.monotonic()).headline == f"not installed: {package}"


def test_the_limits_end_within_8_minutes_and_can_be_changed() -> None:
    assert sum(stage.limit_s for stage in gpu_check.STAGES) <= 480
    assert gpu_check.chosen_limits("tests=10,benchmarks=2.5") == {"tests": 10.0, "benchmarks": 2.5}
    names = [stage.name for stage in gpu_check.chosen_stages("benchmarks,tests")]
    assert names == ["library", "tests", "benchmarks", "summary"]
    for wrong in ("test=10", "tests", "tests=-1", "tests=inf", "tests=nan"):
        with pytest.raises(ValueError, match="stage=seconds"):
            gpu_check.chosen_limits(wrong)
    with pytest.raises(ValueError, match="got 'nothing'"):
        gpu_check.chosen_stages("nothing")


# --- Tests in processes that may die ----------------------------------------------------------------------------------

DYING_TESTS = """
import os, time
import pytest
def test_passes(): pass
def test_crashes(): os.abort()
def test_hangs(): time.sleep(600)
def test_fails(): assert 1 == 2, "the reason"
@pytest.mark.skip(reason="no need")
def test_skipped(): pass
"""


@pytest.mark.slow
def test_a_crash_and_a_hang_cost_the_test_that_had_them(workplace: Workplace, tmp_path: Path) -> None:
    (tmp_path / "test_dying.py").write_text(DYING_TESTS)
    (tmp_path / "test_no_import.py").write_text("import no_such_module")
    workplace.environment["PYTHONPATH"] = str(ROOT)
    record = workplace.logs / "record.jsonl"
    run = Command(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull),
            *("-p", "benchmarks.evidence.pytest_record", "--continue-on-collection-errors"),
            *("--rootdir", str(tmp_path), "--record", str(record), "--seconds-per-test", "2", str(tmp_path)),
        ],
        workplace.logs / "pytest.log",
        workplace.environment,
        tmp_path,
        restart_after=partial(pytest_codes.was_cut_off, record=record),
    )
    outcomes = run_together([run], time.monotonic() + 60)
    result = judge([pytest_codes.read(record)], [outcomes[0].timed_out])
    assert result.status == FAILED
    assert result.headline == "1 passed, 1 failed, 1 errors, 2 crashed or hung, 1 skipped"
    text = "\n".join(result.details)
    assert re.search(r"test_crashes: crashed or hung.*\n.*test_hangs: crashed or hung", text)
    assert "the reason" in text and "no_such_module" in text and "skipped 1 times: Skipped: no need" in text
    log = run.log.read_text()
    assert log.count("started again") == 2 and "Timeout (0:00:02)!" in log and "in test_hangs" in log


def record(*tests: str, running: str | None = None, collected: int) -> list[pytest_codes.Line]:
    lines: list[pytest_codes.Line] = [{"collected": collected}]
    for test in tests:
        lines += [{"start": test}, {"test": test, "outcome": "passed", "seconds": 1.0, "reason": None}]
    return lines + ([{"start": running}] if running else [])


def test_what_was_out_of_time_has_not_failed() -> None:
    result = judge([record("a", "b", collected=2), record("c", running="d", collected=4)], [False, True])
    assert (result.status, result.headline) == (TIMED_OUT, "3 passed, 3 not finished in time")
    result = judge([record("a", "b", collected=2), record("c", running="d", collected=2)], [False, False])
    assert (result.status, result.headline) == (FAILED, "3 passed, 1 crashed or hung")
    assert judge([record("a", collected=1)], [False]).status == PASSED
    assert judge([[]], [False]).status == FAILED


def test_every_module_that_takes_the_gpu_is_among_the_tests() -> None:
    modules = kernel_test_modules(ROOT / "tests")
    ours = {"attention/test_cuda_attention.py", "attention/test_triton_attention.py", "decode/test_decode.py"}
    assert {*ours, "int8/test_int8.py"} < set(modules)
    assert not [name for name in modules if name.startswith("emulator/")]
    names = ("backward_sm90", "paged_sm90", "sm90")
    hopper = [f"attention/test_cuda_attention_{name}.py" for name in names]
    assert modules[: len(names)] == hopper, "the kernels for Hopper are shown first"
    assert modules.index("attention/test_cuda_attention.py") < modules.index("decode/test_decode.py")
    assert (ROOT / "tests" / "emulator" / "tests" / "test_gpu.py").exists()


def test_no_module_among_them_imports_the_emulator_where_there_is_a_gpu() -> None:
    """Importing the emulator builds it in each process, which takes longer than the stage."""
    tests = ROOT / "tests"
    conftests = [path for path in tests.rglob("conftest.py") if tests / "emulator" not in path.parents]
    modules = [tests / name for name in kernel_test_modules(tests)]
    for path in (*modules, *conftests, *(tests / "support").glob("*.py")):
        for statement in ast.parse(path.read_text()).body:  # imports behind an `if` ask first whether there is a GPU
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            names += [str(statement.module)] if isinstance(statement, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "emulator"], path


# --- compute-sanitizer ------------------------------------------------------------------------------------------------

MEMCHECK_LOG = """========= COMPUTE-SANITIZER
cuda, forward: ran
========= Invalid __global__ read of size 16 bytes
=========     at attention_forward_sm80+0x1a0
=========     by thread (0,0,0) in block (3,0,0)
=========     Host Frame: cudaLaunchKernel [0x1] in library
=========
========= ERROR SUMMARY: 2 errors
"""
FAKE_SANITIZER = """#!{python}
import sys, time
arguments = sys.argv[1:]
tool = arguments[arguments.index("--tool") + 1]
{body}
"""


def fake_sanitizer(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "compute-sanitizer"
    path.write_text(FAKE_SANITIZER.format(python=sys.executable, body=body))
    path.chmod(0o755)
    monkeypatch.setattr(stages_kernels, "find_sanitizer", lambda: str(path))


@pytest.fixture
def with_cases(workplace: Workplace, tmp_path: Path) -> Workplace:
    workplace.root = tmp_path
    (tmp_path / "benchmarks" / "evidence").mkdir(parents=True)
    (tmp_path / "benchmarks" / "evidence" / "sanitizer_cases.py").write_text("print('ran')")
    return workplace


@pytest.mark.slow
def test_the_tools_of_the_sanitizer(with_cases: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"""
if tool == "memcheck": print({MEMCHECK_LOG!r}); sys.exit(86)
if tool == "synccheck": time.sleep(600)
print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
"""
    fake_sanitizer(tmp_path, body, monkeypatch)
    result = stages_kernels.run_sanitizer(with_cases, time.monotonic() + 8)
    assert result.status == FAILED
    assert result.headline == (
        "memcheck: 2 errors; racecheck: 0 hazards displayed (0 errors, 0 warnings); synccheck: out of time"
    )
    assert result.details[0] == "memcheck: Invalid __global__ read of size 16 bytes"
    assert not any("Host Frame" in line for line in result.details)


def test_a_sanitizer_that_is_not_there_or_refuses_the_gpu(
    with_cases: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_kernels, "find_sanitizer", lambda: None)
    assert stages_kernels.run_sanitizer(with_cases, time.monotonic() + 60).status == NOT_RUN
    fake_sanitizer(tmp_path, "print('========= Error: Device not supported'); sys.exit(1)", monkeypatch)
    result = stages_kernels.run_sanitizer(with_cases, time.monotonic() + 60)
    assert result.status == NOT_RUN and "Device not supported" in result.headline


# --- What leaves the machine ------------------------------------------------------------------------------------------


def test_a_long_log_loses_its_middle() -> None:
    text = b"begin " + b"x" * 5000 + b" end"
    cut = bundle.without_middle(text, 400)
    assert len(cut) <= 400 and cut.startswith(b"begin") and cut.endswith(b"end")
    assert b"5010 bytes in all: the middle is left out" in cut
    assert bundle.without_middle(text, 5010) == text
    assert len(bundle.without_middle(text, 10)) <= 10


def unpacked(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_an_archive_fits(tmp_path: Path) -> None:
    """Random bytes do not compress: logs are cut first, then the largest other file is left out."""
    sizes = {"a.log": 300_000, "b.png": 60_000, "c.png": 30_000, "d.json": 100}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    members = {f"x/{name}": tmp_path / name for name in sizes}
    archive = tmp_path / "out.tar.gz"
    assert bundle.pack(members, archive) == []
    assert {name: len(content) for name, content in unpacked(archive).items()} == {
        f"x/{name}": size for name, size in sizes.items()
    }
    assert bundle.pack(members, archive, limit=200_000, log_bytes=280_000) == []
    assert archive.stat().st_size <= 200_000 and len(unpacked(archive)["x/a.log"]) == 70_000
    assert bundle.pack(members, archive, limit=80_000) == ["x/b.png (60000 bytes)"]
    assert archive.stat().st_size <= 80_000 and set(unpacked(archive)) == {"x/a.log", "x/c.png", "x/d.json"}


def benchmark_document() -> dict[str, Any]:
    case = AttentionCase(head_dim=128, seqlen=1024, batch=16, heads=16, kv_heads=16, causal=True)

    def of(name: str, seconds: float, is_peer: bool, **changes: Any) -> dict[str, Any]:
        row = row_of(case, name, is_peer, seconds, None, Work(10**9, 10**6))
        return {**row, "fraction": 0.5, "resource": "compute", "ratio_to_best_peer": 0.8, **changes}

    rows = [
        of("fastattn cuda", 1e-5, False),
        of("fastattn triton", 1e-5, False, status="wrong", reason="error 3", eager=None),
        of("slow peer", 4e-5, True),
        of("quick peer", 8e-6, True),
    ]
    return {**document("attention_forward", rows), "complete": False}


@pytest.mark.slow
def test_what_is_brought_out(workplace: Workplace, tmp_path: Path) -> None:
    workplace.results.mkdir()
    workplace.logs.mkdir()
    (workplace.results / "attention_forward.json").write_text(json.dumps(benchmark_document()))
    for name in (*gpu_check.PLOTS, "decode_roofline.png"):
        (workplace.results / name).write_bytes(b"png")
    for number in range(30):
        (workplace.logs / f"{number}.log").write_bytes(os.urandom(2**16) * 64)
    results = [
        Result(FAILED, "2 passed, 1 failed", ["tests/test_x.py::test_y: assert | 1 == 2"], "tests", 12.3, 130),
        Result(TIMED_OUT, "decode timed out", [], "benchmarks", 180.0, 180),
    ]
    out = tmp_path / "out"
    page = gpu_check.bring_out(out, workplace, results)
    assert page == (out / "summary.md").read_text()
    files = list(out.iterdir())
    assert len(files) <= bundle.MOST_FILES and all(path.stat().st_size < 16 * 10**6 for path in files)
    assert len(unpacked(out / "logs.tar.gz")) == 30
    assert "results/decode_roofline.png" in unpacked(out / "results.tar.gz")
    written = json.loads((out / "gpu_check.json").read_text())
    assert [stage["status"] for stage in written["stages"]] == [FAILED, TIMED_OUT]
    for words in (
        "commit abc",
        "- GPU: NVIDIA H200, compute capability 9.0, driver 580.1",
        "- Python 3.12.3, torch 2.13.0+cu130, CUDA 13.0, triton 3.9.0",
        "| tests | failed | 12 s | 130 s | 2 passed, 1 failed |",
        "tests/test_x.py::test_y: assert | 1 == 2",
        "| fastattn cuda | 10.0 | 100.0 | 100 | 50% | compute | 0.80 |",
        "| fastattn triton | wrong: error 3 |",
        "| quick peer | 8.0 |",
        "Rows: 3 ok, 1 wrong; the time was up before the last case. 1 cases in the JSON.",
    ):
        assert words in page
    assert "slow peer" not in page


def test_the_page_of_a_dry_run(workplace: Workplace) -> None:
    facts = {**FACTS, "gpu": None, "compute_capability": None}
    page = summary.as_markdown(summary.as_document([], facts, "abc", "2030-01-31", ["a.png (9 bytes)"]), [])
    assert "- GPU: none (dry run)" in page and "Left out for their size: a.png (9 bytes)" in page


# --- The machine that it runs on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python_version": [3, 9], "python": "3.9.1"}, "Python 3.9.1 is too old"),
        ({"torch": None, "torch_error": "No module named 'torch'"}, "No module named 'torch'"),
        ({"torch": "2.9.1", "torch_version": [2, 9]}, "torch 2.9.1 is too old: 2.10"),
        ({"cuda": None, "gpu": None}, "built without CUDA"),
        ({"gpu": None, "gpu_error": "no driver"}, "no NVIDIA GPU found by torch 2.13.0+cu130: no driver"),
    ],
)
def test_what_is_missing_is_said_in_a_line(changes: dict[str, Any], words: str) -> None:
    said = machine.obstacle({**FACTS, **changes})
    assert said is not None and words in said and "\n" not in said
    assert machine.obstacle(FACTS) is None
    assert machine.missing({**FACTS, "packages": {"pytest": True}}, "pytest", "ninja") == "not installed: ninja"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path: Path) -> None:
    command = ["make", "--silent", "gpu-check", f"OUT={tmp_path / 'out'}", f"PYTHON={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout == ""
    said, code, *_ = done.stderr.splitlines()
    assert said.startswith("gpu-check: no NVIDIA GPU ") and code.endswith(f"Error {gpu_check.NO_GPU}")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_goes_all_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The stages are short; caches and results are where they belong."""
    code = "import os; print(*(os.environ[n] for n in ('TMPDIR', 'TRITON_CACHE_DIR', 'CUDA_CACHE_PATH')), sep='\\n')"
    stages = (stage("library", code, needs_gpu=False, needs_library=False), stage("tests", "print(1)"))
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    monkeypatch.setattr(gpu_check, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(machine, "look", lambda environment: {**FACTS, "gpu": None, "gpu_error": "no driver"})
    assert gpu_check.main(["--out", str(tmp_path / "out"), "--dry-run"]) == 0
    page = (tmp_path / "out" / "summary.md").read_text()
    assert "| tests | not run |" in page and "| library | passed |" in page
    assert page in capsys.readouterr().out
    for line in unpacked(tmp_path / "out" / "logs.tar.gz")["logs/library.log"].decode().splitlines():
        assert Path(line).is_relative_to(tmp_path / "scratch") and Path(line).is_dir()
    monkeypatch.setattr(gpu_check, "STAGES", (stage("tests", "raise SystemExit(1)", needs_gpu=False),))
    assert gpu_check.main(["--out", str(tmp_path / "out"), "--dry-run"]) == 1


def test_the_package_of_this_tree_is_what_runs(tmp_path: Path) -> None:
    environment = gpu_check.make_environment(tmp_path, {**os.environ, "PYTHONPATH": "/nowhere"})
    package = tmp_path / "site" / "fastattn"
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(package.parent), str(ROOT), "/nowhere"]
    assert (package / "ops").samefile(ROOT / "python" / "fastattn" / "ops")
    assert (package / "triton_kernels").samefile(ROOT / "triton_kernels")
