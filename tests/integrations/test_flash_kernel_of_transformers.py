"""Tests the functions that a kernel repository exports, as transformers calls kernels with "flash" in their name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
import transformers.integrations.hub_kernels as hub_kernels
import transformers.modeling_flash_attention_utils as flash

import fastattn
import fastattn.integrations.flash_attn as flash_attn
import tiny_models

NAME = "somebody/fastattn-flash2"
HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(autouse=True)
def _kernel(monkeypatch):
    """Makes transformers find our functions where it would find those of a repository."""
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **kwargs: flash_attn)
    # transformers would require certain versions of the package `kernels`.
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args, **kwargs: True)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(flash, name, None)
    for name in ("_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
        monkeypatch.setattr(flash, name, None)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def call(query, key, value, mask=None, **options):
    length = query.shape[1]
    return flash._flash_attention_forward(
        query, key, value, mask, query_length=length, is_causal=True, attn_implementation=NAME, **options
    )


def expected(query, key, value, **options):
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    return fastattn.attention(*heads_first, causal=True, **options).transpose(1, 2)


QKV = random(2, 9, HEADS, DIM), random(2, 9, KV_HEADS, DIM), random(2, 9, KV_HEADS, DIM)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"sliding_window": 4}, {"window": (3, 0)}),
        ({"softcap": 5.0}, {"softcap": 5.0}),
        ({"s_aux": random(HEADS)}, {"sinks": random(HEADS)}),
        ({"softmax_scale": 0.5}, {"scale": 0.5}),
    ],
)
def test_what_a_model_asks_for_reaches_the_function(asked, meant):
    torch.testing.assert_close(call(*QKV, **asked), expected(*QKV, **meant))


@pytest.mark.parametrize("sinks", [None, random(HEADS)])
def test_padding_becomes_packed_sequences(sinks):
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    out = call(*QKV, mask, s_aux=sinks)
    padded = [x[1:, 4:] for x in QKV]
    torch.testing.assert_close(out[:1], expected(*[x[:1] for x in QKV], sinks=sinks))
    torch.testing.assert_close(out[1:, 4:], expected(*padded, sinks=sinks))


@pytest.mark.parametrize("sinks", [None, random(HEADS)])
def test_continuous_batching_appends_to_pages_and_attends(sinks):
    """Each of three sequences has one new token, [1, 3, H, D], over pages of 4 tokens."""
    lengths, page_size = [5, 1, 8], 4
    table = torch.tensor([[3, 0, 0], [5, 0, 0], [1, 4, 2]], dtype=torch.int32)
    table[0, 1] = 6
    k_cache, v_cache = random(7, page_size, KV_HEADS, DIM), random(7, page_size, KV_HEADS, DIM) + 1
    query, key, value = random(1, 3, HEADS, DIM), random(1, 3, KV_HEADS, DIM), random(1, 3, KV_HEADS, DIM) - 1

    def rows(cache, sequence):
        return cache[table[sequence].long()].flatten(0, 1)[: lengths[sequence]].clone()

    before = [(rows(k_cache, each), rows(v_cache, each)) for each in range(3)]
    ends = torch.tensor([0, *(sum(length + 1 for length in lengths[: i + 1]) for i in range(3))], dtype=torch.int32)
    starts = torch.arange(4, dtype=torch.int32)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": ends, "max_length_q": 1, "max_length_k": 9}
    out = call(query, key, value, block_table=table, k_cache=k_cache, v_cache=v_cache, s_aux=sinks, **packed)
    assert out.shape == query.shape
    for each, (keys, values) in enumerate(before):
        keys, values = torch.cat([keys, key[0, each : each + 1]]), torch.cat([values, value[0, each : each + 1]])
        wanted = expected(query[:, each : each + 1], keys[None], values[None], sinks=sinks)
        torch.testing.assert_close(out[:, each : each + 1], wanted)
        at = table[each, lengths[each] // page_size], lengths[each] % page_size
        assert torch.equal(k_cache[at], key[0, each])
        assert torch.equal(v_cache[at], value[0, each])


@pytest.fixture
def llama():
    return tiny_models.make_model("llama", "eager").eval()


TOKENS = torch.arange(1, 19).reshape(2, 9)


def test_a_model_takes_the_repository_by_its_name(llama):
    exact, eager = copy.deepcopy(llama).double()(TOKENS).logits, llama(TOKENS).logits
    words = llama.generate(TOKENS, max_new_tokens=4, do_sample=False)
    llama.set_attn_implementation(NAME)
    with fastattn.record() as calls:
        came = llama(TOKENS).logits
    assert (came - exact).abs().max() <= 2 * (eager - exact).abs().max()
    assert len(calls) == llama.config.num_hidden_layers
    assert torch.equal(llama.generate(TOKENS, max_new_tokens=4, do_sample=False), words)


def test_continuous_batching_generates_what_generate_does(llama):
    llama = llama.to("cuda" if torch.cuda.is_available() else "cpu")  # generation runs on the accelerator
    words = llama.generate(TOKENS.to(llama.device), max_new_tokens=4, do_sample=False)[:, 9:]
    llama.set_attn_implementation(NAME)
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default, the cache would take most of the machine's memory.
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    answers = llama.generate_batch(
        TOKENS.tolist(), generation_config=config, continuous_batching_config=small, warmup=False
    )
    assert [answers[name].generated_tokens for name in sorted(answers)] == words.tolist()
