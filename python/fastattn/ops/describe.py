"""Describes the operations to the dispatcher: what their calls need, and which kernels would run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import native
from fastattn.activations import GATED
from fastattn.call import AppendCall, AttentionCall, DecodeCall, Int8Call
from fastattn.checks import mapped_size, needs_gradient
from fastattn.dispatch.device import DeviceFacts
from fastattn.dispatch.reasons import only_torch_handles, words_for
from fastattn.dispatch.request import Op, Request
from fastattn.dispatch.support import CHANGES_SCORES, FEATURE_OF_CACHE, FEATURES

# --- attention --------------------------------------------------------------------------------------------------------


class AttentionDetails(NamedTuple):
    """Holds the sizes of an attention call. ``may_decode`` says that a call with few queries and the features of
    decoding may run on the decoding kernel."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    may_decode: bool = True


def _attention_kernel(backend: str, request: Request, gpu: DeviceFacts) -> tuple[str, Any]:
    if backend == "triton":
        from fastattn.triton_kernels import tiles

        return tiles.describe_attention(gpu, request.head_dim, request.value_dim, request.features)
    name = native.attention_forward_kernel(
        gpu.arch,
        gpu.shared_memory_bytes,
        int(request.head_dim),  # a tracer's symbol becomes a number
        int(request.value_dim),
        request.dtype,
        changes_scores=not request.features.isdisjoint(CHANGES_SCORES),
        paged="paged" in request.features,
    )
    return _with_tile(name, request)


def _with_tile(kernel: str | None, request: Request) -> tuple[str, Any]:
    """Returns ``kernel`` and its tile. Raises RuntimeError if it is None: the library was built without it."""
    if kernel is None:
        raise RuntimeError(
            f"fastattn's library was built without its {request.op.name} kernel for {request.dtype} and head dims "
            f"{request.head_dim} and {request.value_dim}; build it with all kernels (in a clone, `make install`)"
        )
    return kernel, native.KERNELS.get(kernel)


# Few queries over many keys go to the decoding kernel, which splits the keys among CTAs. The attention kernels have
# tiles of 128 rows of queries, so they would launch few CTAs that each loop over all keys. The limits 16 and 1024 are
# guesses: speculative decoding has up to 16 queries, and 1024 keys are enough to split.
_FEW_QUERIES = 16
_MANY_KEYS = 1024
_MOST_KEYS = 2**30  # for the decoding kernel, so that sums of positions stay within 32 bits
_ATTENTION_FEATURES = frozenset(FEATURES["attention"])  # torch 2.11's dynamo cannot intersect a set with keys()
_DECODED = _ATTENTION_FEATURES & frozenset(FEATURES["decode"])


def _decoded(request: Request) -> Request | None:
    """Turns attention with few queries over many keys into a request for decoding; returns None for other calls."""
    sizes: AttentionDetails = request.details
    if not sizes.may_decode or not request.features <= _DECODED:
        return None
    conditions = (
        sizes.batch > 0,
        sizes.heads > 0,
        sizes.queries > 0,
        sizes.queries <= _FEW_QUERIES,
        sizes.keys >= _MANY_KEYS,
        sizes.keys < _MOST_KEYS,
    )
    if not (_hold_in_graph(conditions) if torch.compiler.is_compiling() else all(conditions)):
        return None
    rows = sizes.queries * (sizes.heads // sizes.kv_heads)
    return request._replace(op=DECODE, details=DecodeDetails(rows, request.dtype.itemsize))


def _hold_in_graph(conditions: tuple[Any, ...]) -> bool:
    """Returns whether all conditions on sizes hold in the graph that PyTorch is tracing.

    torch.compile adds a guard for each condition, and traces another graph for sizes that fail a guard. An exported
    program is one graph for all sizes that it takes, so here a condition must hold for all these sizes. (Before torch
    2.13 every graph looks like an exported one.)
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    for condition in conditions:
        if not (statically_known_true(condition) if torch.compiler.is_exporting() else guard_or_false(condition)):
            return False
    return True


ATTENTION = Op("attention", _attention_kernel, instead=_decoded, has_torch_sdpa=True)


def describe_attention(call: AttentionCall) -> Request:
    """Returns the request for a checked call."""
    query, key, value, bias, slopes = call[:5]
    needs_grad = torch.is_grad_enabled() and any(map(needs_gradient, call[:6]))
    is_paged, (left, right) = call.block_table is not None, call.window
    if call.cu_seqlens_q is None:
        batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    else:
        batch, queries, keys = call.cu_seqlens_q.shape[0] - 1, call.max_seqlen_q, call.max_seqlen_k
    heads, kv_heads = query.shape[1], key.shape[1]
    uses = {
        "causal": right == 0,  # by ``causal``, or by a window that means the same
        "window": left >= 0 or right > 0,
        "softcap": call.softcap > 0,
        "dropout": call.dropout_p > 0,
        "mask": bias is not None and bias.dtype == torch.bool,
        "bias": bias is not None and bias.dtype != torch.bool,
        "alibi": slopes is not None,
        "sinks": call.sinks is not None,
        "gradients": needs_grad,
        "bias gradients": needs_grad and needs_gradient(bias),
        "slope gradients": needs_grad and needs_gradient(slopes),
        "gqa": heads != kv_heads,
        "value dim": value.shape[-1] != query.shape[-1],
        "key ranges": call.key_ranges is not None,
        "paged key ranges": call.key_ranges is not None and is_paged,
        "max logit": call.return_max_logit,
        "varlen": call.is_packed,
        "paged": is_paged,
        "paged gradients": is_paged and needs_grad,
    }
    may_decode = not call.exact_out and not torch._C._are_functorch_transforms_active()
    details = AttentionDetails(batch, heads, kv_heads, queries, keys, may_decode)
    return request_for_attention(query, value, uses, details, only_torch_handles(*call.tensors))


def request_for_attention(
    query: Tensor,
    value: Tensor,
    uses: Mapping[str, bool] | None = None,
    details: AttentionDetails | None = None,
    only_torch: str | None = None,
) -> Request:
    """Returns the request for attention that ``uses`` some features. Without ``details`` only PyTorch can take it."""
    dims = (query.shape[-1], value.shape[-1]) if details is not None else (0, 0)
    return Request(ATTENTION, query.device, query.dtype, _used(uses or {}), *dims, details, only_torch)


def _used(uses: Mapping[str, bool]) -> frozenset[str]:
    return frozenset([feature for feature, used in uses.items() if used])


# --- decoding ---------------------------------------------------------------------------------------------------------

# A call over a cache goes to the attention kernel if it has more than MOST_DECODED_QUERIES queries per sequence, which
# fill that kernel's tiles. Over an 8-bit cache, a KV head must also have more than MOST_DECODED_ROWS_OF_8_BITS rows.
# The attention kernel needs a 16-bit copy of the cache, made once per call, whereas the decoding kernel reads the 8-bit
# keys again for every 32 rows. Both limits are guesses, not measured on a GPU.
MOST_DECODED_QUERIES = 64
MOST_DECODED_ROWS_OF_8_BITS = 256


class DecodeDetails(NamedTuple):
    """Holds the sizes of decoding: rows of a KV head (queries times its query heads), bytes of a cached element, and
    the page size, or 0 for a contiguous cache. ``may_prefill`` says that the attention kernel should run the call."""

    rows: int
    itemsize: int
    page_size: int = 0
    may_prefill: bool = False


def _decode_kernel(backend: str, request: Request, gpu: DeviceFacts) -> tuple[str, Any]:
    sizes: DecodeDetails = request.details
    if backend == "triton":
        from fastattn.triton_kernels import tiles

        shape = request.head_dim, request.value_dim, sizes.rows, sizes.itemsize
        tile = tiles.decode_tile(*shape, gpu.shared_memory_bytes, sizes.page_size)
        return "decode.split_kernel", tile
    widest = max(int(request.head_dim), int(request.value_dim))
    cache, shared_bytes = _cache_format(request.features), gpu.shared_memory_bytes
    name = native.decode_kernel(gpu.arch, shared_bytes, widest, request.dtype, cache, int(sizes.rows))
    return _with_tile(name, request)


def _cache_format(features: frozenset[str]) -> str:
    """Returns the member of ``native.CACHE_FORMATS`` that the features name."""
    return next((name for name in native.CACHE_FORMATS if f"{name} cache" in features), "16-bit")


def _prefilled(request: Request) -> Request | None:
    """Turns decoding with many queries into a request for attention over pages; returns None for other calls."""
    if not request.details.may_prefill:
        return None
    return request._replace(op=ATTENTION, features=request.features & _ATTENTION_FEATURES | {"varlen", "paged"})


DECODE = Op("decode", _decode_kernel, instead=_prefilled, has_torch_sdpa=True)


def describe_decode(call: DecodeCall) -> Request:
    """Returns the request for a checked call."""
    (batch, heads, queries, head_dim), kv_heads = call.query.shape, call.k_cache.shape[1]
    value_dim, (left, right) = call.v_cache.shape[-1], call.window
    cache = FEATURE_OF_CACHE.get(call.k_cache.dtype)
    uses = {
        "causal": right == 0 and queries > 1,
        "window": left >= 0 or right > 0,
        "tree mask": call.tree_mask is not None,
        "append": call.k_new is not None,
        "rotary": call.rotary_cos is not None,
        "paged": call.block_table is not None,
        "softcap": call.softcap > 0,
        "alibi": call.alibi_slopes is not None,
        "sinks": call.sinks is not None,
        "gqa": heads != kv_heads,
        "value dim": value_dim != head_dim,
        cache or "": cache is not None,
    }
    rows = queries * (heads // kv_heads if kv_heads else 1)
    may_prefill = (
        queries > MOST_DECODED_QUERIES
        and (cache is None or (kv_heads > 0 and rows > MOST_DECODED_ROWS_OF_8_BITS))
        and call.num_splits == 0
        and call.tree_mask is None
        and 0 < batch * call.capacity < 2**31
    )
    page_size = 0 if call.block_table is None else call.k_cache.shape[2]
    details = DecodeDetails(rows, call.k_cache.element_size(), page_size, may_prefill)
    query, dims = call.query, (head_dim, value_dim)
    return Request(DECODE, query.device, query.dtype, _used(uses), *dims, details, only_torch_handles(*call.tensors))


def _append_kernel(backend: str, request: Request, gpu: DeviceFacts) -> tuple[str, Any]:
    if backend == "triton":
        return "decode_append.append_to_slots_kernel", None
    widest = max(int(request.head_dim), int(request.value_dim))
    return _with_tile(native.append_kernel(gpu.arch, widest, request.dtype, _cache_format(request.features)), request)


APPEND = Op("append", _append_kernel)


def describe_append(call: AppendCall) -> Request:
    """Returns the request for a checked call."""
    new, dims = call.k_new, (call.k_new.shape[-1], call.v_new.shape[-1])
    cache = FEATURE_OF_CACHE.get(call.k_cache.dtype)
    uses = {"value dim": dims[0] != dims[1], cache or "": cache is not None}
    return Request(APPEND, new.device, new.dtype, _used(uses), *dims, only_torch=only_torch_handles(*call))


MERGE = Op("merge", lambda backend, request, gpu: ("merge_attention.merge_attention_kernel", None))


def describe_merge(*tensors: Tensor) -> Request:
    """Returns the request for a merge of attention results, dense or packed."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else tensors[0].dtype
    needs_grad = torch.is_grad_enabled() and any(map(needs_gradient, tensors))
    uses = {"gradients": needs_grad, "varlen": tensors[0].dim() == 3}
    return Request(MERGE, tensors[0].device, dtype, _used(uses), only_torch=only_torch_handles(*tensors))


# --- int8 matmul ------------------------------------------------------------------------------------------------------


class Int8Details(NamedTuple):
    """Holds the M, N and K of a matmul (``tokens``, ``outputs``, ``depth``), and the group size of its scales, or 0.
    If ``is_input_gradient``, the matmul is ``grad_out @ weight``: its N is then the K of the forward matmul."""

    tokens: int
    outputs: int
    depth: int
    group: int = 0
    is_input_gradient: bool = False


def _int8_kernel(backend: str, request: Request, gpu: DeviceFacts) -> tuple[str, Any]:
    sizes: Int8Details = request.details
    shape = tuple(map(int, sizes[:3]))
    if backend == "triton":
        from fastattn.triton_kernels import tiles

        name = f"int8_matmul.{'grad_input' if sizes.is_input_gradient else 'forward'}_kernel"
        return name, tiles.int8_matmul_tile(gpu.arch, *shape, sizes.group, gpu.shared_memory_bytes, gpu.num_sms)
    features = request.features
    op = "int8_matmul_s8" if "int8 activations" in features else "int8_matmul"
    # With gradients, PyTorch applies activation and residual, so only a bias counts as an epilogue.
    follows = {"bias"} if "gradients" in features else {"bias", "residual", "activation", *GATED}
    has_epilogue = not features.isdisjoint(follows)
    if sizes.is_input_gradient:
        op, has_epilogue = "int8_matmul_grad_input", False
    product = native.Int8Product(op, request.dtype, "group scales" in features, has_epilogue, *shape)
    return _with_tile(native.int8_matmul_kernel(product, gpu.arch, gpu.num_sms), request)


# The features that the CUDA C++ kernels for int8 activations have.
_INT8_ACTIVATIONS_GO_WITH = frozenset({"gradients", "group scales", "bias", "activation", "residual"})
_MAX_INT32 = 2**31 - 1
_IN_16_BITS = 'pass input_precision="16bit"'


def _int8_refusal(backend: str, request: Request, gpu: DeviceFacts) -> str | None:
    """Returns why the CUDA C++ kernels refuse the sizes, or the features of a call with int8 activations, or None."""
    if backend != "cuda":
        return None
    tokens, rows, columns, *_ = request.details
    if not torch.compiler.is_compiling() and max(tokens, rows, columns) > _MAX_INT32:
        return (
            f"x has {tokens} rows and the weight is [{rows}, {columns}], and the CUDA C++ kernels take sizes below "
            "2^31; call int8_linear for part of the rows of x or of the weight at a time."
        )
    if "int8 activations" not in request.features:
        return None
    others = request.features - _INT8_ACTIVATIONS_GO_WITH - {"int8 activations"}
    if others:
        missing = words_for(request.op.name, others)
        return f"the CUDA C++ kernel for int8 activations does not have: {missing}; {_IN_16_BITS}."
    if rows % 8 != 0 or columns % 16 != 0:
        return (
            f"the weight is [{rows}, {columns}], and the CUDA C++ kernel for int8 activations needs [N, K] with N a "
            f"multiple of 8 and K a multiple of 16; pad the weight with zeros, or {_IN_16_BITS}."
        )
    if columns > native.INT8_SUM_DEPTH:
        most = native.INT8_SUM_DEPTH
        return f"K is {columns}, and sums of int8 products fit in int32 only up to K = {most}; {_IN_16_BITS}."
    if not torch.compiler.is_compiling():  # else sizes may be symbols, and only the C++ operator checks
        op, has_groups, sizes = "int8_matmul_s8", "group scales" in request.features, (tokens, rows, columns)
        product = native.Int8Product(op, request.dtype, has_groups, False, *sizes)
        kernel = native.int8_matmul_kernel(product, gpu.arch, gpu.num_sms)
        if kernel is not None and "_sm90" in kernel:  # another kernel quantises tokens; no counter to overflow
            return None
        ctas = native.int8_matmul_schedule(op, gpu.arch, gpu.num_sms, has_groups, *sizes).ctas
        if tokens + 2 * ctas >= native.INT8_LAUNCH_COUNT:
            return (
                f"x has {tokens} rows and the weight {rows}, more than the CUDA C++ kernel for int8 activations can "
                "count in one launch; call int8_linear for fewer rows of x at a time."
            )
    return None


INT8_MATMUL = Op("int8_matmul", _int8_kernel, refusal=_int8_refusal)


def describe_int8(call: Int8Call) -> Request:
    """Returns the request for a checked call."""
    x, scale, (rows, columns) = call.x, call.scale, call.weight.shape
    needs_grad = torch.is_grad_enabled() and any(map(needs_gradient, (x, call.bias, call.residual)))
    groups = scale.shape[1]
    uses = {
        "gradients": needs_grad,
        "group scales": groups > 1,
        "bias": call.bias is not None,
        "residual": call.residual is not None,
        "activation": call.activation != "none" and call.activation not in GATED,
        "swiglu": call.activation in GATED,
        "int8 activations": call.int8_activations,
    }
    tokens = x.shape[:-1].numel() * mapped_size(*((x,) if needs_grad else (x, call.residual)))
    details = Int8Details(tokens, rows, columns, columns // groups if groups > 1 else 0)
    return request_for_int8(x, uses, details, only_torch_handles(*call[:5]))


def request_for_int8(
    like: Tensor, uses: Mapping[str, bool], details: Int8Details | None, only_torch: str | None
) -> Request:
    """Returns the request for a matmul that ``uses`` some features. Without ``details`` only PyTorch can take it."""
    return Request(INT8_MATMUL, like.device, like.dtype, _used(uses), details=details, only_torch=only_torch)
