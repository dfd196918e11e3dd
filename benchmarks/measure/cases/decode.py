"""Defines the benchmarks' cases of decoding over a KV cache, with inputs, work and the results in float64."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fastattn
from benchmarks.measure.accuracy import Expected
from benchmarks.measure.cases import OfDtype, lengths_up_to
from benchmarks.measure.implementations import Prepared
from fastattn import reference
from fastattn.profiler import work
from fastattn.profiler.work import Work

KV_HEADS = 8
MAX_TOKENS = 1 << 21  # in a cache, all sequences together: 8 GiB of keys and values with 8 KV heads of 128 dims


@dataclass(frozen=True)
class DecodeCase(OfDtype):
    """Describes a decoding step with one new query per sequence.

    A ``page_size`` of 0 means a contiguous cache. With ``ragged``, lengths are random, ``context`` / 8 to ``context``.
    """

    batch: int
    context: int
    heads: int
    kv_heads: int = KV_HEADS
    head_dim: int = 128
    dtype: str = "bfloat16"
    page_size: int = 0
    ragged: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the length of each sequence, this step's token included. The first sequence is the longest."""
        return lengths_up_to(self.context, self.batch) if self.ragged else (self.context,) * self.batch

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.context // self.page_size)

    def work(self) -> Work:
        itemsize = self.torch_dtype.itemsize
        shape = (self.batch, self.heads, 1, self.head_dim)
        return work.attention_decode(shape, self.kv_heads, self.head_dim, sum(self.lengths), itemsize, itemsize)


class DecodeInputs(NamedTuple):
    """Holds the inputs of a step: ``query [B, Hq, 1, D]``, the caches, and ``lengths`` int32 ``[B]``.

    A cache is ``[B, Hkv, context, D]``, or has pages ``[num_pages, Hkv, page_size, D]`` in random order and a
    ``block_table`` int32 ``[B, pages]``.
    """

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    block_table: Tensor | None


def make_inputs(case: DecodeCase, device: torch.device, seed: int) -> DecodeInputs:
    """Returns inputs of normally distributed random numbers; the sequences' pages are shuffled in memory."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device, dtype=case.torch_dtype)
    query = normal(case.batch, case.heads, 1, case.head_dim)
    table = None
    shape = (case.batch, case.kv_heads, case.context, case.head_dim)
    if case.page_size:
        num_pages = case.batch * case.pages_per_sequence
        shape = (num_pages, case.kv_heads, case.page_size, case.head_dim)
        order = torch.randperm(num_pages, generator=generator, device=device)
        table = order.to(torch.int32).view(case.batch, case.pages_per_sequence)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return DecodeInputs(query, normal(*shape), normal(*shape), lengths, table)


def prepare(case: DecodeCase, inputs: DecodeInputs) -> Prepared:
    """Prepares a call of fastattn's public function."""
    call = partial(fastattn.attention_with_kv_cache, *inputs[:4], block_table=inputs.block_table)
    return Prepared(call, lambda out: (out,))


def cached(case: DecodeCase, inputs: DecodeInputs, cache: Tensor, sequence: int) -> Tensor:
    """Returns one sequence's rows of a cache, ``[1, Hkv, length, D]``."""
    if inputs.block_table is None:
        rows = cache[sequence]
    else:
        rows = cache[inputs.block_table[sequence].long()].transpose(0, 1).flatten(1, 2)
    return rows[None, :, : case.lengths[sequence]]


def checked_slice(case: DecodeCase, out: Tensor) -> Tensor:
    """Returns the last KV head's query heads, for the first and last sequence: ``[2 or 1, group, 1, D]``."""
    group = case.heads // case.kv_heads
    return out[[0, -1] if case.batch > 1 else [0], -group:]


def expected(case: DecodeCase, inputs: DecodeInputs) -> Expected:
    """Returns the expected output of the checked slice."""

    def compute(dtype: torch.dtype) -> Tensor:
        group = case.heads // case.kv_heads
        outs = []
        for sequence in dict.fromkeys((0, case.batch - 1)):
            key, value = (cached(case, inputs, each, sequence)[:, -1:] for each in (inputs.k_cache, inputs.v_cache))
            query = inputs.query[sequence, None, -group:]
            outs.append(reference.attention(query.to(dtype), key.to(dtype), value.to(dtype), compute_dtype=dtype)[0])
        return torch.cat(outs)

    return Expected.from_composite([compute(torch.float64)], [compute(case.torch_dtype)], case.torch_dtype)


def quick_cases() -> list[DecodeCase]:
    """Returns the quick grid, the most informative cases first: a run with a time limit may not reach the end."""
    grouped = [
        DecodeCase(batch, context, heads=32) for batch, context in ((1, 4096), (1, 131072), (1, 16384), (1, 1024))
    ]
    batched = [DecodeCase(batch, 8192, heads=64) for batch in (16, 128)]
    paged = [DecodeCase(16, 8192, heads=64, page_size=256, ragged=ragged) for ragged in (False, True)]
    return [*grouped, *batched, *paged, DecodeCase(16, 8192, heads=8), DecodeCase(1, 262144, heads=32)]


def full_cases() -> list[DecodeCase]:
    """Returns every batch, context, grouping and kind of cache that fits into ``MAX_TOKENS``."""
    cases = [
        DecodeCase(batch, context, heads=KV_HEADS * group)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for context in (1024, 4096, 16384, 65536, 262144)
        for group in (1, 4, 8, 16)
        if batch * context <= MAX_TOKENS
    ]
    return [
        replace(case, page_size=page_size, ragged=ragged)
        for page_size, ragged in ((0, False), (0, True), (256, False), (64, True))
        for case in cases
        if case.batch > 1 or not ragged
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that keep only some cases of the grid."""
    parser.add_argument("--batch", type=int, nargs="+", help="only these")
    parser.add_argument("--context", type=int, nargs="+", help="only these")
    parser.add_argument("--cache", choices=("contiguous", "paged"), help="only this kind")


def chosen(options: argparse.Namespace) -> list[DecodeCase]:
    """Returns the cases of the quick or the full grid that the options keep."""

    def is_kept(case: DecodeCase) -> bool:
        return (
            (options.batch is None or case.batch in options.batch)
            and (options.context is None or case.context in options.context)
            and options.cache in (None, "paged" if case.page_size else "contiguous")
        )

    return [case for case in (full_cases() if options.full else quick_cases()) if is_kept(case)]
