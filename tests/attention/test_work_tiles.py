"""Kernels whose CTAs claim their work while they run: no CTA holds two work tiles while a resident one has none."""

from __future__ import annotations

import pytest

import attention_cases as attention
import test_cuda_attention_backward as backward
from cuda_kernels import EMULATED, MARKS, NEEDS_HOPPER, only_emulated

if EMULATED:
    from emulator import device, launches
    from work_tiles import unfair_claims

pytestmark = [*MARKS, only_emulated]

NUM_TILES = 8
# (architecture, head dims, keys of a tile, kernel)
SCHEDULERS = [
    (80, (192, 192), 32, "attention_backward_key_value_sm80"),
    (80, (64, 64), 128, "attention_backward_key_value_large_sm80"),
    pytest.param(90, (64, 64), 256, "attention_backward_key_value_sm90", marks=NEEDS_HOPPER),
    pytest.param(90, (192, 128), 64, "attention_backward_key_value_wide_sm90", marks=NEEDS_HOPPER),
]
# Their ring `work` has two places: a tile is claimed before the last one is done.
CLAIM_AHEAD = {"attention_backward_key_value_sm90", "attention_backward_key_value_wide_sm90"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("arch", "head_dims", "block_n", "kernel"), SCHEDULERS)
def test_no_cta_holds_two_tiles_while_another_has_none(
    arch: int, head_dims: tuple[int, int], block_n: int, kernel: str, seed: int
) -> None:
    case = attention.Case(shape=(1, 1, 1, 64, NUM_TILES * block_n), head_dims=head_dims)
    with device.emulated(arch, num_sms=4), launches.recorded() as found:
        grad_key = backward.run(case, deterministic=True, seed=seed, log_writes=True)["grad_key"]
    begin, tile_bytes = grad_key.data_ptr(), grad_key.nbytes // NUM_TILES

    def tile_of(address: int) -> int | None:
        return (address - begin) // tile_bytes if begin <= address < begin + grad_key.nbytes else None

    (launched,) = (launched for launched in found if kernel in launched.report.kernel)
    found_ahead = unfair_claims(launched, tile_of)
    assert bool(found_ahead) is (kernel in CLAIM_AHEAD), found_ahead
