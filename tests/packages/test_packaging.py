"""Tests the build and its products: the wheel, the native library in it, and the tools that the build searches for."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch

import installed_library
from emulator.native_library import kernels_named
from fastattn import native
from fastattn.dispatch.support import support_table
from native_build import cached, machine_code
from native_build.cuda import CudaToolkit, check_host_compiler, find_nvcc
from native_build.errors import BuildError
from native_build.instances import all_instances, instances_for
from native_build.targets import TARGETS, parse_targets
from native_build.tools import find_torch
from native_build.wheel_tag import needed_versions, wheel_platform
from native_builds import CSRC, with_kernels, without_kernels

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]  # all tests share one wheel

ROOT = Path(__file__).resolve().parents[2]
MAX_LIBRARY_BYTES = 14 * 2**20  # with machine code for sm_80, sm_90 and sm_90a, and PTX


def run(*command, cwd=ROOT, **environment):
    """Runs a command and returns what it printed on either stream; fails the test if the command fails."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


# --- The wheel --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds a wheel of this tree as a user would; ninja finds nearly everything compiled already."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", folder
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    """Unpacks the wheel's files as an installation does."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def library(unpacked):
    """Returns the path of the native library in the wheel."""
    return unpacked / "fastattn" / "libfastattn.so"


@pytest.fixture(scope="module")
def build(library):
    """Returns the build description of the wheel's library."""
    code = "import json; from fastattn import native; print(json.dumps(native.BUILD))"
    return json.loads(run(sys.executable, "-c", code, FASTATTN_LIBRARY=library).splitlines()[-1])


def _metadata(unpacked, name):
    (path,) = unpacked.glob(f"fastattn-*.dist-info/{name}")
    return HeaderParser().parsestr(path.read_text())


def test_wheel_is_for_every_python_3_on_the_platform_that_the_library_needs(wheel, unpacked, library):
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none")
    fits = wheel_platform("linux_x86_64", needed_versions(library)).startswith("manylinux_2_28")
    assert platform.startswith("manylinux_2_28_" if fits else "linux_")
    assert _metadata(unpacked, "WHEEL")["Tag"] == f"py3-none-{platform}"


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT / "python")) for path in (ROOT / "python" / "fastattn").rglob("*.py")}
    assert "fastattn/functional/attention.py" in modules
    kernels = {f"fastattn/triton_kernels/{path.name}" for path in (ROOT / "triton_kernels").glob("*.py")}
    assert "fastattn/triton_kernels/__init__.py" in kernels
    assert names == modules | kernels | {"fastattn/py.typed", "fastattn/libfastattn.so"}


def test_wheel_requires_torch_and_on_linux_triton(unpacked):
    metadata = _metadata(unpacked, "METADATA")
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_all("Requires-Dist") == ["torch>=2.10", 'triton>=3.6; platform_system == "Linux"']


def test_installed_wheel_imports_and_leaves_the_bare_name_triton_kernels_alone(unpacked, tmp_path):
    output = run(
        sys.executable,
        "-c",
        "import importlib.util, fastattn, fastattn.triton_kernels as kernels\n"
        "from fastattn import native\n"
        "print(fastattn.__file__, kernels.__file__, native.LIBRARY_PATH, sep='\\n')\n"
        "print(fastattn.__version__, importlib.util.find_spec('triton_kernels'))",
        cwd=tmp_path,
        PYTHONPATH=unpacked,
        FASTATTN_LIBRARY="",
    )
    *files, last = output.splitlines()[-4:]
    assert all(Path(file).is_relative_to(unpacked) for file in files), files
    assert last == f"{_metadata(unpacked, 'METADATA')['Version']} None"


def test_source_archive_holds_all_that_the_build_needs(tmp_path):
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    run(sys.executable, "-c", build)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (root,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for folder in ("csrc", "python/fastattn", "triton_kernels"):
        expected = {
            path.relative_to(ROOT)
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix not in {".so", ".pyc"}
        }
        assert expected <= {path.relative_to(root) for path in root.rglob("*")}
    assert (root / "setup.py").exists()
    assert (root / "LICENSE").exists()
    assert not list(root.rglob("*.so"))


# --- The native library -----------------------------------------------------------------------------------------------


def _symbols(library, which):
    lines = run("nm", "-D", which, library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def test_library_is_small(library):
    assert library.stat().st_size <= MAX_LIBRARY_BYTES


def test_library_uses_the_stable_abi_and_neither_python_nor_a_shared_cuda_library(library):
    undefined = _symbols(library, "--undefined-only")
    assert any(name.startswith("aoti_torch_") for name in undefined)
    # torch's C++ interface (mangled), which changes with every release; Python's C API; CUDA's runtime and driver.
    forbidden = re.compile(r"_Z\w*?(2at|3c10|5torch)|_?Py[A-Z_]|cuda|cu[A-Z]")
    assert sorted(name for name in undefined if forbidden.match(name)) == []


def test_library_names_only_libraries_that_every_torch_and_every_system_has(library):
    dynamic = run("readelf", "-d", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    system = {
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "librt.so.1",
        "libpthread.so.0",
        "libstdc++.so.6",
        "libgcc_s.so.1",
    }
    loaders = {name for name in needed if name.startswith("ld-linux")}
    assert needed - system - loaders == {"libtorch_cpu.so"}
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_library_exports_what_python_asks_and_nothing_else(library, build):
    queries = set(native._QUERIES) if build["archs"] else set()
    assert _symbols(library, "--defined-only") == {"fastattn_build_info", *queries}


def test_library_carries_no_path_of_the_machine_that_built_it(library):
    content = library.read_bytes()
    assert str(ROOT).encode() not in content
    assert str(Path(sys.prefix)).encode() not in content


def test_library_holds_machine_code_for_each_architecture_and_ptx_for_later_gpus(library, build):
    if not build["archs"]:
        pytest.skip("the library was built without CUDA C++ kernels")
    triton = Path(importlib.util.find_spec("triton").origin).parent
    listing = run(triton / "backends" / "nvidia" / "bin" / "cuobjdump", "--list-elf", "--list-ptx", library)
    code = set().union(*build["code"].values())
    assert {f"sm_{name}" for name in re.findall(r"\.sm_(\w+)\.cubin", listing)} == {
        name for name in code if name.startswith("sm_")
    }
    assert set(re.findall(r"\.sm_(\w+)\.ptx", listing)) == {
        name.removeprefix("compute_") for name in code if name.startswith("compute_")
    }


def test_build_description_is_that_of_the_release(unpacked, build):
    assert build["version"] == _metadata(unpacked, "METADATA")["Version"]
    every = all_instances(ROOT / "csrc")
    for architecture, code in build["code"].items():
        assert set(code) <= {name for each in every if each.architecture == architecture for name in each.code}
    assert list(build["code"]) == build["archs"]
    assert (build["nvcc"] is None) == (build["archs"] == [])


@pytest.fixture(scope="module")
def plain_library(tmp_path_factory):
    """Builds the library without nvcc: it has operator schemas only."""
    build = without_kernels(tmp_path_factory.mktemp("plain"))
    path = build.run()
    first = path.stat().st_mtime_ns
    assert build.run().stat().st_mtime_ns == first, "a second build compiled what had not changed"
    return path


def test_without_nvcc_the_ops_are_there_and_the_report_says_what_to_do(plain_library, tmp_path):
    report = run(sys.executable, "-m", "fastattn", "--short", cwd=tmp_path, FASTATTN_LIBRARY=plain_library)
    assert "1.2.3" in report
    assert "without CUDA C++ kernels" in report
    assert "install a CUDA toolkit" in report
    ops = run(
        sys.executable,
        "-c",
        "import fastattn, torch; print(torch.ops.fastattn.attention_forward.default._schema)",
        cwd=tmp_path,
        FASTATTN_LIBRARY=plain_library,
    )
    assert "fastattn::attention_forward(Tensor query" in ops


def test_the_report_names_versions_and_ends_in_the_support_table(tmp_path):
    report = run(sys.executable, "-m", "fastattn", cwd=tmp_path)
    assert re.search(rf"^fastattn +{re.escape(installed_library.BUILD['version'])}$", report, re.MULTILINE)
    assert str(installed_library.LIBRARY_PATH) in report
    assert re.search(rf"^torch +{re.escape(torch.__version__)}, CUDA ", report, re.MULTILINE)
    assert report.strip().endswith(support_table())


def test_a_missing_library_is_an_import_error_that_says_what_to_run(tmp_path):
    missing = tmp_path / "libfastattn.so"
    code = "try:\n import fastattn.native\nexcept ImportError as error:\n print(error)"
    message = run(sys.executable, "-c", code, cwd=tmp_path, FASTATTN_LIBRARY=missing)
    assert f"{missing} does not exist" in message
    assert "make install" in message


# --- Tools that the build searches for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [("80;90a", ["80", "90a"]), ("90a, 80", ["80", "90a"]), ("80", ["80"]), ("90a;", ["90a"]), ("none", [])],
)
def test_architectures_are_read_in_any_order_and_with_any_separator(text, names):
    assert [target.name for target in parse_targets(text)] == names


@pytest.mark.parametrize("text", ["", "90", "75", "80;sm_90", "none;80", "native;80"])
def test_a_wrong_architecture_is_an_error_that_names_the_variable_and_the_choices(text):
    with pytest.raises(BuildError, match=f"FASTATTN_ARCHS={text!r}: expected one or more of 80, 90a"):
        parse_targets(text)


def _nvidia_smi(folder, script):
    """Returns an environment in which the shell script is nvidia-smi."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("gpus", "code"),
    [
        (["9.0", "9.0"], {"sm_90", "sm_90a"}),
        (["8.0"], {"sm_80"}),
        (["8.9", "9.0"], {"sm_80", "sm_90", "sm_90a"}),
        (["12.0"], {"compute_80", "compute_90"}),
    ],
)
def test_native_means_the_code_that_the_gpus_here_run(tmp_path, gpus, code):
    environ = _nvidia_smi(tmp_path, "\n".join(f"echo {gpu}" for gpu in gpus))
    (target,) = parse_targets("native", environ)
    assert set(target.code) == code
    instances = instances_for(CSRC, [target])
    assert {name for instance in instances for name in instance.code} <= code
    for gpu in gpus:
        assert _calls_without_a_kernel(instances, gpu) == []


def _calls_without_a_kernel(instances, gpu):
    """Returns calls of kernels for sm_80 that no kernel of the build runs on ``gpu``, not even with larger sizes."""
    runs = {"8.0": {"sm_80"}, "8.9": {"sm_80"}, "9.0": {"sm_90", "sm_90a"}, "12.0": {"compute_80", "compute_90"}}[gpu]

    def calls_of(instance):
        """Returns an instance's calls. A kernel for paged and other keys has both; tiles of other sizes add none."""
        operation = re.sub(r"(_large|_wide)?_sm\d+\.cu$", "", instance.source)
        calls = []
        for kernel in instance.kernels:
            values = {"OPTIONS": "false", **dict(kernel)}
            values.pop("FEW_KEYS", None)
            paged = [values.pop("PAGED")] if "PAGED" in values else ["false", "true"]
            size = int(values.pop("HEAD_DIM", values.pop("BLOCK_M", "0")))
            size = min(size, int(values.pop("VALUE_DIM", size)))
            calls += [((operation, tuple(sorted(values.items())), each), size) for each in paged]
        return calls

    largest = {}
    for instance in instances:
        if runs & set(instance.code):
            for kind, size in calls_of(instance):
                largest[kind] = max(size, largest.get(kind, 0))
    calls = [call for instance in all_instances(CSRC) if instance.architecture == "80" for call in calls_of(instance)]
    return [(kind, size) for kind, size in calls if largest.get(kind, -1) < size]


@pytest.mark.parametrize(
    ("text", "gpu"), [("90a", "9.0"), ("80", "8.0"), ("80;90a", "8.9"), ("80;90a", "9.0"), ("80", "12.0")]
)
def test_a_build_for_a_gpu_has_a_kernel_for_every_call_there(text, gpu):
    instances = instances_for(CSRC, parse_targets(text))
    assert _calls_without_a_kernel(instances, gpu) == []
    assert "80" in {instance.architecture for instance in instances}, "else the library has no op of fastattn"
    if text == "90a":  # there, the plain forward kernel for sm_80 would never run
        assert not any("sm_80" in name or "compute_80" in name for each in instances for name in each.code)
        assert "attention/instances/forward_sm80.cu" not in {each.source for each in instances}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "there is no nvidia-smi"),
        ("echo 'No devices were found'; exit 6", "names no GPU; it says: No devices were found"),
        ("echo 7.5", "compute capability 7.5, and the kernels need 8.0"),
    ],
)
def test_native_without_a_gpu_that_the_kernels_run_on_is_an_error_that_says_so(tmp_path, script, words):
    environ = {"PATH": str(tmp_path)} if script is None else _nvidia_smi(tmp_path, script)
    with pytest.raises(BuildError, match=f"FASTATTN_ARCHS=native: .*{words}"):
        parse_targets("native", environ)


def test_a_wrong_architecture_stops_the_build(tmp_path):
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path],
        cwd=ROOT,
        env={**os.environ, "FASTATTN_ARCHS": "75"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "FASTATTN_ARCHS='75'" in result.stderr
    assert "Traceback" not in result.stderr


# --- The instance table -----------------------------------------------------------------------------------------------


def _table(folder, rows, files=("forward_sm80.cu",)):
    """Writes a csrc of empty kernels and a table with these rows, to which it adds what every row must have."""
    (folder / "attention" / "instances").mkdir(parents=True)
    for name in files:
        (folder / "attention" / "instances" / name).touch()
    usual = {"source": "attention/instances/forward_sm80.cu", "architecture": "80"}
    architectures = {"80": {"code": ["sm_80", "sm_90", "compute_80"]}, "90a": {"code": ["sm_90a"]}}
    table = {"architectures": architectures, "kernels": [{**usual, **row} for row in rows]}
    (folder / "instances.json").write_text(json.dumps(table))
    return folder


BOTH_DTYPES = [["kFloat16", "kBFloat16"]]


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ({"HEAD_DIM": [64, 128], "CAUSAL": [False, True]}, ["64 false", "64 true", "128 false", "128 true"]),
        (
            {"HEAD_DIM VALUE_DIM": [[64, 64], [192, 128]], "CAUSAL": [False, True]},
            ["64 64 false", "64 64 true", "192 128 false", "192 128 true"],
        ),
        ({"HEAD_DIM": [64, 128], "DTYPE": BOTH_DTYPES, "CAUSAL": [True]}, ["64 true", "128 true"]),
        ({"BLOCK_M": [[16, 32], [64]], "DTYPE": BOTH_DTYPES}, [r"16\,32", "64"]),
    ],
    ids=["every combination", "values that go together", "both dtypes at once", "a list at once"],
)
def test_what_a_row_is_compiled_into(tmp_path, row, values):
    """Each compilation has an object of its own. The dtype is no macro."""
    instances = all_instances(_table(tmp_path, [row]))
    names = [name for names in row for name in names.split() if name != "DTYPE"]
    assert [instance.defines for instance in instances] == [
        [f"-DFASTATTN_{name}={value}" for name, value in zip(names, each.split(), strict=True)] for each in values
    ]
    assert len({instance.object_path for instance in instances}) == len(values)
    gencodes = [["arch=compute_80,code=[sm_80,sm_90,compute_80]"]] * len(values)
    assert [instance.gencodes() for instance in instances] == gencodes


def test_the_kernels_of_what_is_compiled_at_once(tmp_path):
    csrc = _table(tmp_path, [{"BLOCK_M": [[16, 32], [64]], "DTYPE": BOTH_DTYPES}])
    instances = all_instances(csrc)
    assert instances[1].kernels == tuple((("BLOCK_M", "64"), ("DTYPE", dtype)) for dtype in BOTH_DTYPES[0])
    assert [instance.name for instance in instances] == ["forward_sm80.BLOCK_M_16-32", "forward_sm80.BLOCK_M_64"]
    assert [instance.kernel_names for instance in instances] == [
        ["forward_sm80.BLOCK_M_16", "forward_sm80.BLOCK_M_32"],
        ["forward_sm80.BLOCK_M_64"],
    ]
    assert [len(instance.kernels) for instance in instances] == [4, 2]


def test_an_instance_has_the_code_of_its_architecture_or_of_its_row_as_far_as_the_targets_want_it(tmp_path):
    rows = [
        {"HEAD_DIM": [64]},
        {"HEAD_DIM": [128], "code": ["sm_80", "compute_80"]},  # sm_90 has another kernel for it
        {"source": "attention/instances/forward_sm90.cu", "architecture": "90a", "HEAD_DIM": [128]},
        {"HEAD_DIM": [256], "code": ["sm_80", "sm_90", "compute_80", "compute_90"]},  # it uses instructions of sm_90
    ]
    csrc = _table(tmp_path, rows, ("forward_sm80.cu", "forward_sm90.cu"))
    sm80, sm90 = TARGETS

    def code(*targets):
        return [instance.code for instance in instances_for(csrc, targets)]

    all_code = ("sm_80", "sm_90", "compute_80", "compute_90")
    assert code(sm80, sm90) == [("sm_80", "sm_90", "compute_80"), ("sm_80", "compute_80"), ("sm_90a",), all_code]
    assert code(sm80) == [*[("sm_80", "compute_80")] * 2, ("sm_80", "compute_80", "compute_90")]
    assert code(sm90) == [("sm_90",), ("sm_90a",), ("sm_90",)]
    assert code() == []

    def gencodes(*targets):
        return instances_for(csrc, targets)[-1].gencodes()

    assert gencodes(sm80, sm90) == [
        "arch=compute_80,code=[sm_80,compute_80]",
        "arch=compute_90,code=[sm_90,compute_90]",
    ]
    assert gencodes(sm80) == ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90,code=[compute_90]"]
    assert gencodes(sm90) == ["arch=compute_90,code=[sm_90]"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"source": "attention/instances/other_sm80.cu"}], "other_sm80.cu does not exist"),
        ([{"architecture": "75"}], "unknown architecture, '75'"),
        ([{"code": ["sm_80", "sm_999"]}], "unknown code, 'sm_999'"),
        ([{"head_dim": [64]}], "unknown key, 'head_dim'"),
        ([{"HEAD_DIM VALUE_DIM": [[64, 64], [64]]}], "has 2 names, and \\[64\\] as a value"),
        ([{"HEAD_DIM VALUE_DIM": [64]}], "has 2 names, and \\[64\\] as a value"),
        ([{"HEAD_DIM": [64]}, {"HEAD_DIM": [128, 64]}], "'HEAD_DIM': '64'} is there twice"),
        ([{"HEAD_DIM": [[64, 96], 96]}], "'HEAD_DIM': '96'} is there twice"),
        ([{"HEAD_DIM": [[64, 64]]}], "'HEAD_DIM': '64'} is there twice"),
        ([{"HEAD_DIM": [[]]}], "'HEAD_DIM' has an empty list"),
        ([{"HEAD_DIM VALUE_DIM": [[[64, 96], 64]]}], "lists in a list"),
        ([{"DTYPE": ["kBFloat16"]}], "must have DTYPE"),
        ([], "no row for attention/instances/forward_sm80.cu"),
    ],
)
def test_a_wrong_table_is_an_error_that_says_what_is_wrong(tmp_path, rows, words):
    with pytest.raises(BuildError, match=words):
        all_instances(_table(tmp_path, rows))


def _edges(lines, rule):
    return [line.split()[1].rstrip(":") for line in lines if f": {rule} " in line]


def test_each_instance_is_compiled_once_for_every_library():
    instances = all_instances(CSRC)
    build = with_kernels()
    lines = build.ninja_file().splitlines()
    compiled, with_code = _edges(lines, "cuda"), _edges(lines, "machine_code")
    assert compiled == [str(instance.object_path) for instance in instances]
    assert len(set(compiled)) == len(compiled) > 80
    assert with_code == [str(instance.machine_code_path) for instance in instances]
    assert not set(compiled) & set(with_code)
    gencodes = [line.removeprefix("  gencode = ") for line in lines if line.startswith("  gencode = ")]
    made = [" ".join(f"'{each}'" for each in instance.gencodes()) for instance in instances]
    assert gencodes[len(instances) :] == made
    assert all("sm_" not in each for each in gencodes[: len(instances)])
    (link,) = [line for line in lines if line.startswith("build ") and ": link " in line]
    assert set(with_code) <= set(link.split())

    emulated = dataclasses.replace(
        build, instances=instances[:3], emulated_runtime=Path("libcuda.so"), version="0", variant="emulated"
    )
    emulated_lines = emulated.ninja_file().splitlines()
    assert set(compiled) & set(emulated_lines[-1].split()) == set(compiled[:3])
    assert _edges(emulated_lines, "machine_code") == []
    own = {line.split()[1] for line in set(emulated_lines) - set(lines) if line.startswith("build ")}
    assert own == {f"emulated/{name}:" for name in ("bindings.o", "build_info.o", "libfastattn.so")}


def test_a_pattern_names_kernels_by_the_beginning_of_a_name_or_with_stars():
    def names(*patterns):
        return [each.name for each in kernels_named(patterns)]

    both = [f"forward_options_sm80.HEAD_DIM_32.PAGED_{paged}" for paged in ("false", "true")]
    assert names("forward_options_sm80.HEAD_DIM_32") == both
    assert names(both[0], "append_sm80.*.CACHE_kInt8") == [
        both[0],
        "append_sm80.HEAD_DIM_64-128-256.CACHE_kInt8",
    ]
    assert names("append_sm80.HEAD_DIM_128.CACHE_kInt8") == names("append_sm80.*.CACHE_kInt8")
    assert len(names()) == len(all_instances(CSRC))
    with pytest.raises(ValueError, match=r"no kernel is named forward_options_sm80\.HEAD_DIM_3;"):
        names("gemm_sm80", "forward_options_sm80.HEAD_DIM_3")


def _container(*entries):
    """Returns a container as nvcc embeds it; an entry is (kind, bytes when compressed, its content)."""
    packed = b"".join(
        machine_code.ENTRY.pack(kind, 0x0101, 64, len(content), compressed, 64, 0, 9, 80).ljust(64, b"\0") + content
        for kind, compressed, content in entries
    )
    return machine_code.CONTAINER.pack(machine_code.MAGIC, 1, 16, len(packed)) + packed


def test_ptx_is_read_from_its_container_and_loses_its_lines():
    ptx = """.version 9.0
.target sm_90a
.address_size 64

.entry kernel()
{
\t.loc\t1 7 3
\tmov.u32 \t%r1, 7;
$L__tmp0:
\t.loc\t1 8 3, function_name $L__info_string0, inlined_at 1 9 1
\tret;
}
\t.file\t1 "/home/someone/kernel.cu"
\t.section\t.debug_str
\t{
$L__info_string0:
.b8 95
.b8 0
\t}
"""
    padded = ptx.encode().ljust(512, b"\0")
    container = _container((2, 0, b"machine code".ljust(16)), (machine_code.PTX, 0, padded))
    assert list(machine_code.ptx_texts(container)) == [ptx]
    assert machine_code.architecture(ptx) == "90a"
    lines = machine_code.without_lines(ptx).splitlines()
    assert lines == [
        *(".version 9.0", ".target sm_90a", ".address_size 64", ".entry kernel()", "{"),
        *("\tmov.u32 \t%r1, 7;", "$L__tmp0:", "\tret;", "}"),
    ]
    with pytest.raises(SystemExit, match="compressed"):
        list(machine_code.ptx_texts(_container((machine_code.PTX, 9, b"x" * 16))))
    with pytest.raises(SystemExit, match="does not know"):
        machine_code.entries(bytes(16))


def _products(between):
    """Returns a kernel of two products that add to the same sums, with ``between`` between them."""
    multiply = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd1, 1, 1, 1, 0, 0;"
    return f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 sums, .param .u64 matrix)
{{
    .reg .f32 %f<4>; .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [sums]; ld.param.u64 %rd1, [matrix];
    {" ".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(4))}
    wgmma.fence.sync.aligned;
    {multiply} {between} {multiply}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    st.global.v4.f32 [%rd0], {{%f0, %f1, %f2, %f3}};
    ret;
}}
"""


@pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")
def test_the_build_fails_where_ptxas_serialises_wgmma(tmp_path, capfd):
    ptx, code, nvcc = tmp_path / "kernel.ptx", tmp_path / "kernel.fatbin", [str(find_nvcc())]
    gencode = "arch=compute_90a,code=[sm_90a]"
    ptx.write_text(_products(""))
    machine_code.assemble(ptx, code, gencode, nvcc)
    assert code.exists()
    ptx.write_text(_products("add.f32 %f0, %f0, %f0;"))  # the first product may not have written the sum yet
    with pytest.raises(SystemExit, match=r"serialises the wgmma[\s\S]*\(C75\d\d\) warpgroup.wait is injected"):
        machine_code.assemble(ptx, code, gencode, nvcc)
    assert "(C75" in capfd.readouterr().out, "what ptxas says is shown, too"
    ptx.write_text(_products("wrong;"))
    with pytest.raises(SystemExit) as failed:
        machine_code.assemble(ptx, code, gencode, nvcc)
    assert isinstance(failed.value.code, int)


def test_ptxas_has_many_reasons_to_serialise_wgmma():
    said = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    assert machine_code.WGMMA_ADVICE.search(f"{said}insufficient register resources for the function 'kernel'")
    assert not machine_code.WGMMA_ADVICE.search("ptxas info    : (C7508) Overriding maximum register limit 256 to 168")


COMPILER = """#!/bin/sh
echo x >> "$(dirname "$0")/runs"
grep -q wrong "$1" && exit 3
{ cat "$1"; printf '.file 1 "%s/csrc/kernel.cu"\\n' "$ROOT"; } > "$2"
"""


def test_an_object_comes_from_the_cache_until_something_that_it_is_made_from_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ROOT", str(ROOT))
    compiler, source, headers = tmp_path / "compiler", tmp_path / "a" / "unit.cu", tmp_path / "include"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    source.parent.mkdir()
    headers.mkdir()
    source.write_text('#include "near.h"\n  #  include "far.cuh"\n#include <vector>\n#include "of_the_system.h"\n')
    (source.parent / "near.h").write_text("int near;\n")
    (headers / "far.cuh").write_text('#include "farther.h"\n')
    (headers / "farther.h").write_text("int farther;\n")
    output, dependencies = tmp_path / "unit.o", tmp_path / "unit.d"

    def runs(about="c++ 12", *more, status=0):
        """Returns how often the compiler has run, after one more call."""
        output.unlink(missing_ok=True)
        command = [str(compiler), str(source), str(output), "-I", str(headers), "-MF", str(dependencies), *more]
        assert cached.run(output, about, [source], command) == status
        if not status:
            text = output.read_text()
            assert text.startswith(source.read_text())
            assert text.splitlines()[-1].rstrip() == '.file 1 "csrc/kernel.cu"'
            assert output.stat().st_size == source.stat().st_size + len(f'.file 1 "{ROOT}/csrc/kernel.cu"\n')
        return len((tmp_path / "runs").read_text().split())

    assert runs() == 1
    assert not dependencies.exists()  # only a real compiler writes it
    assert runs() == 1
    files = [source, source.parent / "near.h", headers / "far.cuh", headers / "farther.h"]
    assert dependencies.read_text() == f"{output}: {' '.join(map(str, sorted(files)))}\n"
    assert runs("c++ 13") == 2
    assert runs("c++ 13", "-DFASTATTN_HEAD_DIM=64") == 3
    (headers / "farther.h").write_text("int changed;\n")
    assert runs() == 4
    assert runs("c++ 13") == 5
    (headers / "farther.h").write_text("int farther;\n")
    assert runs() == runs("c++ 13") == 5
    for kept in (tmp_path / "cache" / "objects").glob("*/*"):
        kept.write_bytes(kept.read_bytes()[:-5])  # as on a full disk
    assert runs() == 6
    monkeypatch.setenv("FASTATTN_CACHE", str(source))  # not a folder
    assert runs() == 7
    source.write_text("wrong\n")
    assert runs(status=3) == runs(status=3) - 1 == 8


def test_what_nobody_used_for_long_leaves_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    old, new = (tmp_path / "objects" / name[:2] / name for name in ("0123", "4567"))
    for path in (old, new):
        cached.write(path, b"x")
    os.utime(old, (0, 0))
    cached.forget_unused()
    assert list(tmp_path.glob("objects/*/*")) == [new]


NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
--dryrun) echo '#$ _HERE_=elsewhere' >&2; echo "#$ TOP={top}" >&2 ;;
*) echo 'error: unsupported GNU version!' >&2; exit 1 ;;
esac
"""


def _make_toolkit(root, libraries="lib64"):
    """Makes a CUDA toolkit in which only nvcc's answers are real. It rejects every C++ compiler."""
    for folder in ("bin", "include", libraries):
        (root / folder).mkdir(parents=True)
    (root / "include" / "cuda_runtime.h").touch()
    (root / libraries / "libcudart_static.a").touch()
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text(NVCC.replace("{top}", f"{root}/bin/.."))
    nvcc.chmod(0o755)
    return nvcc


def test_nvcc_is_looked_for_in_cuda_home_then_path_then_the_usual_place_then_the_wheels(tmp_path):
    cuda_home = _make_toolkit(tmp_path / "home")
    on_path = _make_toolkit(tmp_path / "path")
    usual = _make_toolkit(tmp_path / "usual")
    wheel = _make_toolkit(tmp_path / "site-packages" / "nvidia" / "cu13", libraries="lib")
    packages = [tmp_path / "other-packages", tmp_path / "site-packages"]
    environ = {"CUDA_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}:{tmp_path}/path/bin"}

    def find():
        return find_nvcc(environ, packages, tmp_path / "usual")

    for expected in (cuda_home, on_path, usual, wheel):
        assert find() == expected
        expected.unlink()
    assert find() is None


@pytest.mark.parametrize("libraries", ["lib64", "lib"])
def test_the_toolkit_is_found_behind_a_script_that_starts_nvcc(tmp_path, libraries):
    root = tmp_path / "toolkit"
    nvcc = _make_toolkit(root, libraries)
    script = tmp_path / "nvcc"
    script.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    script.chmod(0o755)
    toolkit = CudaToolkit.of(script)
    assert toolkit == CudaToolkit(script, "13.0.88", root / "include", root / libraries)


def test_an_incomplete_toolkit_is_an_error_that_says_what_is_missing(tmp_path):
    nvcc = _make_toolkit(tmp_path)
    (tmp_path / "lib64" / "libcudart_static.a").unlink()
    with pytest.raises(BuildError, match=r"incomplete: .* lacks .*libcudart_static\.a.*FASTATTN_ARCHS=none"):
        CudaToolkit.of(nvcc)


def test_a_compiler_that_nvcc_rejects_is_an_error_with_nvccs_reason_and_the_ways_out(tmp_path):
    toolkit = CudaToolkit.of(_make_toolkit(tmp_path))
    with pytest.raises(BuildError) as caught:
        check_host_compiler(toolkit, "/usr/bin/g++", all_instances(CSRC))
    message = str(caught.value)
    assert "unsupported GNU version" in message
    assert "/usr/bin/g++" in message
    assert all(way_out in message for way_out in ("CXX", "CUDA_HOME", "FASTATTN_ARCHS=none"))


def test_building_without_torch_says_to_install_it_and_to_leave_isolation_off(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"Install torch first .* --no-build-isolation"):
        find_torch()


# --- The platform tag -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        ({}, "manylinux_2_28_x86_64"),
        ({"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "GCC": (3, 0)}, "manylinux_2_28_x86_64"),
        ({"GLIBC": (2, 29)}, "linux_x86_64"),
        ({"GLIBC": (2, 17), "GLIBCXX": (3, 4, 25)}, "linux_x86_64"),
        ({"CXXABI": (1, 3, 12)}, "linux_x86_64"),
        ({"OPENSSL": (1, 1, 0)}, "linux_x86_64"),
    ],
)
def test_manylinux_is_claimed_only_where_every_needed_version_allows_it(needed, expected):
    assert wheel_platform("linux_x86_64", needed) == expected


def test_other_platforms_keep_their_tag():
    assert wheel_platform("macosx_14_0_arm64", {}) == "macosx_14_0_arm64"


def test_needed_versions_are_those_that_objdump_lists(library):
    references = run("objdump", "-p", library).partition("Version References:")[2]
    expected = {}
    for family, version in re.findall(r"\b([A-Z]+)_([\d.]+)$", references, re.MULTILINE):
        expected[family] = max(expected.get(family, ()), tuple(map(int, version.split("."))))
    assert expected["GLIBC"] >= (2, 2)
    assert needed_versions(library) == expected


def test_needed_versions_rejects_what_is_not_a_library(tmp_path):
    text = tmp_path / "text"
    text.write_text("not a library")
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        needed_versions(text)
