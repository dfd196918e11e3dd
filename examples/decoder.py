"""Builds a small LLaMA-style decoder on top of fastattn: RMSNorm, SwiGLU, rotary positions, grouped-query attention.

The model sees the tokens of several documents in one row, ``[total]``, without padding. The ``attend`` argument of
:meth:`Decoder.forward` keeps the documents apart: the layers compute queries, keys and values, and ``attend`` decides
which queries attend to which keys. So the same model trains on packed batches (:class:`PackedAttention`), generates
from a cache (:class:`CachedAttention`) and can be compared with plain PyTorch (:class:`PaddedAttention`).

Sources: Touvron et al., "LLaMA" (2023); Ainslie et al., "GQA" (2023); sharing one layer across the depth: Lan et al.,
"ALBERT" (2020), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastattn


@dataclass(frozen=True)
class DecoderConfig:
    """Holds the sizes of a decoder. ``max_positions`` limits the length of a document, generated tokens included."""

    vocab_size: int
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 352
    max_positions: int = 512
    rotary_base: float = 10_000.0
    share_layers: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                "expected dim to be an even multiple of num_heads, and num_heads a multiple of num_kv_heads, got dim "
                f"{self.dim}, num_heads {self.num_heads}, num_kv_heads {self.num_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


@dataclass(frozen=True)
class Rotary:
    """Holds the cosines and sines of the angles, ``[max_positions, head_dim / 2]``, and the tokens' positions
    ``[total]``."""

    cos: Tensor
    sin: Tensor
    positions: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Returns ``x [total, H, D]`` rotated by its tokens' positions, in pairs of elements ``(i, i + D / 2)``.

        Source: Su et al., "RoFormer" (2021).
        """
        cos, sin = self.cos[self.positions, None], self.sin[self.positions, None]
        a, b = x.chunk(2, dim=-1)  # 16-bit halves times fp32 cosines and sines give fp32
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Attend(Protocol):
    """Maps ``query [total, Hq, D]``, ``key``, ``value [total, Hkv, D]`` to ``[total, Hq, D]``.

    Queries and keys are not rotated yet. ``depth`` is the number of layers before this one, even if layers share
    their weights.
    """

    def __call__(self, depth: int, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor: ...


def by_sequence(x: Tensor, batch: int) -> Tensor:
    """Returns ``x [total, H, D]``, which holds ``batch`` sequences of one length, as ``[B, H, length, D]``."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def by_token(x: Tensor) -> Tensor:
    """Returns ``x [B, H, length, D]`` as ``[total, H, D]``: the inverse of ``by_sequence``."""
    return x.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class PackedAttention:
    """Lets each document attend to itself. Document ``b`` has tokens ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``."""

    cu_seqlens: Tensor  # [B + 1] int32
    max_seqlen: int

    def __call__(self, depth: int, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
        return fastattn.attention_varlen(
            rotary.rotate(query),
            rotary.rotate(key),
            value,
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            causal=True,
        )


@dataclass(frozen=True)
class PaddedAttention:
    """Attends in plain PyTorch, for comparison. The ``batch`` documents are padded at the end to one length."""

    batch: int

    def __call__(self, depth: int, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (by_sequence(x, self.batch) for x in (rotary.rotate(query), rotary.rotate(key), value))
        # The padding follows the text, so the causal mask hides it.
        return by_token(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


class PagedBatch:
    """Holds a ``PagedKVCache`` with one sequence for each row of a batch."""

    def __init__(self, cache: fastattn.PagedKVCache, batch: int) -> None:
        self.cache = cache
        self.sequences = [cache.add() for _ in range(batch)]

    def step(self, num_new: int) -> fastattn.StepCache:
        """Returns the cache of one step that adds ``num_new`` tokens to every row."""
        return self.cache.step(self.sequences, num_new)

    def truncate(self, lengths: Tensor) -> None:
        """Drops the tokens of each row ``b`` beyond ``lengths[b]`` and frees their pages."""
        for sequence, length in zip(self.sequences, lengths.tolist(), strict=True):
            self.cache.truncate(sequence, length)


@dataclass(frozen=True)
class CachedAttention:
    """Appends the same number of new tokens to each row of the cache; a row attends to all of its own cached tokens.

    The cache knows the positions, and the kernel rotates the new queries and keys by them. A ``KVCache`` serves all
    steps; the ``step`` and ``chunk`` methods of a ``PagedKVCache`` return a cache for one step.
    """

    cache: fastattn.StepCache

    def __call__(self, depth: int, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (by_sequence(x, self.cache.batch) for x in (query, key, value))
        return by_token(self.cache.attend(depth, q, k, v, rotary_cos=rotary.cos, rotary_sin=rotary.sin))


class Attention(nn.Module):
    """Projects queries, keys and values, calls ``attend``, and projects its output."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        kv_dim = config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, depth: int, rotary: Rotary, attend: Attend) -> Tensor:
        query = self.query(x).unflatten(-1, (self.num_heads, -1))
        key = self.key(x).unflatten(-1, (self.num_kv_heads, -1))
        value = self.value(x).unflatten(-1, (self.num_kv_heads, -1))
        return self.out(attend(depth, query, key, value, rotary).flatten(1))


class FeedForward(nn.Module):
    """Computes the SwiGLU feed-forward network (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Chains attention and feed-forward: each normalises its input and adds its output to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, depth: int, rotary: Rotary, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), depth, rotary, attend)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """Maps token ids ``[total]`` and their positions ``[total]`` to logits of the next token, ``[total, vocab_size]``.

    With ``use_checkpoints``, training keeps only the input of each layer and computes the layer again in backward.
    """

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.use_checkpoints = False
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(1 if config.share_layers else config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

        frequency = config.rotary_base ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.arange(config.max_positions)[:, None] * frequency
        self.register_buffer("rotary_cos", angle.cos(), persistent=False)
        self.register_buffer("rotary_sin", angle.sin(), persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.dim**-0.5)
        if isinstance(module, (Attention, FeedForward)):  # each layer adds two terms to the residual stream
            last = module.out if isinstance(module, Attention) else module.down
            with torch.no_grad():
                last.weight.mul_((2 * self.config.num_layers) ** -0.5)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        rotary = Rotary(self.rotary_cos, self.rotary_sin, positions)
        x = self.embedding(tokens)
        for depth in range(self.config.num_layers):
            layer = self.layers[depth % len(self.layers)]
            if self.use_checkpoints and torch.is_grad_enabled():
                x = checkpoint(layer, x, depth, rotary, attend, use_reentrant=False)
            else:
                x = layer(x, depth, rotary, attend)
        return self.head(self.norm(x))
