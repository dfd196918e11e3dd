"""Tests the machine code of the forward kernels for sm_90a: warp roles, products, registers, main loops' instructions.

None of these tests needs a GPU. They read a loop's instructions along the path where no barrier has to be waited for,
no row outgrows its reference, and all values are finite.
"""

from __future__ import annotations

import re

import pytest

from emulator.static_facts import KernelFacts, exponentials_beside_products, product_waits
from instances import ALL_INSTANCES, rows_of
from machine_code_facts import exchanged_registers, facts_of
from machine_code_library import BUILD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("hopper_kernels"),  # one process disassembles the library
    pytest.mark.skipif("90a" not in BUILD["archs"], reason="the native library was built without kernels for sm_90a"),
]

Instance = tuple[int, int, str]  # head dim, head dim of values, dtype
# Keys per tile, by both head dims.
BLOCK_N = {(64, 64): 96, (96, 96): 128, (128, 128): 128, (192, 128): 80, (192, 192): 96, (256, 256): 80}
REGISTERS = {  # per thread of consumers, of the producer
    (64, 64): (160, 32),
    (96, 96): (232, 40),
    (128, 128): (232, 40),
    (192, 128): (160, 32),
    (192, 192): (232, 40),
    (256, 256): (240, 24),
}
CONSUMERS = {(64, 64): 3, (192, 128): 3}  # 2 with other dims
MASKED_STEPS = {(192, 128): 1}  # in one round of the masked loop; 2 with other dims
# The least fraction of a step's exponentials during its P·V; 0.9 with other dims. With these dims no register is left
# to keep ptxas from moving the wait up among them: see forward_sm90.cuh.
BESIDE_PRODUCTS = {(192, 128): 0.25}
FORWARD = "attention/instances/forward_sm90.cu"
OPTIONS = "attention/instances/forward_options_sm90.cu"
SOURCES = sorted({each.source for each in ALL_INSTANCES if each.architecture == "90a"})
# Limits of the kernel with options: local accesses in its loop, and bytes of stack. Other dims have none. With 64 and
# 192 dims, a step stores addresses where it must load a bias key by key. With 256, it stores numbers of options that
# are seldom used together, and the producer has 24 registers.
LOCAL_OF_OPTIONS = {(64, 64): (4, 8), (192, 192): (2, 8), (256, 256): (1, 40)}
# Bytes per thread that the producer has no registers for, once per work tile and never in a main loop. With 256 dims it
# has 24 registers.
MAX_STACK_BYTES = {(256, 256): 48}

each_forward = pytest.mark.parametrize("instance", rows_of(FORWARD), ids=str)
each_with_options = pytest.mark.parametrize("instance", rows_of(OPTIONS), ids=str)


def masked_path(kernel: KernelFacts, body: frozenset[int]) -> list[str]:
    """Returns the opcodes of the shortest path through a loop that sets every mask (R2P), so that it has no rare
    branches."""
    return kernel.shortest_round(body, ("R2P",))


def loops(kernel: KernelFacts) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the lines of the loop of masked tiles, and those of the loop of full tiles."""
    masked, full = sorted(kernel.main_loops, key=min)
    return masked, full


def two_full_steps(kernel: KernelFacts) -> list[str]:
    """Returns the opcodes where no row outgrows its reference, and no barrier has to be waited for."""
    return kernel.shortest_round(loops(kernel)[1])


@pytest.mark.parametrize("source", SOURCES)
def test_every_instance_for_hopper_is_there(source: str) -> None:
    assert facts_of(source, "sm_90a").keys() == set(rows_of(source))


@each_with_options
def test_options_leave_products_and_copies_to_the_hopper_units(instance: Instance) -> None:
    kernel = facts_of(OPTIONS, "sm_90a")[instance]
    assert list(kernel.tensor_core) == ["HGMMA"]
    assert "UTMALDG" in {opcode.split(".")[0] for opcode in kernel.instructions}


@each_with_options
def test_options_hardly_use_local_memory(instance: Instance) -> None:
    kernel = facts_of(OPTIONS, "sm_90a")[instance]
    in_loops, stack_bytes = LOCAL_OF_OPTIONS.get(instance[:2], (0, 0))
    assert kernel.local_in_loops <= in_loops and kernel.stack_bytes <= stack_bytes


@each_forward
def test_warpgroups_exchange_the_registers_that_are_listed(instance: Instance) -> None:
    kernel = facts_of(FORWARD, "sm_90a")[instance]
    assert kernel.registers == 65536 // (128 * (CONSUMERS.get(instance[:2], 2) + 1)) // 8 * 8  # per thread at launch
    assert exchanged_registers(kernel) == sorted(REGISTERS[instance[:2]])


@each_forward
def test_loops_use_no_local_memory(instance: Instance) -> None:
    kernel = facts_of(FORWARD, "sm_90a")[instance]
    assert kernel.local_in_loops == 0
    assert kernel.stack_bytes <= MAX_STACK_BYTES.get(instance[:2], 32)


@each_forward
def test_products_are_those_of_warpgroups(instance: Instance) -> None:
    head_dim, value_dim, dtype = instance
    kernel = facts_of(FORWARD, "sm_90a")[instance]
    assert list(kernel.tensor_core) == ["HGMMA"]
    products = head_dim // 16 + BLOCK_N[head_dim, value_dim] // 16  # of Q·Kᵀ and of P·V in a step
    masked, _ = loops(kernel)
    masked_steps = MASKED_STEPS.get(instance[:2], 2)
    for opcodes, steps in ((kernel.opcodes_of(masked), masked_steps), (two_full_steps(kernel), 2)):
        found = [opcode for opcode in opcodes if opcode.startswith("HGMMA")]
        assert len(found) == steps * products
        assert all(("BF16" in opcode) == (dtype == "bfloat16") for opcode in found)


@each_forward
def test_the_producer_copies_with_tma(instance: Instance) -> None:
    """It gathers rows of small pages with LDGSTS. Consumers copy nothing, and wait for no memory fence."""
    kernel = facts_of(FORWARD, "sm_90a")[instance]
    kinds = {opcode.split(".")[0] for opcode in kernel.instructions}
    assert "UTMALDG" in kinds and "LDSM" not in kinds
    full = two_full_steps(kernel)
    assert not {opcode.split(".")[0] for opcode in full} & {"LDGSTS", "LDG", "LDS", "STS", "MEMBAR", "ERRBAR"}


@pytest.mark.parametrize("source", SOURCES)
def test_proxy_fences_wait_for_this_cta_alone(source: str) -> None:
    """A fence for all SMs (MEMBAR.GPU) would delay every stage that TMA fills, and would add to the one fence that a
    semaphore needs."""
    for kernel in facts_of(source, "sm_90a").values():
        for fence in (i for i, line in enumerate(kernel.lines) if "FENCE.VIEW.ASYNC" in line):
            before = kernel.lines[fence - 4 : fence]
            assert not any(re.search(r"MEMBAR\S*\.GPU", line) for line in before), kernel.name


@each_forward
def test_a_full_step_has_an_exponential_for_each_score_and_no_maxima_and_masks(instance: Instance) -> None:
    full = two_full_steps(facts_of(FORWARD, "sm_90a")[instance])
    assert sum(opcode.startswith("MUFU.EX2") for opcode in full) == BLOCK_N[instance[:2]]  # 64 rows, 128 lanes
    assert not [opcode for opcode in full if opcode.startswith(("FMNMX", "FSEL", "FMUL", "SHFL"))]


@each_forward
def test_a_step_waits_twice_and_its_exponentials_run_beside_a_product(instance: Instance) -> None:
    """It waits for the scores, with P·V of the tile before in flight, and for that P·V after the softmax."""
    full = two_full_steps(facts_of(FORWARD, "sm_90a")[instance])
    assert product_waits(full) == 2 * 2
    assert exponentials_beside_products(full) >= BESIDE_PRODUCTS.get(instance[:2], 0.9) * full.count("MUFU.EX2")


@each_with_options
def test_a_step_with_options_waits_twice_and_its_exponentials_run_beside_a_product(instance: Instance) -> None:
    """It waits as without options. Its loop is the last of those with products, and begins in the middle of a step."""
    kernel = facts_of(OPTIONS, "sm_90a")[instance]
    step = kernel.shortest_round(max(kernel.main_loops, key=min))
    assert product_waits(step) == 2
    assert exponentials_beside_products(step) >= 0.9 * step.count("MUFU.EX2") > 0


@each_forward
def test_a_step_is_short(instance: Instance) -> None:
    """The limits are per 64 rows by 128 keys of a warpgroup. FlashAttention-3 has 423 with 64 dims, 433 with 128."""
    head_dims = instance[:2]
    full = two_full_steps(facts_of(FORWARD, "sm_90a")[instance])
    per_128_keys = len(full) / 2 * 128 / BLOCK_N[head_dims]
    most = {(64, 64): 355, (96, 96): 342, (128, 128): 355, (192, 128): 448, (192, 192): 418, (256, 256): 487}
    assert per_128_keys <= most[head_dims]


@each_forward
def test_a_masked_step_is_short(instance: Instance) -> None:
    """The limits are per 64 rows by 128 keys of a warpgroup. FlashAttention-3 has 579 with 64 dims, 618 with 128."""
    head_dims = instance[:2]
    kernel = facts_of(FORWARD, "sm_90a")[instance]
    path, steps = masked_path(kernel, loops(kernel)[0]), MASKED_STEPS.get(head_dims, 2)
    columns = BLOCK_N[head_dims] // 2  # columns of a lane in its two rows
    assert path.count("FSEL") == steps * columns
    assert not [opcode for opcode in path if opcode.startswith("BAR")]  # consumers do not wait for each other
    most = {(64, 64): 485, (96, 96): 467, (128, 128): 481, (192, 128): 648, (192, 192): 546, (256, 256): 624}
    assert len(path) / steps * 128 / BLOCK_N[head_dims] <= most[head_dims]
