"""Tests of the tracking allocator: overruns into neighbours, freed memory, and lifetimes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import expected_errors
from emulator import EmulatorError, Module, allocations
from emulator.native import native
from expected_errors import failing

PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry store(.param .u64 out, .param .s32 first, .param .u32 count)
{
    .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [out]; ld.param.s32 %r1, [first]; ld.param.u32 %r2, [count];
    mov.u32 %r0, %tid.x; setp.ge.u32 %p1, %r0, %r2; @%p1 bra DONE;
    add.s32 %r3, %r0, %r1; mul.wide.s32 %rd1, %r3, 4; add.s64 %rd1, %rd0, %rd1;
    st.global.u32 [%rd1], 0;
DONE:
    ret;
}"""


@pytest.fixture(autouse=True)
def tracking() -> Iterator[None]:
    with allocations.tracked():
        yield


def store(address: int, first: int, count: int, **options: object) -> None:
    """Runs a kernel that gets a bare pointer and stores zeros to the ``count`` elements from ``first`` on."""
    options = {"tracked": True} | options
    Module(PTX).launch("store", (1,), (32,), [address, first, count], **options)  # type: ignore[arg-type]


def fails(address: int, first: int, count: int, text: str) -> EmulatorError:
    return expected_errors.fails("out-of-bounds", text, lambda: store(address, first, count))


def neighbours() -> tuple[Tensor, Tensor]:
    """Returns two tensors, the one at the lower address first."""
    first, second = sorted((torch.ones(25) for _ in range(2)), key=Tensor.data_ptr)
    return first, second


def test_an_overrun_by_one_element_is_found() -> None:
    first, second = neighbours()
    error = fails(first.data_ptr(), 0, 26, "reaching 4 bytes past the end of allocation")
    assert error.thread == (25, 0, 0) and "(100 bytes)" in error.message
    assert (second == 1).all()
    store(first.data_ptr(), 0, 25)
    assert (first == 0).all()


def test_an_underrun_is_found() -> None:
    tensor = torch.ones(25)
    assert fails(tensor.data_ptr(), -1, 1, "4 bytes before the start of").thread == (0, 0, 0)
    store(tensor.data_ptr(), 0, 1)


def test_no_tensor_lies_next_to_another() -> None:
    """Checks that the gap between tensors is at least as large as a tensor, so that it catches overruns of a tile."""
    tensors = [torch.empty(4096) for _ in range(8)]
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(later[0] - earlier[1] >= tensors[0].nbytes for earlier, later in itertools.pairwise(ranges))


def test_messages_name_what_was_labelled() -> None:
    tensor = torch.ones(25)
    allocations.label(tensor[3:], "the query")
    fails(tensor.data_ptr(), 0, 26, "4 bytes past the end of the query (100 bytes)")
    with pytest.raises(ValueError, match="not tracked"), allocations.tracked():
        allocations.label(torch.from_numpy(np.ones(3)), "foreign")


def test_use_after_free_is_found() -> None:
    tensor = torch.ones(25)
    address = tensor.data_ptr()
    allocations.label(tensor, "the workspace")
    store(address, 0, 25)
    del tensor
    others = [torch.ones(25) for _ in range(50)]
    assert address not in [other.data_ptr() for other in others]
    fails(address, 0, 25, "which is in the workspace (100 bytes, freed)")


def test_fresh_and_freed_memory_is_nan() -> None:
    assert torch.empty(1000).isnan().all() and torch.empty(10, dtype=torch.bfloat16).isnan().all()
    tensor = torch.ones(25)
    address = tensor.data_ptr()
    del tensor
    assert set(ctypes.string_at(address, 100)) == {0xFF}


def test_views() -> None:
    """Checks that a kernel with a bare pointer may touch the whole storage, but with a view only the view."""
    base = torch.ones(8, 8)
    view = base[:, :4]
    store(view.data_ptr(), 4, 4)
    assert (base[0] == torch.tensor([1.0] * 4 + [0.0] * 4)).all()
    module = Module(PTX)
    with pytest.raises(EmulatorError, match="4 bytes past the end of argument 0"):
        module.launch("store", (1,), (32,), [view[:2], 12, 1])
    with pytest.raises(EmulatorError, match=r"past the end of argument 0, float32 \[4\] \(16 bytes\)"):
        module.launch("store", (1,), (32,), [base[7, 4:], 4, 1], tracked=True)
    module.launch("store", (1,), (32,), [view[:2], 11, 1])


def test_what_torch_did_not_make_is_known_on_request() -> None:
    array = np.ones(8, np.float32)
    address = array.ctypes.data
    fails(address, 0, 8, "a write of 4 bytes")
    with allocations.allow(array, "a numpy array"):
        store(address, 0, 8)
        fails(address, 0, 9, "4 bytes past the end of a numpy array (32 bytes)")
    assert (array == 0).all()
    fails(address, 0, 8, "a write of 4 bytes")


def test_tensors_may_outlive_the_tracking_and_be_older() -> None:
    gc.collect()
    before = len(allocations.live())
    with allocations.tracked():
        inner = torch.ones(25)
    assert len(allocations.live()) == before + 1
    inner.resize_(2000).fill_(2)
    store(inner.data_ptr(), 0, 2000)
    del inner
    gc.collect()
    assert len(allocations.live()) == before


@pytest.mark.slow
def test_only_within() -> None:
    script = """
import torch
from emulator import allocations
older = torch.ones(100)
with allocations.tracked():
    kept = torch.ones(7)
    assert allocations.live() == [(kept.data_ptr(), 28, "allocation 1")], allocations.live()
    older.resize_(1000)
    del older
later = torch.ones(100)
assert len(allocations.live()) == 1
del kept
assert allocations.live() == []
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)


@pytest.mark.parametrize(("offset", "text"), [(25, "at byte 100"), (-1, "at byte -4")])
def test_red_zones_are_verified(offset: int, text: str) -> None:
    """Checks that `verify` finds the writes of a launch without checks."""
    tensor = torch.ones(25)
    allocations.label(tensor, "the output")
    store(tensor.data_ptr(), offset, 1, checks=False)
    with failing("out-of-bounds", f"{text} of the output"):
        allocations.verify()
    allocations.verify()  # reports it only once
    store(tensor.data_ptr(), 0, 25, checks=False)
    allocations.verify()


def test_red_zones_are_verified_when_the_tensor_is_freed() -> None:
    with pytest.raises(EmulatorError, match="at byte 100 of allocation"), allocations.tracked():
        tensor = torch.ones(25)
        store(tensor.data_ptr(), 25, 1, checks=False)
        del tensor


def test_writes_after_the_free_are_found() -> None:
    tensor = torch.ones(25)
    address = tensor.data_ptr()
    del tensor
    store(address, 2, 1, checks=False)
    with pytest.raises(EmulatorError, match="written at byte 8 of allocation"):
        allocations.verify()


@pytest.mark.parametrize(("count", "size"), [(200, 4 << 20), (400_000, 1)], ids=["large", "small"])
def test_memory_goes_back_in_the_end(count: int, size: int) -> None:
    """Checks the limit of the quarantine, red zones included. In this process, memory that other tests freed could hide
    what the quarantine holds, so the test starts another one."""
    script = f"""
import ctypes, os, sys
sys.path.insert(0, {str(Path(native.__file__).parent)!r})
import _emulator
allocate, deallocate = _emulator.allocations.functions()
allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(allocate)
deallocate = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deallocate)

def resident_bytes():
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident_bytes()
for _ in range({count}):
    deallocate(allocate({size}))
grown = resident_bytes() - before
assert grown < 128 << 20, f"{{grown >> 20}} MiB"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_threads() -> None:
    """Checks allocations by autograd's threads, and by several threads at the same time."""
    weight = torch.randn(32, 32, requires_grad=True)
    before = len(allocations.live())

    def work() -> None:
        for _ in range(200):
            (weight @ torch.randn(32, 4)).sum().backward()
            store(torch.ones(25).data_ptr(), 0, 0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert weight.grad is not None and len(allocations.live()) <= before + 4
