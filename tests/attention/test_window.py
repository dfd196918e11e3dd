"""Tests which keys a row sees through a window, and which rows see a key: device/sequence.cuh compiled for the host."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native_build.tools import find_cxx

CSRC = Path(__file__).parents[2] / "csrc"
UNBOUNDED = 2**31 - 1  # ScoreParams::kUnbounded
MOST = 2**31 - 1  # rows, and keys, of a whole call
SOURCE = """
#include "device/sequence.cuh"
extern "C" void ranges_of(const fastattn::Window* window, int32_t row, int32_t key, int32_t num_rows, int32_t* out) {
    const auto keys = window->keys_of(row);
    const auto rows = window->rows_of(key, num_rows);
    out[0] = keys.begin, out[1] = keys.end, out[2] = rows.begin, out[3] = rows.end;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = tmp_path_factory.mktemp("window") / "window.cpp"
    source.write_text(SOURCE)
    options = ["-std=c++20", "-O1", "-ftrapv", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([*find_cxx(os.environ), *options, source, "-o", source.with_suffix(".so")], check=True)
    return ctypes.CDLL(str(source.with_suffix(".so")))


def number(least: int, most: int) -> st.SearchStrategy[int]:
    """Draws small, medium and large numbers."""
    ends = [least, min(least + 3, most), most, max(most - 3, least)]
    return st.one_of(st.sampled_from(ends), st.integers(least, min(least + 300, most)), st.integers(least, most))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_ranges_are_those_of_numbers_without_bounds(library: ctypes.CDLL, data: st.DataObject) -> None:
    """Calls are small, or the largest possible, where an overflow would stop the process."""
    num_rows, num_keys = (data.draw(number(1, MOST)) for _ in range(2))
    if data.draw(st.booleans()):
        offset = num_keys - num_rows
    else:  # a block of a larger call
        offset = data.draw(number(0, MOST - num_rows)) - data.draw(number(0, MOST - num_keys))
    left, right = (data.draw(st.one_of(st.just(UNBOUNDED), number(0, MOST - 1))) for _ in range(2))
    row, key = data.draw(number(0, num_rows - 1)), data.draw(number(0, num_keys - 1))
    out = (ctypes.c_int32 * 4)()
    library.ranges_of((ctypes.c_int32 * 4)(num_keys, offset, left, right), row, key, num_rows, out)

    before, after = (4 * MOST if side == UNBOUNDED else side for side in (left, right))
    first, end = row + offset - before, row + offset + after + 1
    assert out[0] == max(first, 0)
    assert out[1] == max(min(end, num_keys), 0)
    first, end = key - offset - after, key - offset + before + 1
    assert out[2] == min(max(first, 0), num_rows)
    assert out[3] == max(min(end, num_rows), 0)
