"""Tests layouts and arguments of the peers, with stand-ins of the same signatures that compute the formula."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark_cases import ATTENTION, ATTENTION_CASES, CPU, DECODE_CASES, INT8_CASES, name_of
from benchmarks.measure import accuracy
from benchmarks.measure.cases import attention as case_attention
from benchmarks.measure.cases import decode as case_decode
from benchmarks.measure.cases import int8 as case_int8
from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.measure.implementations import Prepared, Unsupported
from benchmarks.measure.peers import attention as peers_attention
from benchmarks.measure.peers import decode as peers_decode
from benchmarks.measure.peers import int8 as peers_int8
from fastattn import reference


def reference_heads_last(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: tuple[Any, Any]) -> Tensor:
    """Takes and returns ``[B, S, H, D]``, as flash-attn, xformers and flashinfer do."""
    left, right = (-1 if side is None else side for side in window)
    heads_first = (t.transpose(1, 2) for t in (query, key, value))
    out, _ = reference.attention(*heads_first, causal=causal, window=(left, right))
    return out.transpose(1, 2)


def flash_attn_stand_in(returns_lse: bool) -> ModuleType:
    def with_lse(out: Tensor) -> Any:
        return (out, None) if returns_lse else out

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: Any = (-1, -1)) -> Any:
        assert q.is_contiguous() and k.is_contiguous()
        return with_lse(reference_heads_last(q, k, v, causal, window_size))

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_k: Tensor | None = None,
        page_table: Tensor | None = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
    ) -> Any:
        if seqused_k is not None:
            return flash_attn_with_kvcache(q, k, v, seqused_k, page_table=page_table, causal=causal)
        assert cu_seqlens_q is not None and cu_seqlens_k is not None and max_seqlen_q and max_seqlen_k
        left, right = (-1 if side is None else side for side in window_size)
        out, _ = reference.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window=(left, right)
        )
        return with_lse(out)

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor | None = None,
        page_table: Tensor | None = None,
        causal: bool = False,
    ) -> Any:
        table = block_table if page_table is None else page_table
        heads_first = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
        out, _ = reference.attention_with_kv_cache(*heads_first, cache_seqlens, block_table=table, causal=causal)
        return with_lse(out.transpose(1, 2))

    module = ModuleType("flash_attn")
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, function)
    return module


def flashinfer_stand_in() -> ModuleType:
    class Prefill:
        def __init__(self, workspace: Tensor, kv_layout: str = "NHD") -> None:
            assert workspace.dtype == torch.uint8 and kv_layout == "NHD"

        def plan(
            self,
            qo_indptr: Tensor,
            kv_indptr: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            causal: bool = False,
            window_left: int = -1,
            q_data_type: Any = "float16",
        ) -> None:
            self.offsets, self.causal, self.window = (qo_indptr, kv_indptr), causal, window_left
            self.dtype = q_data_type
            self.shape = num_qo_heads, num_kv_heads, head_dim_qk

        def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert (q.shape[1], k.shape[1], q.shape[2]) == self.shape and q.dtype == self.dtype
            longest = (int(offsets.diff().max()) for offsets in self.offsets)
            out, _ = reference.attention_varlen(
                q, k, v, *self.offsets, *longest, causal=self.causal, window=(self.window, -1)
            )
            return out

    class Decode:
        def __init__(self, workspace: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
            assert kv_layout == "HND"

        def plan(
            self,
            indptr: Tensor,
            indices: Tensor,
            last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            q_data_type: Any = None,
            kv_data_type: Any = None,
        ) -> None:
            self.indptr, self.indices, self.last, self.page_size = indptr, indices, last_page_len, page_size

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            outs = []
            for sequence in range(q.shape[0]):
                pages = self.indices[self.indptr[sequence] : self.indptr[sequence + 1]].long()
                length = (len(pages) - 1) * self.page_size + int(self.last[sequence])
                key, value = (c[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for c in paged_kv_cache)
                outs.append(reference.attention(q[sequence, None, :, None], key, value)[0][0, :, 0])
            return torch.stack(outs)

    def single_prefill_with_kv_cache(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_left: int = -1
    ) -> Tensor:
        return reference_heads_last(q[None], k[None], v[None], causal, (window_left, -1))[0]

    def single_decode_with_kv_cache(
        q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False
    ) -> Tensor:
        assert kv_layout == "HND"
        return reference.attention(q[None, :, None], k[None], v[None])[0][0, :, 0]

    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper, module.BatchDecodeWithPagedKVCacheWrapper = Prefill, Decode
    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache
    module.single_decode_with_kv_cache = single_decode_with_kv_cache
    return module


class XformersMask:
    """A stand-in for the masks of ``xformers.ops.fmha.attn_bias`` that the peers use."""

    def __init__(self, window_left: int = -1, window_right: int = 0, lengths: Sequence[Sequence[int]] = ()) -> None:
        self.causal, self.window, self.lengths = window_right == 0, window_left, lengths

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> XformersMask:
        return cls(window_right=-1, lengths=(q_seqlen, kv_seqlen, kv_seqlen))

    def make_causal_from_bottomright(self) -> XformersMask:
        return XformersMask(lengths=self.lengths)


def memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None) -> Tensor:
    """Takes ``[B, S, H, D]``, or ``[B, S, Hkv, group, D]`` with key and value expanded over the group."""
    grouped = query.dim() == 5
    if grouped:
        assert key.stride(3) == 0, "expanded, not copied"
        query, key, value = (t.flatten(2, 3) for t in (query, key, value))
    if isinstance(attn_bias, XformersMask) and attn_bias.lengths:
        tensors = zip((query, key, value), attn_bias.lengths, strict=True)
        parts = (t.split(list(lengths), dim=1) for t, lengths in tensors)
        outs = (reference_heads_last(*each, attn_bias.causal, (-1, -1)) for each in zip(*parts, strict=True))
        out = torch.cat(list(outs), dim=1)
    elif isinstance(attn_bias, XformersMask):
        out = reference_heads_last(query, key, value, attn_bias.causal, (attn_bias.window, -1))
    else:
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        out = reference.attention(*heads_first, bias=attn_bias)[0].transpose(1, 2)
    return out.unflatten(2, (-1, query.shape[2] // 2)) if grouped else out


def xformers_stand_ins() -> dict[str, ModuleType]:
    xformers: Any = ModuleType("xformers")
    xformers.ops = ModuleType("xformers.ops")
    xformers.ops.memory_efficient_attention = memory_efficient_attention
    xformers.ops.fmha = ModuleType("xformers.ops.fmha")
    xformers.ops.fmha.attn_bias = ModuleType("attn_bias")
    for name in ("BlockDiagonalMask", "LocalAttentionFromBottomRightMask", "LowerTriangularFromBottomRightMask"):
        setattr(xformers.ops.fmha.attn_bias, name, XformersMask)
    return {"xformers": xformers, "xformers.ops": xformers.ops, "xformers.ops.fmha": xformers.ops.fmha}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces flash-attn 2, 3, 4, flashinfer and xformers by modules that compute the formula on the CPU."""
    flash_attn = flash_attn_stand_in(returns_lse=False)
    flash_attn.cute = flash_attn_stand_in(returns_lse=True)  # type: ignore[attr-defined]
    modules = {
        "flash_attn": flash_attn,
        "flash_attn.cute": flash_attn.cute,
        "flash_attn_interface": flash_attn_stand_in(returns_lse=True),
        "flashinfer": flashinfer_stand_in(),
        **xformers_stand_ins(),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


FORWARD_PEERS = {
    "flash 2": peers_attention._forward(peers_attention._flash_attn_2),
    "flash 3": peers_attention._forward(peers_attention._flash_attn_3),
    "flash 4": peers_attention._forward(peers_attention._flash_attn_4),
    "flashinfer": peers_attention._flashinfer_batch,
    "single": peers_attention._flashinfer_single,
    "xformers": peers_attention._forward(peers_attention._xformers),
}
SINGLE = dataclasses.replace(ATTENTION, batch=1, causal=True, window=5)
UNGROUPED = dataclasses.replace(ATTENTION, kv_heads=4, bias=True)


@pytest.mark.parametrize("case", [*ATTENTION_CASES, SINGLE, UNGROUPED], ids=name_of)
@pytest.mark.parametrize("prepare", FORWARD_PEERS.values(), ids=FORWARD_PEERS)
@pytest.mark.usefixtures("stand_ins")
def test_layouts_of_forward_peers(prepare: Callable[[Any, Any], Prepared], case: AttentionCase) -> None:
    inputs = case_attention.make_inputs(case, CPU, seed=5)
    expected = case_attention.expected_forward(case, inputs)
    try:
        prepared = prepare(case, inputs)
    except Unsupported as refused:
        is_alone = prepare is peers_attention._flashinfer_single and case.batch > 1
        assert case.bias or is_alone or case.mask or (case.varlen and case.window >= 0), refused
        return
    outputs = prepared.outputs(prepared.call())
    checked = [case_attention.checked_slice(case, output) for output in outputs]
    assert accuracy.judge(checked, expected, is_peer=False).reason is None


CHUNK = dataclasses.replace(ATTENTION, causal=True, queries=5)


@pytest.mark.parametrize("name", peers_attention.sdpa_contexts())
def test_torch_takes_the_mask_of_fewer_queries_without_memory_or_refuses_it(name: str) -> None:
    """torch's ``is_causal`` starts at the first key. Flash can end at the last; efficient can for ungrouped heads."""
    with peers_attention.sdpa_contexts()[name]():
        for case in (CHUNK, dataclasses.replace(CHUNK, kv_heads=4)):
            inputs = case_attention.make_inputs(case, CPU, seed=5)
            if name.endswith("flash") or (name.endswith("efficient") and case.kv_heads == case.heads):
                built = peers_attention._sdpa(case, inputs)
            else:
                with pytest.raises(Unsupported, match="a mask in memory"):
                    peers_attention._sdpa(case, inputs)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        built = peers_attention._sdpa(case, inputs)
        out = built.attend(inputs.query, inputs.key, inputs.value)
    expected = case_attention.expected_forward(case, inputs)
    assert accuracy.judge([case_attention.checked_slice(case, out)], expected, is_peer=True).reason is None


@pytest.mark.parametrize("case", [CHUNK, dataclasses.replace(CHUNK, window=7)], ids=name_of)
def test_the_mask_of_flex_attention_ends_with_the_keys(case: AttentionCase) -> None:
    mask = peers_attention._block_mask(case, CPU)
    row, column = torch.arange(case.queries)[:, None] + case.seqlen - case.queries, torch.arange(case.seqlen)
    nearest = row - case.window if case.window >= 0 else 0
    visible = mask.mask_mod(0, 0, torch.arange(case.queries)[:, None], column)
    assert mask.shape == (1, 1, case.queries, case.seqlen)
    assert torch.equal(visible, (column <= row) & (column >= nearest))


@pytest.mark.parametrize("case", [case for case in ATTENTION_CASES if not (case.bias or case.mask)], ids=name_of)
@pytest.mark.usefixtures("stand_ins")
def test_layouts_of_backward_peers(case: AttentionCase) -> None:
    inputs = case_attention.make_inputs(case, CPU, seed=6)
    expected = case_attention.expected_backward(case, inputs)
    prepared = peers_attention._backward(peers_attention._flash_attn_4)(case, inputs)
    for _ in range(2):  # peers are timed many times
        gradients = prepared.outputs(prepared.call())
    checked = [case_attention.checked_slice(case, gradient) for gradient in gradients]
    assert accuracy.judge(checked, expected, is_peer=True).reason is None


@pytest.mark.parametrize("case", DECODE_CASES, ids=name_of)
@pytest.mark.parametrize(
    "prepare",
    [peers_decode._flash_attn_2, peers_decode._flash_attn_3, peers_decode._flash_attn_4, peers_decode._flashinfer],
)
@pytest.mark.usefixtures("stand_ins")
def test_layouts_of_decode_peers(prepare: Callable[[Any, Any], Prepared], case: DecodeCase) -> None:
    inputs = case_decode.make_inputs(case, CPU, seed=7)
    expected = case_decode.expected(case, inputs)
    try:
        prepared = prepare(case, inputs)
    except Unsupported:
        assert case.page_size or case.batch > 1
        return
    (out,) = prepared.outputs(prepared.call())
    assert out.shape == inputs.query.shape
    assert accuracy.judge([case_decode.checked_slice(case, out)], expected, is_peer=False).reason is None


@pytest.mark.parametrize("case", INT8_CASES, ids=name_of)
def test_dequantising_peers_compute_the_same(case: Int8Case) -> None:
    inputs = case_int8.make_inputs(case, CPU, seed=8)
    expected = case_int8.expected(case, inputs)
    for prepare in (
        peers_int8._dequantize_then_matmul,
        peers_int8._through(peers_int8._cublas, differentiable=True),
        case_int8.prepare,
    ):
        prepared = prepare(case, inputs)
        outputs = [case_int8.checked_slice(case, out) for out in prepared.outputs(prepared.call())]
        assert accuracy.judge(outputs, expected, is_peer=True).error < 0.01


def test_peers_that_are_not_installed_are_not_listed() -> None:
    names = [peer.name for peer in peers_attention.forward_peers()]
    assert {"torch SDPA flash", "torch SDPA cuDNN", "torch SDPA efficient", "torch SDPA math"} <= set(names)
    assert len(set(names)) == len(names)
    for peer in (*peers_attention.backward_peers(), *peers_decode.peers(), *peers_int8.peers()):
        assert peer.is_peer and peer.version
