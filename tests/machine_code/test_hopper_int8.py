"""Tests the machine code of the int8 kernels for sm_90a: products, and the instructions that decode their operands.

The matmul and the input gradient decode weights into registers; with int8 activations, TMA loads both operands and
wgmma reads them. None of these tests needs a GPU.
"""

from __future__ import annotations

import pytest

from emulator import static_facts
from emulator.static_facts import KernelFacts, product_waits
from instances import rows_of
from machine_code_facts import exchanged_registers, facts_of
from machine_code_library import BUILD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("hopper_kernels"),  # one process disassembles the library
    pytest.mark.skipif("90a" not in BUILD["archs"], reason="the native library was built without kernels for sm_90a"),
]

Instance = tuple[int, bool, str]  # tokens per tile, whether scales are per group along K, dtype
MATMUL = "int8_matmul/instances/gemm_sm90.cu"
GRADIENT = "int8_matmul/instances/grad_input_sm90.cu"
INT8_TOKENS = "int8_matmul/instances/gemm_s8_sm90.cu"
REGISTERS = {MATMUL: [24, 240], GRADIENT: [56, 224]}  # that warpgroups set

each_matmul = pytest.mark.parametrize("instance", rows_of(MATMUL), ids=str)
each_gradient = pytest.mark.parametrize("instance", rows_of(GRADIENT), ids=str)
each_of_int8_tokens = pytest.mark.parametrize("instance", rows_of(INT8_TOKENS), ids=str)


def facts(source: str, instance: tuple[object, ...]) -> KernelFacts:
    return facts_of(source, "sm_90a")[instance]


def loops_of(kernel: KernelFacts) -> list[list[str]]:
    """Returns the opcodes of the shortest path through each loop with products: two steps."""
    bodies = [body for body in kernel.main_loops if any("HGMMA" in name for name in kernel.opcodes_of(body))]
    return [kernel.shortest_round(body) for body in bodies]


def count(opcodes: list[str], *kinds: str) -> int:
    return sum(name.split(".")[0] in kinds for name in opcodes)


@pytest.mark.parametrize("source", [MATMUL, GRADIENT, INT8_TOKENS])
def test_nothing_is_in_local_memory(source: str) -> None:
    for instance, kernel in facts_of(source, "sm_90a").items():
        assert kernel.registers == 168, instance
        assert kernel.local_in_loops == 0 and kernel.stack_bytes == 0, instance
        assert source not in REGISTERS or exchanged_registers(kernel) == REGISTERS[source], instance


@pytest.mark.parametrize("source", [MATMUL, GRADIENT, INT8_TOKENS])
def test_results_leave_in_16_bits(source: str) -> None:
    """A pass of the epilogue stores 32 rows to shared memory, meets the other threads once, and leaves the rest to
    TMA. Its second barrier is for a residual. A thread has 16 results: 2 STSM, or 8 STS in the input gradient."""
    for instance, kernel in facts_of(source, "sm_90a").items():
        names = {
            body: {*map(static_facts.opcode, kernel.opcodes_of(body))} for body in static_facts.loops(kernel.lines)
        }
        bodies = [body for body in names if {"UTMASTG", "BAR"} <= names[body]]
        stores = ("STS" if source == GRADIENT else "STSM",)
        opcodes = kernel.shortest_round(min(bodies, key=len), stores)
        assert (count(opcodes, "STSM"), count(opcodes, "STS")) == ((0, 8) if source == GRADIENT else (2, 0)), instance
        assert count(opcodes, "F2FP") == 8 and count(opcodes, "BAR") <= 2 and not count(opcodes, "STG"), instance
        assert len(opcodes) <= 110, instance


# --- The matmul -------------------------------------------------------------------------------------------------------

STEP_PRODUCTS, STEP_PAIRS = 4, 16  # products over 16 of K; pairs of weights that a thread decodes
MACS = 2048  # per SM and clock
SCHEDULERS = 4


@each_matmul
def test_products_are_those_of_warpgroups(instance: Instance) -> None:
    tokens, _, dtype = instance
    kernel = facts(MATMUL, instance)
    assert list(kernel.tensor_core) == ["HGMMA"]
    assert "UTMALDG" in {opcode.split(".")[0] for opcode in kernel.instructions}
    (opcodes,) = loops_of(kernel)
    products = [name for name in opcodes if name.startswith("HGMMA")]
    assert len(products) == 2 * STEP_PRODUCTS
    assert all(f"64x{tokens}x16" in name and ("BF16" in name) == (dtype == "bfloat16") for name in products)


@each_matmul
def test_a_pair_takes_a_load_and_three_instructions(instance: Instance) -> None:
    """With groups, two more instructions multiply it by its scale. The shortest path makes no factors of scales."""
    has_groups = instance[1]
    (opcodes,) = loops_of(facts(MATMUL, instance))
    pairs = 2 * STEP_PAIRS
    assert count(opcodes, "LDS") == pairs
    assert count(opcodes, "HFMA2", "HADD2", "HMUL2") == pairs * (3 if has_groups else 1)
    # Each step also has a barrier's address in the other CTA, its phase, and an address if ptxas computes it so.
    assert count(opcodes, "PRMT", "LOP3") <= 2 * pairs + 2 * 3
    assert not count(opcodes, "I2F", "F2F", "I2I", "I2FP", "MEMBAR", "STS", "LDG", "FMUL")


@each_matmul
def test_two_steps_are_in_flight_and_decoding_is_hidden(instance: Instance) -> None:
    """Both consumers issue for less than 60 % of the clocks of their products; with 96 tokens for less than two thirds;
    with 64 tokens, where memory binds, for less than all. Multiplying by the scales of groups takes a third more."""
    tokens, has_groups, _ = instance
    (opcodes,) = loops_of(facts(MATMUL, instance))
    assert count(opcodes, "WARPGROUP") == 4  # an arrival and a wait per step
    assert product_waits(opcodes) == 2
    consumers, warps = 2, 4
    tensor_clocks = consumers * 2 * STEP_PRODUCTS * 64 * 16 * tokens / MACS
    issued = consumers * warps * len(opcodes) / SCHEDULERS
    assert issued <= {64: 1.0, 96: 2 / 3}.get(tokens, 0.6) * tensor_clocks * (4 / 3 if has_groups else 1)


@pytest.mark.parametrize("instance", [row for row in rows_of(MATMUL) if row[1]], ids=str)
def test_the_factors_of_two_steps_take_160_instructions(instance: Instance) -> None:
    """This is for groups of 32, which need four scales a step. Groups of 64 need two, groups of 128 two in every other
    step."""
    kernel = facts(MATMUL, instance)
    (body,) = kernel.main_loops
    longest, shortest = kernel.shortest_round(body, ("LDG", "F2FP")), kernel.shortest_round(body)
    assert count(longest, "LDG") == 8 and count(longest, "F2FP") == 16
    assert not count(longest, "I2F", "F2F", "MUFU", "MEMBAR", "STS", "BAR", "SHFL")
    assert len(longest) <= len(shortest) + 160


# --- The input gradient -----------------------------------------------------------------------------------------------

# Limits of two steps, in which a thread decodes 32 pairs of weights: in bf16 by 2.5 LOP3, PRMT, HFMA2 or HMUL2 each.
PAIRS = 32
MOST_INSTRUCTIONS = {"float16": 235, "bfloat16": 205}


@each_gradient
def test_the_gradients_decoding_is_short_and_two_steps_are_in_flight(instance: tuple[int, str]) -> None:
    dtype = instance[1]
    (opcodes,) = loops_of(facts(GRADIENT, instance))  # scales stay in their range
    products = [name for name in opcodes if name.startswith("HGMMA")]
    assert len(products) == 2 * 4 and all(("BF16" in name) == (dtype == "bfloat16") for name in products)
    assert product_waits(opcodes) == 2
    assert not count(opcodes, "LDG", "LDGSTS", "FMUL", "MEMBAR")
    assert count(opcodes, "LDSM") == 2 * 2
    assert count(opcodes, "HFMA2", "HMUL2") == PAIRS * (1 if dtype == "bfloat16" else 2)
    assert len(opcodes) <= MOST_INSTRUCTIONS[dtype]


# --- Int8 activations -------------------------------------------------------------------------------------------------


@each_of_int8_tokens
def test_products_are_those_of_warpgroups_on_int8(instance: Instance) -> None:
    """Each product is over 32 of K. With groups, each group size has a loop."""
    tokens, has_groups, _ = instance
    kernel = facts(INT8_TOKENS, instance)
    assert list(kernel.tensor_core) == ["IGMMA"]
    assert "UTMALDG" in {opcode.split(".")[0] for opcode in kernel.instructions}
    loops = [kernel.opcodes_of(loop) for loop in kernel.main_loops]
    assert len(loops) == (3 if has_groups else 1)
    for opcodes in loops:
        products = [opcode for opcode in opcodes if opcode.startswith("IGMMA")]
        assert products == [f"IGMMA.64x{tokens}x32.S8.S8"] * 4
    # A group's sums are scaled before the next product: a step has one group of 128, two of 64 or four of 32.
    assert sorted(map(product_waits, loops)) == ([1, 2, 4] if has_groups else [1])


@each_of_int8_tokens
def test_a_step_loads_nothing_itself(instance: Instance) -> None:
    """TMA loads the operands, and wgmma reads them; LDG loads scales of groups. Without groups sums stay in place: a
    step takes a tenth of the issue slots of its tensor clocks, at the smallest tile."""
    tokens, has_groups, _ = instance
    kernel = facts(INT8_TOKENS, instance)
    for opcodes in map(kernel.opcodes_of, kernel.main_loops):
        assert not count(opcodes, "LDS", "STS", "LDSM", "LDGSTS", "MEMBAR")
        if not has_groups:
            assert not count(opcodes, "LDG") and len(opcodes) <= 80
        else:
            conversions = sum(opcode.startswith(("I2F", "I2FP")) for opcode in opcodes)
            assert conversions / (tokens // 2) in (1, 2, 4)
