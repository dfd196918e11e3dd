"""Tests whole models over a sequence that is spread over ranks, with ``with context_parallel``."""

from __future__ import annotations

import itertools
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ranks
from fastattn import InputError

# They have grouped heads, windows in some layers, softcap and sinks; one has no RoPE.
DECODERS = ("llama", "mistral", "gemma2", "gpt_oss", "gpt2")
LENGTH = 16


def in_words(family: str, text: str) -> str:
    return f"{family}: {text}"


# --- On each rank -----------------------------------------------------------------------------------------------------


def models_of_transformers_compute_what_one_process_does(rank: int, mesh: DeviceMesh) -> None:
    import fastattn.integrations.transformers as integration
    from fastattn.distributed import context_parallel, shard_sequence
    from tiny_models import VOCABULARY, make_model

    integration.register()
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(LENGTH).expand(2, -1)
    for family, (strategy, layout) in zip(
        DECODERS, itertools.cycle([("ring", "zigzag"), ("allgather", "contiguous"), ("allgather", "zigzag")])
    ):
        eager, ours = make_model(family, "eager"), make_model(family, "fastattn")
        expected = eager(tokens, use_cache=False).logits
        expected.cos().sum().backward()

        def mine(whole: Tensor, layout: str = layout) -> Tensor:
            return shard_sequence(whole, 1, group=mesh, layout=layout)

        with context_parallel(mesh, strategy=strategy, layout=layout):
            found = ours(mine(tokens), position_ids=mine(positions), use_cache=False).logits
            found.cos().sum().backward()
        torch.testing.assert_close(found, mine(expected), rtol=2e-4, atol=2e-5, msg=partial(in_words, family))
        for (name, wanted), came in zip(eager.named_parameters(), ours.parameters(), strict=True):
            if wanted.grad is None:
                continue
            dist.all_reduce(came.grad)
            error = (came.grad - wanted.grad).abs().max() / wanted.grad.abs().max().clamp(min=0.1)
            assert error < 1e-3, (family, name)


def padding_and_packing_are_refused(rank: int, mesh: DeviceMesh) -> None:
    import fastattn.integrations.transformers as integration
    from fastattn.distributed import context_parallel
    from tiny_models import make_model

    integration.register()
    tokens = torch.ones(2, 8, dtype=torch.long)
    padding = tokens.clone()
    padding[0, :3] = 0
    packed = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]]).expand(2, -1)
    llama = make_model("llama", "fastattn")
    with context_parallel(mesh):
        for refused in ({"attention_mask": padding}, {"position_ids": packed}):
            with pytest.raises(InputError, match=r"attention_mask: expected none inside of .*, got padding, packed"):
                llama(tokens, use_cache=False, **refused)
        with pytest.raises(InputError, match="sliding_window: expected causal layers that pass it"):
            make_model("modernbert", "fastattn")(tokens)


def a_refusal_on_one_rank_is_one_on_all(rank: int, mesh: DeviceMesh) -> None:
    import fastattn.integrations.transformers as integration
    from fastattn.distributed import context_parallel
    from tiny_models import make_model

    integration.register()
    llama = make_model("llama", "fastattn")
    tokens, padding = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    padding[0, :3] = 0
    own = torch.randn(1, 2, 8, 8)
    os.environ["FASTATTN_CHECK"] = "1"
    for strategy in ("ring", "ulysses"):
        with context_parallel(mesh, strategy=strategy):
            told = "^rank 1 of the group raised an error: " if rank == 0 else "^"
            with pytest.raises(InputError, match=told + "attention_mask: expected none inside"):
                llama(tokens, use_cache=False, attention_mask=padding if rank == 1 else None)
            with pytest.raises(InputError, match=told + "attn_mask: expected None"):
                F.scaled_dot_product_attention(own, own, own, torch.zeros(8, 8) if rank == 1 else None)
            F.scaled_dot_product_attention(own, own, own)
    del os.environ["FASTATTN_CHECK"]


def sdpa_is_spread_and_comes_back(rank: int, mesh: DeviceMesh) -> None:
    from torch.utils.checkpoint import checkpoint

    import fastattn
    from fastattn.distributed import context_parallel, shard_sequence

    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, heads, LENGTH, 8, generator=generator) for heads in (4, 2, 2))
    whole = [tensor.requires_grad_() for tensor in (query, key, value)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True, scale=0.3)
    grads = torch.autograd.grad(expected.square().sum(), whole)
    own = [shard_sequence(tensor.detach(), -2, group=mesh, layout="zigzag").requires_grad_() for tensor in whole]

    def attend(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True, scale=0.3)

    before = F.scaled_dot_product_attention
    with fastattn.patch_sdpa(), context_parallel(mesh, strategy="ulysses", layout="zigzag"):
        for call in (attend, lambda *tensors: checkpoint(attend, *tensors, use_reentrant=False)):
            found = call(*own)
            sharded = [shard_sequence(result, -2, group=mesh, layout="zigzag") for result in (expected, *grads)]
            torch.testing.assert_close([found, *torch.autograd.grad(found.square().sum(), own)], sharded)
        with pytest.raises(InputError, match="attn_mask: expected None inside of context_parallel, got a mask"):
            F.scaled_dot_product_attention(*own, attn_mask=torch.zeros(8, 8))
        with pytest.raises(InputError, match="key: expected the query's 4 heads, or enable_gqa=True, got 2"):
            F.scaled_dot_product_attention(*own)
        with pytest.raises(InputError, match=r"query: expected \[..., H, L, E\] with a batch"):
            F.scaled_dot_product_attention(*(tensor[0, 0] for tensor in own))
        with context_parallel(mesh):  # the innermost context is in force
            torch.testing.assert_close(
                F.scaled_dot_product_attention(*own, enable_gqa=True, scale=0.3).shape, own[0].shape
            )
    assert F.scaled_dot_product_attention is before
    with context_parallel(mesh, strategy="ulysses", layout="zigzag"), fastattn.patch_sdpa():  # in the opposite order
        torch.testing.assert_close(attend(*own), shard_sequence(expected, -2, group=mesh, layout="zigzag"))
        fastattn.install()
    torch.testing.assert_close(
        attend(*own), F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True, scale=0.3)
    )
    fastattn.uninstall()
    assert F.scaled_dot_product_attention is before
    torch.manual_seed(4)  # makes the same layer on all ranks
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()
    tokens = torch.randn(2, LENGTH, 32, generator=generator)
    with torch.no_grad():  # uses torch's fused path
        whole_layer = layer(tokens)
        with context_parallel(mesh):
            own_layer = layer(shard_sequence(tokens, 1, group=mesh))
    torch.testing.assert_close(own_layer, shard_sequence(whole_layer, 1, group=mesh))
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(InputError, match="strategy: expected one of"), context_parallel(mesh, strategy="star"):
        pass
    assert F.scaled_dot_product_attention is before


# --- Here -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    checks = (
        sdpa_is_spread_and_comes_back,
        models_of_transformers_compute_what_one_process_does,
        padding_and_packing_are_refused,
        a_refusal_on_one_rank_is_one_on_all,
    )
    ranks.run(__name__, *(check.__name__ for check in checks), emulated=False)
