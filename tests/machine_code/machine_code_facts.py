"""Reads the machine code of the library's kernels by their instances. Not a test module."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from emulator import static_facts
from emulator.static_facts import KernelFacts
from instances import rows_of
from kernel_symbols import arguments_of
from machine_code_library import library_path


@functools.cache
def machine_code(code: str = "sm_80") -> dict[str, KernelFacts]:
    """Returns the facts of the library's kernels with machine code for ``code``, by mangled name."""
    return static_facts.of_library(library_path(), code)


def symbols_of(source: str, symbols: Iterable[str]) -> dict[tuple[Any, ...], str]:
    """Returns those of the mangled names that the kernel in ``csrc/source`` has, by template arguments as in `rows_of`.

    Arguments that the instance table lacks are there too, in the order of their types.
    """

    def by_type(arguments: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(sorted(arguments, key=lambda argument: type(argument).__name__))

    row_of = {by_type(row): row for row in rows_of(source)}
    expected = f"{source.partition('/')[0]}_{Path(source).stem}".replace("_gemm", "")
    found = {}
    for symbol in symbols:
        kernel, arguments = arguments_of(symbol)
        if kernel == expected:
            found[row_of.get(by_type(arguments), by_type(arguments))] = symbol
    return found


@functools.cache
def facts_of(source: str, code: str = "sm_80") -> dict[tuple[Any, ...], KernelFacts]:
    """Returns the facts of each instance of the kernel in ``csrc/source``, by template arguments as in `rows_of`."""
    facts = machine_code(code)
    return {row: facts[symbol] for row, symbol in symbols_of(source, facts).items()}


def exchanged_registers(kernel: KernelFacts) -> list[int]:
    """Returns the numbers of registers that warpgroups set for themselves, in ascending order."""
    found = [re.search(r"USETMAXREG.*\b0x([0-9a-f]+)", line) for line in kernel.lines]
    return sorted(int(match[1], 16) for match in found if match)
