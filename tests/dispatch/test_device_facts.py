"""Tests facts about a device: the driver's version, autocast, and whether Triton's pipelines can be trusted."""

from __future__ import annotations

import ctypes
import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from fastattn.__main__ import describe_gpu
from fastattn.dispatch import device, reasons
from fastattn.dispatch.device import DeviceFacts
from fastattn.functional.autocast import autocast_dtype
from fastattn.triton_kernels import tiles

CUDA = torch.device("cuda", 0)


def answers(version: int, status: int = 0) -> SimpleNamespace:
    def ask(found: ctypes._CArgObject) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = version
        return status

    return SimpleNamespace(cuDriverGetVersion=ask)


@pytest.mark.parametrize(
    ("driver", "expected"),
    [(answers(12080), 12080), (answers(0, status=3), None), (SimpleNamespace(), None), (OSError("no driver"), None)],
    ids=["known", "refused", "no such function", "no driver"],
)
def test_the_driver_is_asked_and_may_be_silent(
    driver: object, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> object:
        assert name == "libcuda.so.1"
        if isinstance(driver, OSError):
            raise driver
        return driver

    monkeypatch.setattr(device.ctypes, "CDLL", load)
    assert device._driver_cuda() == expected


@pytest.mark.parametrize(("driver_cuda", "refused"), [(None, False), (13000, False), (11080, True)])
def test_a_silent_driver_is_no_reason_against_a_kernel(
    driver_cuda: int | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasons.native, "BUILD", {"archs": ["80"], "code": {"80": ["sm_80"]}, "cuda": "12.8"})
    reason = reasons.unavailable("cuda", CUDA, DeviceFacts(80, 108, 163 * 1024, driver_cuda))
    assert (reason is not None and "the driver supports CUDA 11.8" in reason) == refused


@pytest.mark.parametrize(
    ("arch", "driver_cuda", "expected"),
    [
        (90, 13000, ["an H100, sm_90, 80 GiB", "CUDA C++ kernels in machine code for sm_90a", "Triton kernels"]),
        (90, 12040, ["an H100, sm_90, 80 GiB", "no CUDA C++ kernels: the driver supports CUDA 12.4", "Triton kernels"]),
        (86, 13000, ["an H100, sm_86, 80 GiB", "no CUDA C++ kernels: the library was built for oth", "Triton kernels"]),
        (75, 13000, ["an H100: PyTorch's own kernels run; fastattn's need sm_80"]),
    ],
)
def test_the_report_says_what_the_dispatcher_will(
    arch: int, driver_cuda: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = {"archs": ["80", "90a"], "code": {"90a": ["sm_90a"]}, "cuda": "13.0"}
    monkeypatch.setattr(reasons.native, "BUILD", build)
    monkeypatch.setattr(device, "facts", lambda gpu: DeviceFacts(arch, 132, 227 * 1024, driver_cuda))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "an H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=80 << 30))
    lines = describe_gpu(0).splitlines()
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_autocast_of_devices_that_have_none() -> None:
    assert autocast_dtype("meta") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") == torch.bfloat16
        assert torch.compile(lambda x: x.to(autocast_dtype("cpu")), backend="eager", fullgraph=True)(
            torch.ones(2)
        ).dtype == (torch.bfloat16)


@pytest.mark.parametrize(
    ("version", "pipelines"), [("3.6.0", False), ("3.7.0", False), ("3.7.1", False), ("3.8.0", True), ("3.10.0", True)]
)
def test_no_pipeline_where_tritons_are_not_sound(
    version: str, pipelines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This concerns Hopper and Blackwell: matrix instructions of others read shared memory as any instruction does."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    forget()
    try:
        for arch in (80, 90, 100, 120):
            found = [
                tiles.attention_forward_tile(arch, 64, 64),
                tiles.attention_backward_tile(arch, 64, 64, "query"),
                tiles.int8_matmul_tile(arch, 512, 1024, 1024, 0, 99 * 1024, 100),
            ]
            assert [tile.num_stages > 1 for tile in found] == [pipelines or arch in (80, 120)] * 3
    finally:
        forget()


def forget() -> None:
    tiles._pipelines_are_sound.cache_clear()
    tiles.int8_matmul_tile.cache_clear()
