"""Tests of ``python -m emulator run``."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from command_in_process import command, process
from emulator.toolkit import nvcc

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # each script is a process that imports torch


def run(
    script: str, tmp_path: Path, *options: str, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    return process("run", *options, file, *arguments)


ADD_ONE = """
    import sys

    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def add_one(x, SIZE, BLOCK: tl.constexpr):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + index, tl.load(x + index, mask=index < SIZE) + 1, mask=index < SIZE)

    x = torch.zeros(200)
    add_one[(2,)](x, int(sys.argv[1]), BLOCK=128)
    assert bool((x == 1).all())
    print("done", __name__)
"""


def test_any_triton_kernel(tmp_path: Path) -> None:
    done = run(ADD_ONE, tmp_path, arguments=("200",))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done __main__\n"


def test_an_overrun_is_an_error(tmp_path: Path) -> None:
    """Checks an overrun into memory of the process that torch did not allocate."""
    done = run(ADD_ONE, tmp_path, arguments=("201",))
    assert done.returncode != 0
    assert "EmulatorError: out-of-bounds" in done.stderr and "script.py:" in done.stderr


def test_the_dispatcher_sees_the_gpu(tmp_path: Path) -> None:
    script = """
        import fastattn
        import torch
        from fastattn.dispatch.device import facts

        known = facts(torch.device("cpu"))
        assert (known.arch, known.num_sms, known.shared_memory_bytes) == (90, 7, 232448), known
        torch.manual_seed(0)
        query = torch.randn(1, 2, 70, 64, dtype=torch.bfloat16)
        with fastattn.record() as calls, fastattn.use_backend("triton"):
            out = fastattn.attention(query, query, query, softcap=5.0, causal=True)
        with fastattn.use_backend("torch"):
            expected = fastattn.attention(query, query, query, softcap=5.0, causal=True)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-3)
        chosen = fastattn.explain(fastattn.attention, query.requires_grad_(), query, query, softcap=5.0)
        assert chosen.backend in ("cuda", "triton"), chosen  # cuda where there is an nvcc
        print([call.backend for call in calls])
    """
    done = run(script, tmp_path, "--arch", "sm_90", "--sms", "7", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['triton']\n"


NATIVE = """
    import fastattn
    import torch

    query, key = torch.randn(1, 2, 70, 64, dtype=torch.bfloat16), torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
    if BROKEN:
        key.untyped_storage().resize_(1000)
    with fastattn.record() as calls, fastattn.use_backend("cuda"):
        out = fastattn.attention(query, key, key, causal=True)
    with fastattn.use_backend("torch"):
        expected = fastattn.attention(query, key, key, causal=True)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    print([call.backend for call in calls])
"""


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
def test_the_native_library(tmp_path: Path) -> None:
    done = run(NATIVE.replace("BROKEN", "False"), tmp_path, "--arch", "sm_90")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['cuda']\n"


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
def test_a_fault_of_a_native_kernel_has_its_place(tmp_path: Path) -> None:
    done = run(NATIVE.replace("BROKEN", "True"), tmp_path)
    assert done.returncode == 1
    assert "EmulatorError: out-of-bounds" in done.stderr and "cp_async.cuh" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "sm_75"], "sm_80"),
        (["--sms", "0"], "--sms: expected a number of at least 1, got 0"),
        (["--shared-memory", "-1"], "--shared-memory: expected a number of at least 1, got -1"),
        (["--seed", "-1"], "--seed: expected a number of at least 0, got -1"),
        (["missing.py"], "there is no file missing.py"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], message: str) -> None:
    done = command("run", *options, __file__)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_an_impossible_gpu_is_refused() -> None:
    from emulator import device

    for wrong in ({"num_sms": 0}, {"shared_memory_bytes": -1}, {"arch": 75}):
        with pytest.raises(ValueError, match=next(iter(wrong))), device.emulated(**wrong):
            pass


def test_replicas_of_what_changes_in_place_are_a_race(tmp_path: Path) -> None:
    """Checks a kernel in which all four warps load 16 elements, and one warp stores them."""
    script = ADD_ONE.replace("BLOCK=128", "BLOCK=16").replace("torch.zeros(200)", "torch.zeros(32)")
    done = run(script, tmp_path, arguments=("32",))
    assert done.returncode == 1 and "EmulatorError: race" in done.stderr
    done = run(script, tmp_path, "--no-races", arguments=("32",))
    assert done.returncode == 0, done.stderr


def test_a_script_finds_its_neighbours_and_keeps_its_exit_code(tmp_path: Path) -> None:
    """Checks kernels of another module, and that options after the script's name go to the script."""
    kernel = ADD_ONE.rpartition("    x = torch")[0]
    # Triton's cache would give another test this file's kernel, with its lines, if it had the same name.
    (tmp_path / "neighbour.py").write_text(textwrap.dedent(kernel).replace("add_one", "add_one_here"))
    script = """
        import sys
        import torch
        from neighbour import add_one_here

        x = torch.zeros(3)
        add_one_here[(1,)](x, 3, BLOCK=128)
        print(x.tolist(), sys.argv[1:])
        sys.exit(7)
    """
    done = run(script, tmp_path, arguments=("--seed", "-h"))
    assert done.returncode == 7, done.stderr
    assert done.stdout == "[1.0, 1.0, 1.0] ['--seed', '-h']\n"
