"""Compares the machine code's registers with those that launch bounds claim, all that the emulator knows of them."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import pytest

from emulator import native_library, static_facts
from machine_code_library import BUILD, library_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("registers"),  # one process disassembles the libraries
    pytest.mark.skipif("80" not in BUILD["archs"], reason="the native library was built without kernels"),
]

OF_AN_SM, GRANULARITY_OF_WARP, GRANULARITY_OF_THREAD, MOST_OF_THREAD = 65536, 256, 8, 255
ARCHS = [arch for arch in ("sm_80", "sm_90", "sm_90a") if any(arch in code for code in BUILD["code"].values())]


@dataclass(frozen=True)
class Bounds:
    """The __launch_bounds__ of a kernel, 0 where it has none."""

    threads: int
    least_ctas: int

    @property
    def registers(self) -> int:
        """Returns a thread's registers before setmaxnreg moves any: see the emulator's registers_at_launch."""
        per_thread = OF_AN_SM // (self.threads * self.least_ctas) // GRANULARITY_OF_THREAD * GRANULARITY_OF_THREAD
        return min(per_thread, MOST_OF_THREAD)


@functools.cache
def bounds() -> dict[str, Bounds]:
    """Returns the launch bounds of all kernels by symbol, from their PTX."""
    library = native_library.build()
    assert library is not None
    found = {}
    text = library.read_bytes().decode("latin-1")  # the library's PTX is not compressed
    for name, directives in re.findall(r"\.entry (\w+)\([^)]*\)([^{]*)\{", text):
        threads = re.search(r"\.maxntid (\d+)(?:, (\d+))?(?:, (\d+))?", directives)
        least = re.search(r"\.minnctapersm (\d+)", directives)
        count = math.prod(map(int, threads.groups(default="1"))) if threads else 0
        found[name] = Bounds(count, int(least[1]) if least else 0)
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_as_many_ctas_fit_as_the_launch_bounds_claim(arch: str) -> None:
    """An SM allocates registers per warp."""
    kernels = static_facts.of_library(library_path(), arch)
    assert kernels and set(kernels) <= set(bounds())
    for symbol, kernel in kernels.items():
        bound = bounds()[symbol]
        assert bound.threads > 0, f"{symbol} has no launch bounds"
        of_warp = -(-kernel.registers * 32 // GRANULARITY_OF_WARP) * GRANULARITY_OF_WARP
        assert OF_AN_SM // (of_warp * -(-bound.threads // 32)) >= max(bound.least_ctas, 1), symbol


@pytest.mark.skipif("sm_90a" not in ARCHS, reason="the native library was built without kernels for sm_90a")
def test_warps_that_exchange_registers_begin_with_what_the_emulator_gives_them() -> None:
    """The emulator counts the registers that warps give and take, and finds a warp that takes more than are free."""
    kernels = static_facts.of_library(library_path(), "sm_90a")
    exchanging = {
        symbol: kernel for symbol, kernel in kernels.items() if any("USETMAXREG" in line for line in kernel.lines)
    }
    assert exchanging
    for symbol, kernel in exchanging.items():
        assert kernel.registers == bounds()[symbol].registers, symbol
