"""The prediction of a step of generation: what the table says, and that it follows from bytes and trips."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.predict import decode_time
from benchmarks.predict.decode_time import STEPS, predict, trips
from fastattn import native

pytestmark = pytest.mark.skipif(not native.KERNELS, reason="the native library was built without kernels")


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode-time"]) == 0
    printed = capsys.readouterr().out
    assert decode_time.table() in printed and "Predicted, not measured" in printed


@pytest.mark.parametrize("cache", STEPS)
def test_longer_contexts_take_longer_and_come_closer_to_the_memory(cache: str) -> None:
    found = [predict(1 << power, 8, 4, cache) for power in range(9, 19)]
    times, shares = [each.microseconds for each in found], [each.of_memory for each in found]
    assert times == sorted(times) and shares == sorted(shares)
    assert shares[-1] <= 1
    assert found[-1].megabytes == pytest.approx(8 * 8 * 2**18 * STEPS[cache].key_bytes / 1e6)


def test_parts_cost_trips() -> None:
    alone, merged, merged_twice = trips(1, False), trips(16, False), trips(17, False)
    assert merged - alone == pytest.approx(3 * 263 / 1830) == merged_twice - merged
    assert trips(1, True) - alone == pytest.approx(263 / 1830)


@pytest.mark.parametrize("cache", STEPS)
def test_a_step_is_that_of_the_kernel(cache: str) -> None:
    variant = "" if cache == "16-bit" else f"_{cache}"
    assert STEPS[cache].block == native.TILES[f"decode_split{variant}_sm80"]["128"]["block_n"]
