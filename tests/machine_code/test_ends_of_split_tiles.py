"""Tests what CTAs that split a tile wait for in machine code: fences, atomics and loads of partials.

This is the end of decoding and of an int8 matmul of few tokens. The tests cover each GPU for which the library has
machine code. csrc/scheduler/choose_matmul_tile.h and csrc/scheduler/combine.cuh count the trips to L2.
"""

from __future__ import annotations

import functools
import itertools

import pytest

import kernel_symbols
from emulator import static_facts
from emulator.static_facts import KernelFacts, full_opcode, opcode
from machine_code_facts import facts_of
from machine_code_library import BUILD, library_path

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("native_library")]  # one process disassembles the library

CODES = [code for code in BUILD["code"].get("80", []) if code.startswith("sm_")]
DECODING = "decode_split_sm80"
MATMUL, WITH_INT8_TOKENS, GRADIENT = "int8_matmul_sm80", "int8_matmul_s8_sm80", "int8_matmul_grad_input_sm80"
ATOMICS = ("ATOM", "ATOMG", "RED", "REDG")

each_code = pytest.mark.parametrize("code", CODES)


@functools.cache
def kernels_of(code: str, kernel: str) -> dict[str, KernelFacts]:
    """Returns the facts of the kernels by their names in the library."""
    found = {
        kernel_symbols.name_of(symbol): facts
        for symbol, facts in static_facts.of_library(library_path(), code).items()
        if f"{len(kernel)}{kernel}I" in symbol
    }
    assert found, f"no {kernel} for {code}"
    return found


def of_few_tokens(code: str, kernel: str) -> list[KernelFacts]:
    return [kernels_of(code, kernel)[f"{kernel}<16, {dtype}>"] for dtype in kernel_symbols.DTYPES]


@each_code
def test_an_arrival_is_one_addition_and_all_fences_are_its_own(code: str) -> None:
    """Between a fence and its addition, only registers move. One swap opens the counter; the gradient has another pair,
    for sums over tokens. tests/int8/test_cuda_int8.py counts how often CTAs add: never where no tile is split."""
    for kernel, counters in ((DECODING, 1), (MATMUL, 1), (GRADIENT, 2)):
        for facts in kernels_of(code, kernel).values():
            names = [full_opcode(line) or line for line in facts.lines]  # labels are kept
            atomics = [name for name in names if name.split(".")[0] in ATOMICS]
            assert sum(".ADD.64.STRONG.GPU" in name for name in atomics) == counters, facts.name
            assert all(".ADD." in name or ".CAS." in name for name in atomics)
            fences = [index for index, name in enumerate(names) if name.startswith(("MEMBAR", "FENCE"))]
            assert [names[index] for index in fences] == ["MEMBAR.ALL.GPU"] * counters
            for index in fences:
                between = list(itertools.takewhile(lambda name: ".ADD." not in name, names[index + 1 :]))
                assert all(name.startswith(("MOV", "IMAD.MOV", "IMAD.U32", "ERRBAR", "CGAERRBAR")) for name in between)
            in_loops = frozenset().union(*facts.main_loops)
            assert not [line for line in in_loops if opcode(facts.lines[line]) in ("CCTL", *ATOMICS)]


@each_code
def test_decoding_loads_all_sums_in_one_trip_after_the_last_arrival(code: str) -> None:
    """One barrier tells all threads of the arrival, one of the partials' slots, and one of the sums. Between the last
    two stand all loads of sums and, with 128 dims, the copies of the first values, which start before them."""
    for (head_dim, *_), facts in facts_of("decode/instances/split_sm80.cu", code).items():
        names = [full_opcode(line) for line in facts.lines]
        (arrival,) = (index for index, name in enumerate(names) if ".ADD.64.STRONG.GPU" in name)
        kinds = (
            name.split(".")[0] for name in names[arrival:] if name.startswith(("BAR", "LDGSTS", "LDG.E.64.STRONG"))
        )
        copies, loads = (["LDGSTS"] * 4, 4) if head_dim == 128 else ([], 6)
        expected = ["BAR", "BAR", *copies, *["LDG"] * loads, "BAR"]
        assert list(itertools.islice(kinds, len(expected))) == expected, facts.name


@each_code
def test_partials_of_few_tokens_are_loaded_together(code: str) -> None:
    """Sixteen partials of up to four tokens, or eight of four rows of more tokens, are loaded before any is added."""
    for facts in of_few_tokens(code, MATMUL) + of_few_tokens(code, GRADIENT) + of_few_tokens(code, WITH_INT8_TOKENS):
        names = [full_opcode(line) for line in facts.lines]
        runs, run = [], 0
        for name in names:
            if name == "LDG.E.128.STRONG.GPU":
                run += 1
            elif name == "FADD" and run > 0:
                runs.append(run)
                run = 0
        expected = [8, 16, 32] if "grad_input" in facts.name else [16, 32]  # 8: sums over tokens
        assert sorted(each for each in runs if each >= 8) == expected, facts.name
