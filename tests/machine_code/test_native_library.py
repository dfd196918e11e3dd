"""Tests the native library statically: the operators that it registers, its sources, and its machine code.

No test needs a GPU. cuobjdump, from the CUDA toolkit or Triton's wheel, reads the machine code. No binary says how much
dynamic shared memory a kernel needs: kernels assert that when they are compiled.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kernel_symbols
from emulator import static_facts
from emulator.static_facts import KernelFacts
from fastattn import native
from instances import ALL_INSTANCES, rows_of
from machine_code_facts import facts_of, machine_code, symbols_of
from machine_code_library import BUILD, kernels, library_path, tiles

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("native_library")]  # one process disassembles the library

CSRC = Path(__file__).resolve().parents[2] / "csrc"

SCHEMA_ARGUMENTS = {
    "attention_forward": 24,
    "attention_backward": 27,
    "attention_backward_add": 27,
    "attention_decode": 21,
    "attention_decode_out": 22,
    "append_to_cache": 7,
    "dequantize_cache": 8,
    "attention_split_keys": 9,
    "int8_matmul": 7,
    "int8_matmul_grad_input": 4,
}

FORWARD = "attention/instances/forward_sm80.cu"
OPTIONS = "attention/instances/forward_options_sm80.cu"
KEY_VALUE = "attention/instances/backward_key_value_sm80.cu"
LARGE = "attention/instances/backward_key_value_large_sm80.cu"
OTHER_BACKWARD = [
    f"attention/instances/backward_{kernel}_sm80.cu"
    for kernel in ("ranges", "query", "rows", "bias", "sinks", "slopes", "slope_sums")
]
DECODE = "decode/instances/split_sm80.cu"
APPEND = "decode/instances/append_sm80.cu"
DEQUANTIZE = "decode/instances/dequantize_sm80.cu"
INT8 = "int8_matmul/instances/gemm_sm80.cu"
INT8_GRADIENT = "int8_matmul/instances/grad_input_sm80.cu"
INT8_TOKENS = "int8_matmul/instances/gemm_s8_sm80.cu"  # with int8 activations
SOURCES = (
    *(FORWARD, OPTIONS, KEY_VALUE, LARGE, *OTHER_BACKWARD),
    *(DECODE, APPEND, DEQUANTIZE, INT8, INT8_GRADIENT, INT8_TOKENS),
)
PRODUCTS = {"float16": "HMMA.16816.F32", "bfloat16": "HMMA.16816.F32.BF16"}  # by dtype

MAX_REGISTERS = 255  # per thread: two CTAs of 128 threads, or one of 256, share an SM's 65536
MAX_SHARED_BYTES = 99 * 1024  # limit of a CTA on sm_86, sm_89 and sm_120


# --- What is registered -----------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_library_defines_exactly_the_documented_ops() -> None:
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastattn::")}
    assert defined == {f"fastattn::{name}" for name in SCHEMA_ARGUMENTS}


@pytest.mark.quick
@pytest.mark.parametrize("name", SCHEMA_ARGUMENTS)
def test_schema_has_the_documented_number_of_arguments(name: str) -> None:
    assert len(getattr(torch.ops.fastattn, name).default._schema.arguments) == SCHEMA_ARGUMENTS[name]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "more"), [("attention_decode", set()), ("attention_decode_out", {"out"}), ("append_to_cache", set())]
)
def test_decode_says_that_it_writes_to_the_caches_and_their_scales(name: str, more: set[str]) -> None:
    arguments = getattr(torch.ops.fastattn, name).default._schema.arguments
    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    assert written == {"k_cache", "v_cache", "k_scale", "v_scale"} | more


@pytest.mark.quick
@pytest.mark.parametrize("name", SCHEMA_ARGUMENTS)
def test_cuda_kernels_are_registered_where_they_were_built(name: str) -> None:
    has = {key: torch._C._dispatch_has_kernel_for_dispatch_key(f"fastattn::{name}", key) for key in ("CUDA", "CPU")}
    built = "80" in native.BUILD["archs"]
    assert has == {"CUDA": built and not native.TAKES_CPU_TENSORS, "CPU": built and native.TAKES_CPU_TENSORS}


# --- How the sources are arranged -------------------------------------------------------------------------------------


def sources() -> list[Path]:
    return [path for path in sorted(CSRC.rglob("*")) if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]


@pytest.mark.quick
def test_inline_ptx_stands_in_one_folder() -> None:
    outside = [path for path in sources() if path.parent != CSRC / "device" / "ptx"]
    assert outside
    assert [path for path in outside if re.search(r"\basm\b", path.read_text())] == []


@pytest.mark.quick
def test_torch_headers_are_included_by_the_api_alone() -> None:
    including = [path for path in sources() if re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text())]
    assert CSRC / "bindings.cpp" in including
    assert [path for path in including if path.parent != CSRC / "api" and path != CSRC / "bindings.cpp"] == []


@pytest.mark.quick
def test_an_instance_file_only_registers_its_kernel() -> None:
    instances = sorted(CSRC.glob("*/instances/*.cu"))
    assert instances
    for path in instances:
        text = path.read_text()
        assert len(text.splitlines()) <= 20 and text.count("static const Registration") == 1, path
        assert "__global__" not in text, path


def test_every_instance_file_is_for_the_architecture_in_its_name() -> None:
    suffixes = {"80": "_sm80.cu", "90a": "_sm90.cu"}
    assert [each for each in ALL_INSTANCES if not each.source.endswith(suffixes[each.architecture])] == []


# --- The machine code -------------------------------------------------------------------------------------------------

with_sm80_kernels = pytest.mark.skipif(
    "sm_80" not in BUILD["code"].get("80", []), reason="the native library was built without machine code for sm_80"
)
has_sm90_code = pytest.mark.skipif(
    "sm_90" not in BUILD["code"].get("80", []), reason="the native library was built without machine code for sm_90"
)


def each_instance(*sources: str, without_options: bool = False) -> pytest.MarkDecorator:
    """Runs a test for each instance of the kernels in the sources, or only for those whose flag is false."""
    instances = [
        (source, row) for source in sources for row in rows_of(source) if not (without_options and True in row)
    ]
    return pytest.mark.parametrize("kernel", instances, ids=[f"{Path(source).stem}-{row}" for source, row in instances])


@pytest.fixture
def source(kernel: tuple[str, Any]) -> str:
    return kernel[0]


@pytest.fixture
def instance(kernel: tuple[str, Any]) -> Any:
    return kernel[1]


def products_of(kernel: KernelFacts) -> list[str]:
    return [name for name in kernel.instructions if name.startswith(("HMMA", "IMMA", "HGMMA"))]


def count(opcodes: list[str], kind: str) -> int:
    return sum(opcode.startswith(kind) for opcode in opcodes)


@with_sm80_kernels
@pytest.mark.parametrize("source", SOURCES)
def test_every_instance_is_there(source: str) -> None:
    assert facts_of(source).keys() == set(rows_of(source))


@with_sm80_kernels
@each_instance(*(source for source in SOURCES if source not in (APPEND, DEQUANTIZE)))
def test_a_kernel_stays_within_its_registers_and_shared_memory(source: str, instance: tuple[Any, ...]) -> None:
    kernel = facts_of(source)[instance]
    assert 0 < kernel.registers <= MAX_REGISTERS
    assert kernel.static_shared_bytes <= MAX_SHARED_BYTES
    assert kernel.local_in_loops == kernel.local_outside == kernel.stack_bytes == 0


def stated_counts(table: str) -> dict[int, dict[str, int]]:
    """Reads the table of tiles_sm80.h that begins with ``// table: head dim column …``: head dim → column → number."""
    lines = iter((CSRC / "attention" / "tiles_sm80.h").read_text().splitlines())
    heading = next(line for line in lines if line.startswith(f"// {table}: head dim "))
    columns = re.findall(r"\S+", heading.partition(": head dim ")[2])
    rows = itertools.takewhile(lambda line: re.match(r"//\s+\d", line), lines)
    numbers = [[int(number) for number in re.findall(r"\d+", row)] for row in rows]
    return {head_dim: dict(zip(columns, rest, strict=True)) for head_dim, *rest in numbers}


@with_sm80_kernels
@each_instance(FORWARD, KEY_VALUE, without_options=True)
def test_main_loop_is_what_the_tile_table_states(source: str, instance: tuple[Any, ...]) -> None:
    """Matrix instructions, matrix loads and exponentials follow from the algorithm, so their numbers must be exact."""
    check_main_loop(facts_of(source)[instance], "Forward" if source == FORWARD else "Backward", instance[0])


@with_sm80_kernels
@pytest.mark.parametrize("instance", [row for row in rows_of(FORWARD) if True in row], ids=str)
def test_main_loop_with_few_keys_is_what_the_tile_table_states(instance: tuple[int, str, bool]) -> None:
    check_main_loop(facts_of(FORWARD)[instance], "Forward, few keys", instance[0])


def check_main_loop(kernel: KernelFacts, table: str, head_dim: int) -> None:
    stated = stated_counts(table)[head_dim]
    for kind in ("HMMA", "MUFU.EX2", "LDSM"):
        assert count(kernel.main_loop, kind) == stated[kind], kind
    assert len(kernel.main_loop) == pytest.approx(stated["instructions"], rel=0.03)
    assert kernel.registers <= stated["registers"]


@with_sm80_kernels
@pytest.mark.parametrize("instance", rows_of(LARGE), ids=str)
def test_loops_of_large_backward_are_what_the_tile_table_states(instance: tuple[int, str]) -> None:
    """One loop is for the value warps, which have the exponentials, and one for the key warps, which add to global
    memory. Neither touches local memory, and both together multiply as often as a step of four warps needs."""
    head_dim, dtype = instance
    kernel, stated = facts_of(LARGE)[instance], stated_counts("Large backward")[head_dim]
    assert kernel.registers <= stated["registers"]
    values, keys = sorted(
        (opcodes for opcodes in map(kernel.opcodes_of, kernel.main_loops) if any("HMMA" in each for each in opcodes)),
        key=lambda opcodes: "RED" in {opcode.split(".")[0] for opcode in opcodes},
    )
    assert {opcode for opcode in values + keys if "MMA" in opcode} == {PRODUCTS[dtype]}
    blocks = 2  # blocks of 64 rows by 64 keys in a step
    assert len(values + keys) == pytest.approx(blocks * stated["loops"], rel=0.03)
    products = 64 * 64 * head_dim // (16 * 8 * 16 * 4)
    assert stated["HMMA"] == 5 * products
    assert (count(values, "HMMA"), count(keys, "HMMA")) == (blocks * 3 * products, blocks * 2 * products)
    assert (count(values, "MUFU.EX2"), count(keys, "MUFU")) == (blocks * 32, 0)
    assert count(values + keys, "LDSM") == blocks * stated["LDSM"]
    assert count(keys, "RED.E.ADD.F32") == blocks * stated["RED"] and count(values, "RED") == 0


@with_sm80_kernels
@pytest.mark.parametrize("instance", rows_of(FORWARD), ids=str)
def test_forward_multiplies_on_the_tensor_cores_and_copies_asynchronously(instance: tuple[int, str, bool]) -> None:
    head_dim, dtype, has_few_keys = instance
    kernel = facts_of(FORWARD)[instance]
    # A warp computes two products, in the masked loop and in the unmasked one.
    rows, keys = (32 if head_dim <= 128 else 16), (32 if has_few_keys or head_dim > 192 else 64)
    assert products_of(kernel) == [PRODUCTS[dtype]] * (2 * 2 * (rows // 16) * (keys // 8) * (head_dim // 16))
    assert {"LDGSTS", "LDSM", "MUFU"} <= {name.split(".")[0] for name in kernel.instructions}


@with_sm80_kernels
@pytest.mark.parametrize("instance", rows_of(OPTIONS), ids=str)
def test_forward_with_options_multiplies_on_the_tensor_cores(instance: tuple[int, str, bool]) -> None:
    head_dim, dtype, _ = instance
    # A warp computes two products of 16 rows; masked and other steps share their code.
    keys = 64 if head_dim <= 128 else 32
    assert products_of(facts_of(OPTIONS)[instance]) == [PRODUCTS[dtype]] * (2 * (keys // 8) * (head_dim // 16))


@with_sm80_kernels
@each_instance(INT8, INT8_GRADIENT)
def test_int8_dequantises_in_two_and_a_half_instructions_a_pair(source: str, instance: tuple[int, str]) -> None:
    """The forward pass has main loops with and without groups; the gradient has one that also sums tokens for a bias,
    and one that does not. A warp dequantises each of its operands A once, 4 pairs per lane, and multiplies it with all
    tokens. The gradient takes one more instruction, which scales. One of the loops with groups may double a scale."""
    tokens, dtype = instance
    is_forward = source == INT8
    kernel = facts_of(source)[instance]
    loops = []
    for body in kernel.main_loops:
        opcodes = kernel.opcodes_of(body)
        products = [opcode for opcode in opcodes if opcode.startswith(("HMMA", "IMMA"))]
        assert set(products) == {PRODUCTS[dtype]}
        loops.append((len(products), len(opcodes), body, opcodes))
    without, others = min(loops)[:2], max(loops)[:2]
    if not is_forward:  # a tile of ones times two tiles of eight columns, per 16 tokens
        assert others[0] - without[0] == 2 * (tokens // 16) and others[1] > without[1]
    assert len(loops) == 2
    for num_products, _, body, opcodes in loops:
        pairs = 4 * (num_products if is_forward else without[0]) // (tokens // 8)
        conversions = sum(opcode.split(".")[0] in ("PRMT", "HFMA2", "HMUL2", "HADD2") for opcode in opcodes)
        biasing = sum("LOP3" in kernel.lines[index] and "0x80808080" in kernel.lines[index] for index in body)
        assert biasing > 0 and conversions + biasing <= (2.5 * pairs + 1 if is_forward else 3.5 * pairs)
        assert not [opcode for opcode in opcodes if opcode.split(".")[0] in ("I2F", "F2F", "I2I")]


@with_sm80_kernels
@pytest.mark.parametrize("instance", rows_of(INT8_TOKENS), ids=str)
def test_int8_activations_multiply_without_conversion(instance: tuple[int, str]) -> None:
    """The three main loops are for one scale per row, for groups of 32, and for larger groups. ldmatrix loads operands,
    and additions convert sums of groups to fp32. With tiles of 16 tokens, a path through the loop quantises tokens."""
    tokens, _ = instance
    kernel = facts_of(INT8_TOKENS)[instance]
    assert len(kernel.main_loops) == 3
    blocks = 2 if tokens == 128 else 4  # blocks of 32 k in a step
    one_scale, *groups = sorted(map(kernel.opcodes_of, kernel.main_loops), key=len)
    loads = 4 + 4 if tokens == 128 else 2 + tokens // 16  # a warp's loads of weights and tokens
    assert count(one_scale, "LDSM") == blocks * loads
    # The larger of IMMA's clocks on an A100, and the clocks in which an H200's memory loads the weights.
    assert len(one_scale) <= max(8 * blocks * 2 * tokens // 8, 128 * 32 * blocks / 18.4)
    for opcodes in map(kernel.shortest_round, kernel.main_loops):
        products = [opcode for opcode in opcodes if opcode.startswith(("HMMA", "IMMA"))]
        assert products == ["IMMA.16832.S8.S8"] * (blocks * 2 * tokens // 8)
        assert not [opcode for opcode in opcodes if opcode.split(".")[0] in ("PRMT", "I2F", "F2I", "I2I")]
    for opcodes in groups:
        assert count(opcodes, "LDSM") == blocks * (2 + tokens // 16)


def accesses_of_a_small_kernel(kernel: KernelFacts) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the opcodes, in words, of loads and stores of global memory, for a kernel with few registers."""
    assert 0 < kernel.registers <= 64 and kernel.static_shared_bytes == kernel.stack_bytes == 0
    opcodes = [name.split(".") for name in kernel.instructions]
    return [words for words in opcodes if words[0] == "LDG"], [words for words in opcodes if words[0] == "STG"]


@with_sm80_kernels
def test_append_copies_16_bytes_at_a_time_and_leaves_room_for_other_ctas() -> None:
    """It loads keys and values once each. It waits for memory, so many warps should run at a time."""
    for (_, _, cache_format), kernel in facts_of(APPEND).items():
        loads, stores = accesses_of_a_small_kernel(kernel)
        assert sum("128" in words for words in loads) == 2
        assert sum(("128" if cache_format == "16-bit" else "64") in words for words in stores) == 2


@with_sm80_kernels
def test_dequantising_loads_8_bytes_for_each_16_that_it_stores() -> None:
    """It loads keys and values once each, in so few registers that many CTAs wait for memory at a time."""
    for kernel in facts_of(DEQUANTIZE).values():
        loads, stores = accesses_of_a_small_kernel(kernel)
        assert sum("64" in words for words in loads) == 2
        assert sum("128" in words for words in stores) == len(stores) == 2


@with_sm80_kernels
@pytest.mark.parametrize("instance", rows_of(DECODE), ids=str)
def test_decode_multiplies_on_the_tensor_cores(instance: tuple[int, int, str, str]) -> None:
    head_dim, rows, dtype, cache_format = instance
    kernel = facts_of(DECODE)[instance]
    variant = "" if cache_format == "16-bit" else f"_{cache_format}"
    tile = tiles()[f"decode_split{variant}_sm80"][f"{head_dim}" + (f", {rows} rows" if rows > 16 else "")]
    assert tile["block_m"] == rows
    keys = tile["block_n"] // (tile["num_warps"] // (rows // 16))
    products = 2 * (keys // 8) * (head_dim // 16)  # two products, of 16 rows by a warp's keys
    assert products_of(kernel) == [PRODUCTS["float16" if cache_format == "fp8" else dtype]] * products
    assert {"LDGSTS", "LDSM"} <= {name.split(".")[0] for name in kernel.instructions}


@has_sm90_code
@pytest.mark.parametrize(
    ("head_dim", "cache_format", "instructions", "kilobytes"),
    [
        (64, "16-bit", 359, 75),
        (64, "fp8", 679, 104),
        (64, "int8", 712, 95),
        (128, "16-bit", 410, 78),
        (128, "fp8", 829, 111),
        (128, "int8", 957, 102),
        (256, "16-bit", 496, 83),
        (256, "fp8", 760, 115),
        (256, "int8", 906, 101),
    ],
)
def test_steps_and_code_of_decoding(head_dim: int, cache_format: str, instructions: int, kilobytes: int) -> None:
    """Counts the shortest path through the loop that copies and multiplies: a step of a warp, of 16 keys in 16 bits or
    with 256 dims, else of 32 keys. Also bounds the code size, as each launch fetches the code again."""
    kernel = facts_of(DECODE, "sm_90")[head_dim, 16, "float16", cache_format]
    step = kernel.shortest_round(max(kernel.main_loops, key=len), ("LDGSTS", "HMMA"))
    assert len(step) <= 1.02 * instructions
    assert 16 * len(kernel.instructions) <= 1.02 * kilobytes * 1024


@with_sm80_kernels
@pytest.mark.parametrize("instance", rows_of(KEY_VALUE), ids=str)
def test_backward_of_keys_and_values_computes_five_products_of_a_tile_once(instance: tuple[int, bool, str]) -> None:
    head_dim, has_options, dtype = instance
    kernel = facts_of(KEY_VALUE)[instance]
    name = "attention_backward_key_value_options_sm80" if has_options else "attention_backward_key_value_sm80"
    tile = tiles()[name][str(head_dim)]
    products = 5 * tile["block_m"] * tile["block_n"] * head_dim // (16 * 8 * 16 * tile["num_warps"])
    assert products_of(kernel) == [PRODUCTS[dtype]] * products
    assert {"LDGSTS", "LDSM", "MUFU", "RED"} <= {name.split(".")[0] for name in kernel.instructions}


@with_sm80_kernels
@each_instance(*(f"attention/instances/backward_{kernel}_sm80.cu" for kernel in ("rows", "bias", "slopes")))
def test_other_backward_kernels_multiply_on_the_tensor_cores(source: str, instance: tuple[Any, ...]) -> None:
    assert set(products_of(facts_of(source)[instance])) == {PRODUCTS[instance[-1]]}


@with_sm80_kernels
def test_ptx_for_later_gpus_is_there_for_every_instance() -> None:
    ptx = static_facts.run("cuobjdump", "-ptx", library_path())[0]
    modules = re.split(r"^\.target (\w+)", ptx, flags=re.MULTILINE)[1:]
    entries_of: dict[str, list[str]] = {}
    for target, text in zip(modules[::2], modules[1::2], strict=True):
        entries_of.setdefault(target, []).extend(re.findall(r"\.entry (\w+)", text))
    assert entries_of.keys() == {"sm_80", "sm_90"}
    waiting = (DECODE, INT8, INT8_TOKENS)  # these wait for the kernel before them, by an instruction of sm_90
    for source in SOURCES:
        later, earlier = (symbols_of(source, entries_of[target]).keys() for target in ("sm_90", "sm_80"))
        assert (later if source in waiting else earlier) == set(rows_of(source))
        assert not (earlier if source in waiting else later)


@with_sm80_kernels
def test_every_kernel_goes_by_the_name_that_the_library_gives_it() -> None:
    symbols = static_facts.kernels_of_library(library_path())
    assert {kernel_symbols.name_of(symbol) for symbol in symbols} == kernels()


# --- On sm_90 ---------------------------------------------------------------------------------------------------------


@has_sm90_code
def test_sm80_kernels_have_machine_code_for_sm90() -> None:
    """The exceptions are kernels that kernels for sm_90a replace there."""
    names = {kernel_symbols.name_of(symbol) for symbol in machine_code("sm_90")}
    of_sm80 = [instance for instance in ALL_INSTANCES if instance.architecture == "80"]
    replaced = ("forward", "forward_options", "backward_key_value", "backward_key_value_large", "backward_query")
    files = {f"attention/instances/{name}_sm80.cu" for name in replaced}
    assert {each.source for each in of_sm80 if "sm_90" not in each.code} == files
    everywhere = {name for name in kernels() if re.search(r"_sm80\b", name)}
    assert names == {name for name in everywhere if not re.match(rf"attention_({'|'.join(replaced)})_sm80<", name)}


@has_sm90_code
def test_on_sm90_nothing_spills() -> None:
    kernels = {kernel_symbols.name_of(symbol): kernel for symbol, kernel in machine_code("sm_90").items()}
    assert {name: kernel.stack_bytes for name, kernel in kernels.items() if kernel.stack_bytes > 0} == {}
    assert {name: kernel.local_in_loops for name, kernel in kernels.items() if kernel.local_in_loops} == {}


@has_sm90_code
@pytest.mark.parametrize("code", ["sm_90", "sm_90a"])
def test_what_the_kernel_before_may_write_is_not_loaded_as_constant(code: str) -> None:
    """Such a load (LDG.CONSTANT, from __ldg) may find what was in the cache before the kernel waited (ACQBULK)."""
    waiting = [kernel for kernel in machine_code(code).values() if any("ACQBULK" in line for line in kernel.lines)]
    assert waiting
    for kernel in waiting:
        constant = [line for line in kernel.lines if "LDG" in line and ".CONSTANT" in line]
        # Scales of weights, which the kernel that quantises tokens does not write.
        assert not constant or "int8_matmul_s8_sm90" in kernel.name, kernel.name
