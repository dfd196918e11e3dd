"""Tests of CTAs that begin late, and of persistent CTAs that claim work tiles."""

from __future__ import annotations

import pytest
import torch

from cuda_sources import load, needs_nvcc
from emulator import launches
from work_tiles import unfair_claims

pytestmark = [needs_nvcc, pytest.mark.parametrize("seed", range(8))]
NUM_CTAS, NUM_TILES, TILE_BYTES = 4, 11, 128


def unfair_claims_of(kernel: str, num_tiles: int, seed: int) -> list[str]:
    values, out, counter = torch.arange(32 * num_tiles).int(), torch.zeros(32 * num_tiles).int(), torch.zeros(1).int()
    with launches.recorded() as found:
        load("schedulers", "compute_80").launch(
            kernel, (NUM_CTAS,), (32,), [values, out, counter, num_tiles], seed=seed, log_writes=True
        )
    assert torch.equal(out, values)
    begin = out.data_ptr()

    def tile_of(address: int) -> int | None:
        return (address - begin) // TILE_BYTES if begin <= address < begin + out.nbytes else None

    return unfair_claims(found[0], tile_of)


@pytest.mark.parametrize("num_tiles", [NUM_TILES, NUM_CTAS])
def test_a_claim_ahead_is_found(seed: int, num_tiles: int) -> None:
    assert unfair_claims_of("claims_ahead", num_tiles, seed)
    assert not unfair_claims_of("claims_in_turn", num_tiles, seed)


def test_ctas_begin_late(seed: int) -> None:
    """Checks that CTAs begin so late that only an explicit wait sees all of them, not a fixed delay."""
    num_ctas = 24
    for waits in (False, True):
        begun, counts = torch.zeros(num_ctas).int(), torch.zeros(num_ctas).int()
        load("schedulers", "compute_80").launch(
            "counts_begun", (num_ctas,), (1,), [begun, counts, 300, waits], seed=seed, workers=1
        )
        assert (counts.min().item() == num_ctas) == waits
