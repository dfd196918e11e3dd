"""Tests of tensor maps: invalid arguments, maps as arguments, maps that kernels create, and their misuse."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from emulator import EmulatorError, TensorMap
from emulator.native import native
from emulator_tma import WAIT, build, copy_out
from expected_errors import fails

ROWS = torch.arange(80 * 64, dtype=torch.int16).view(torch.float16).view(80, 64)
MATRIX = ROWS[:64]

LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"


def load(size: int = 1024, instruction: str = f"{LOAD} [%r1], [%rd0, {{%r10, %r11}}], [%r2];", before: str = "") -> str:
    return f"""
    {before}
    @%p1 bra SKIP;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size};
    {instruction}
SKIP:
    bar.sync 0;
    {WAIT.format(parity=0)}
    {copy_out("%rd1", size)}
    """


def box(tensor_map: Any, x: int, y: int, body: str = "", *, has_map: bool = True, **options: Any) -> torch.Tensor:
    """Loads a box of 16 x 32 halfs at (x, y) and returns it."""
    out = torch.zeros(16, 32, dtype=torch.float16)
    module = build(body or load(), 4096, 1 if has_map else 2, integers=2, has_map=has_map)
    arguments = [tensor_map, out] if has_map else [out, tensor_map]
    module.launch("k", args=[*arguments, x, y], **options)
    return out


@pytest.mark.parametrize(
    ("text", "tensor", "size", "options"),
    [
        ("address", torch.zeros(100, dtype=torch.float16)[1:65].view(8, 8), [8, 8], {}),
        ("stride of dimension 1", torch.zeros(8, 12, dtype=torch.float16), [8, 8], {}),
        ("stride of dimension 1 is 0", torch.zeros(16).expand(8, 16), [8, 16], {}),
        ("stride of dimension 2 is 0", torch.zeros(2, 16).expand(3, 2, 16), [1, 2, 16], {}),
        ("rank", torch.zeros(1, 1, 1, 1, 1, 16), [1, 1, 1, 1, 1, 16], {}),
        ("different lengths", torch.zeros(16, 16), [16], {}),
        ("box size", MATRIX, [257, 8], {}),
        ("box size", MATRIX, [0, 8], {}),
        ("no multiple of 16 bytes", MATRIX, [8, 4], {}),
        ("more than the swizzle's 32", MATRIX, [8, 32], {"swizzle": "32B"}),
        ("more than the swizzle's 64", MATRIX, [8, 64], {"swizzle": "64B"}),
        ("more than the swizzle's 128", MATRIX.float(), [8, 64], {"swizzle": "128B"}),
        ("element stride", MATRIX, [8, 8], {"element_strides": [9, 1]}),
        ("element stride", MATRIX, [8, 8], {"element_strides": [0, 1]}),
        ("no floating-point", MATRIX.view(torch.int16), [8, 8], {"fill": "nan"}),
        ("none of", MATRIX, [8, 8], {"swizzle": "96B"}),
        ("none of", MATRIX.to(torch.complex64), [8, 8], {}),
        ("not contiguous", MATRIX.t(), [8, 8], {}),
        ("size of dimension 1", np.zeros((4, 16), np.float32)[:0], [1, 16], {}),
    ],
)
def test_what_the_driver_refuses(text: str, tensor: torch.Tensor, size: list[int], options: dict[str, Any]) -> None:
    fails("arguments", text, lambda: TensorMap(tensor, size, **options))


@pytest.mark.parametrize(
    ("text", "tensor"),
    [
        ("", torch.zeros(2, 3, 4, 16)),
        ("", torch.zeros(3, 4, 32)[:, :, :16]),
        ("", torch.zeros(2, 1, 16).expand(2, 1, 16)),
        (
            "stride of dimension 1, 32, is less than the 64 bytes of dimension 0",
            torch.zeros(72).as_strided((8, 16), (8, 1)),
        ),
        (
            "stride of dimension 2, 64, is less than the 768 bytes that it spans",
            torch.zeros(2, 4, 3, 16).transpose(1, 2),
        ),
        ("stride of dimension 2, 416, is no multiple of 64", torch.zeros(400).as_strided((3, 4, 16), (104, 16, 1))),
    ],
)
def test_strides_that_do_not_nest_are_a_warning(text: str, tensor: torch.Tensor) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        TensorMap(tensor, [1] * (tensor.dim() - 1) + [16])
    assert len(found) == bool(text) and all(text in str(each.message) for each in found)


def test_strides_beyond_what_a_map_holds() -> None:
    wide = np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (1, 2, 16), (1 << 40, 1 << 40, 4))
    fails("arguments", "stride", lambda: TensorMap(wide, [1, 1, 16]))
    fails("unsupported", "interleaved", lambda: TensorMap(MATRIX, [8, 8], interleave="16B"))


def test_the_stride_of_one_element_is_as_long_as_what_it_spans() -> None:
    tensor_map = TensorMap(torch.zeros(1, 4, 16), [1, 4, 16])

    def encode(strides: list[int]) -> None:
        data_type, *fields = tensor_map.fields._replace(strides=strides)
        native.encode_tiled(tensor_map.address, data_type, MATRIX.data_ptr(), *fields)

    encode([64, 256])
    encode([64, 512])
    with pytest.raises(native.Fault, match="dimension 2, of one element, is 240, less than the 256"):
        encode([64, 240])


def test_a_map_as_a_struct_and_as_a_pointer() -> None:
    tensor_map = TensorMap(MATRIX, [16, 32])
    expected = MATRIX[3:19, 8:40]
    assert torch.equal(box(tensor_map, 8, 3).view(torch.int16), expected.view(torch.int16))
    by_pointer = load(before="mov.u64 %rd0, %rd2;")
    assert torch.equal(box(tensor_map, 8, 3, by_pointer, has_map=False).view(torch.int16), expected.view(torch.int16))
    fails("arguments", "got a tensor map", lambda: build("", 128, 0, 1).launch("k", args=[tensor_map, tensor_map]))


def test_arrays_of_numpy_and_dimensions_of_one_element() -> None:
    array = MATRIX.view(torch.int16).numpy()
    got = box(TensorMap(array, [16, 32]), 0, 40).view(torch.int16)
    assert torch.equal(got, MATRIX[40:56, :32].view(torch.int16))
    row = MATRIX[5:6, :40]
    got = box(TensorMap(row.as_strided((1, 40), (3, 1), row.storage_offset()), [16, 32]), 0, 0)
    assert torch.equal(got[0], row[0, :32]) and got[1:].eq(0).all()


# Triton's code for tl.make_tensor_descriptor: it creates a map in shared memory, then publishes it.
REPLACE = "tensormap.replace.tile"
MAKE = f"""
    shl.b32 %r20, %r0, 2; add.u32 %r20, %r20, %r1; mov.u32 %r21, 0; st.shared.b32 [%r20], %r21;
    bar.warp.sync -1;
    @%p1 bra MADE;
    cvt.u64.u32 %rd8, %r1; mov.u32 %r22, 32; mov.u32 %r23, 16; mov.u32 %r24, 64; mov.u32 %r25, 1; mov.u64 %rd9, 128;
    {REPLACE}.global_address.shared::cta.b1024.b64 [ %rd8 + 0 ], %rd2;
    {REPLACE}.rank.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x1;
    {REPLACE}.box_dim.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x0, %r22;
    {REPLACE}.box_dim.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x1, %r23;
    {REPLACE}.global_dim.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x0, %r24;
    {REPLACE}.global_dim.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x1, %r24;
    {REPLACE}.global_stride.shared::cta.b1024.b64 [ %rd8 + 0 ], 0x0, %rd9;
    {REPLACE}.element_stride.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x0, %r25;
    {REPLACE}.element_stride.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x1, %r25;
    {REPLACE}.elemtype.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x6;
    {REPLACE}.swizzle_mode.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x0;
MADE:
    bar.warp.sync -1;
    cvt.u64.u32 %rd8, %r1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [ %rd3 + 0 ], [ %rd8 + 0 ], 0x80;
    fence.proxy.tensormap::generic.acquire.gpu [ %rd3 + 0 ], 0x80;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.u64 %rd0, %rd3;
"""


def made(body: str, scratch: torch.Tensor, x: int = 8, y: int = 3) -> torch.Tensor:
    out = torch.zeros(16, 32, dtype=torch.float16)
    build(body, 4096, 3, integers=2, has_map=False).launch("k", args=[out, MATRIX, scratch, x, y])
    return out


def aligned(size: int, alignment: int = 128) -> torch.Tensor:
    storage = torch.full((size + alignment,), 255, dtype=torch.uint8)
    start = -storage.data_ptr() % alignment
    return storage[start : start + size]


def test_maps_made_by_kernels() -> None:
    scratch = aligned(128)
    expected = MATRIX[3:19, 8:40].view(torch.int16)
    assert torch.equal(made(load(before=MAKE), scratch).view(torch.int16), expected)
    host = bytes(TensorMap(MATRIX, [16, 32]))
    assert bytes(scratch.numpy()) == host
    nan = MAKE.replace(
        "swizzle_mode.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x0", "fill_mode.shared::cta.b1024.b32 [%rd8], 1"
    )
    got = made(load(before=nan), scratch, 40, 60)
    assert got[:4, :24].view(torch.int16).equal(MATRIX[60:, 40:].view(torch.int16))
    assert got[4:].isnan().all() and got[:, 24:].isnan().all()


@pytest.mark.filterwarnings("ignore:a tensor map")
@pytest.mark.parametrize("number", range(16))
def test_element_types_of_ptx_are_not_the_drivers(number: int) -> None:
    """Checks PTX's numbers (PTX ISA, table "Tensormap new_val validity"). The last three need a later architecture."""
    dtypes = ["uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float32_ftz", "float64"]
    dtypes += ["bfloat16", "tfloat32", "tfloat32_ftz"]
    body = MAKE.replace(
        "elemtype.shared::cta.b1024.b32 [ %rd8 + 0 ], 0x6", f"elemtype.shared::cta.b1024.b32 [%rd8], {number}"
    )
    scratch = aligned(128)
    if number >= len(dtypes):
        fails("unsupported", "value of the field", lambda: made(body, scratch))
        return
    made(body, scratch)
    width = [1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4][number]
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    tensor = ROWS.view(same).as_strided((64, 64), (128 // width, 1))
    assert bytes(scratch.numpy()) == bytes(TensorMap(tensor, [16, 32], dtype=dtypes[number]))


# Planted faults.


def test_maps_that_a_copy_cannot_use() -> None:
    good = TensorMap(MATRIX, [16, 32])
    three = LOAD.replace("2d", "3d") + " [%r1], [%rd0, {%r10, %r11, %r11}], [%r2];"
    fails("arguments", "it is 2-dimensional", lambda: box(good, 0, 0, load(instruction=three)))
    fails("arguments", "no tensor map", lambda: box(bytes([255] * 128), 0, 0))
    shifted = load().replace("[%rd0,", "[%rd0+32,")
    fails("misaligned", "parameter", lambda: box(good, 0, 0, shifted))
    shared = load(before="cvt.u64.u32 %rd8, %r1; cvta.shared.u64 %rd0, %rd8;")
    fails("out-of-bounds", "has to be a parameter", lambda: box(good, 0, 0, shared))
    large = MAKE.replace("mov.u32 %r23, 16", "mov.u32 %r23, 257")
    fails("arguments", "257", lambda: made(load(before=large), aligned(128)))


def test_a_tensor_larger_than_its_memory() -> None:
    """Checks that the rows of a box that are inside the map's tensor are checked against the memory."""
    part = MATRIX[:33].clone()
    larger = TensorMap(part, [16, 32])
    larger.tensor = part[:32]
    box(larger, 0, 16)
    fails("out-of-bounds", "reaching 64 bytes past the end", lambda: box(larger, 0, 17))
    larger.tensor = part
    assert box(larger, 0, 29)[4:].eq(0).all()


def test_boxes_that_do_not_fit_into_shared_memory() -> None:
    good = TensorMap(MATRIX, [16, 32])
    fails("out-of-bounds", "of shared memory", lambda: box(good, 0, 0, load().replace("[%r1],", "[%r1+3200],")))
    fails("misaligned", "multiple of 128", lambda: box(good, 0, 0, load().replace("[%r1],", "[%r1+64],")))


def test_a_wrong_number_of_bytes() -> None:
    """Checks that a box that is partly outside the tensor still signals all of its bytes to the mbarrier."""
    good = TensorMap(MATRIX, [16, 32])
    box(good, 40, 60)
    short = load().replace("_, [%r2], 1024", "_, [%r2], 192")
    fails("deadlock", "-832 bytes", lambda: box(good, 40, 60, short))


def test_a_missing_wait_for_a_load() -> None:
    tensor_map, wrong = TensorMap(MATRIX, [16, 32]), load().replace(WAIT.format(parity=0), "")
    seen = set()
    for seed in range(12):
        fails("race", "cp.async.bulk.tensor", lambda seed=seed: box(tensor_map, 8, 3, wrong, seed=seed))
        try:
            got = box(tensor_map, 8, 3, wrong, seed=seed, races=False)
            seen.add("right" if got.view(torch.int16).equal(MATRIX[3:19, 8:40].view(torch.int16)) else "poison")
        except EmulatorError as error:
            seen.add(error.kind)
    assert seen >= {"poison", "cluster"}
