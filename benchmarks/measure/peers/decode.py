"""Prepares other libraries' attention over a KV cache, with one new query per sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure.cases.decode import DecodeCase, DecodeInputs
from benchmarks.measure.implementations import Implementation, Prepared, first, installed, require
from benchmarks.measure.peers.attention import compiled_flex_attention, flashinfer_workspace, torch_peers


def _sdpa(case: DecodeCase, inputs: DecodeInputs) -> Prepared:
    require(not case.page_size, "paged cache")
    require(not case.ragged, "sequences of different lengths")
    return _contiguous(case, inputs, F.scaled_dot_product_attention)


def _flex(case: DecodeCase, inputs: DecodeInputs) -> Prepared:
    require(not case.page_size, "paged cache but by a mask over all pages")
    require(not case.ragged, "sequences of different lengths but by a mask")
    return _contiguous(case, inputs, compiled_flex_attention())


def _contiguous(case: DecodeCase, inputs: DecodeInputs, function: Any) -> Prepared:
    grouped = case.heads != case.kv_heads
    query, key, value = inputs.query, inputs.k_cache, inputs.v_cache
    return Prepared(lambda: function(query, key, value, enable_gqa=grouped), lambda out: (out,))


def _token_first(inputs: DecodeInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the query and the caches in flash-attn's layout, ``[B or pages, tokens, H, D]``."""
    query, k_cache, v_cache = (t.transpose(1, 2).contiguous() for t in inputs[:3])
    return query, k_cache, v_cache


def _flash_with_kv_cache(case: DecodeCase, inputs: DecodeInputs, function: Any, table_name: str) -> Prepared:
    query, k_cache, v_cache = _token_first(inputs)
    options = {"cache_seqlens": inputs.lengths, "causal": True}
    if inputs.block_table is not None:
        options[table_name] = inputs.block_table
    return Prepared(lambda: function(query, k_cache, v_cache, **options), lambda out: (first(out).transpose(1, 2),))


def _flash_attn_2(case: DecodeCase, inputs: DecodeInputs) -> Prepared:
    from flash_attn import flash_attn_with_kvcache

    require(case.page_size % 256 == 0, "pages but of multiples of 256 tokens")
    return _flash_with_kv_cache(case, inputs, flash_attn_with_kvcache, "block_table")


def _flash_attn_3(case: DecodeCase, inputs: DecodeInputs) -> Prepared:
    from flash_attn_interface import flash_attn_with_kvcache

    return _flash_with_kv_cache(case, inputs, flash_attn_with_kvcache, "page_table")


def _flash_attn_4(case: DecodeCase, inputs: DecodeInputs) -> Prepared:
    from flash_attn.cute import flash_attn_varlen_func

    query, k_cache, v_cache = _token_first(inputs)
    return Prepared(
        lambda: flash_attn_varlen_func(
            query, k_cache, v_cache, seqused_k=inputs.lengths, page_table=inputs.block_table, causal=True
        ),
        lambda out: (first(out).transpose(1, 2),),
    )


def _flashinfer(case: DecodeCase, inputs: DecodeInputs) -> Prepared:
    """Prepares the batch wrapper, planned once, for pages; the single-sequence function for a contiguous cache."""
    import flashinfer

    query = inputs.query[:, :, 0]
    if inputs.block_table is None:
        require(case.batch == 1, "contiguous cache of more than one sequence")
        key, value = inputs.k_cache[0], inputs.v_cache[0]
        return Prepared(
            lambda: flashinfer.single_decode_with_kv_cache(
                query[0], key, value, kv_layout="HND", use_tensor_cores=case.heads > case.kv_heads
            ),
            lambda out: (out[None, :, None],),
        )
    device = query.device
    pages = [-(-length // case.page_size) for length in case.lengths]
    starts = torch.tensor((0, *pages), device=device).cumsum(0).to(torch.int32)
    table = inputs.block_table
    used = torch.cat([table[sequence, :count] for sequence, count in enumerate(pages)])
    in_last = torch.tensor([(n - 1) % case.page_size + 1 for n in case.lengths], dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        flashinfer_workspace(device), "HND", use_tensor_cores=case.heads > case.kv_heads
    )
    wrapper.plan(
        starts,
        used,
        in_last,
        case.heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        q_data_type=case.torch_dtype,
        kv_data_type=case.torch_dtype,
    )
    caches = (inputs.k_cache, inputs.v_cache)
    return Prepared(lambda: wrapper.run(query, caches), lambda out: (out[:, :, None],))


def peers() -> list[Implementation]:
    """Returns every peer that can be imported."""
    return torch_peers(_sdpa, _flex) + installed(
        [
            ("flash-attn 2", "flash_attn.flash_attn_interface", ("flash-attn",), _flash_attn_2),
            ("flash-attn 3", "flash_attn_interface", ("flash-attn-3",), _flash_attn_3),
            ("flash-attn 4", "flash_attn.cute", ("flash-attn-4", "fa4"), _flash_attn_4),
            ("flashinfer", "flashinfer", ("flashinfer-python", "flashinfer"), _flashinfer),
        ]
    )
