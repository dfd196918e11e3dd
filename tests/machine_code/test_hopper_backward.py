"""Tests the machine code of the backward kernels for sm_90a: warp roles, products, registers, instructions of a step.

None of these tests needs a GPU.
"""

from __future__ import annotations

import pytest

from emulator.static_facts import KernelFacts, product_waits
from instances import rows_of
from machine_code_facts import exchanged_registers, facts_of
from machine_code_library import BUILD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("hopper_kernels"),  # one process disassembles the library
    pytest.mark.skipif("90a" not in BUILD["archs"], reason="the native library was built without kernels for sm_90a"),
]

KEY_VALUE = "attention/instances/backward_key_value_sm90.cu"  # True: with options
WIDE = "attention/instances/backward_key_value_wide_sm90.cu"
KEY_BLOCKS = {64: 2, 96: 1, 128: 1}  # blocks of 64 keys per warpgroup
# Limits of a full step, per warpgroup and 64 rows by 64 keys. FlashAttention-3 has 352 with 64 dims, 405 with 128.
MOST_INSTRUCTIONS = {64: 345, 96: 430, 128: 455}
# The same in kernels with options, for a call that has none: the cost of asking for them.
MOST_INSTRUCTIONS_WITH_OPTIONS = {64: 575, 96: 655, 128: 675}
# Limits above 128 dims, for the warpgroups of dV, dK and dQ together. True: with options, which a call lacks.
MOST_INSTRUCTIONS_WIDE = {
    (192, 128, False): 645,
    (192, 192, False): 665,
    (256, 256, False): 740,
    (192, 128, True): 915,
    (192, 192, True): 940,
    (256, 256, True): 1030,
}
MAX_STACK_BYTES = 40  # per thread: producer values without a register, and values around the loop
# With options, each step loads some addresses again, and warps with 24 registers look for the tiles in key ranges.
MAX_STACK_BYTES_WITH_OPTIONS = {64: 56, 96: 64, 128: 64}
MOST_LOCAL_WITH_OPTIONS = {64: 6, 96: 0, 128: 6}

each_instance = pytest.mark.parametrize("instance", rows_of(KEY_VALUE), ids=str)
each_plain_instance = pytest.mark.parametrize("instance", [each for each in rows_of(KEY_VALUE) if not each[2]], ids=str)
each_options_instance = pytest.mark.parametrize("instance", [each for each in rows_of(KEY_VALUE) if each[2]], ids=str)
each_wide = pytest.mark.parametrize("instance", rows_of(WIDE), ids=str)


def wide_steps(kernel: KernelFacts) -> dict[str, list[str]]:
    """Returns a full step of each warpgroup: only dV's has exponentials, only dK's stores matrices."""
    steps = [kernel.shortest_round(loop) for loop in kernel.main_loops]
    (values,) = (opcodes for opcodes in steps if "MUFU.EX2" in opcodes)
    (keys,) = (opcodes for opcodes in steps if any(opcode.startswith("STSM") for opcode in opcodes))
    (queries,) = (opcodes for opcodes in steps if opcodes is not values and opcodes is not keys)
    return {"dV": values, "dK": keys, "dQ": queries}


def step(kernel: KernelFacts) -> list[str]:
    """Returns the opcodes of a full step that need not wait at barriers: the shortest path through the loop."""
    (loop,) = kernel.main_loops
    return kernel.shortest_round(loop)


@each_instance
def test_warpgroups_exchange_the_registers_that_are_listed(instance: tuple[int, str, bool]) -> None:
    kernel = facts_of(KEY_VALUE, "sm_90a")[instance]
    assert kernel.registers == 168
    assert exchanged_registers(kernel) == [24, 240]


@each_plain_instance
def test_the_loop_uses_no_local_memory(instance: tuple[int, str, bool]) -> None:
    kernel = facts_of(KEY_VALUE, "sm_90a")[instance]
    assert kernel.local_in_loops == 0
    assert kernel.stack_bytes <= MAX_STACK_BYTES


@each_options_instance
def test_the_loop_with_options_uses_next_to_no_local_memory(instance: tuple[int, str, bool]) -> None:
    kernel = facts_of(KEY_VALUE, "sm_90a")[instance]
    assert kernel.local_in_loops <= MOST_LOCAL_WITH_OPTIONS[instance[0]]
    assert kernel.stack_bytes <= MAX_STACK_BYTES_WITH_OPTIONS[instance[0]]


@each_instance
def test_products_are_those_of_warpgroups(instance: tuple[int, str, bool]) -> None:
    """No wait follows each product, though the compiler serialises products where registers do not suffice."""
    head_dim, dtype, _ = instance
    opcodes = step(facts_of(KEY_VALUE, "sm_90a")[instance])
    found = [opcode for opcode in opcodes if opcode.startswith("HGMMA")]
    scores, gradients, query = 2 * head_dim // 16, 2 * 64 // 16, 128 // 16
    assert len(found) == KEY_BLOCKS[head_dim] * (scores + gradients) + query
    assert all(("BF16" in opcode) == (dtype == "bfloat16") for opcode in found)
    # One wait is for dQ and one for the first S. Each block waits for dP, and all but the first also for dK and S.
    assert product_waits(opcodes) == 1 + 2 * KEY_BLOCKS[head_dim]


@each_instance
def test_copies_and_additions_are_those_of_tma(instance: tuple[int, str, bool]) -> None:
    """Consumers copy nothing, and add nothing to global memory."""
    kernel = facts_of(KEY_VALUE, "sm_90a")[instance]
    kinds = {opcode.split(".")[0] for opcode in kernel.instructions}
    assert {"UTMALDG", "UBLKCP", "UBLKRED"} <= kinds
    opcodes = step(kernel)
    assert not {opcode.split(".")[0] for opcode in opcodes} & {"LDGSTS", "LDG", "RED", "REDG", "ERRBAR"}
    fences = [opcode for opcode in opcodes if opcode.startswith("MEMBAR")]
    assert set(fences) <= {"MEMBAR.ALL.CTA"}  # they store for wgmma and TMA of this CTA only


@each_plain_instance
def test_a_step_is_short(instance: tuple[int, str, bool]) -> None:
    opcodes = step(facts_of(KEY_VALUE, "sm_90a")[instance])
    blocks = KEY_BLOCKS[instance[0]]
    assert opcodes.count("MUFU.EX2") == 32 * blocks
    # There are no masks, and delta is in dP.
    assert not [opcode for opcode in opcodes if opcode.startswith(("FSEL", "SHFL", "FADD"))]
    assert len(opcodes) / blocks <= MOST_INSTRUCTIONS[instance[0]]


@each_options_instance
def test_a_step_without_any_option_is_short_where_there_could_be_some(instance: tuple[int, str, bool]) -> None:
    opcodes = step(facts_of(KEY_VALUE, "sm_90a")[instance])
    blocks = KEY_BLOCKS[instance[0]]
    assert opcodes.count("MUFU.EX2") == 32 * blocks
    assert not [opcode for opcode in opcodes if opcode.startswith(("LDG", "SHFL", "MUFU.RCP", "IMAD.HI"))]
    assert len(opcodes) / blocks <= MOST_INSTRUCTIONS_WITH_OPTIONS[instance[0]]


# --- Above 128 dims ---------------------------------------------------------------------------------------------------


@each_wide
def test_wide_warpgroups_exchange_the_registers_that_are_listed(instance: tuple[int, int, str, bool]) -> None:
    kernel = facts_of(WIDE, "sm_90a")[instance]
    assert kernel.registers == 128
    assert exchanged_registers(kernel) == [32, 64, 208, 208]


@each_wide
def test_wide_warpgroups_have_no_local_memory(instance: tuple[int, int, str, bool]) -> None:
    kernel = facts_of(WIDE, "sm_90a")[instance]
    assert kernel.local_in_loops == 0
    assert kernel.stack_bytes <= MAX_STACK_BYTES


@each_wide
def test_products_above_128_dims_are_those_of_warpgroups(instance: tuple[int, int, str, bool]) -> None:
    """No wait follows each product, though the compiler serialises products where registers do not suffice."""
    head_dim, value_dim, dtype, _ = instance
    found = wide_steps(facts_of(WIDE, "sm_90a")[instance])
    products = {name: [each for each in opcodes if each.startswith("HGMMA")] for name, opcodes in found.items()}

    def gradient(dims: int) -> int:  # products have at most 192 dims
        return 64 // 16 * (2 if dims > 192 else 1)

    assert {name: len(each) for name, each in products.items()} == {
        "dV": head_dim // 16 + gradient(value_dim),
        "dK": value_dim // 16 + gradient(head_dim),
        "dQ": head_dim // 64 * 64 // 16,
    }
    assert all(("BF16" in opcode) == (dtype == "bfloat16") for each in products.values() for opcode in each)
    waits = {name: product_waits(opcodes) for name, opcodes in found.items()}
    assert waits == {"dV": 2, "dK": 2, "dQ": head_dim // 64}


@each_wide
def test_steps_above_128_dims_are_short(instance: tuple[int, int, str, bool]) -> None:
    head_dim, value_dim, _, has_options = instance
    found = wide_steps(facts_of(WIDE, "sm_90a")[instance])
    assert found["dV"].count("MUFU.EX2") == 32
    opcodes = [opcode for each in found.values() for opcode in each]
    unwanted = ("FSEL", "SHFL", "LDG", "RED", "ERRBAR", *(("MUFU.RCP", "IMAD.HI") if has_options else ("FADD",)))
    assert not [opcode for opcode in opcodes if opcode.startswith(unwanted)]
    assert {opcode for opcode in opcodes if opcode.startswith("MEMBAR")} == {"MEMBAR.ALL.CTA"}
    assert len(opcodes) <= MOST_INSTRUCTIONS_WIDE[head_dim, value_dim, has_options]
