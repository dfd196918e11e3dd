"""Tests of the emulated CUDA runtime with host code of nvcc (cuda/host_code.cu), which they call through ctypes."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emulator import EmulatorError, TensorMap, cuda_runtime, launches, options
from emulator.nvcc_compile import compile_library
from emulator.toolkit import ROOT, nvcc
from native_build.tools import find_cxx

pytestmark = pytest.mark.skipif(nvcc() is None, reason="needs nvcc")

KIB = 1024
SUCCESS, INVALID_VALUE, INVALID_CONFIGURATION, NO_IMAGE = 0, 1, 9, 209
ILLEGAL_ADDRESS, NOT_SUPPORTED, INVALID_CLUSTER_SIZE = 700, 801, 912
STATIC_BYTES = KIB  # static shared memory of use_shared

Ints = ctypes.Array[ctypes.c_int]


@pytest.fixture(scope="module")
def library_path() -> Path:
    source = Path(__file__).parent / "cuda" / "host_code.cu"
    return compile_library(source, ["compute_80", "compute_90", "compute_90a"])


@pytest.fixture(scope="module")
def library(library_path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library_path))
    loaded.error_string.restype = loaded.error_name.restype = ctypes.c_char_p
    loaded.entry_point.restype = ctypes.c_void_p
    return loaded


@pytest.fixture(autouse=True)
def no_error_before(library: ctypes.CDLL) -> None:
    library.get_last_error()


@pytest.fixture
def out() -> Ints:
    return (ctypes.c_int * 128)()


@pytest.fixture(autouse=True)
def a100() -> Iterator[None]:
    with cuda_runtime.pretend(80, 108, 163 * KIB):
        yield


def message(library: ctypes.CDLL, error: int) -> str:
    text: bytes = library.error_string(error)
    return text.decode()


def test_arrivals_left_at_a_barrier() -> None:
    """Checks the warning in the report, the error of the launch with ``unawaited``, and that flags reach nvcc."""
    source = Path(__file__).parent / "cuda" / "left_arrivals.cu"
    left = ctypes.CDLL(str(compile_library(source, ["compute_80"], flags=["-DNUM_CTAS=3"])))
    with launches.recorded() as found:
        assert left.run_leave_arrivals() == SUCCESS
    assert found[0].report.warnings == {"threads arrived at barrier 2, which nobody waited for": 3}
    with options.launching(unawaited=True):
        assert left.run_leave_arrivals() != SUCCESS


def test_arguments_and_variables(library: ctypes.CDLL, out: Ints) -> None:
    """Checks a pointer, an int and a struct with padding, and the initial and changed values of variables."""
    assert library.run_store(out, 20) == SUCCESS
    assert list(out[:21]) == [3 + (1, 2, 3, 4)[i % 4] + 10 + 100 for i in range(20)] + [0]
    assert library.set_variables(50, (ctypes.c_int * 4)(5, 6, 7, 8)) == SUCCESS
    assert library.get_counter(out) == SUCCESS and out[0] == 50
    assert library.run_store(out, 4) == SUCCESS
    assert list(out[:4]) == [50 + value + 10 + 100 for value in (5, 6, 7, 8)]
    assert library.set_variables(3, (ctypes.c_int * 4)(1, 2, 3, 4)) == SUCCESS


def test_template_kernels_and_grids(library: ctypes.CDLL, out: Ints) -> None:
    with launches.recorded() as found:
        assert library.run_fill(out) == SUCCESS
    assert list(out[:4]) == [7, 7, 7, 0]
    (launched,) = found
    assert launched.grid == (3, 1, 1) and launched.block == (1, 1, 1)
    assert launched.report.kernel in launched.ptx and launched.report.by_source_line
    assert any("host_code.cu" in line for line in launched.report.by_source_line)


@pytest.mark.parametrize(("arch", "version"), [(80, 800), (86, 800), (90, 901), (100, 900)])
def test_the_newest_ptx_that_the_gpu_runs(library: ctypes.CDLL, out: Ints, arch: int, version: int) -> None:
    """Checks which PTX each GPU runs; compute_90a only runs on 9.0."""
    with cuda_runtime.pretend(arch, 100, 99 * KIB):
        assert library.run_which(out) == SUCCESS
    assert out[0] == version


def test_a_gpu_without_code(library: ctypes.CDLL, out: Ints) -> None:
    with cuda_runtime.pretend(75, 40, 64 * KIB):
        assert library.run_which(out) == NO_IMAGE
    assert message(library, NO_IMAGE) == "no kernel image is available for execution on the device: _Z5whichPi"
    assert library.error_name(NO_IMAGE) == b"cudaErrorNoKernelImageForDevice"


def test_the_device_is_the_pretended_one(library: ctypes.CDLL, out: Ints) -> None:
    with cuda_runtime.pretend(90, 7, 100 * KIB):
        assert library.properties(out) == SUCCESS
        assert list(out[:3]) == [90, 7, 100 * KIB]
        for attribute, value in ((75, 9), (76, 0), (16, 7), (97, 100 * KIB), (81, 101 * KIB), (8, 48 * KIB), (120, 1)):
            assert library.device_attribute(out, attribute) == SUCCESS
            assert out[0] == value, attribute
    assert library.properties(out) == SUCCESS and list(out[:3]) == [80, 108, 163 * KIB]
    assert library.device_attribute(out, 120) == SUCCESS and out[0] == 0  # clusters


@pytest.mark.parametrize("attribute", [42, 43, 9999])
def test_an_unknown_device_attribute_is_an_error(library: ctypes.CDLL, out: Ints, attribute: int) -> None:
    assert library.device_attribute(out, attribute) == NOT_SUPPORTED
    assert f"device attribute {attribute}" in message(library, NOT_SUPPORTED)


def test_shared_memory_must_be_asked_for(library: ctypes.CDLL, out: Ints) -> None:
    by_default = 48 * KIB - STATIC_BYTES
    assert library.run_use_shared(out, 32, by_default) == SUCCESS and out[0] == 2
    assert library.run_use_shared(out, 32, by_default + 1) == INVALID_VALUE
    assert "without cudaFuncSetAttribute" in message(library, INVALID_VALUE)
    assert library.allow_shared(100 * KIB) == SUCCESS
    assert library.run_use_shared(out, 32, 100 * KIB) == SUCCESS and out[0] == 2
    assert library.run_use_shared(out, 32, 100 * KIB + 1) == INVALID_VALUE
    assert library.function_attributes(out) == SUCCESS
    assert list(out[:4]) == [STATIC_BYTES, 100 * KIB, 96, 80]
    assert library.allow_shared(163 * KIB - STATIC_BYTES) == SUCCESS
    assert library.allow_shared(163 * KIB - STATIC_BYTES + 1) == INVALID_VALUE
    assert str(163 * KIB) in message(library, INVALID_VALUE)
    with cuda_runtime.pretend(80, 108, 99 * KIB):
        assert library.allow_shared(100 * KIB) == INVALID_VALUE


@pytest.mark.parametrize("threads", [0, 1025])
def test_impossible_blocks(library: ctypes.CDLL, out: Ints, threads: int) -> None:
    assert library.run_use_shared(out, threads, 0) == INVALID_CONFIGURATION
    assert message(library, INVALID_CONFIGURATION) == "invalid configuration argument"


def test_more_threads_than_the_launch_bounds(library: ctypes.CDLL, out: Ints) -> None:
    assert library.run_use_shared(out, 96, 0) == SUCCESS
    assert library.run_use_shared(out, 97, 0) == INVALID_VALUE
    assert ".maxntid" in message(library, INVALID_VALUE)


@pytest.mark.parametrize(
    ("threads", "dynamic_bytes", "ctas"),
    [(32, 0, 32), (96, 0, 21), (1024, 0, 2), (32, 80 * KIB - STATIC_BYTES, 2), (32, 54 * KIB - STATIC_BYTES, 2)],
)
def test_occupancy(library: ctypes.CDLL, out: Ints, threads: int, dynamic_bytes: int, ctas: int) -> None:
    """Checks the limits of 32 CTAs, 2048 threads and 164 KiB; each CTA uses 1 KiB more than its own shared memory."""
    assert library.allow_shared(163 * KIB - STATIC_BYTES) == SUCCESS
    assert library.occupancy(out, threads, ctypes.c_size_t(dynamic_bytes)) == SUCCESS
    assert out[0] == ctas


def test_occupancy_of_what_cannot_be_launched(library: ctypes.CDLL, out: Ints) -> None:
    assert library.occupancy(out, 32, ctypes.c_size_t(200 * KIB)) == SUCCESS and out[0] == 0
    assert library.occupancy(out, 0, ctypes.c_size_t(0)) == INVALID_VALUE


def test_clusters(library: ctypes.CDLL, out: Ints) -> None:
    with cuda_runtime.pretend(90, 132, 227 * KIB):
        assert library.run_clusters(out, 8, 4) == SUCCESS
        assert list(out[:9]) == [4] * 8 + [0]
        assert library.run_clusters(out, 9, 4) == INVALID_VALUE
        assert "no multiple of the cluster" in message(library, INVALID_VALUE)
        assert library.run_clusters(out, 16, 16) == INVALID_CLUSTER_SIZE
        assert library.allow_large_clusters() == SUCCESS
        assert library.run_clusters(out, 16, 16) == SUCCESS and out[15] == 16
    assert library.run_clusters(out, 8, 4) == INVALID_VALUE
    assert "sm_80 has no clusters" in message(library, INVALID_VALUE)


@pytest.mark.parametrize("attribute", [1, 7, 12, 99])
def test_an_unknown_launch_attribute_is_an_error(library: ctypes.CDLL, out: Ints, attribute: int) -> None:
    assert library.run_with_attribute(out, 0) == SUCCESS  # cudaLaunchAttributeIgnore
    out[0] = 0
    assert library.run_with_attribute(out, attribute) == NOT_SUPPORTED
    assert f"launch attribute {attribute}" in message(library, NOT_SUPPORTED) and out[0] == 0


@pytest.mark.parametrize("attribute", [0, 11, 77])
def test_an_unknown_function_attribute_is_an_error(library: ctypes.CDLL, attribute: int) -> None:
    assert library.set_function_attribute(attribute, 1) == NOT_SUPPORTED
    assert f"function attribute {attribute}" in message(library, NOT_SUPPORTED)


def test_memory_streams_and_events(library: ctypes.CDLL, out: Ints) -> None:
    with options.launching(tracked=True):
        assert library.use_memory_and_streams(out) == SUCCESS
    assert list(out[:32]) == list(range(1, 33))


def test_a_fault_of_a_kernel_is_an_error_with_its_place(library: ctypes.CDLL) -> None:
    with options.launching(tracked=True):
        assert library.overrun(32) == SUCCESS
        assert library.overrun(33) == ILLEGAL_ADDRESS
        told = message(library, ILLEGAL_ADDRESS)
        assert re.match(r"out-of-bounds: .*0 bytes past|out-of-bounds: .*4 bytes past", told), told
        places = "kernel _Z7add_onePi", "PTX line", "ld.global.u32", "host_code.cu:", "CTA (0, 0, 0)", "thread (32"
        for place in places:
            assert place in told
        with pytest.raises(EmulatorError) as caught, cuda_runtime.raising_faults():
            raise RuntimeError(f"launching failed: {told}")
        assert caught.value.kind == "out-of-bounds"
        assert caught.value.kernel == "_Z7add_onePi" and caught.value.thread == (32, 0, 0)
        assert caught.value.source is not None and "host_code.cu:" in caught.value.source
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(ValueError, match="something else"), cuda_runtime.raising_faults():
            raise ValueError("something else")
        assert library.overrun(32) == SUCCESS  # later launches run


def test_null_pointers_are_found_also_where_nobody_knows_the_bounds(library: ctypes.CDLL) -> None:
    assert library.run_which(None) == ILLEGAL_ADDRESS
    assert message(library, ILLEGAL_ADDRESS).startswith("out-of-bounds: ")


def test_replaced_instructions(library: ctypes.CDLL, out: Ints) -> None:
    with cuda_runtime.replaced(", 7;", ", 9;"):
        assert library.run_fill(out) == SUCCESS
    assert list(out[:3]) == [9] * 3
    assert library.run_fill(out) == SUCCESS and list(out[:3]) == [7] * 3
    with cuda_runtime.replaced("no such instruction", ""):
        assert library.run_fill(out) == INVALID_VALUE
    assert "no such instruction" in message(library, INVALID_VALUE)


def test_launch_options_are_those_in_force(library: ctypes.CDLL, out: Ints) -> None:
    with options.launching(instruction_limit=2):
        assert library.run_fill(out) == 702  # cudaErrorLaunchTimeout
        assert message(library, 702).startswith("limit: ")
    assert library.run_fill(out) == SUCCESS


def test_the_last_error_stays_until_it_is_got(library: ctypes.CDLL, out: Ints) -> None:
    assert library.device_attribute(out, 9999) == NOT_SUPPORTED
    assert library.properties(out) == SUCCESS
    assert [library.peek_at_last_error(), library.peek_at_last_error()] == [NOT_SUPPORTED] * 2
    assert [library.get_last_error(), library.get_last_error()] == [NOT_SUPPORTED, SUCCESS]
    assert "9999" in message(library, NOT_SUPPORTED)


def test_a_real_runtime_in_the_same_process_is_not_taken(library_path: Path, tmp_path: Path) -> None:
    """Checks that a real libcudart is not used even if its symbols come first, as with a CUDA build of torch."""
    source, versions, other = tmp_path / "cudart.cpp", tmp_path / "versions.map", tmp_path / "libcudart.so.13"
    source.write_text('extern "C" int cudaDeviceGetAttribute(int* value, int, int) { return *value = 42, 0; }')
    versions.write_text("libcudart.so.13 { global: *; };")
    compiler = find_cxx(os.environ)
    subprocess.run([*compiler, "-shared", "-fPIC", f"-Wl,--version-script={versions}", source, "-o", other], check=True)
    code = (
        "import ctypes, sys; number = ctypes.c_int();"
        "other = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); import emulator.cuda_runtime;"
        "ctypes.CDLL(sys.argv[2]).device_attribute(ctypes.byref(number), 16); print(number.value);"
        "other.cudaDeviceGetAttribute(ctypes.byref(number), 16, 0); print(number.value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, other, library_path],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["108", "42"]


def test_driver_functions(library: ctypes.CDLL) -> None:
    """Checks the lookup of cuTensorMapEncodeTiled, and that of an unknown function."""
    assert library.entry_point(b"cuCtxCreate") is None
    address = library.entry_point(b"cuTensorMapEncodeTiled")
    assert address is not None
    tensor = torch.zeros(20, 64, dtype=torch.bfloat16)
    expected = TensorMap(tensor, [8, 64], "128B")
    storage = torch.zeros(128, dtype=torch.uint8)
    fields = expected.fields
    lists = [
        (kind * len(values))(*values)
        for kind, values in (
            (ctypes.c_uint64, fields.dims),
            (ctypes.c_uint64, fields.strides),
            (ctypes.c_uint32, fields.box),
            (ctypes.c_uint32, fields.element_strides),
        )
    ]
    encode = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        *[ctypes.c_void_p] * 5,
        *[ctypes.c_int] * 4,
    )(address)
    options_of_map = fields.interleave, fields.swizzle, fields.l2_promotion, fields.fill
    data = storage.data_ptr(), fields.data_type, 2, tensor.data_ptr()
    assert encode(*data, *lists, *options_of_map) == SUCCESS
    assert bytes(storage.tolist()) == bytes(expected)
    assert encode(*data, *lists, 0, 99, 0, 0) == INVALID_VALUE
