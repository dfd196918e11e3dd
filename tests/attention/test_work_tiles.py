"""Tests kernels whose CTAs claim work as they run: no CTA holds two work tiles while a resident CTA has none."""

from __future__ import annotations

import pytest

import attention_cases as attention
import test_cuda_attention_backward as backward
from cuda_kernels import EMULATED, MARKS, NEEDS_HOPPER, only_emulated

if EMULATED:
    from emulator import device, launches
    from work_tiles import unfair_claims

pytestmark = [*MARKS, only_emulated]

# (architecture, head dims, query rows, keys per tile, kernel). A Hopper CTA claims its next tile while a tile's last
# steps of 64 rows are in flight. So there are many steps, by whose end even late CTAs have a tile.
NUM_SMS = 4
SCHEDULERS = [
    (80, (192, 192), 64, 32, "attention_backward_key_value_sm80"),
    (80, (64, 64), 64, 128, "attention_backward_key_value_large_sm80"),
    pytest.param(90, (64, 64), 2048, 256, "attention_backward_key_value_sm90", marks=NEEDS_HOPPER),
    pytest.param(90, (192, 128), 3072, 64, "attention_backward_key_value_wide_sm90", marks=NEEDS_HOPPER),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("arch", "head_dims", "num_rows", "block_n", "kernel"), SCHEDULERS)
def test_no_cta_holds_two_tiles_while_another_has_none(
    arch: int, head_dims: tuple[int, int], num_rows: int, block_n: int, kernel: str, seed: int
) -> None:
    num_tiles = 2 * NUM_SMS
    case = attention.Case(shape=(1, 1, 1, num_rows, num_tiles * block_n), head_dims=head_dims)
    with device.emulated(arch, num_sms=NUM_SMS), launches.recorded() as found:
        grad_key = backward.run(case, deterministic=arch == 80, seed=seed, log_writes=True)["grad_key"]
    begin, tile_bytes = grad_key.data_ptr(), grad_key.nbytes // num_tiles

    def tile_of(address: int) -> int | None:
        return (address - begin) // tile_bytes if begin <= address < begin + grad_key.nbytes else None

    (launched,) = (launched for launched in found if kernel in launched.report.kernel)
    assert not unfair_claims(launched, tile_of)
