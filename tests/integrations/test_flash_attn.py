"""Compares flash-attn's public functions with the formulas that they compute, in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fastattn
import fastattn.integrations.flash_attn as flash_attn
from fastattn.integrations.flash_attn import bert_padding
from flash_formulas import flash_attention, offsets, packed_flash_attention, scores_of

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS_Q, LENGTHS_K = [3, 1, 5], [6, 4, 2]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "causal and window": {"causal": True, "window_size": (2, 7)},
    "softcap": {"softcap": 1.5, "causal": True},
    "scale": {"softmax_scale": 0.7},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "causal ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True},
    "ALiBi in a window": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "window_size": (3, 0)},
    "sinks": {"learnable_sink": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64), "causal": True},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)

NO_MASKS = r"; flash-attn has no masks; fastattn\.attention takes a bool mask or a bias as bias=, in \[B, H, S, D\]$"


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def check_gradients(inputs: list[Tensor], came: Tensor, wanted: Tensor) -> None:
    weights = torch.linspace(-1, 1, came.numel(), dtype=came.dtype).view_as(came)
    grads = [torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True) for out in (came, wanted)]
    torch.testing.assert_close(grads[0], grads[1])


class TestDense:
    @each_option
    @pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 7), (7, 5), (1, 4)])
    def test_output_lse_and_gradients(self, options: dict[str, Any], num_queries: int, num_keys: int) -> None:
        q = random(2, num_queries, HEADS, DIM)
        k, v = (random(2, num_keys, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
        out, lse, s_dmask = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        wanted = flash_attention(q, k, v, **options)
        torch.testing.assert_close((out, lse), wanted)
        assert s_dmask.numel() == 0 and out.is_contiguous()
        check_gradients([q, k, v], out, wanted[0])
        alone = flash_attn.flash_attn_func(q, k, v, **options)
        torch.testing.assert_close(alone, wanted[0])
        check_gradients([q, k, v], alone, wanted[0])

    def test_slopes_for_each_sequence(self) -> None:
        q, k = random(2, 5, HEADS, DIM), random(2, 7, KV_HEADS, DIM, seed=1)
        slopes = torch.rand(2, HEADS, generator=torch.Generator().manual_seed(0))
        out, lse, _ = flash_attn.flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes, return_attn_probs=True)
        torch.testing.assert_close((out, lse), flash_attention(q, k, k, causal=True, alibi_slopes=slopes))

    def test_a_window_that_hides_nothing_is_none(self) -> None:
        """flash-attn drops such a window, which changes the form of ALiBi."""
        q, slopes = random(1, 5, HEADS, DIM), torch.full((HEADS,), 0.5)
        options = {"causal": True, "alibi_slopes": slopes, "return_attn_probs": True}
        narrow = flash_attn.flash_attn_func(q, q, q, window_size=(4, -1), **options)[1]
        wide = flash_attn.flash_attn_func(q, q, q, window_size=(5, -1), **options)[1]
        none = flash_attn.flash_attn_func(q, q, q, **options)[1]
        torch.testing.assert_close(wide, none)
        assert not torch.allclose(narrow, none)

    @pytest.mark.parametrize(
        "window", [torch.tensor([2, 1]), numpy.array([2, 1]), [2, numpy.int64(1)]], ids=["tensor", "numpy", "list"]
    )
    def test_a_window_is_any_two_integers(self, window: Any) -> None:
        q = random(1, 5, HEADS, DIM)
        wanted = flash_attn.flash_attn_func(q, q, q, window_size=(2, 1))
        assert torch.equal(flash_attn.flash_attn_func(q, q, q, window_size=window), wanted)

    @pytest.mark.parametrize("window", [3, (1,), (1, 2, 3), (1.0, 2), "12", torch.tensor([0.5, 1.0])], ids=repr)
    def test_other_windows_are_refused(self, window: Any) -> None:
        q = random(1, 5, HEADS, DIM)
        with pytest.raises(fastattn.InputError, match=r"^window_size: expected "):
            flash_attn.flash_attn_func(q, q, q, window_size=window)

    def test_packed_arguments(self) -> None:
        qkv = random(2, 6, 3, HEADS, DIM)
        q, k, v = qkv.unbind(2)
        wanted = flash_attention(q, k, v, causal=True, softmax_scale=0.3)[0]
        came = flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, True)
        torch.testing.assert_close(came, wanted)
        check_gradients([qkv], came, wanted)
        kv = random(2, 6, 2, KV_HEADS, DIM, seed=3)
        wanted = flash_attention(q, *kv.unbind(2), causal=True, softmax_scale=0.3)[0]
        came = flash_attn.flash_attn_kvpacked_func(q, kv, 0.0, 0.3, True)
        torch.testing.assert_close(came, wanted)
        check_gradients([qkv, kv], came, wanted)

    def test_values_of_another_head_dim(self) -> None:
        q, k, v = random(2, 5, HEADS, DIM), random(2, 7, KV_HEADS, DIM, seed=1), random(2, 7, KV_HEADS, 5, seed=2)
        torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v), flash_attention(q, k, v)[0])

    def test_the_lse_is_differentiable(self) -> None:
        q, k = random(1, 5, HEADS, DIM), random(1, 7, KV_HEADS, DIM, seed=1)
        lse = flash_attn.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[1]
        check_gradients([q, k], lse, flash_attention(q, k, k, causal=True)[1])

    def test_float32(self) -> None:
        q = random(1, 5, HEADS, DIM).detach().float()
        out, lse, _ = flash_attn.flash_attn_func(q, q, q, return_attn_probs=True)
        assert out.dtype == lse.dtype == torch.float32


class TestVarlen:
    @each_option
    def test_output_lse_and_gradients(self, options: dict[str, Any]) -> None:
        q = random(sum(LENGTHS_Q), HEADS, DIM)
        k, v = (random(sum(LENGTHS_K), KV_HEADS, DIM, seed=seed) for seed in (1, 2))
        packed = (offsets(LENGTHS_Q), offsets(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K))
        out, lse, s_dmask = flash_attn.flash_attn_varlen_func(q, k, v, *packed, return_attn_probs=True, **options)
        wanted = packed_flash_attention(q, k, v, LENGTHS_Q, LENGTHS_K, **options)
        torch.testing.assert_close((out, lse), wanted)
        assert s_dmask.numel() == 0
        check_gradients([q, k, v], out, wanted[0])
        torch.testing.assert_close(flash_attn.flash_attn_varlen_func(q, k, v, *packed, **options), wanted[0])

    def test_packed_arguments(self) -> None:
        qkv, cu_seqlens = random(sum(LENGTHS_Q), 3, HEADS, DIM), offsets(LENGTHS_Q)
        q, k, v = qkv.unbind(1)
        wanted, _ = packed_flash_attention(q, k, v, LENGTHS_Q, LENGTHS_Q, causal=True)
        torch.testing.assert_close(
            flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 5, 0.0, None, True), wanted
        )
        kv = random(sum(LENGTHS_K), 2, KV_HEADS, DIM, seed=4)
        wanted, _ = packed_flash_attention(q, *kv.unbind(1), LENGTHS_Q, LENGTHS_K, causal=True)
        came = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, offsets(LENGTHS_K), 5, 6, 0.0, None, True)
        torch.testing.assert_close(came, wanted)

    @pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["plain", "causal"])
    def test_rows_that_are_not_used(self, options: dict[str, Any]) -> None:
        used_q, used_k = [2, 0, 5], [4, 3, 2]
        q = random(sum(LENGTHS_Q), HEADS, DIM)
        k, v = (random(sum(LENGTHS_K), KV_HEADS, DIM, seed=seed) for seed in (1, 2))
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            *(q, k, v, offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 6),
            seqused_q=torch.tensor(used_q, dtype=torch.int32),
            seqused_k=torch.tensor(used_k, dtype=torch.int32),
            return_attn_probs=True,
            **options,
        )
        wanted_out, wanted_lse = torch.zeros_like(out), torch.full_like(lse, math.inf)
        starts = zip(offsets(LENGTHS_Q).tolist(), used_q, offsets(LENGTHS_K).tolist(), used_k, strict=False)
        for begin_q, num_q, begin_k, num_k in starts:
            rows_q, rows_k = slice(begin_q, begin_q + num_q), slice(begin_k, begin_k + num_k)
            part = flash_attention(q[None, rows_q], k[None, rows_k], v[None, rows_k], **options)
            wanted_out = wanted_out.index_copy(0, torch.arange(begin_q, begin_q + num_q), part[0][0])
            wanted_lse[:, rows_q] = part[1][0].detach()
        torch.testing.assert_close((out, lse), (wanted_out, wanted_lse))
        check_gradients([q, k, v], out, wanted_out)

    @pytest.mark.parametrize("keyword", ["block_table", "page_table"])
    def test_pages_of_any_size(self, keyword: str) -> None:
        page_size, table = 3, torch.tensor([[4, 1], [0, 7], [2, -1]], dtype=torch.int32)
        q = random(sum(LENGTHS_Q), HEADS, DIM)
        pages_k, pages_v = (random(8, page_size, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
        k, v = (
            torch.cat([pages[row].flatten(0, 1)[:length] for row, length in zip(table.long(), LENGTHS_K, strict=True)])
            for pages in (pages_k, pages_v)
        )
        packed = (offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 6)
        came = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, *packed, causal=True, **{keyword: table})
        torch.testing.assert_close(came, packed_flash_attention(q, k, v, LENGTHS_Q, LENGTHS_K, causal=True)[0])
        with torch.no_grad():  # as vLLM does: with seqused_k, offsets mean nothing
            came = flash_attn.flash_attn_varlen_func(
                *(q, pages_k, pages_v, packed[0], torch.zeros(4, dtype=torch.int32), 5, 6),
                causal=True,
                block_table=table,
                seqused_k=torch.tensor(LENGTHS_K, dtype=torch.int32),
            )
        torch.testing.assert_close(came, packed_flash_attention(q, k, v, LENGTHS_Q, LENGTHS_K, causal=True)[0])
        for entry in (-1, 8):  # no such page exists
            table[0, 1] = entry
            with pytest.raises(
                RuntimeError, match=f"^block_table: expected pages from 0 to 7, .*got {entry} as page 1"
            ):
                flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, *packed, causal=True, **{keyword: table})


def exponentials(scores: Tensor) -> Tensor:
    """Returns what flash-attn leaves in S_dmask: 1 for the largest score of a row, 0 for masked keys."""
    return (scores - scores.amax(-1, keepdim=True)).exp()


class TestDropout:
    @pytest.mark.parametrize("options", [{}, {"learnable_sink": torch.full((HEADS,), 9.0)}], ids=["plain", "sinks"])
    def test_s_dmask_is_exponentials_with_signs(self, options: dict[str, Any]) -> None:
        q, k = random(2, 5, HEADS, DIM).detach(), random(2, 7, KV_HEADS, DIM, seed=1).detach()
        v = random(2, 7, KV_HEADS, DIM, seed=2).detach()
        torch.manual_seed(0)
        out, lse, s_dmask = flash_attn.flash_attn_func(q, k, v, 0.4, causal=True, return_attn_probs=True, **options)
        assert s_dmask.shape == (2, HEADS, 128, 128)
        scores = scores_of(q, k, causal=True)
        torch.testing.assert_close(s_dmask[:, :, :5, :7].abs(), exponentials(scores))
        weights = (scores - lse[..., None]).exp()
        kept = torch.where(s_dmask[:, :, :5, :7] > 0, weights / 0.6, 0.0)
        torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", kept, v.repeat_interleave(2, dim=2)), out)
        assert not s_dmask[:, :, 5:].any() and not s_dmask[..., 7:].any()
        assert 0.2 < float((s_dmask[:, :, :5, :7] < 0).sum() / (weights > 0).sum()) < 0.6

    def test_rows_without_keys(self) -> None:
        q, k = random(1, 5, HEADS, DIM).detach(), random(1, 2, KV_HEADS, DIM, seed=1).detach()
        s_dmask = flash_attn.flash_attn_func(q, k, k, 0.4, causal=True, return_attn_probs=True)[2]
        assert not s_dmask[:, :, :3].any() and bool((s_dmask[:, :, 3:5].abs().amax(-1) == 1).all())

    def test_the_softmax_from_s_dmask_block_by_block(self) -> None:
        """Readers of S_dmask compute it so, with the number of keys in a block. It is as exact as its own dtype."""
        q = (3 * random(1, 9, HEADS, DIM)).detach().bfloat16()
        s_dmask = flash_attn.flash_attn_func(q, q, q, 0.4, return_attn_probs=True)[2]
        assert s_dmask.dtype == torch.bfloat16
        size = flash_attn.flash_attn_interface._get_block_size_n(q.device, DIM, is_dropout=True, is_causal=False)
        scores = scores_of(q.double(), q.double())
        blocks = zip(s_dmask[..., :9, :9].abs().double().split(size, dim=-1), scores.split(size, dim=-1), strict=True)
        parts = [
            block * (own.amax(-1, keepdim=True) - scores.logsumexp(-1, keepdim=True)).exp() for block, own in blocks
        ]
        torch.testing.assert_close(torch.cat(parts, dim=-1), scores.softmax(-1), rtol=2**-8, atol=1e-6)

    def test_s_dmask_of_packed_sequences(self) -> None:
        q = random(sum(LENGTHS_Q), HEADS, DIM).detach()
        k, v = (random(sum(LENGTHS_K), KV_HEADS, DIM, seed=seed).detach() for seed in (1, 2))
        torch.manual_seed(0)
        out, _, s_dmask = flash_attn.flash_attn_varlen_func(
            q, k, v, offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 6, 0.4, return_attn_probs=True
        )
        assert s_dmask.shape == (3, HEADS, 128, 128)
        parts = zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K), out.split(LENGTHS_Q), strict=True)
        for sequence, (part_q, part_k, part_v, part_out) in enumerate(parts):
            scores = scores_of(part_q[None], part_k[None])[0]
            signed = s_dmask[sequence, :, : len(part_q), : len(part_k)]
            torch.testing.assert_close(signed.abs(), exponentials(scores))
            kept = torch.where(signed > 0, scores.softmax(-1) / 0.6, 0.0)
            torch.testing.assert_close(torch.einsum("hqk,khd->qhd", kept, part_v.repeat_interleave(2, dim=1)), part_out)

    def test_without_dropout_there_is_none(self) -> None:
        q = random(1, 3, HEADS, DIM)
        assert flash_attn.flash_attn_func(q, q, q, return_attn_probs=True)[2].shape == (0,)


@pytest.mark.slow
def test_a_graph_without_breaks() -> None:
    q, k = random(1, 5, HEADS, DIM), random(1, 7, KV_HEADS, DIM, seed=1)
    options = {"causal": True, "alibi_slopes": torch.full((HEADS,), 0.5), "return_attn_probs": True}
    compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
    came = compiled(q, k, k, **options)
    wanted = flash_attention(q, k, k, causal=True, alibi_slopes=options["alibi_slopes"])
    torch.testing.assert_close(came[:2], wanted)
    check_gradients([q, k], came[0], wanted[0])


class TestKeywords:
    def test_signatures_are_flash_attns(self) -> None:
        common = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None "
        common += "deterministic=False return_attn_probs=False"
        offsets_of_both = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        wanted = {
            "flash_attn_func": "q k v " + common,
            "flash_attn_kvpacked_func": "q kv " + common,
            "flash_attn_qkvpacked_func": "qkv " + common,
            "flash_attn_varlen_func": "q k v " + offsets_of_both + common + " block_table=None",
            "flash_attn_varlen_kvpacked_func": "q kv " + offsets_of_both + common,
            "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen " + common,
            "flash_attn_with_kvcache": (
                "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
                "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False "
                "window_size=(-1, -1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 "
                "return_softmax_lse=False"
            ),
        }
        for name, signature in wanted.items():
            parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
            came = [
                p.name if p.default is p.empty else f"{p.name}={p.default}"
                for p in parameters
                if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
            ]
            assert " ".join(came) == signature, name

    def test_what_only_steers_a_launch_means_nothing(self) -> None:
        q = random(1, 3, HEADS, DIM)
        came = flash_attn.flash_attn_func(q, q, q, pack_gqa=True, sm_margin=8, num_splits=3, window_size=(None, None))
        assert torch.equal(came, flash_attn.flash_attn_func(q, q, q))

    @pytest.mark.parametrize("name", ["attention_chunk", "qv", "q_descale", "score_mod", "mask_mod"])
    def test_what_fastattn_has_not_is_refused(self, name: str) -> None:
        q = random(1, 3, HEADS, DIM)
        for nothing in (None, 0) if name == "attention_chunk" else (None,):
            flash_attn.flash_attn_func(q, q, q, **{name: nothing})
        with pytest.raises(fastattn.InputError, match=rf"^{name}: expected None in flash_attn_func"):
            flash_attn.flash_attn_func(q, q, q, **{name: q})

    @pytest.mark.parametrize("name", ["return_softmax_lse", "return_lse"])
    def test_the_lse_has_another_keyword(self, name: str) -> None:
        q = random(1, 3, HEADS, DIM)
        with pytest.raises(TypeError, match=r"; return_attn_probs=True returns the lse, too$"):
            flash_attn.flash_attn_func(q, q, q, **{name: True})
        with pytest.raises(TypeError, match=NO_MASKS):
            flash_attn.flash_attn_func(q, q, q, attn_mask=q)

    def test_packed_tensors_of_another_shape_are_refused(self) -> None:
        ends = torch.tensor([0, 3], dtype=torch.int32)
        four, five = random(3, 2, HEADS, DIM), random(1, 3, 4, HEADS, DIM)
        with pytest.raises(fastattn.InputError, match=r"^qkv: expected 5 dimensions \[B, S, 3, H, D\], got 4"):
            flash_attn.flash_attn_qkvpacked_func(four)
        with pytest.raises(fastattn.InputError, match=r"^qkv: expected shape \[B, S, 3, H, D\], got \[1, 3, 4, "):
            flash_attn.flash_attn_qkvpacked_func(five)
        with pytest.raises(fastattn.InputError, match=r"^kv: expected shape \[B, Sk, 2, Hk, D\], got \[1, 3, 4, "):
            flash_attn.flash_attn_kvpacked_func(four[None, :, 0], five)
        with pytest.raises(fastattn.InputError, match=r"^qkv: expected shape \[total, 3, H, D\], got \[3, 2, "):
            flash_attn.flash_attn_varlen_qkvpacked_func(four, ends, 3)
        with pytest.raises(fastattn.InputError, match=r"^kv: expected 4 dimensions \[total_k, 2, Hk, D\], got 5"):
            flash_attn.flash_attn_varlen_kvpacked_func(four[:, 0], five, ends, ends, 3, 3)

    def test_errors_say_of_which_layout_their_shapes_are(self) -> None:
        q, pages = random(1, 3, HEADS, DIM), random(4, 16, 2, DIM)
        ends, table = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
        with pytest.raises(fastattn.InputError, match="flatten") as raised:
            flash_attn.flash_attn_varlen_func(q, q, q, ends, ends, 3, 3)
        assert "after transpose" not in str(raised.value)
        with pytest.raises(fastattn.InputError, match=r"; these shapes are after transpose\(1, 2\) of the .*, \[num_"):
            flash_attn.flash_attn_varlen_func(q[0], pages[0], pages[0], ends, ends, 3, 3, block_table=table)

    def test_a_window_of_one_number_gets_advice(self) -> None:
        q = random(1, 3, HEADS, DIM)
        with pytest.raises(fastattn.InputError, match=r"got 4; \(3, 0\) lets a query see 4 keys up to its own$"):
            flash_attn.flash_attn_func(q, q, q, window_size=4)

    def test_what_needs_packed_sequences_is_refused_without(self) -> None:
        q = random(1, 3, HEADS, DIM)
        for function in (flash_attn.flash_attn_func, flash_attn.flash_attn_with_kvcache):
            words = rf"^seqused_k: expected None in {function.__name__}, .*with_kvcache takes lengths as cache_seqlens"
            with pytest.raises(fastattn.InputError, match=words):
                function(q, q, q, seqused_k=torch.ones(1, dtype=torch.int32))

    def test_errors_name_arguments_as_flash_attn_does(self) -> None:
        q, kv = random(2, 3, HEADS, DIM), random(2, 4, 2, HEADS, DIM)
        k, v = kv.unbind(2)
        cases: dict[str, Callable[[], Any]] = {
            r"^v: expected .* got .*transpose\(1, 2\)": lambda: flash_attn.flash_attn_func(q, k, v[:, :2]),
            r"^k: expected torch\.\w+, as the query is, got torch\.int8; cast it with k\.": lambda: (
                flash_attn.flash_attn_func(q, k.to(torch.int8), v)
            ),
            r"^q: expected 4 dimensions \[B, S, H, D\], got 3.*flash_attn_varlen_func takes packed": lambda: (
                flash_attn.flash_attn_func(q[0], k, v)
            ),
            r"^q: .* got q \[2, 8, 1, 32\], k \[2, 2, 48, 32\]; .* pass q\.transpose\(1, 2\), k\.tr": lambda: (
                flash_attn.flash_attn_func(random(2, 8, 1, 32), *[random(2, 2, 48, 32)] * 2)
            ),
            r"^softmax_scale: expected a number": lambda: flash_attn.flash_attn_func(q, k, v, softmax_scale="1"),
            r"^kv: ": lambda: flash_attn.flash_attn_kvpacked_func(q, kv.to(torch.int8)),
            r"^qkv: ": lambda: flash_attn.flash_attn_qkvpacked_func(kv[:, :, [0, 1, 1]].to(torch.int8)),
            r"^max_seqlen: .* in cu_seqlens, got 2": lambda: flash_attn.flash_attn_varlen_qkvpacked_func(
                kv[0][:, [0, 1, 1]], torch.tensor([0, 4], dtype=torch.int32), 2
            ),
            r"^v: expected shape": lambda: flash_attn.flash_attn_with_kvcache(q, k, v, k, v[:, :2], cache_seqlens=0),
            r"^k_cache: expected 4 dimensions": lambda: flash_attn.flash_attn_with_kvcache(q, k[0], v),
            r"^cache_seqlens: expected an int": lambda: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=1.5),
        }
        for words, call in cases.items():
            with pytest.raises((fastattn.InputError, TypeError), match=words):
                call()

    def test_a_typing_error_is_one(self) -> None:
        q = random(1, 3, HEADS, DIM)
        with pytest.raises(TypeError, match="unexpected keyword argument 'casual'; did you mean 'causal'"):
            flash_attn.flash_attn_func(q, q, q, casual=True)
        for ours, theirs in (("is_causal", "causal"), ("window", "window_size"), ("scale", "softmax_scale")):
            for function in (flash_attn.flash_attn_func, flash_attn.flash_attn_with_kvcache):
                with pytest.raises(TypeError, match=rf"^{function.__name__}.* it is called '{theirs}' here"):
                    function(q, q, q, **{ours: None})
        with pytest.raises(fastattn.InputError, match=r"^window_size: expected \(left, right\)"):
            flash_attn.flash_attn_func(q, q, q, window_size=3)


class TestBertPadding:
    MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1]])

    def test_unpad_and_pad(self) -> None:
        hidden = random(2, 4, 3)
        packed, indices, cu_seqlens, max_seqlen, used = bert_padding.unpad_input(hidden, self.MASK)
        assert indices.tolist() == [0, 1, 3, 6, 7]
        assert (cu_seqlens.tolist(), cu_seqlens.dtype, max_seqlen) == ([0, 3, 5], torch.int32, 3)
        assert used.tolist() == [3, 2]
        assert torch.equal(packed, hidden[self.MASK.bool()])
        padded = bert_padding.pad_input(packed, indices, 2, 4)
        assert torch.equal(padded, hidden * self.MASK[..., None])
        padded.sum().backward()
        assert torch.equal(hidden.grad, self.MASK[..., None].expand(-1, -1, 3).double())

    def test_room_for_later_tokens(self) -> None:
        unused = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0]])
        _, indices, cu_seqlens, max_seqlen, used = bert_padding.unpad_input(random(2, 4, 3), self.MASK, unused)
        assert indices.tolist() == [0, 1, 2, 3, 5, 6, 7]
        assert (cu_seqlens.tolist(), max_seqlen, used.tolist()) == ([0, 4, 7], 4, [3, 2])

    def test_several_sequences_in_a_row(self) -> None:
        hidden = random(2, 6, 3)
        lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
        packed, indices, cu_seqlens, max_seqlen = bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
        assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
        assert (cu_seqlens.tolist(), max_seqlen) == ([0, 2, 5, 9], 4)
        assert torch.equal(packed, hidden.flatten(0, 1)[indices])

    def test_rows(self) -> None:
        hidden, indices = random(5, 3), torch.tensor([3, 1])
        rows, residual = bert_padding.index_first_axis_residual(hidden, indices)
        assert torch.equal(rows, hidden[indices]) and torch.equal(residual, hidden)
        (rows.sum() + 2 * residual.sum()).backward()
        assert hidden.grad[:, 0].tolist() == [2.0, 3.0, 2.0, 3.0, 2.0]
        put = bert_padding.index_put_first_axis(rows, indices, 4)
        assert torch.equal(put[indices], rows) and not put[[0, 2]].any()
