"""Tests the machine code of the int8 matmul with int8 activations for sm_90a: products of int8 numbers from shared
memory, and the other instructions of its main loops. None of these tests needs a GPU."""

from __future__ import annotations

import functools
import re

import pytest

import instances
from emulator import static_facts
from emulator.static_facts import KernelFacts, product_waits
from machine_code_library import BUILD, library_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("hopper_kernels"),  # one process disassembles the library
    pytest.mark.skipif("90a" not in BUILD["archs"], reason="the native library was built without kernels for sm_90a"),
]

DTYPES = ("float16", "bfloat16")  # in the order of the C++ enum DataType
Instance = tuple[int, bool, str]  # tokens per tile, whether scales are per group along K, dtype
ROWS = instances.rows_of("int8_matmul/instances/gemm_s8_sm90.cu")
STEP_PRODUCTS = 4  # each over 32 of K

each_instance = pytest.mark.parametrize("instance", ROWS, ids=str)


@functools.cache
def kernels() -> dict[Instance, KernelFacts]:
    found = {}
    for symbol, facts in static_facts.of_library(library_path(), "sm_90a").items():
        match = re.search(r"int8_matmul_s8_sm90ILi(\d+)ELN\w*?8DataTypeE(\d)ELb(\d)E", symbol)
        if match:
            found[int(match[1]), match[3] == "1", DTYPES[int(match[2])]] = facts
    return found


def test_every_instance_is_there() -> None:
    assert sorted(kernels()) == ROWS


@each_instance
def test_products_are_those_of_warpgroups_on_int8(instance: Instance) -> None:
    """Each product is over 32 of K. With groups, each group size has a loop."""
    tokens, has_groups, _ = instance
    kernel = kernels()[instance]
    assert list(kernel.tensor_core) == ["IGMMA"]
    assert "UTMALDG" in {opcode.split(".")[0] for opcode in kernel.instructions}
    loops = kernel.main_loops
    assert len(loops) == (3 if has_groups else 1)
    for loop in loops:
        products = [opcode for opcode in kernel.opcodes_of(loop) if opcode.startswith("IGMMA")]
        assert products == [f"IGMMA.64x{tokens}x32.S8.S8"] * STEP_PRODUCTS
    # A group's sums are scaled before the next product: a step has one group of 128, two of 64 or four of 32.
    waits = [product_waits(kernel.opcodes_of(loop)) for loop in loops]
    assert sorted(waits) == ([1, 2, 4] if has_groups else [1])


@each_instance
def test_nothing_is_in_local_memory(instance: Instance) -> None:
    kernel = kernels()[instance]
    assert kernel.local_in_loops == 0 and kernel.stack_bytes == 0 and kernel.registers == 168


@each_instance
def test_a_step_loads_nothing_itself(instance: Instance) -> None:
    """TMA loads the operands, and wgmma reads them; LDG loads scales of groups. Without groups sums stay in place: a
    step takes a tenth of the issue slots of its tensor clocks, at the smallest tile."""
    tokens, has_groups, _ = instance
    kernel = kernels()[instance]
    for loop in kernel.main_loops:
        opcodes = kernel.opcodes_of(loop)
        kinds = {opcode.split(".")[0] for opcode in opcodes}
        assert not kinds & {"LDS", "STS", "LDSM", "LDGSTS", "MEMBAR"}
        if not has_groups:
            assert "LDG" not in kinds and len(opcodes) <= 80
        else:
            conversions = sum(opcode.startswith(("I2F", "I2FP")) for opcode in opcodes)
            groups = conversions / (tokens // 2)
            assert groups in (1, 2, 4)
