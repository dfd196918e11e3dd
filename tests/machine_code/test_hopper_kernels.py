"""The machine code for sm_90a: warp roles, products, registers, and the instructions of the main loops.

None of these tests needs a GPU. What a loop executes is read off the code along the path that is taken where barriers
have completed, rows have a reference that is not outgrown, and values are finite.
"""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest

import instances
from emulator import static_facts
from emulator.static_facts import KernelFacts, exponentials_beside_products, product_waits
from machine_code_library import BUILD, library_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("hopper_kernels"),  # the library is taken apart once
    pytest.mark.skipif("90a" not in BUILD["archs"], reason="the native library was built without kernels for sm_90a"),
]

CSRC = Path(__file__).resolve().parents[2] / "csrc"
DTYPES = ("float16", "bfloat16")  # in the order of the C++ enum DataType
Instance = tuple[int, int, str]  # head dim, that of values, dtype
# By both head dims.
BLOCK_N = {(64, 64): 96, (96, 96): 128, (128, 128): 128, (192, 128): 80, (192, 192): 96, (256, 256): 80}
REGISTERS = {  # of consumers, producer
    (64, 64): (160, 32),
    (96, 96): (232, 40),
    (128, 128): (232, 40),
    (192, 128): (160, 32),
    (192, 192): (232, 40),
    (256, 256): (240, 24),
}
MASKED_STEPS = {(192, 128): 1}  # in one round of the loop of tiles with masks; 2 with other dims
# The least part of a step's exponentials that run beside its P·V; 0.9 with other dims. With these, no registers are
# left to keep ptxas from moving the wait up among them: see forward_sm90.cuh.
BESIDE_PRODUCTS = {(192, 128): 0.25}
FORWARD = instances.rows_of("attention/instances/forward_sm90.cu")
OPTIONS = instances.rows_of("attention/instances/forward_options_sm90.cu")
# Of the kernel with options: accesses to local memory in its loop, and bytes of the stack. Other dims have none. With
# 96 dims, a step puts an address aside where it has to load a bias key by key.
LOCAL_OF_OPTIONS = {(96, 96): (2, 8), (256, 256): (9, 32)}
MAX_STACK_BYTES = 32  # of a thread, for what the producer has no registers for; never in a main loop

each_forward = pytest.mark.parametrize("instance", FORWARD, ids=str)
each_with_options = pytest.mark.parametrize("instance", OPTIONS, ids=str)


@functools.cache
def machine_code() -> dict[str, KernelFacts]:
    return static_facts.of_library(library_path(), "sm_90a")


def kernels(name: str) -> dict[Instance, KernelFacts]:
    found = {}
    for symbol, facts in machine_code().items():
        match = re.search(rf"{name}ILi(\d+)ELi(\d+)ELN\w*?8DataTypeE(\d)E", symbol)
        if match:
            found[int(match[1]), int(match[2]), DTYPES[int(match[3])]] = facts
    return found


def forward_kernels() -> dict[Instance, KernelFacts]:
    return kernels("attention_forward_sm90")


def options_kernels() -> dict[Instance, KernelFacts]:
    return kernels("attention_forward_options_sm90")


def masked_path(kernel: KernelFacts, body: frozenset[int]) -> list[str]:
    """The opcodes of the shortest way through a loop on which every mask is set (R2P) and every tile of values is
    searched for what is not finite (BAR.RED): nothing that seldom happens is on it."""
    return kernel.shortest_round(body, ("R2P", "BAR.RED"))


def loops(kernel: KernelFacts) -> tuple[frozenset[int], frozenset[int]]:
    """(of tiles with masks, of full tiles)"""
    masked, full = sorted(kernel.main_loops, key=min)
    return masked, full


def two_full_steps(kernel: KernelFacts) -> list[str]:
    """Where rows have a reference that is not outgrown, and barriers have completed."""
    return kernel.shortest_round(loops(kernel)[1])


def stated_counts() -> dict[tuple[int, int], dict[str, int]]:
    """Head dims → column → number, of the table in tiles_sm90.h."""
    lines = iter((CSRC / "attention" / "tiles_sm90.h").read_text().splitlines())
    heading = next(line for line in lines if line.startswith("// Forward: head dim "))
    columns = re.findall(r"\S+", heading.partition(": head dim ")[2])
    rows = itertools.takewhile(lambda line: re.match(r"//\s+\d", line), lines)
    found = {}
    for row in rows:
        *dims, rest = re.fullmatch(r"//\s+(\d+)(?:, (\d+))?((?:\s+\d+)+)", row).groups()  # one dim where both are equal
        numbers = map(int, rest.split())
        found[int(dims[0]), int(dims[1] or dims[0])] = dict(zip(columns, numbers, strict=True))
    return found


def test_every_instance_is_there() -> None:
    assert sorted(forward_kernels()) == FORWARD
    assert sorted(options_kernels()) == OPTIONS


@each_with_options
def test_options_leave_products_and_copies_to_the_hopper_units(instance: Instance) -> None:
    kernel = options_kernels()[instance]
    assert list(kernel.tensor_core) == ["HGMMA"]
    assert "UTMALDG" in {opcode.split(".")[0] for opcode in kernel.instructions}


@each_with_options
def test_options_hardly_use_local_memory(instance: Instance) -> None:
    kernel = options_kernels()[instance]
    in_loops, stack_bytes = LOCAL_OF_OPTIONS.get(instance[:2], (0, 0))
    assert kernel.local_in_loops <= in_loops and kernel.stack_bytes <= stack_bytes


@each_forward
def test_warpgroups_exchange_registers_as_planned(instance: Instance) -> None:
    kernel = forward_kernels()[instance]
    assert kernel.registers == stated_counts()[instance[:2]]["registers"]
    found = [re.search(r"USETMAXREG.*\b0x([0-9a-f]+)", line) for line in kernel.lines]
    assert sorted(int(match[1], 16) for match in found if match) == sorted(REGISTERS[instance[:2]])


@each_forward
def test_local_memory_is_no_part_of_the_loops(instance: Instance) -> None:
    kernel = forward_kernels()[instance]
    assert kernel.local_in_loops == 0
    assert kernel.stack_bytes <= MAX_STACK_BYTES


@each_forward
def test_products_are_those_of_warpgroups(instance: Instance) -> None:
    head_dim, value_dim, dtype = instance
    kernel = forward_kernels()[instance]
    assert list(kernel.tensor_core) == ["HGMMA"]
    products = head_dim // 16 + BLOCK_N[head_dim, value_dim] // 16  # of Q·Kᵀ and of P·V, in a step
    masked, _ = loops(kernel)
    masked_steps = MASKED_STEPS.get(instance[:2], 2)
    for opcodes, steps in ((kernel.opcodes_of(masked), masked_steps), (two_full_steps(kernel), 2)):
        found = [opcode for opcode in opcodes if opcode.startswith("HGMMA")]
        assert len(found) == steps * products
        assert all(("BF16" in opcode) == (dtype == "bfloat16") for opcode in found)


@each_forward
def test_the_producer_copies_with_tma(instance: Instance) -> None:
    """It gathers rows of small pages with LDGSTS; consumers copy nothing, and wait for no fence of memory."""
    kernel = forward_kernels()[instance]
    kinds = {opcode.split(".")[0] for opcode in kernel.instructions}
    assert "UTMALDG" in kinds and "LDSM" not in kinds
    full = two_full_steps(kernel)
    assert not {opcode.split(".")[0] for opcode in full} & {"LDGSTS", "LDG", "LDS", "STS", "MEMBAR", "ERRBAR"}


@each_forward
def test_main_loop_is_what_the_tile_table_states(instance: Instance) -> None:
    stated = stated_counts()[instance[:2]]
    kernel = forward_kernels()[instance]
    full = two_full_steps(kernel)
    for kind in ("HGMMA", "MUFU.EX2"):
        assert sum(opcode.startswith(kind) for opcode in full) == stated[kind], kind
    assert len(full) == pytest.approx(stated["instructions"], rel=0.03)
    masked = masked_path(kernel, loops(kernel)[0])
    of_two = 2 // MASKED_STEPS.get(instance[:2], 2)
    assert of_two * len(masked) == pytest.approx(stated[":masked"], rel=0.03)
    assert not [
        opcode for opcode in full if opcode.startswith(("FMNMX", "FSEL", "FMUL", "SHFL"))
    ]  # no maxima, no masks


@each_forward
def test_a_step_waits_twice_and_its_exponentials_run_beside_a_product(instance: Instance) -> None:
    """It waits for the scores, which leaves P·V of the tile before in flight, and for that after the softmax."""
    full = two_full_steps(forward_kernels()[instance])
    assert product_waits(full) == 2 * 2
    assert exponentials_beside_products(full) >= BESIDE_PRODUCTS.get(instance[:2], 0.9) * full.count("MUFU.EX2")


@each_with_options
def test_a_step_with_options_waits_twice_and_its_exponentials_run_beside_a_product(instance: Instance) -> None:
    """The same as without options; its loop is the last of those with products, and begins in the middle of a step."""
    kernel = options_kernels()[instance]
    step = kernel.shortest_round(max(kernel.main_loops, key=min))
    assert product_waits(step) == 2
    assert exponentials_beside_products(step) >= 0.9 * step.count("MUFU.EX2") > 0


@each_forward
def test_a_step_is_short(instance: Instance) -> None:
    """Per 64 rows by 128 keys of a warpgroup; FlashAttention-3 has 423 and 433 with 64 and 128 dims."""
    head_dims = instance[:2]
    full = two_full_steps(forward_kernels()[instance])
    per_128_keys = len(full) / 2 * 128 / BLOCK_N[head_dims]
    most = {(64, 64): 400, (96, 96): 420, (128, 128): 420, (192, 128): 475, (192, 192): 460, (256, 256): 540}
    assert per_128_keys <= most[head_dims]


@each_forward
def test_a_masked_step_is_short(instance: Instance) -> None:
    """Per 64 rows by 128 keys of a warpgroup; FlashAttention-3 has 579 and 618 with 64 and 128 dims."""
    head_dims = instance[:2]
    kernel = forward_kernels()[instance]
    path, steps = masked_path(kernel, loops(kernel)[0]), MASKED_STEPS.get(head_dims, 2)
    columns = BLOCK_N[head_dims] // 2  # of a lane in its two rows
    assert path.count("FSEL") == steps * columns
    assert sum(opcode.startswith("BAR.RED") for opcode in path) == steps
    most = {(64, 64): 530, (96, 96): 530, (128, 128): 560, (192, 128): 700, (192, 192): 640, (256, 256): 745}
    assert len(path) / steps * 128 / BLOCK_N[head_dims] <= most[head_dims]
