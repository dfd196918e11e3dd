"""Tests the machine code of the int8 input gradient for sm_90a: warp roles, products, registers, a step's instructions.

None of these tests needs a GPU.
"""

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
INSTANCES = instances.rows_of("int8_matmul/instances/grad_input_sm90.cu")
# Limits of two steps, in which a thread decodes 32 pairs of weights: in bf16 by 2.5 LOP3, PRMT, HFMA2 or HMUL2 each.
PAIRS = 32
MOST_INSTRUCTIONS = {"float16": 235, "bfloat16": 205}

each_instance = pytest.mark.parametrize("instance", INSTANCES, ids=str)


@functools.cache
def kernels() -> dict[tuple[int, str], KernelFacts]:
    found = {}
    for symbol, facts in static_facts.of_library(library_path(), "sm_90a").items():
        match = re.search(r"int8_matmul_grad_input_sm90ILi(\d+)ELN\w*?8DataTypeE(\d)E", symbol)
        if match:
            found[int(match[1]), DTYPES[int(match[2])]] = facts
    return found


def two_steps(kernel: KernelFacts) -> list[str]:
    """Returns the opcodes of the shortest path through the consumers' loop, where scales stay in their range."""
    with_wgmma = [body for body in kernel.main_loops if any("HGMMA" in name for name in kernel.opcodes_of(body))]
    (loop,) = with_wgmma
    return kernel.shortest_round(loop)


def test_every_instance_is_there() -> None:
    assert sorted(kernels()) == INSTANCES


@each_instance
def test_there_is_no_local_memory(instance: tuple[int, str]) -> None:
    kernel = kernels()[instance]
    assert kernel.registers == 168 and kernel.stack_bytes == 0
    found = [re.search(r"USETMAXREG.*\b0x([0-9a-f]+)", line) for line in kernel.lines]
    assert sorted(int(match[1], 16) for match in found if match) == [56, 224]


@each_instance
def test_two_steps_of_products_are_in_flight(instance: tuple[int, str]) -> None:
    opcodes = two_steps(kernels()[instance])
    products = [name for name in opcodes if name.startswith("HGMMA")]
    assert len(products) == 2 * 4 and all(("BF16" in name) == (instance[1] == "bfloat16") for name in products)
    assert product_waits(opcodes) == 2
    assert not {name.split(".")[0] for name in opcodes} & {"LDG", "LDGSTS", "FMUL", "MEMBAR"}


@each_instance
def test_decoding_is_short(instance: tuple[int, str]) -> None:
    opcodes = two_steps(kernels()[instance])
    kinds = [name.split(".")[0] for name in opcodes]
    assert kinds.count("LDSM") == 2 * 2
    assert kinds.count("HFMA2") + kinds.count("HMUL2") == PAIRS * (1 if instance[1] == "bfloat16" else 2)
    assert len(opcodes) <= MOST_INSTRUCTIONS[instance[1]]
