"""Tests of ``python -m emulator profile``, for scripts and for sources, with ptxas and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_in_process import command, process
from emulator import nvcc_compile, static_facts

pytestmark = pytest.mark.slow  # each script is a process that imports torch

with_tools = pytest.mark.skipif(not static_facts.has_tools(), reason="needs ptxas, cuobjdump and nvdisasm")

PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 data, .param .f32 factor)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .f32 %f<3>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [data];
    ld.param.f32 %f1, [factor];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    mov.u32 %r2, 0;
AGAIN:
    ld.global.f32 %f2, [%rd1];
    mul.f32 %f2, %f2, %f1;
    st.global.f32 [%rd1], %f2;
    add.s32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, 3;
    @%p1 bra AGAIN;
    ret;
}
.visible .entry other() { ret; }"""

SCRIPT = """
import sys
import torch
from emulator import Module

module = Module(open(sys.argv[1]).read())
data = torch.ones(64)
for _ in range(int(sys.argv[2])):
    module.launch("scale", (1,), (64,), [data, 2.0])
module.launch("other")
assert data[0] == 8.0 ** int(sys.argv[2])
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    ptx, script = tmp_path / "scale.ptx", tmp_path / "script.py"
    ptx.write_text(PTX)
    script.write_text(SCRIPT)
    return ptx, script


def cells(text: str, name: str) -> list[str]:
    """Returns the words of the only line that begins with ``name``."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(name))
    return line.split()


def test_a_script(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks the counts of two launches of 2 warps with 3 iterations, and that the script gets its arguments."""
    done = process("profile", "--json", tmp_path / "out.json", files[1], files[0], 2)
    assert done.returncode == 0, done.stderr
    scale, other = done.stdout.split("\n\nother\n")
    assert "launches 2: 2 with (1, 1, 1) of (64, 1, 1) threads" in scale
    assert "launches 1: 1 with (1, 1, 1) of (32, 1, 1) threads" in other
    assert cells(scale, "float ")[1] == "12" and cells(scale, "global  ")[1] == "24"
    assert cells(scale, "st.global.f32")[-4:] == ["12", "128.0", "4.0", "1,536"]
    counted = json.loads((tmp_path / "out.json").read_text())
    assert [entry["kernel"] for entry in counted] == ["scale", "other"]
    assert counted[0]["counted"]["instructions"]["float"] == 12
    if static_facts.has_tools():
        registers = counted[0]["machine_code"]["registers"]
        assert registers == counted[0]["counted"]["registers"] and f"registers {registers}," in scale
        assert "spilled 0 bytes" in scale and "main loop" in scale


TRITON_SCRIPT = """
import torch
import triton
import triton.language as tl

@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)
    tl.store(out + place, tl.dot(tl.load(a + place), tl.load(b + place)))

a, b = (torch.ones(64, 64, dtype=torch.float16) for _ in range(2))
product[(1,)](a, b, torch.empty(64, 64), 64)
"""


@with_tools
@pytest.mark.parametrize(("arch", "product"), [("sm_80", "mma.sync"), ("sm_90", "wgmma")])
def test_a_triton_kernel(arch: str, product: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks two architectures, for which Triton emits different PTX versions."""
    pytest.importorskip("triton")
    files[1].write_text(TRITON_SCRIPT)
    out = tmp_path / "out.json"
    done = process("profile", "--arch", arch, "--json", out, files[1], TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "tensor cores: f16 * f16 + f32: 262,144 multiply-adds" in done.stdout and "not known" not in done.stdout
    (entry,) = json.loads(out.read_text())
    assert any(row["opcode"].startswith(product) for row in entry["counted"]["rows"])
    assert entry["machine_code"]["registers"] > 0


def test_only_some_kernels(files: tuple[Path, Path]) -> None:
    done = process("profile", "--kernel", "^sc", files[1], files[0], 1)
    assert done.returncode == 0 and "scale\n" in done.stdout and "other\n" not in done.stdout

    done = process("profile", "--kernel", "attention", files[1], files[0], 1)
    assert done.stdout == "no kernel has a name that matches attention: there are scale, other\n"


@pytest.mark.parametrize(("last_line", "code"), [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("int('nonsense')", 1)])
def test_however_a_script_ends_its_launches_are_printed(files: tuple[Path, Path], last_line: str, code: int) -> None:
    files[1].write_text(f"{SCRIPT}\n{last_line}\n")
    done = process("profile", files[1], files[0], 1)
    assert done.returncode == code and "scale\n  launches 1:" in done.stdout
    assert ("ValueError" in done.stderr) == (code == 1), done.stderr


def test_a_script_without_kernels(files: tuple[Path, Path]) -> None:
    files[1].write_text("")
    done = process("profile", files[1])
    assert done.returncode == 0 and done.stdout == "no kernel was launched\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.ptx"], "there is no file missing.ptx"),
        (["missing.py"], "there is no file missing.py"),
        (["--kernel", "(", __file__], "( is no regular expression"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(options: list[str], message: str) -> None:
    done = command("profile", *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@with_tools
def test_a_ptx_file(files: tuple[Path, Path]) -> None:
    done = command("profile", "--arch", "sm_90", files[0])
    assert done.returncode == 0, done.stderr
    assert "scale\n  registers" in done.stdout and "executed" not in done.stdout
    assert "other\n  registers" in done.stdout
    done = command("profile", files[0], "--kernel", "^sc")
    assert done.returncode == 0 and "scale\n" in done.stdout and "other\n" not in done.stdout
    done = command("profile", files[0], "nonsense")
    assert done.returncode == 2 and "unrecognized arguments: nonsense" in done.stderr


@with_tools
@pytest.mark.skipif(nvcc_compile.nvcc() is None, reason="needs nvcc")
def test_a_cuda_file(tmp_path: Path) -> None:
    (tmp_path / "half.h").write_text("#define HALF 0.5f\n")
    source = tmp_path / "kernel.cu"
    source.write_text('#include "half.h"\n__global__ void halve(float* x) { x[threadIdx.x] *= HALF; }\n')
    for arguments in (["-I", tmp_path, source], [source, "-I", tmp_path, "--arch", "sm_90"]):
        done = command("profile", *arguments)
        assert done.returncode == 0, done.stderr
        assert "halve" in done.stdout and "static shared memory 0 bytes" in done.stdout


@with_tools
def test_what_the_compiler_refuses_is_said_in_its_words(files: tuple[Path, Path]) -> None:
    files[0].write_text(PTX.replace("mul.f32", "mul.f31"))
    done = command("profile", files[0])
    assert done.returncode == 1 and ".f31" in done.stderr and "Traceback" not in done.stderr


def test_without_the_tools_the_counts_remain(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from emulator import profiling as command
    from emulator.launches import recorded
    from emulator.module import Module

    def too_old(ptx: str) -> None:
        raise RuntimeError("ptxas failed: Unsupported .version")

    with monkeypatch.context() as patch, recorded() as launched:
        patch.setattr(static_facts, "of_ptx", too_old)
        Module(PTX).launch("other")
        (found,) = command.of_launches(launched)
    assert found.facts is None and found.report is not None
    monkeypatch.setattr(static_facts, "candidates", lambda name: [])
    with recorded() as launched:
        Module(PTX).launch("other")
    (found,) = command.of_launches(launched)
    text = command.render(found, 10)
    assert found.facts is None and "not known" in text and "executed (PTX)" in text
    with pytest.raises(SystemExit, match="are needed"):
        command.main(command.argparse.Namespace(script=Path("kernel.ptx"), arguments=[]))
