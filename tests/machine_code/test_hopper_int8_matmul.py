"""Tests the machine code of the int8 matmul for sm_90a: products of warpgroups with operands in registers, and the
instructions that decode these. None of these tests needs a GPU."""

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
ROWS = instances.rows_of("int8_matmul/instances/gemm_sm90.cu")
STEP_PRODUCTS, STEP_PAIRS = 4, 16  # products over 16 of K; pairs of weights that a thread decodes
MACS = 2048  # per SM and clock
SCHEDULERS = 4

each_instance = pytest.mark.parametrize("instance", ROWS, ids=str)
each_plain = pytest.mark.parametrize("instance", [row for row in ROWS if not row[1]], ids=str)


@functools.cache
def kernels() -> dict[Instance, KernelFacts]:
    found = {}
    for symbol, facts in static_facts.of_library(library_path(), "sm_90a").items():
        match = re.search(r"int8_matmul_sm90ILi(\d+)ELN\w*?8DataTypeE(\d)ELb(\d)E", symbol)
        if match:
            found[int(match[1]), match[3] == "1", DTYPES[int(match[2])]] = facts
    return found


def loops_of(kernel: KernelFacts) -> list[list[str]]:
    """Returns the opcodes of the shortest path through each loop with products: two steps."""
    bodies = [body for body in kernel.main_loops if any("HGMMA" in name for name in kernel.opcodes_of(body))]
    return [kernel.shortest_round(body) for body in bodies]


def count(opcodes: list[str], *kinds: str) -> int:
    return sum(name.split(".")[0] in kinds for name in opcodes)


def test_every_instance_is_there() -> None:
    assert sorted(kernels()) == ROWS


@each_instance
def test_products_are_those_of_warpgroups(instance: Instance) -> None:
    """With groups, one loop is for groups of 32, and one for larger groups."""
    tokens, has_groups, dtype = instance
    kernel = kernels()[instance]
    assert list(kernel.tensor_core) == ["HGMMA"]
    assert "UTMALDG" in {opcode.split(".")[0] for opcode in kernel.instructions}
    loops = loops_of(kernel)
    assert len(loops) == (2 if has_groups else 1)
    for opcodes in loops:
        products = [name for name in opcodes if name.startswith("HGMMA")]
        assert len(products) == 2 * STEP_PRODUCTS
        assert all(f"64x{tokens}x16" in name and ("BF16" in name) == (dtype == "bfloat16") for name in products)


@each_instance
def test_nothing_is_in_local_memory(instance: Instance) -> None:
    kernel = kernels()[instance]
    assert kernel.registers == 168 and kernel.stack_bytes == 0
    found = [re.search(r"USETMAXREG.*\b0x([0-9a-f]+)", line) for line in kernel.lines]
    assert sorted(int(match[1], 16) for match in found if match) == [24, 240]


@each_instance
def test_a_pair_takes_a_load_and_three_instructions(instance: Instance) -> None:
    for opcodes in loops_of(kernels()[instance]):
        pairs = 2 * STEP_PAIRS
        assert count(opcodes, "LDS") == pairs and count(opcodes, "HFMA2", "HADD2") == pairs
        # Each step also has a barrier's address in the other CTA, its phase, and an address if ptxas computes it so.
        assert count(opcodes, "PRMT", "LOP3") <= 2 * pairs + 2 * 3
        assert not count(opcodes, "I2F", "F2F", "I2I", "I2FP", "MEMBAR", "STS")


@each_plain
def test_two_steps_are_in_flight_and_decoding_is_hidden(instance: Instance) -> None:
    """Both consumers issue for less than 60 % of the clocks of their products; with 96 tokens for less than two thirds;
    with 64 tokens, where memory binds, for less than all."""
    tokens, _, _ = instance
    (opcodes,) = loops_of(kernels()[instance])
    assert count(opcodes, "WARPGROUP") == 4  # an arrival and a wait per step
    assert product_waits(opcodes) == 2
    consumers, warps = 2, 4
    tensor_clocks = consumers * 2 * STEP_PRODUCTS * 64 * 16 * tokens / MACS
    issued = consumers * warps * len(opcodes) / SCHEDULERS
    assert issued <= {64: 1.0, 96: 2 / 3}.get(tokens, 0.6) * tensor_clocks
