"""Defines the benchmarks' cases of attention over whole sequences, with inputs, work and the results in float64."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fastattn
from benchmarks.measure.accuracy import Expected
from benchmarks.measure.cases import OfDtype, lengths_up_to
from benchmarks.measure.cases.masks import MASKS, ranges_of
from benchmarks.measure.implementations import Prepared
from fastattn import reference
from fastattn.profiler import work
from fastattn.profiler.work import Work

TOKENS = 16 * 1024  # the tokens of a batch, all sequences together
MAX_CHUNK_ELEMENTS = 1 << 25  # the most scores that the check holds at a time


@dataclass(frozen=True)
class AttentionCase(OfDtype):
    """Describes one shape with its options.

    ``window`` is how many keys before its own key a query sees; -1 means all, any other value implies a causal mask.
    With ``varlen``, ``batch`` sequences of random lengths of at most ``seqlen`` are packed. ``queries`` is the number
    of queries of each sequence, which are its last tokens, as in chunked prefill; 0 means as many as keys. ``mask``
    names a mask of key ranges (`masks.MASKS`), which replaces the causal mask and the window.
    """

    head_dim: int
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: int = -1
    bias: bool = False
    varlen: bool = False
    queries: int = 0
    mask: str = ""

    @property
    def longest_queries(self) -> int:
        """Returns the number of queries of the longest sequence."""
        return self.queries or self.seqlen

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """Returns the number of queries of each sequence."""
        return tuple(min(self.longest_queries, length) for length in self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the number of keys of each sequence: ``seqlen``, or packed, from ``seqlen`` / 8 to ``seqlen``."""
        return lengths_up_to(self.seqlen, self.batch) if self.varlen else (self.seqlen,) * self.batch

    @property
    def pairs(self) -> int:
        """Returns the number of visible pairs of query and key, over all sequences and query heads."""
        if self.mask:
            begin, end = ranges_of(self.mask, self.seqlen).long().unbind(-1)
            return self.batch * self.heads * int((end - begin).sum())
        right = 0 if self.causal or self.window >= 0 else -1
        lengths = zip(self.query_lengths, self.lengths, strict=True)
        return self.heads * sum(work.visible_pairs(*each, self.window, right) for each in lengths)

    @property
    def query_shape(self) -> tuple[int, ...]:
        if self.varlen:
            return sum(self.query_lengths), self.heads, self.head_dim
        return self.batch, self.heads, self.longest_queries, self.head_dim

    @property
    def key_shape(self) -> tuple[int, ...]:
        """Returns the shape of the keys and of the values."""
        if self.varlen:
            return sum(self.lengths), self.kv_heads, self.head_dim
        return self.batch, self.kv_heads, self.seqlen, self.head_dim

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return 1, self.heads, self.longest_queries, self.seqlen

    @property
    def bias_bytes(self) -> int:
        return math.prod(self.bias_shape) * self.torch_dtype.itemsize if self.bias else 0

    def forward_work(self) -> Work:
        return work.attention_forward(*self._shapes(), self.torch_dtype.itemsize, self.pairs, self.bias_bytes)

    def backward_work(self) -> Work:
        return work.attention_backward(*self._shapes(), self.torch_dtype.itemsize, self.pairs, self.bias_bytes)

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.query_shape, self.key_shape, self.key_shape


class AttentionInputs(NamedTuple):
    """Holds the inputs of a call.

    ``query`` and ``grad_out`` are ``[B, Hq, Sq, D]``, ``key`` and ``value`` ``[B, Hkv, Sk, D]``; packed, all are
    ``[total, H, D]``. ``bias`` is ``[1, Hq, Sq, Sk]``. The ``cu_seqlens`` are int32 ``[B + 1]``, None in a dense case.
    ``key_ranges`` are int32 ``[1, 1, S, R, 2]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    bias: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    key_ranges: Tensor | None = None


def make_inputs(case: AttentionCase, device: torch.device, seed: int) -> AttentionInputs:
    """Returns inputs of normally distributed random numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device, dtype=case.torch_dtype)
    query, grad_out = normal(*case.query_shape), normal(*case.query_shape)
    key, value = normal(*case.key_shape), normal(*case.key_shape)
    bias = normal(*case.bias_shape) if case.bias else None
    offsets_q = offsets(case.query_lengths, device) if case.varlen else None
    offsets_k = offsets(case.lengths, device) if case.varlen else None
    ranges = ranges_of(case.mask, case.seqlen).to(device) if case.mask else None
    return AttentionInputs(query, key, value, grad_out, bias, offsets_q, offsets_k, ranges)


def offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns the offset at which each packed sequence begins, and the total length last: int32 ``[B + 1]``."""
    return torch.tensor((0, *lengths), device=device).cumsum(0).to(torch.int32)


def attend(case: AttentionCase, inputs: AttentionInputs, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Calls fastattn's public function for the case."""
    window = (case.window, 0 if case.window >= 0 else -1)
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        return fastattn.attention_varlen(
            query,
            key,
            value,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            case.longest_queries,
            case.seqlen,
            causal=case.causal,
            window=window,
        )
    bias, ranges = inputs.bias, inputs.key_ranges
    return fastattn.attention(query, key, value, causal=case.causal, window=window, bias=bias, key_ranges=ranges)


def prepare_forward(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
    return Prepared(lambda: attend(case, inputs, inputs.query, inputs.key, inputs.value), lambda out: (out,))


def prepare_backward(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
    leaves = tuple(t.detach().requires_grad_() for t in (inputs.query, inputs.key, inputs.value))
    out = attend(case, inputs, *leaves)
    return Prepared(lambda: torch.autograd.grad(out, leaves, inputs.grad_out, retain_graph=True), tuple)


# --- expected results ----------------------------------------------------------------------------------------------


def checked_slice(case: AttentionCase, tensor: Tensor) -> Tensor:
    """Returns the last KV head of the last sequence, or the query heads that read it: ``[1, heads, rows, D]``."""
    heads = tensor.shape[1]
    group = heads // case.kv_heads
    if case.varlen:
        is_query = tensor.shape[0] == sum(case.query_lengths)
        rows = case.query_lengths[-1] if is_query else case.lengths[-1]
        return tensor[tensor.shape[0] - rows :, heads - group :].transpose(0, 1)[None]
    return tensor[-1:, heads - group :]


def expected_results(case: AttentionCase, inputs: AttentionInputs, with_gradients: bool) -> Expected:
    """Returns the expected output of the checked slice, or its expected gradients of query, key and value."""
    oracle = _by_chunks(case, inputs, torch.float64, torch.float64, with_gradients)
    composite = _by_chunks(case, inputs, case.torch_dtype, torch.float32, with_gradients)
    return Expected.from_composite(oracle, composite, case.torch_dtype)


expected_forward = partial(expected_results, with_gradients=False)
expected_backward = partial(expected_results, with_gradients=True)


def _by_chunks(
    case: AttentionCase, inputs: AttentionInputs, dtype: torch.dtype, sums: torch.dtype, with_gradients: bool
) -> tuple[Tensor, ...]:
    """Runs the reference on the checked slice, some query rows at a time; gradients are summed in dtype ``sums``."""
    query, key, value, grad_out = (checked_slice(case, t).to(sums) for t in inputs[:4])
    leaves = tuple(t.contiguous().requires_grad_(with_gradients) for t in (query, key, value))
    (group, num_queries), seqlen = query.shape[1:3], key.shape[2]
    rows = max(MAX_CHUNK_ELEMENTS // (group * seqlen), 1)
    is_causal = case.causal or case.window >= 0
    outs = []
    for first in range(0, num_queries, rows):
        last = min(first + rows, num_queries)
        # Masks align to the bottom right, so the last query sees the keys up to its own.
        keys = seqlen - num_queries + last if is_causal else seqlen
        bias = None if inputs.bias is None else inputs.bias[:, -group:, first:last, :keys]
        with torch.set_grad_enabled(with_gradients):
            out, _ = reference.attention(
                leaves[0][:, :, first:last].to(dtype),
                leaves[1][:, :, :keys].to(dtype),
                leaves[2][:, :, :keys].to(dtype),
                causal=is_causal,
                window=(case.window, -1),
                bias=bias,
                key_ranges=None if inputs.key_ranges is None else inputs.key_ranges[:, :, first:last],
                compute_dtype=dtype,
            )
        if with_gradients:
            out.backward(grad_out[:, :, first:last].to(dtype))
        outs.append(out.detach())
    if not with_gradients:
        return (torch.cat(outs, dim=2),)
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)


# --- grids of cases ------------------------------------------------------------------------------------------------


def multi_head(head_dim: int, seqlen: int) -> AttentionCase:
    """Returns a case with hidden dimension 2048 and 16k tokens, as in the FlashAttention papers."""
    heads = 2048 // head_dim
    return AttentionCase(head_dim, seqlen, max(TOKENS // seqlen, 1), heads, heads)


def grouped(head_dim: int, seqlen: int) -> AttentionCase:
    """Returns a case with hidden dimension 8192 and eight query heads per KV head."""
    heads = 8192 // head_dim
    return AttentionCase(head_dim, seqlen, max(TOKENS // seqlen, 1), heads, heads // 8)


def chunk(queries: int, seqlen: int, batch: int = 1) -> AttentionCase:
    """Returns a case of chunked prefill in the shape of Llama-3-8B.

    It has few tiles of query rows, so CTAs have to split the keys to fill a GPU.
    """
    return AttentionCase(128, seqlen, batch, 32, 8, causal=True, queries=queries)


def quick_cases() -> list[AttentionCase]:
    """Returns the quick grid, the most informative cases first: a run with a time limit may not reach the end."""
    causal = [replace(multi_head(128, seqlen), causal=True) for seqlen in (4096, 16384, 1024)]
    other_dims = [replace(multi_head(dim, seqlen), causal=True) for dim in (64, 256) for seqlen in (4096, 16384, 1024)]
    plain = multi_head(128, 4096)
    return [
        *causal,
        multi_head(128, 16384),
        replace(grouped(128, 4096), causal=True),
        *other_dims,
        replace(plain, causal=True, varlen=True),
        replace(plain, bias=True),
        replace(plain, causal=True, window=1024),
        replace(plain, causal=True, dtype="float16"),
        *(replace(multi_head(128, 16384), mask=mask) for mask in MASKS),
    ]


def full_cases() -> list[AttentionCase]:
    """Returns the full grid: head dims, lengths, masks, groupings, dtypes; then packed sequences, bias and window."""
    dense = [
        replace(shape(head_dim, seqlen), causal=causal, dtype=dtype)
        for head_dim in (64, 128, 256)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384, 32768)
        for shape in (multi_head, grouped)
        for causal in (True, False)
        for dtype in ("bfloat16", "float16")
    ]
    with_options = [
        changed
        for head_dim in (64, 128, 256)
        for seqlen in (1024, 4096, 8192)
        for changed in (
            replace(multi_head(head_dim, seqlen), causal=True, varlen=True),
            replace(multi_head(head_dim, seqlen), bias=True),
            replace(multi_head(head_dim, seqlen), causal=True, window=seqlen // 4),
            *(replace(multi_head(head_dim, seqlen), mask=mask) for mask in MASKS),
        )
    ]
    return dense + with_options


def quick_chunks() -> list[AttentionCase]:
    """Returns quick cases with fewer queries than keys, for the forward pass only."""
    return [chunk(512, 32768), replace(chunk(256, 8192, batch=8), varlen=True)]


def full_chunks() -> list[AttentionCase]:
    """Returns chunks of single sequences, and of several sequences with different lengths."""
    alone = [chunk(queries, seqlen) for seqlen in (8192, 32768) for queries in (64, 256, 512, 2048)]
    return alone + [
        replace(chunk(queries, seqlen, batch), varlen=True)
        for queries in (64, 256, 2048)
        for seqlen, batch in ((8192, 8), (32768, 4))
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that keep only some cases of the grid."""
    parser.add_argument("--head-dim", type=int, nargs="+", help="only these")
    parser.add_argument("--seqlen", type=int, nargs="+", help="only these")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), help="only this one")
    parser.add_argument("--mask", choices=("causal", "full", "window", *MASKS), help="only this one")


def chosen(options: argparse.Namespace, cases: Iterable[AttentionCase]) -> list[AttentionCase]:
    """Returns the cases that the options keep."""

    def is_kept(case: AttentionCase) -> bool:
        mask = case.mask or ("window" if case.window >= 0 else "causal" if case.causal else "full")
        return (
            (options.head_dim is None or case.head_dim in options.head_dim)
            and (options.seqlen is None or case.seqlen in options.seqlen)
            and options.dtype in (None, case.dtype)
            and options.mask in (None, mask)
        )

    return [case for case in cases if is_kept(case)]


def forward_cases(options: argparse.Namespace) -> list[AttentionCase]:
    """Returns the forward cases of the quick or the full grid that the options keep."""
    full, quick = full_cases() + full_chunks(), quick_cases() + quick_chunks()
    return chosen(options, full if options.full else quick)


def backward_cases(options: argparse.Namespace) -> list[AttentionCase]:
    """Returns the backward cases of the quick or the full grid that the options keep."""
    return chosen(options, full_cases() if options.full else quick_cases())
