"""Tests seeds of dropout: the seed that is drawn where none is given, and the seeds that a user may give."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fastattn.functional.dropout_seed import draw_seed, seed_tensor

CPU = torch.device("cpu")


def test_bounds_of_a_drawn_seed_are_int32_numbers() -> None:
    """Inductor writes the bounds into a kernel as int32, and the kernel subtracts them."""
    graph = make_fx(lambda: draw_seed(CPU))().graph
    (drawn,) = (node for node in graph.nodes if "randint" in str(node.target))
    bounds = [argument for argument in drawn.args if isinstance(argument, int)]
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    int32 = torch.iinfo(torch.int32)
    for number in (low, high, high - low):
        assert int32.min <= number <= int32.max
    assert high - low >= 2**31 - 1, "a narrower range would repeat seeds for no reason"


def test_a_drawn_seed_is_the_generators() -> None:
    torch.manual_seed(7)
    first = [draw_seed(CPU).item() for _ in range(8)]
    torch.manual_seed(7)
    assert [draw_seed(CPU).item() for _ in range(8)] == first
    assert len(set(first)) == 8


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1])
def test_a_given_seed_has_64_bits(seed: int) -> None:
    tensor = seed_tensor(seed, CPU)
    assert tensor.dtype == torch.int64
    assert tensor.item() % 2**64 == seed % 2**64
