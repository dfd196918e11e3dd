"""Lists what the int8 matmul compiles to: each tile, granularity and direction."""

from __future__ import annotations

from typing import Any

from aot import Build, each
from fastattn.triton_kernels import tiles
from fastattn.triton_kernels.int8_matmul import forward_kernel, grad_input_kernel

KB = 1024
SHARED_MEMORY = {80: 163 * KB, 86: 99 * KB, 90: 227 * KB, 100: 227 * KB}
NUM_SMS = 132
WIDTH = 4096  # outputs and columns of the weight
COMMON = {
    **each("i32", "M num_splits scale_stride"),
    **each("i32:16", "N K weight_stride"),
    "weight": "*i8:16",
    "scale": "*fp32:16",
}


def launch_options(tile: tiles.Int8MatmulTile) -> dict[str, Any]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}


def tile_of(arch: int, m: int, group: int) -> tuple[tiles.Int8MatmulTile, int]:
    """Returns the tile and its limit of shared memory: half of an SM's where two CTAs should share the SM."""
    tile = tiles.int8_matmul_tile(arch, m, WIDTH, WIDTH, group, SHARED_MEMORY[arch], NUM_SMS)
    return tile, SHARED_MEMORY[arch] // (1 if tile.block_m == 128 else 2)


def forward_build(arch: int, dtype: str, m: int, group: int, activation: str) -> Build:
    tile, limit = tile_of(arch, m, group)
    is_split = tile.split_k > 1
    types: dict[str, Any] = COMMON | {
        **each(f"*{dtype}:16", "x bias residual out"),
        **each("i32:16", "x_stride residual_stride"),
        "partial": "*fp32:16" if is_split else "none",
    }
    constexprs = {
        "GROUP": group,
        "HAS_SCALE": group == 0,
        **each(True, "HAS_BIAS HAS_RESIDUAL"),
        "ACTIVATION": activation,
        "SPLIT": is_split,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    } | launch_options(tile)
    name = f"int8-forward-sm{arch}-{dtype}-m{m}-group{group}-{activation}"
    return Build(name, forward_kernel, arch, types, constexprs, limit)


def grad_input_build(arch: int, dtype: str, m: int, group: int) -> Build:
    tile, limit = tile_of(arch, m, 0)
    types: dict[str, Any] = COMMON | {
        "grad_out": f"*{dtype}:16",
        "grad_out_stride": "i32:16",
        "largest_scale": "*fp32:16",
        "out": "*fp32:16" if tile.split_k > 1 else f"*{dtype}:16",
    }
    constexprs = {
        "GROUP": group,
        "PER_CHANNEL": True,
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_n,
        "BLOCK_N": tile.block_k,
    } | launch_options(tile)
    name = f"int8-grad-input-sm{arch}-{dtype}-m{m}-group{group}"
    return Build(name, grad_input_kernel, arch, types, constexprs, limit)


def builds() -> list[Build]:
    found = [forward_build(100, "fp16", 1, 0, "gelu"), forward_build(100, "bf16", 4096, 128, "none")]
    found.append(grad_input_build(100, "bf16", 4096, 0))
    for arch in (80, 86, 90):
        for m in (1, 32, 64, 4096):
            dtype, other = ("fp16", "bf16") if m in (1, 64) else ("bf16", "fp16")
            found.append(forward_build(arch, dtype, m, 0, "gelu"))
            if arch != 86 and m in (1, 4096):
                found.append(forward_build(arch, other, m, 32, "silu"))
                found.append(forward_build(arch, dtype, m, 128, "none"))
                found.append(forward_build(arch, other, m, 0, "swiglu"))
        found.append(grad_input_build(arch, "bf16", 4096, 0))
        if arch != 86:
            found.append(grad_input_build(arch, "fp16", 4096, 32))
            found.append(grad_input_build(arch, "fp16", 64, 128))
    return found
