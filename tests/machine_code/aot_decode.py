"""Lists what flash-decoding compiles to: every tile shape, cache format and feature that changes the main loop."""

from __future__ import annotations

from typing import Any

from aot import Build, each
from fastattn.triton_kernels import tiles
from fastattn.triton_kernels.decode import split_kernel

KB = 1024
SHARED_MEMORY = {80: 163 * KB, 86: 99 * KB, 90: 227 * KB, 100: 227 * KB}
STRIDES = ("i32", "i32", "i32")
ONES = "num_queries num_splits num_kv_heads num_new num_pages num_positions rotary_stride capacity"
# All features at once need most registers. 8-bit caches and pages, which change the loads, are separate.
FEATURES = {"softcap": True, "alibi": True, "sinks": True, "rotary_dim": 64, "split": False, "rows_differ": True}


def cache_types(dtype: str, cache_format: str, paged: bool, rotary: bool) -> dict[str, Any]:
    """Returns the types of the append and split kernels' common arguments. Formats: "16bit", "int8", "fp8"."""
    cache = {"16bit": f"*{dtype}:16", "int8": "*i8:16", "fp8": "*u8:16"}[cache_format]
    scale = "none" if cache_format == "16bit" else "*fp32:16"
    table = f"*{dtype}:16" if rotary else "none"
    return {
        **each(cache, "k_cache v_cache"),
        **each(scale, "k_scale v_scale"),
        **each(STRIDES, "k_strides v_strides k_scale_strides v_scale_strides"),
        "cache_seqlens": "*i32:16",
        "block_table": "*i32:16" if paged else "none",
        **each(table, "rotary_cos rotary_sin"),
        **each("i32", "table_stride page_stride num_pages rotary_stride num_positions capacity num_new num_kv_heads"),
    }


def split_build(
    arch: int,
    dtype: str,
    dims: tuple[int, int],
    rows: int,
    *,
    page_size: int = 0,
    cache: str = "16bit",
    rows_differ: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    tree: bool = False,
    rotary_dim: int = 0,
    split: bool = True,
    ones: str = "",
) -> Build:
    """Returns a build of the split kernel. ``ones`` names integers that are 1, which Triton makes constants."""
    tile = tiles.decode_tile(*dims, rows, 2 if cache == "16bit" else 1, SHARED_MEMORY[arch], page_size)
    types: dict[str, Any] = cache_types(dtype, cache, page_size > 0, rotary_dim > 0) | {
        "query": f"*{dtype}:16",
        "q_strides": STRIDES,
        "alibi_slopes": "*fp32:16" if alibi else "none",
        "sinks": "*fp32:16" if sinks else "none",
        "tree_mask": "*u8" if tree else "none",
        "tree_strides": STRIDES,
        "out": "*fp32:16" if split else f"*{dtype}:16",
        "lse": "*fp32:16",
        **each(("i32", *STRIDES), "out_strides lse_strides"),
        **each("fp32", "inner_scale softcap"),
        **each("i32", "alibi_batch_stride window_left window_right num_queries num_splits blocks_per_split"),
    }
    constexprs = {
        "GROUP": 8,
        "HEAD_DIM": dims[0],
        "VALUE_DIM": dims[1],
        "D_PAD": tiles.padded_head_dim(dims[0]),
        "DV_PAD": tiles.padded_head_dim(dims[1]),
        "ROTARY_DIM": rotary_dim,
        "INTERLEAVED": False,
        "PAGE_SIZE": page_size,
        "QUANTISED": cache != "16bit",
        "IS_FP8": cache == "fp8",
        "HAS_SOFTCAP": softcap,
        "HAS_ALIBI": alibi,
        "HAS_SINK": sinks,
        "ROWS_DIFFER": rows_differ,
        "SPLIT": split,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
    types = {name: kind for name, kind in types.items() if name not in ones.split()}
    constexprs |= each(1, ones)
    kind = "ones" if ones else "features" if softcap else "tree" if tree else "rows-differ" if rows_differ else "plain"
    pages = f"-page{page_size}" if page_size else ""
    name = f"decode-sm{arch}-{dtype}-d{dims[0]}x{dims[1]}-rows{rows}-{cache}{pages}-{kind}"
    return Build(name, split_kernel, arch, types, constexprs, SHARED_MEMORY[arch] // tile.ctas_per_sm)


def builds() -> list[Build]:
    """Returns both row tiles and every width for sm_80 and sm_90, whose tiles sm_100 uses too, and the costliest
    features once per tile."""
    found = [split_build(100, "bf16", (256, 256), 32, **FEATURES), split_build(100, "fp16", (128, 128), 16)]
    found.append(split_build(100, "bf16", (128, 128), 16, page_size=64, cache="int8"))
    for arch in (80, 90):
        for dtype, other, rows in (("fp16", "bf16", 16), ("bf16", "fp16", 32)):
            for dim in (64, 128, 256):
                found.append(split_build(arch, dtype, (dim, dim), rows))
                if arch == 90 or dim == 128:
                    found.append(split_build(arch, other, (dim, dim), rows, **FEATURES))
            found.append(split_build(arch, dtype, (128, 128), rows, page_size=16, rows_differ=True))
            found.append(split_build(arch, other, (128, 128), rows, page_size=64, cache="int8"))
            found.append(split_build(arch, dtype, (128, 128), rows, cache="fp8"))
        for cache in ("int8", "fp8"):
            found.append(split_build(arch, "fp16", (256, 256), 32, page_size=16, cache=cache, rows_differ=True))
    found.append(split_build(90, "bf16", (128, 128), 32, page_size=16, rows_differ=True, tree=True))
    found.append(split_build(80, "bf16", (72, 40), 16))
    for arch, dtype, rows in ((80, "bf16", 32), (86, "fp16", 16), (90, "bf16", 16)):
        found.append(split_build(arch, dtype, (512, 512), rows, page_size=16, rows_differ=True))
    found.append(split_build(86, "bf16", (512, 512), 32, **FEATURES))
    found.append(split_build(80, "bf16", (512, 512), 32, page_size=16, cache="int8"))
    found.append(split_build(90, "bf16", (64, 64), 8, rotary_dim=64, page_size=16, ones=ONES))
    # sm_86, sm_89 and sm_120 have 99 KB of shared memory.
    found += [split_build(86, "bf16", (dim, dim), 32, rows_differ=True) for dim in (128, 256)]
    found.append(split_build(86, "fp16", (256, 256), 32, page_size=16, cache="int8"))
    return found
