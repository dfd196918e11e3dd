"""The build and what it ships: the wheel, the native library in it, and the tools that setup.py looks for."""

from __future__ import annotations

import importlib.util
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
from fastattn.dispatch.support import support_table

ROOT = Path(__file__).resolve().parents[2]
MAX_LIBRARY_BYTES = 20 * 2**20


def _load_setup():
    spec = importlib.util.spec_from_file_location("fastattn_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


setup = _load_setup()


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
    """A wheel of this tree, built as a user would build it; ninja finds nearly everything compiled already."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", folder
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    """The wheel's files as they are installed."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def library(unpacked):
    """The native library in the wheel."""
    return unpacked / "fastattn" / "libfastattn.so"


def _metadata(unpacked, name):
    (path,) = unpacked.glob(f"fastattn-*.dist-info/{name}")
    return HeaderParser().parsestr(path.read_text())


def test_wheel_is_for_every_python_3_on_the_platform_that_the_library_needs(wheel, unpacked, library):
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none")
    fits = setup.wheel_platform("linux_x86_64", setup.needed_versions(library)).startswith("manylinux_2_28")
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
        "print(importlib.util.find_spec('triton_kernels'))",
        cwd=tmp_path,
        PYTHONPATH=unpacked,
        FASTATTN_LIBRARY="",
    )
    *files, bare = output.splitlines()[-4:]
    assert all(Path(file).is_relative_to(unpacked) for file in files), files
    assert bare == "None"


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


def test_library_exports_its_description_alone(library):
    dealt = {"fastattn_dealt_int8_matmul", "fastattn_dealt_decode"}
    assert _symbols(library, "--defined-only") == {"fastattn_build_info", "fastattn_tiles", *dealt}


def test_library_carries_no_path_of_the_machine_that_built_it(library):
    content = library.read_bytes()
    assert str(ROOT).encode() not in content
    assert str(Path(sys.prefix)).encode() not in content


def test_library_holds_machine_code_for_each_architecture_and_ptx_for_later_gpus(library):
    if not installed_library.BUILD["archs"]:
        pytest.skip("the library was built without CUDA C++ kernels")
    triton = Path(importlib.util.find_spec("triton").origin).parent
    listing = run(triton / "backends" / "nvidia" / "bin" / "cuobjdump", "--list-elf", "--list-ptx", library)
    code = {f"sm_{name}" for name in installed_library.BUILD["archs"]}
    assert set(re.findall(r"\.(sm_\w+)\.cubin", listing)) == code
    assert set(re.findall(r"\.(sm_\w+)\.ptx", listing)) == code & {"sm_80"}


def test_build_description_is_that_of_the_installed_release(unpacked):
    assert installed_library.BUILD["version"] == _metadata(unpacked, "METADATA")["Version"]
    assert set(installed_library.BUILD["archs"]) <= {architecture.name for architecture in setup.ARCHITECTURES}
    assert (installed_library.BUILD["nvcc"] is None) == (installed_library.BUILD["archs"] == [])


@pytest.fixture(scope="module")
def plain_library(tmp_path_factory):
    """The library as it is where there is no nvcc: op schemas alone."""
    build = setup.NativeBuild(
        source=ROOT / "csrc",
        output=tmp_path_factory.mktemp("plain"),
        version="1.2.3",
        cxx=setup.find_cxx(os.environ),
        torch=setup.find_torch(),
        toolkit=None,
        instances={},
    )
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


# --- What setup.py looks for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [("80;90a", ["80", "90a"]), ("90a, 80", ["80", "90a"]), ("80", ["80"]), ("90a;", ["90a"]), ("none", [])],
)
def test_architectures_are_read_in_any_order_and_with_any_separator(text, names):
    assert [architecture.name for architecture in setup.parse_architectures(text)] == names


@pytest.mark.parametrize("text", ["", "90", "75", "80;sm_90", "none;80"])
def test_a_wrong_architecture_is_an_error_that_names_the_variable_and_the_choices(text):
    with pytest.raises(setup.BuildError, match=f"FASTATTN_ARCHS={text!r}: expected one or more of 80, 90a"):
        setup.parse_architectures(text)


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


def test_an_instance_is_compiled_for_the_architecture_in_its_name_alone(tmp_path):
    folder = tmp_path / "attention" / "instances"
    folder.mkdir(parents=True)
    for name in ("forward_sm80.cu", "forward_sm90.cu"):
        (folder / name).touch()
    sm80, sm90 = setup.ARCHITECTURES
    assert setup.instance_files(tmp_path, [sm80, sm90]) == {
        folder / "forward_sm80.cu": sm80,
        folder / "forward_sm90.cu": sm90,
    }
    assert setup.instance_files(tmp_path, [sm90]) == {folder / "forward_sm90.cu": sm90}
    (folder / "forward.cu").touch()
    with pytest.raises(setup.BuildError, match=r"forward\.cu must end in _sm80\.cu or _sm90\.cu"):
        setup.instance_files(tmp_path, [sm80])


NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
--dryrun) echo '#$ _HERE_=elsewhere' >&2; echo "#$ TOP={top}" >&2 ;;
*) echo 'error: unsupported GNU version!' >&2; exit 1 ;;
esac
"""


def _make_toolkit(root, libraries="lib64"):
    """A CUDA toolkit of which only the nvcc's answers are real. It rejects every C++ compiler."""
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
        return setup.find_nvcc(environ, packages, tmp_path / "usual")

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
    toolkit = setup.CudaToolkit.of(script)
    assert toolkit == setup.CudaToolkit(script, "13.0.88", root / "include", root / libraries)


def test_an_incomplete_toolkit_is_an_error_that_says_what_is_missing(tmp_path):
    nvcc = _make_toolkit(tmp_path)
    (tmp_path / "lib64" / "libcudart_static.a").unlink()
    with pytest.raises(setup.BuildError, match=r"incomplete: .* lacks .*libcudart_static\.a.*FASTATTN_ARCHS=none"):
        setup.CudaToolkit.of(nvcc)


def test_a_compiler_that_nvcc_rejects_is_an_error_with_nvccs_reason_and_the_ways_out(tmp_path):
    toolkit = setup.CudaToolkit.of(_make_toolkit(tmp_path))
    with pytest.raises(setup.BuildError) as caught:
        setup.check_host_compiler(toolkit, "/usr/bin/g++", setup.ARCHITECTURES)
    message = str(caught.value)
    assert "unsupported GNU version" in message
    assert "/usr/bin/g++" in message
    assert all(way_out in message for way_out in ("CXX", "CUDA_HOME", "FASTATTN_ARCHS=none"))


def test_building_without_torch_says_to_install_it_and_to_leave_isolation_off(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup.BuildError, match=r"Install torch first .* --no-build-isolation"):
        setup.find_torch()


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
    assert setup.wheel_platform("linux_x86_64", needed) == expected


def test_other_platforms_keep_their_tag():
    assert setup.wheel_platform("macosx_14_0_arm64", {}) == "macosx_14_0_arm64"


def test_needed_versions_are_those_that_objdump_lists(library):
    references = run("objdump", "-p", library).partition("Version References:")[2]
    expected = {}
    for family, version in re.findall(r"\b([A-Z]+)_([\d.]+)$", references, re.MULTILINE):
        expected[family] = max(expected.get(family, ()), tuple(map(int, version.split("."))))
    assert expected["GLIBC"] >= (2, 2)
    assert setup.needed_versions(library) == expected


def test_needed_versions_rejects_what_is_not_a_library(tmp_path):
    text = tmp_path / "text"
    text.write_text("not a library")
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        setup.needed_versions(text)
