"""Computes what ``fastattn.reference`` computes on Python numbers, one score at a time, to check the oracle itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(grad)


def philox_by_hand(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Computes Philox 4x32-10 on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def attention_by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    scale: float | None = None,
    first_row: int | None = None,
    first_key: int = 0,
    first_head: int = 0,
) -> tuple[Tensor, Tensor]:
    """Computes ``reference.attention`` with loops."""
    batch, heads, num_queries, head_dim = query.shape
    kv_heads, num_keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if bias is not None:
        bias = bias.expand(batch, heads, num_queries, num_keys)
    slopes = None if alibi_slopes is None else alibi_slopes.expand(batch, heads).tolist()
    out = torch.zeros(batch, heads, num_queries, value_dim, dtype=torch.float64)
    lse = torch.full((batch, heads, num_queries), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            q, k, v = query[b, h].tolist(), key[b, g].tolist(), value[b, g].tolist()
            for i in range(num_queries):
                p = i + (num_keys - num_queries if first_row is None else first_row - first_key)
                logits: dict[int, float] = {}
                for j in range(num_keys):
                    right = 0 if causal else window[1]
                    if (window[0] >= 0 and j < p - window[0]) or ((causal or right >= 0) and j > p + right):
                        continue
                    s = scale * sum(a * b for a, b in zip(q[i], k[j], strict=True))
                    if softcap > 0:
                        s = softcap * math.tanh(s / softcap)
                    if slopes is not None:
                        s -= slopes[b][h] * abs(p - j)
                    if bias is not None:
                        entry = bias[b, h, i, j].item()
                        if entry is False or entry == -math.inf:
                            continue
                        s += 0.0 if entry is True else entry
                    logits[j] = s
                terms = list(logits.values()) + ([] if sinks is None else [float(sinks[h])])
                if not terms:
                    continue
                largest = max(terms)
                row_lse = largest + math.log(sum(math.exp(term - largest) for term in terms))
                lse[b, h, i] = row_lse
                for j, s in logits.items():
                    weight = math.exp(s - row_lse)
                    if dropout_p > 0:
                        place = first_key + j
                        counter = (place // 4, (first_row or 0) + i, first_head + b * heads + h, 0)
                        words = philox_by_hand(counter, (dropout_seed & MASK32, (dropout_seed >> 32) & MASK32))
                        word = words[place % 4]
                        weight *= 0.0 if word < int(dropout_p * 2**32) else 1 / (1 - dropout_p)
                    out[b, h, i] += weight * torch.tensor(v[j], dtype=torch.float64)
    return out, lse


def rotated_by_hand(row: list[float], cos: list[float], sin: list[float], interleaved: bool) -> list[float]:
    """Rotates one head of one token: multiplies its pairs as complex numbers."""
    result, half = list(row), len(cos)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = complex(row[a], row[b]) * complex(cos[i], sin[i])
        result[a], result[b] = turned.real, turned.imag
    return result


def quantized_by_hand(row: list[float]) -> tuple[list[int], float]:
    """Quantises one row to int8. Python's ``round`` rounds halves to even, as torch's does."""
    scale = max(map(abs, row)) / 127 or 1.0
    return [max(-127, min(127, round(x / scale))) for x in row], scale
