"""Tests of tensor copies against index maps written down here, with planted faults."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from emulator import TensorMap
from emulator_tma import WAIT, build, copy_in, copy_out

SWIZZLES = ["none", "32B", "64B", "128B"]
BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def coordinates(rank: int) -> str:
    return "{" + ", ".join(f"%r{10 + i}" for i in range(rank)) + "}"


def load_body(
    rank: int, size: int, area: int, offset: int = 0, *, expect: int | None = None, wait: str | None = None
) -> str:
    return f"""
    @%p1 bra SKIP;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size if expect is None else expect};
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1+{offset}], [%rd0, {coordinates(rank)}], [%r2];
SKIP:
    bar.sync 0;
    {WAIT.format(parity=0) if wait is None else wait}
    {copy_out("%rd1", area)}
    """


def store_body(rank: int, area: int, instruction: str = "cp.async", op: str = "", wait: str = "") -> str:
    return f"""
    {copy_in("%rd1", area)}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra SKIP;
    {instruction}.bulk.tensor.{rank}d.global.shared::cta{op}.bulk_group [%rd0, {coordinates(rank)}], [%r1];
    cp.async.bulk.commit_group;
    {wait or "cp.async.bulk.wait_group 0;"}
SKIP:
    """


def raw(tensor: Tensor) -> np.ndarray:
    """Returns the elements' bits as unsigned integers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integers).numpy().view(BYTES[tensor.element_size()])


def box_indices(
    shape: Sequence[int], box: Sequence[int], at: Sequence[int], steps: Sequence[int]
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Returns each box element's indices in the tensor, and True for those inside it."""
    axes = [start + np.arange(-(-size // step)) * step for size, start, step in zip(box, at, steps, strict=True)]
    grid = np.meshgrid(*axes, indexing="ij")
    inside = np.logical_and.reduce([(g >= 0) & (g < size) for g, size in zip(grid, shape, strict=True)])
    return tuple(np.clip(g, 0, size - 1) for g, size in zip(grid, shape, strict=True)), inside


def places(size: int, swizzle: str, offset: int = 0) -> np.ndarray:
    """Returns the offset in shared memory of each byte of a box. The swizzle xors the number of a 16-byte chunk in its
    128-byte row with the row's number modulo the chunks of the swizzle's width."""
    address = offset + np.arange(size)
    if swizzle == "none":
        return address
    parts = int(swizzle[:-1]) // 16
    line, part = address // 128, address // 16 % 8
    return line * 128 + (part ^ (line % parts)) * 16 + address % 16


def area_of(size: int, offset: int = 0) -> int:
    return -(-(offset + size) // 128) * 128


def expected_load(
    tensor: Tensor, box: Sequence[int], at: Sequence[int], swizzle: str, steps: Sequence[int], fill: int, offset: int
) -> np.ndarray:
    indices, inside = box_indices(tensor.shape, box, at, steps)
    dense = np.where(inside, raw(tensor)[indices], np.array(fill).astype(BYTES[tensor.element_size()]))
    data = np.ascontiguousarray(dense).view(np.uint8).reshape(-1)
    area = np.full(area_of(data.size, offset), 0xFF, np.uint8)
    area[places(data.size, swizzle, offset)] = data
    return area


def check_load(
    tensor: Tensor,
    box: Sequence[int],
    at: Sequence[int],
    swizzle: str = "none",
    *,
    steps: Sequence[int] | None = None,
    fill: str = "zero",
    offset: int = 0,
    seed: int = 0,
) -> None:
    rank = tensor.dim()
    steps = steps or [1] * rank
    pattern = {"zero": 0, "nan": (1 << (8 * tensor.element_size() - 1)) - 1}[fill]
    expected = expected_load(tensor, box, at, swizzle, steps, pattern, offset)
    size = int(np.prod([-(-n // s) for n, s in zip(box, steps, strict=True)])) * tensor.element_size()
    module = build(load_body(rank, size, expected.size, offset), expected.size, integers=rank)
    out = torch.zeros(expected.size, dtype=torch.uint8)
    tensor_map = TensorMap(tensor, box, swizzle, element_strides=steps, fill=fill)
    module.launch("k", args=[tensor_map, out, *reversed(at)], seed=seed)
    np.testing.assert_array_equal(out.numpy(), expected)


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float16, padding: int = 0) -> Tensor:
    """Returns elements whose bits count up. Rows are 16-byte aligned, with `padding` times 16 bytes between them."""
    unit = 16 // dtype.itemsize
    pitch = -(-shape[-1] // unit) * unit + padding * unit
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    storage = torch.arange(int(np.prod(shape[:-1])) * pitch).to(bits).view(dtype)
    return storage.reshape(*shape[:-1], pitch)[..., : shape[-1]]


def whole(tensor: Tensor) -> np.ndarray:
    """Returns the whole storage of a tensor as unsigned integers."""
    return raw(tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0))


RANKS: list[tuple[list[int], list[int]]] = [
    ([200], [64]),
    ([40, 72], [8, 32]),
    ([5, 20, 40], [2, 8, 32]),
    ([3, 4, 10, 40], [2, 3, 4, 32]),
    ([2, 3, 3, 6, 40], [2, 2, 2, 4, 32]),
]


@pytest.mark.parametrize(("shape", "box"), RANKS)
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_boxes_of_every_rank_and_swizzle(shape: list[int], box: list[int], swizzle: str) -> None:
    if len(shape) == 1 and swizzle != "none":
        box = [int(swizzle[:-1]) // 2]
    else:
        box = [*box[:-1], min(box[-1], 16 if swizzle == "32B" else 32)]
    tensor = numbers(shape, padding=1)
    middle = [max(n - b, 0) // 2 for n, b in zip(shape, box, strict=True)]
    check_load(tensor, box, middle, swizzle)
    check_load(tensor, box, [-1] * len(shape), swizzle, seed=1)
    check_load(tensor, box, [n - 1 for n in shape], swizzle, seed=2)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
    + [torch.float64, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_every_type(dtype: torch.dtype, swizzle: str) -> None:
    tensor = numbers([20, 40], torch.int8 if dtype.itemsize == 1 else dtype).view(dtype)
    check_load(tensor, [16, 128 // dtype.itemsize], [3, -2], swizzle)


@pytest.mark.parametrize("at", list(itertools.product([-70, -8, -3, 0, 17, 30, 64], repeat=2)))
def test_outside_on_every_side(at: tuple[int, int]) -> None:
    check_load(numbers([30, 50]), [8, 64], at, "128B", seed=at[0] + 70)


def test_fill_with_nan() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = numbers([10, 24], dtype)
        check_load(tensor, [8, 16], [6, 20], fill="nan")
        check_load(tensor, [8, 16], [-4, -4], fill="nan")


@pytest.mark.parametrize("steps", [[1, 2, 1], [3, 1, 1], [2, 8, 1], [5, 3, 1]])
def test_element_strides(steps: list[int]) -> None:
    tensor = numbers([20, 30, 40])
    check_load(tensor, [7, 11, 32], [2, 3, 4], "64B", steps=steps)
    check_load(tensor, [7, 11, 32], [-3, 25, -4], "64B", steps=steps, seed=3)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_swizzles_follow_the_address(swizzle: str) -> None:
    """Checks that the swizzle depends on the address, for a box that does not begin at a multiple of the pattern."""
    check_load(numbers([40, 64]), [20, 16], [1, 2], swizzle, offset=384)


def test_narrow_boxes_stay_packed() -> None:
    check_load(numbers([40, 64]), [24, 16], [1, 2], "128B")


def test_landing_at_any_moment_gives_the_same() -> None:
    for seed in range(12):
        check_load(numbers([40, 72]), [16, 64], [5, 30], "128B", seed=seed)


def test_types_that_are_rounded_on_the_way() -> None:
    values = torch.tensor([1.0, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-10 - 2**-20, 1e-40, -1e-40, torch.inf, torch.nan])
    values = torch.cat([values, torch.randn(24)])
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    rounded = ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    rounded = torch.where(values.isfinite(), rounded, values)
    flushed = torch.where(values.abs() < 2.0**-126, values * 0, values)
    for dtype, expected in (("float32_ftz", flushed), ("tfloat32", rounded)):
        out = torch.zeros(32)
        build(load_body(1, 128, 128), 128, integers=1).launch("k", args=[TensorMap(values, [32], dtype=dtype), out, 0])
        assert torch.equal(out.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), dtype


def check_store(
    shape: Sequence[int], box: Sequence[int], at: Sequence[int], swizzle: str, dtype: torch.dtype, seed: int
) -> None:
    rank = len(shape)
    target, expected = numbers(shape, dtype, padding=1), numbers(shape, dtype, padding=1)
    size = int(np.prod(box)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, area_of(size)).astype(np.uint8)
    elements = data[places(size, swizzle)].view(BYTES[dtype.itemsize]).reshape(box)
    indices, inside = box_indices(shape, box, at, [1] * rank)
    raw(expected)[tuple(i[inside] for i in indices)] = elements[inside]
    module = build(store_body(rank, data.size), data.size, integers=rank)
    module.launch("k", args=[TensorMap(target, box, swizzle), data, *reversed(at)], seed=seed)
    np.testing.assert_array_equal(whole(target), whole(expected))


@pytest.mark.parametrize(("shape", "box"), RANKS)
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_stores(shape: list[int], box: list[int], swizzle: str) -> None:
    box = [*box[:-1], min(box[-1], 16 if swizzle == "32B" else 32)]
    for seed, at in enumerate(([0] * len(shape), [-1] * len(shape), [n - 1 for n in shape])):
        check_store(shape, box, at, swizzle, torch.int16, seed)
