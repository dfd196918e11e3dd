"""Lists what test_triton_compile.py compiles of the attention kernels: every tile, with few options and with many."""

from __future__ import annotations

from typing import Any

from aot import Build, each
from fastattn.triton_kernels.attention_backward_bias import attention_backward_bias_kernel
from fastattn.triton_kernels.attention_backward_key_value import attention_backward_key_value_kernel
from fastattn.triton_kernels.attention_backward_query import attention_backward_query_kernel
from fastattn.triton_kernels.attention_backward_rows import attention_backward_rows_kernel
from fastattn.triton_kernels.attention_backward_slopes import attention_backward_slopes_kernel
from fastattn.triton_kernels.attention_common import ADDITIVE_BIAS, BOOL_BIAS, NO_BIAS
from fastattn.triton_kernels.attention_forward import attention_forward_kernel
from fastattn.triton_kernels.attention_launch import LAUNCH_OPTIONS, attention_constexprs, is_crowded
from fastattn.triton_kernels.tiles import AttentionTile, attention_backward_tile, attention_forward_tile

KERNELS: dict[str, Any] = {
    "forward": attention_forward_kernel,
    "rows": attention_backward_rows_kernel,
    "query": attention_backward_query_kernel,
    "key_value": attention_backward_key_value_kernel,
    "bias": attention_backward_bias_kernel,
    "slopes": attention_backward_slopes_kernel,
}
MATRICES = ("query", "key", "value", "output", "grad_out", "grad_query", "grad_key", "grad_value")
ROWS = ("lse", "delta", "row_shift", "grad_lse", "grad_bias", "slope_sums")
FLOATS = ("scale", "softcap", "dropout_factor")

DEFAULTS: dict[str, Any] = {
    **each(False, "left right placed softcap alibi sinks dropout"),
    "ranges": 0,
    "bias": NO_BIAS.value,
}
CAUSAL = {**DEFAULTS, "right": True}
BOOL = {**DEFAULTS, "bias": BOOL_BIAS.value}
EVERYTHING = dict.fromkeys(DEFAULTS, True) | {"ranges": 0, "alibi": False, "placed": False, "bias": ADDITIVE_BIAS.value}
RANGES = {**DEFAULTS, "right": True, "ranges": 4}
ALIBI = {**DEFAULTS, "left": True, "right": True, "alibi": True, "dropout": True}
SLOPES = {**EVERYTHING, "alibi": True, "bias": NO_BIAS.value}


def tile_of(
    kernel: str, arch: int, head_dim: int, value_dim: int, options: dict[str, Any], page_size: int = 0
) -> AttentionTile:
    if kernel == "forward":
        return attention_forward_tile(
            arch, head_dim, value_dim, page_size > 0 or options["ranges"] > 0 or is_crowded(options)
        )
    which: Any = "query" if kernel in ("rows", "slopes") else kernel
    return attention_backward_tile(arch, head_dim, value_dim, which, is_crowded(options))


def smallest_user(kernel: str, arch: int, head_dim: int, options: dict[str, Any], page_size: int = 0) -> int:
    """Returns the architecture with the least shared memory that runs ``arch``'s code with the same tile."""
    arguments = head_dim, head_dim, options, page_size
    return 86 if arch == 80 and tile_of(kernel, 86, *arguments) == tile_of(kernel, 80, *arguments) else arch


def argument_types(
    kernel: Any, dtype: str, options: dict[str, Any], head_dim: int, page_size: int = 0
) -> dict[str, str]:
    """Returns the types of a dense call: aligned tensors, strides that are multiples of the head dim."""
    of_pages = "*i32:16" if page_size else "none"
    present = {
        "bias": {NO_BIAS.value: "none", BOOL_BIAS.value: "*u8:16", ADDITIVE_BIAS.value: f"*{dtype}:16"}[
            options["bias"]
        ],
        "row_log2_sum": "*fp32:16" if options["bias"] == ADDITIVE_BIAS.value else "none",
        "alibi_slopes": "*fp32:16" if options["alibi"] else "none",
        "sinks": "*fp32:16" if options["sinks"] else "none",
        "dropout_seed": "*i64:16" if options["dropout"] else "none",
        **each("*i32:16" if options["ranges"] else "none", "ranges tiles"),
        **each(of_pages, "cu_seqlens_q cu_seqlens_k block_table"),
        "max_logits": "none",
        "stride_bias_n": "i32",
    }
    types = {}
    for name in kernel.arg_names:
        if name in present:
            types[name] = present[name]
        elif name in MATRICES:
            types[name] = f"*{dtype}:16"
        elif name in ROWS:
            types[name] = "*fp32:16"
        elif name in FLOATS:
            types[name] = "fp32"
        elif name.startswith("stride") and head_dim % 16 == 0 and name not in kernel.do_not_specialize:
            types[name] = "i32:16"
        else:
            types[name] = "i32"
    return types


def build(
    kernel: str, arch: int, head_dim: int, options: dict[str, Any], dtype: str, target: int = 0, page_size: int = 0
) -> Build:
    """Returns the kernel as launched on ``arch``, or compiled for ``target``, which has the same instructions."""
    function = KERNELS[kernel]
    tile = tile_of(kernel, arch, head_dim, head_dim, options, page_size)
    constexprs = attention_constexprs(tile, head_dim, head_dim, **options)
    constexprs |= {
        "PAGE_SIZE": page_size,
        **each(True, "GRAD_LSE SUM_BATCHES"),
        **each(False, "NEGATE MAX_LOGIT SUM_HEADS SUM_ROWS SUM_COLUMNS"),
    }
    used = [name for name in function.arg_names if name in constexprs]
    named = ",".join(name for name, value in options.items() if value) or "plain"
    named += f",page_size={page_size}" if page_size else ""
    return Build(
        name=f"attention {kernel} sm_{arch} {dtype} d{head_dim} {named}",
        kernel=function,
        arch=target or arch,
        types=argument_types(function, dtype, options, head_dim, page_size),
        constexprs={name: constexprs[name] for name in (*used, *LAUNCH_OPTIONS)},
        shared_limit=_shared_memory_limit(smallest_user(kernel, arch, head_dim, options, page_size)),
    )


def _shared_memory_limit(arch: int) -> int:
    """Returns the bytes of shared memory that one block may use on a GPU (CUDA programming guide, table of technical
    specifications)."""
    return (163 if arch in (80, 87) else 227 if 90 <= arch < 120 else 99) * 1024


def builds() -> list[Build]:
    """Returns every tile of every architecture. The dtypes alternate, as they differ only in an instruction's suffix.
    For sm_100, many options are compiled with 128 dims only: the tiles are then those of sm_90."""
    found = []
    for arch in (80, 90, 100):
        for index, head_dim in enumerate((64, 128, 256)):
            for turn, options in enumerate((CAUSAL, EVERYTHING) if arch < 100 or head_dim == 128 else (CAUSAL,)):
                for kernel in KERNELS if options is EVERYTHING else ("forward", "query", "key_value"):
                    if kernel != "rows" or head_dim == 128:  # rows: the query kernel's tile, with much less work
                        of_kernel = SLOPES if kernel == "slopes" else options
                        found.append(build(kernel, arch, head_dim, of_kernel, ("fp16", "bf16")[(index + turn) % 2]))
    for head_dim, arch in ((64, 90), (128, 80)):
        for kernel in ("forward", "query", "key_value"):
            found.append(build(kernel, arch, head_dim, DEFAULTS, "bf16"))  # other values are in registers then
            if smallest_user(kernel, 80, head_dim, CAUSAL) != 86:  # the code is that of sm_80, the tile is not
                found.append(build(kernel, 86, head_dim, CAUSAL, "bf16", target=80))
    for arch, head_dim, options in ((80, 72, CAUSAL), (90, 40, EVERYTHING)):  # padded; strides are no multiples of 16
        found += [build(kernel, arch, head_dim, options, "bf16") for kernel in ("forward", "query", "key_value")]
    for head_dim in (64, 128, 256):
        found += [build("forward", arch, head_dim, CAUSAL, "bf16", page_size=16) for arch in (80, 90)]
    found += [build("forward", arch, 512, options, "bf16") for arch, options in ((80, EVERYTHING), (90, CAUSAL))]
    found += [
        build("forward", 86, 512, CAUSAL, "fp16", target=80),
        build("forward", 90, 512, CAUSAL, "fp16", page_size=16),
    ]
    found.append(build("forward", 90, 64, ALIBI, "bf16"))
    found.append(build("key_value", 90, 128, BOOL, "fp16"))
    for arch, head_dim in ((80, 64), (90, 128)):
        found += [build(kernel, arch, head_dim, RANGES, "bf16") for kernel in ("forward", "query", "key_value")]
    return found
