"""Finds which CTA held which work tile, in kernels whose CTAs claim tiles by an atomic on one counter.

A CTA holds a tile from its claim until its last write to the tile's results. In a fair scheduler, no CTA holds two
tiles while a resident CTA has none: that CTA could have begun the second tile by now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emulator.launches import Launched


def unfair_claims(launched: Launched, tile_of: Callable[[int], int | None]) -> list[str]:
    """Lists each moment at which a CTA comes to hold two tiles while another has none.

    The launch ran with ``log_writes``, and all of its CTAs were resident. ``tile_of`` maps an address to the tile whose
    results contain it. Each tile belongs to one claim, and a CTA works on its tiles in the order of its claims.
    """
    opcodes = {row.line: row.opcode for row in launched.report.rows}
    claims = [i for i, write in enumerate(launched.report.writes) if opcodes[write.line].startswith("atom.")]
    assert len({launched.report.writes[i].address for i in claims}) == 1, "one counter, and no other atomics"
    last_writes: dict[int, dict[int, int]] = {}  # CTA → tile → index of its last write; tiles in the CTA's order
    for i, write in enumerate(launched.report.writes):
        tile = tile_of(write.address)
        if tile is not None:
            last_writes.setdefault(write.cta, {})[tile] = i
    num_tiles = sum(map(len, last_writes.values()))
    assert 0 < num_tiles <= len(claims), "a claim for each tile"
    claims_of_tiles = set(claims[:num_tiles])
    ends = {i for tiles in last_writes.values() for i in tiles.values()}
    held = Counter(dict.fromkeys(range(launched.grid[0] * launched.grid[1] * launched.grid[2]), 0))
    found = []
    for i, write in enumerate(launched.report.writes):
        held[write.cta] -= i in ends
        if i not in claims_of_tiles:
            continue
        held[write.cta] += 1
        idle = [cta for cta, number in held.items() if number == 0]
        if held[write.cta] > 1 and idle:
            found.append(f"CTA {write.cta} claims its tile {held[write.cta]} while CTAs {idle} have none")
    return found
