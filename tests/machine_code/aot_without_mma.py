"""Lists what the kernels without matrix instructions compile to: those around flash-decoding and the int8 matmul."""

from __future__ import annotations

from typing import Any

from aot import Build, each
from aot_decode import SHARED_MEMORY, STRIDES, cache_types
from fastattn.triton_kernels.decode_append import BLOCK_T, append_kernel
from fastattn.triton_kernels.decode_combine import COMBINE_SPLITS, combine_kernel
from fastattn.triton_kernels.decode_dequantize import dequantize_kernel
from fastattn.triton_kernels.int8_matmul import MERGE_BLOCK, merge_kernel
from fastattn.triton_kernels.merge_attention import merge_attention_kernel, merge_constexprs
from fastattn.triton_kernels.merge_attention_backward import merge_attention_backward_kernel
from fastattn.triton_kernels.tiles import ceil_div


def append_build(arch: int, dtype: str, cache: str, dim: int = 128) -> Build:
    types: dict[str, Any] = cache_types(dtype, cache, True, True) | {
        **each(f"*{dtype}:16", "k_new v_new"),
        **each(STRIDES, "k_new_strides v_new_strides"),
    }
    constexprs = {
        **each(dim, "HEAD_DIM VALUE_DIM D_PAD DV_PAD ROTARY_DIM"),
        "INTERLEAVED": True,
        "PAGE_SIZE": 16,
        "QUANTISED": cache != "16bit",
        "IS_FP8": cache == "fp8",
        "K_GIVEN": False,
        "V_GIVEN": cache == "fp8",
        "BLOCK_T": BLOCK_T,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
    name = f"append-sm{arch}-{dtype}-{cache}-d{dim}"
    return Build(name, append_kernel, arch, types, constexprs, SHARED_MEMORY[arch])


def dequantize_build(arch: int, dtype: str, cache: str, dim: int = 128) -> Build:
    types: dict[str, Any] = cache_types(dtype, cache, True, False) | {
        "seqlens": "*i32:16",
        **each(f"*{dtype}:16", "k_out v_out"),
        "max_pages": "i32",
    }
    constexprs = {
        **each(dim, "HEAD_DIM VALUE_DIM D_PAD DV_PAD"),
        "PAGE_SIZE": 16,
        "IS_FP8": cache == "fp8",
        "BLOCK_T": BLOCK_T,
        "num_warps": 4,
    }
    name = f"dequantize-sm{arch}-{dtype}-{cache}-d{dim}"
    return Build(name, dequantize_kernel, arch, types, constexprs, SHARED_MEMORY[arch])


def combine_build(arch: int, dtype: str, dim: int = 128) -> Build:
    types: dict[str, Any] = {
        **each("*fp32:16", "partial_out partial_lse sinks lse"),
        "out": f"*{dtype}:16",
        "out_strides": STRIDES,
        **each("i32", "num_splits num_rows num_heads num_queries"),
    }
    constexprs = {
        **each(dim, "VALUE_DIM DV_PAD"),
        "HAS_SINK": True,
        "COMBINE_SPLITS": COMBINE_SPLITS,
        "num_warps": ceil_div(dim, 256),
        "enable_fp_fusion": True,
    }
    return Build(f"combine-sm{arch}-{dtype}-d{dim}", combine_kernel, arch, types, constexprs, SHARED_MEMORY[arch])


def merge_build(arch: int, dtype: str) -> Build:
    types: dict[str, Any] = {
        **each("*fp32:16", "partial scale"),
        **each(f"*{dtype}:16", "bias residual out"),
        **each("i32:16", "residual_stride N"),
        **each("i32", "scale_stride M num_splits"),
    }
    constexprs = {
        **each(True, "HAS_SCALE HAS_BIAS HAS_RESIDUAL"),
        "ACTIVATION": "gelu",
        "BLOCK": MERGE_BLOCK,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return Build(f"int8-merge-sm{arch}-{dtype}", merge_kernel, arch, types, constexprs, SHARED_MEMORY[arch])


def merge_attention_build(arch: int, dtype: str, dim: int = 128, gradients: bool = False) -> Build:
    """Returns a merge of float32 sums with a block of ``dtype``, all dense."""
    kernel = merge_attention_backward_kernel if gradients else merge_attention_kernel
    types: dict[str, Any] = {"num_rows": "i32", "num_heads": "i32"}
    constexprs = merge_constexprs(dim)
    for name in kernel.arg_names:
        if name.endswith("_strides"):
            types[name] = ("i32", "i32", "1") if "lse" in name else ("i32:16", "i32:16", "i32:16", "1")
        elif name not in types and name not in constexprs:
            types[name] = f"*{dtype}:16" if name.endswith("out_b") else "*fp32:16"
    name = f"merge-attention-{'backward-' if gradients else ''}sm{arch}-{dtype}-d{dim}"
    return Build(name, kernel, arch, types, constexprs, SHARED_MEMORY[arch])


def builds() -> list[Build]:
    found = []
    for arch, dtype in ((80, "fp16"), (90, "bf16"), (100, "bf16")):
        found += [append_build(arch, dtype, cache) for cache in ("16bit", "int8", "fp8")]
        found += [dequantize_build(arch, dtype, cache) for cache in ("int8", "fp8")]
        found += [combine_build(arch, dtype), merge_build(arch, dtype)]
        found += [merge_attention_build(arch, dtype, gradients=gradients) for gradients in (False, True)]
    found += [append_build(90, "bf16", "int8", 512), dequantize_build(80, "fp16", "fp8", 512)]
    found += [merge_attention_build(90, "fp32", 1000, gradients) for gradients in (False, True)]
    return [*found, combine_build(80, "bf16", 512)]
