"""Counts the work of each fastattn kernel, from the arguments of the operator that launched it.

An operator launches one kernel or several. Recomputation counts as work (the backward kernels recompute the scores),
because a kernel is judged by what it executes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fastattn.profiler import work
from fastattn.profiler.kernel_names import base_name
from fastattn.profiler.operator_calls import OperatorCall
from fastattn.profiler.work import Work


def _pairs(call: OperatorCall) -> tuple[int, bool]:
    """Returns the number of query-key pairs over batch entries and query heads, and whether it is an upper bound."""
    query, key = call["query"].shape, call["key"].shape
    window = call.number("window_left"), call.number("window_right")
    offset = None if call["first_row"].text in ("", "None") else call.number("first_row") - call.number("first_key")
    if call["cu_seqlens_q"].is_tensor:  # the lengths are on the device: take the maximum for each
        longest_q, longest_k = call.number("max_seqlen_q"), call.number("max_seqlen_k")
        pairs = work.visible_pairs(longest_q, longest_k, *window, offset=offset)
        return query[1] * query[0] * pairs // max(longest_q, 1), True
    has_ranges = call["key_ranges"].is_tensor  # on the device, so the pairs are an upper bound
    return query[0] * query[1] * work.visible_pairs(query[2], key[2], *window, offset=offset), has_ranges


def _forward(call: OperatorCall) -> Work:
    pairs, is_upper_bound = _pairs(call)
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    if call["block_table"].is_tensor:  # count the pages that the sequences may use, not all pages
        batch, max_pages = call["block_table"].shape
        tokens = batch * min(max_pages * key[2], call.number("max_seqlen_k"))
        key, value = (tokens, key[1], key[3]), (tokens, value[1], value[3])
    result = work.attention_forward(query, key, value, call["query"].itemsize, pairs, call["bias"].nbytes)
    return result._replace(is_upper_bound=is_upper_bound)


def _backward_part(query_products: int, value_products: int, written: Sequence[str]) -> Callable[[OperatorCall], Work]:
    """Returns a function that counts the work of a backward kernel that writes the gradients ``written``. The kernel
    computes ``query_products`` matrix products with the query's head dim and ``value_products`` with the value's."""

    def part(call: OperatorCall) -> Work:
        pairs, is_upper_bound = _pairs(call)
        query_dim, value_dim = call["query"].shape[-1], call["value"].shape[-1]
        rows = math.prod(call["query"].shape[:-1])
        results = 3 * rows * work.LSE_BYTES  # the lse as two floats, and one float of rowsum(dO * O)
        gradients = sum(_gradient_bytes(call, name) for name in written)
        return Work(
            2 * pairs * (query_products * query_dim + value_products * value_dim),
            call.nbytes("query", "key", "value", "grad_out", "bias") + results + gradients,
            is_upper_bound,
        )

    return part


def _gradient_bytes(call: OperatorCall, name: str) -> int:
    """Counts the bytes of a gradient, which the kernel writes, or reads and writes if it adds to ``grad_…``."""
    return 2 * call[f"grad_{name}"].nbytes or call[name].nbytes


def _sums_bytes(call: OperatorCall) -> int:
    """Returns the bytes of the query's gradient while it is summed in float32."""
    return 4 * math.prod(call["query"].shape)


def _native_key_value(call: OperatorCall) -> Work:
    """Counts all five products, and one read and one write of the query gradient's float32 sums, the least possible."""
    products = _backward_part(3, 2, ("key", "value"))(call)
    return products._replace(bytes=products.bytes + 2 * _sums_bytes(call))


def _native_query(call: OperatorCall) -> Work:
    """Counts the kernel that rounds the query gradient's sums, or adds them to ``grad_query``."""
    return Work(0, _sums_bytes(call) + _gradient_bytes(call, "query"))


def _native_rows(call: OperatorCall) -> Work:
    """Counts rowsum(dO * O), and zeros written for the query gradient's sums. Does not count the scores near finfo.min
    that the kernel recomputes, because the host does not know how many there are."""
    rows, value_dim = math.prod(call["query"].shape[:-1]), call["value"].shape[-1]
    read = call.nbytes("grad_out", "out", "lse", "grad_lse")
    return Work(2 * rows * value_dim, read + 2 * rows * work.LSE_BYTES + _sums_bytes(call))


def _backward_rows(call: OperatorCall) -> Work:
    """Counts the work of recomputing the scores, and of writing the lse (two floats a row) and rowsum(dO * O)."""
    pairs, is_upper_bound = _pairs(call)
    rows, value_dim = math.prod(call["query"].shape[:-1]), call["value"].shape[-1]
    read = call.nbytes("grad_out", "out", "query", "key", "lse", "grad_lse", "bias")
    flops = 2 * pairs * call["query"].shape[-1] + 2 * rows * value_dim
    return Work(flops, read + 3 * rows * work.LSE_BYTES, is_upper_bound)


def _decode(call: OperatorCall) -> Work:
    """Counts as if every sequence filled its cache, because the lengths are on the device."""
    query, cache = call["query"].shape, call["k_cache"].shape
    table = call["block_table"]
    tokens = math.prod(table.shape) * cache[2] if table.is_tensor else cache[0] * cache[2]
    result = work.attention_decode(
        query,
        cache[1],
        call["v_cache"].shape[-1],
        tokens,
        call["query"].itemsize,
        call["k_cache"].itemsize,
        len(call["k_scale"].shape) == 3,
    )
    return result._replace(is_upper_bound=True)


def _split_keys(call: OperatorCall) -> Work:
    query, key, itemsize = call["query"].shape, call["key"].shape, call["query"].itemsize
    result = work.attention_decode(query, key[1], call["value"].shape[-1], key[0] * key[2], itemsize, itemsize, False)
    has_window = call.number("window_left") >= 0 or call.number("window_right") > 0
    return result._replace(is_upper_bound=has_window)


def _append(call: OperatorCall) -> Work:
    new = [call[name] for name in ("k_new", "v_new") if call[name].is_tensor]
    written = sum(math.prod(each.shape) for each in new) * call["k_cache"].itemsize
    return Work(0, call.nbytes("k_new", "v_new") + written)


def _dequantise(call: OperatorCall) -> Work:
    """Counts as if every sequence filled its cache, because the lengths are on the device."""
    read = sum(math.prod(call[name].shape) * call["k_cache"].itemsize for name in ("k_out", "v_out"))
    return Work(0, call.nbytes("k_out", "v_out") + read, is_upper_bound=True)


def _decode_with_append(call: OperatorCall) -> Work:
    """Counts the kernel that appends new tokens to the cache and attends over it."""
    decode, append = _decode(call), _append(call)
    return decode._replace(bytes=decode.bytes + append.bytes)


def _int8(call: OperatorCall) -> Work:
    """Counts the matmul. The profiler keeps no strings, so only a residual with half the columns tells of SwiGLU."""
    x = call["x"] if call["x"].is_tensor else call["grad_out"]
    n, k = call["weight"].shape
    extra = [call[name].shape for name in ("bias", "residual") if call[name].is_tensor]
    scales = math.prod(call["scale"].shape)
    columns = call["residual"].shape[-1] if call["residual"].is_tensor else None
    return work.int8_matmul(math.prod(x.shape[:-1]), n, k, x.itemsize, scales, sum(map(math.prod, extra)), columns)


def _merge(call: OperatorCall) -> Work:
    """Counts reads of the merged tensors, and writes of output and lse in float32."""
    return Work(0, call.nbytes() + 4 * math.prod(call["out_a"].shape) + 4 * math.prod(call["lse_a"].shape))


# Substring of a kernel's name → the function that counts its work, or None if the operator's arguments do not determine
# the work. The first match counts.
_WorkOf: TypeAlias = dict[str, Callable[[OperatorCall], Work] | None]

_DECODING: _WorkOf = {
    "decode_split": _decode_with_append,
    "append": _append,
    "split": _decode,
    "combine": None,
}
# Kernels that list the tiles that key ranges leave, or fill rows outside of sequences: only the device knows how many.
_UNCOUNTED: _WorkOf = dict.fromkeys(("key_ranges", "backward_ranges", "tile_states", "list_tiles", "outside_rows"))
_BACKWARD: _WorkOf = {
    **_UNCOUNTED,
    "attention_backward_rows_sm": _native_rows,
    "attention_backward_key_value_sm": _native_key_value,
    "attention_backward_key_value_large_sm": _native_key_value,
    "attention_backward_key_value_wide_sm": _native_key_value,
    "attention_backward_query_sm": _native_query,
    # Counts reads of the lse and rowsum(dO * O).
    "attention_backward_sinks_sm": lambda call: Work(0, 2 * call["lse"].nbytes),
    "attention_backward_rows": _backward_rows,
    "attention_backward_key_value": _backward_part(2, 2, ("key", "value")),
    "attention_backward_query": _backward_part(2, 1, ("query",)),
    "attention_backward_bias": _backward_part(1, 1, ("bias",)),
    # Counts reads of a partial sum for every 64 rows of a head, and writes of the slopes' gradient.
    "attention_backward_slope_sums": lambda call: Work(0, call["lse"].nbytes // 64 + call["alibi_slopes"].nbytes),
    "attention_backward_slopes": _backward_part(1, 1, ("alibi_slopes",)),
}
_WORK: dict[str, _WorkOf] = {  # by operator
    "attention_forward": {**_UNCOUNTED, "attention_forward": _forward},
    "attention_backward": _BACKWARD,
    "attention_backward_add": _BACKWARD,
    "attention_decode": _DECODING,
    "attention_decode_out": _DECODING,
    "append_to_cache": {"append": _append},
    "dequantize_cache": {"dequantize": _dequantise},
    "attention_split_keys": {"split": _split_keys, "combine": None},
    "merge_attention": {"merge": _merge},
    # Both count reads of all tensors, and writes: of the totals, or of the four gradients.
    "merge_attention_into": {"merge": lambda call: Work(0, call.nbytes() + call.nbytes("out", "lse"))},
    "merge_attention_backward": {
        "merge": lambda call: Work(0, call.nbytes() + call.nbytes("out_a", "lse_a", "out_b", "lse_b"))
    },
    # If cuBLAS computes the product, fastattn's kernel only dequantises the weights. For int8 activations on Hopper,
    # a kernel before the matmul quantises the tokens. The work of these kernels is not counted.
    "int8_matmul": {"quantize": None, "merge": None, "forward": _int8, "int8_matmul": _int8},
    "int8_matmul_grad_input": {"dequantize": None, "merge": None, "grad_input": _int8},
}


def kernel_work(kernel: str, call: OperatorCall) -> Work | None:
    """Returns the work of ``kernel``, which ``call`` launched, or None if the work is unknown."""
    if not call.arguments:
        return None
    for part, work_of in _WORK[call.name].items():
        if part in base_name(kernel):
            return None if work_of is None else work_of(call)
    return None
