"""The native forward kernel for sm_80 as nvcc compiles it, every instance, on the emulator, against the oracle."""

from __future__ import annotations

import functools
import math
import re
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import EmulatorError, Module
from emulator.nvcc_compile import ROOT, compile_all, nvcc
from fastattn import reference
from oracle import check_against_oracle

pytestmark = pytest.mark.skipif(nvcc() is None, reason="needs nvcc")

CSRC = ROOT / "csrc"
INSTANCES = CSRC / "attention" / "instances"
# Of tiles_sm80.h and ForwardStorageSm80: head dim to (kBlockM, threads, shared bytes).
TILES = {64: (128, 128, (128 + 2 * 64) * 64 * 2), 128: (128, 128, (128 + 2 * 64) * 128 * 2)}
HEADS_PER_GROUP = 3  # any number is right: it decides in which order CTAs take tiles


@functools.cache
def modules() -> dict[str, Module]:
    """By the name of the instance file: ``d64_f16_causal``."""
    files = sorted(INSTANCES.glob("forward_*_sm80.cu"))
    names = [file.stem.removeprefix("forward_").removesuffix("_sm80") for file in files]
    return dict(zip(names, map(Module, compile_all(files, "compute_80", [CSRC])), strict=True))


def heads_view(tensor: Tensor) -> bytes:
    """``HeadsView`` of host/params.h."""
    batch, heads, rows, head_dim = tensor.shape
    strides = tensor.stride()[:3]
    return struct.pack("<Q4i3q", tensor.data_ptr(), batch, heads, rows, head_dim, *strides)


def run(query: Tensor, key: Tensor, value: Tensor, causal: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Out and lse of the kernel. Options: ``scale``, ``top_left``, and those of `Module.launch`."""
    batch, heads, rows, head_dim = query.shape
    scale = options.pop("scale", 1 / math.sqrt(head_dim))
    offset = 0 if options.pop("top_left", False) else key.shape[2] - rows
    out = torch.full_like(query, torch.nan)
    lse = torch.full((batch, heads, rows), torch.nan)
    params = b"".join(map(heads_view, (query, key, value, out)))
    params += struct.pack("<Q3i4x", lse.data_ptr(), batch, heads, rows)
    params += struct.pack("<fii4x", scale, offset, HEADS_PER_GROUP)
    module = modules()[
        f"d{head_dim}_{'f16' if query.dtype == torch.float16 else 'bf16'}_{'causal' if causal else 'full'}"
    ]
    block_m, threads, shared_bytes = TILES[head_dim]
    module.launch(
        module.kernels[0],
        (-(-rows // block_m) * heads * batch,),
        (threads,),
        [params],
        shared_bytes,
        memory=[query, key, value, out, lse],
        **options,
    )
    return out, lse


def check(query: Tensor, key: Tensor, value: Tensor, causal: bool, **options: Any) -> None:
    out, lse = run(query, key, value, causal, **options)
    meaning = {name: options[name] for name in ("scale", "top_left") if name in options}
    exact, exact_lse = reference.attention(*(t.double() for t in (query, key, value)), causal=causal, **meaning)
    composite, composite_lse = reference.attention(
        query, key, value, causal=causal, compute_dtype=query.dtype, **meaning
    )
    check_against_oracle("out", out, exact, composite)
    check_against_oracle("lse", lse, exact_lse, composite_lse)


def inputs(
    head_dim: int, dtype: torch.dtype, rows: int, keys: int, heads: tuple[int, int] = (2, 1), batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    shapes = ((heads[0], rows), (heads[1], keys), (heads[1], keys))
    query, key, value = (torch.randn(batch, *shape, head_dim, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


@pytest.mark.quick
def test_every_instance_file_is_known() -> None:
    expected = {f"d{d}_{dtype}_{mask}" for d in TILES for dtype in ("f16", "bf16") for mask in ("causal", "full")}
    assert {file.stem.removeprefix("forward_").removesuffix("_sm80") for file in INSTANCES.glob("*.cu")} == expected


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (77, 131), (257, 67), (128, 192), (33, 0)])
def test_shapes(head_dim: int, dtype: torch.dtype, causal: bool, rows: int, keys: int) -> None:
    check(*inputs(head_dim, dtype, rows, keys), causal, seed=rows)


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("seed", range(4))
def test_order_of_warps_and_copies_has_no_influence(head_dim: int, seed: int) -> None:
    query, key, value = inputs(head_dim, torch.bfloat16, 200, 300)
    first = run(query, key, value, True, seed=100)
    again = run(query, key, value, True, seed=seed, uninitialised=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("rows_and_keys", [(150, 70), (70, 150)])
def test_top_left(head_dim: int, rows_and_keys: tuple[int, int]) -> None:
    check(*inputs(head_dim, torch.bfloat16, *rows_and_keys), True, top_left=True)


def test_grouped_heads_and_strides() -> None:
    """Rows of heads side by side, as a projection leaves them, in a buffer whose rest is NaN."""
    query, key, value = inputs(64, torch.float16, 90, 110, heads=(6, 2), batch=2)

    def interleaved(tensor: Tensor) -> Tensor:
        batch, heads, rows, head_dim = tensor.shape
        buffer = torch.full((batch, rows, heads + 1, head_dim), torch.nan, dtype=tensor.dtype)
        buffer[:, :, :heads] = tensor.transpose(1, 2)
        return buffer[:, :, :heads].transpose(1, 2)

    check(interleaved(query), interleaved(key), interleaved(value), True)


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_masked_keys_have_no_influence(head_dim: int, dtype: torch.dtype) -> None:
    """NaN and infinity in keys and values that no query, or only the later ones, see."""
    query, key, value = inputs(head_dim, dtype, 100, 100)
    key[:, :, 60], value[:, :, 61], value[:, :, 62] = torch.nan, torch.nan, torch.inf
    check(query, key, value, True, top_left=True)
    check(query[:, :, :50], key, value, True, top_left=True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 4.0])
def test_scales(scale: float) -> None:
    check(*inputs(64, torch.float16, 70, 90), False, scale=scale)


def test_one_dominant_key() -> None:
    query, key, value = inputs(128, torch.bfloat16, 64, 200)
    key[:, :, 150] = 8 * query[:, :1, 0]
    check(query, key, value, False)


@pytest.mark.parametrize(
    ("instruction", "instead"),
    [(r"cp\.async\.wait_group\s+0;", "cp.async.wait_group 1;"), (r"bar\.sync\s+0;", "")],
    ids=["waits for one group less", "no barrier"],
)
def test_a_fault_planted_in_the_kernel_is_found(
    instruction: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race detector names it at every seed; without it, the result is wrong at one of a few."""
    source = INSTANCES / "forward_d64_bf16_full_sm80.cu"
    faulty, count = re.subn(instruction, instead, compile_all([source], "compute_80", [CSRC])[0])
    assert count > 0
    monkeypatch.setitem(modules(), "d64_bf16_full", Module(faulty))
    problem = inputs(64, torch.bfloat16, 128, 320)
    for seed in range(3):
        with pytest.raises(EmulatorError, match=r"cp_async\.cuh:\d+") as caught:
            check(*problem, False, seed=seed)
        assert caught.value.kind == "race"
    with pytest.raises(AssertionError):
        for seed in range(6):
            check(*problem, False, seed=seed, races=False)
