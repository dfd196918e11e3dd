"""Tests the warning about tensors that look like ``[B, S, H, D]``, whose heads a causal mask would mask like tokens."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import fastattn
from by_hand import normal
from fastattn.functional import attention
from fastattn.integrations import flash_attn


def test_heads_that_are_taken_for_queries_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_has_warned_of_layout", False)
    query, key = normal(1, 2, 20, 8, 16), normal(2, 2, 20, 2, 16)  # [B, S, H, D]
    with pytest.warns(
        UserWarning, match=r"8 queries and 2 keys, the first 6 rows .* zero.*transpose\(1, 2\)"
    ) as warned:
        out = fastattn.attention(query, key, key, causal=True)
    assert isinstance(out, Tensor) and not out[:, :, :6].any()
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.attention(query, key, key, causal=True)
        monkeypatch.setattr(attention, "_has_warned_of_layout", False)
        compiled = torch.compile(fastattn.attention, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(query, key, key, causal=True), out)


@pytest.mark.parametrize(
    ("query", "key", "causal"),
    [
        ((2, 8, 20, 16), (2, 2, 10, 16), True),  # grouped query heads
        ((2, 4, 20, 16), (2, 4, 9, 16), True),  # 20 heads are no multiple of 9
        ((2, 4, 512, 16), (2, 4, 256, 16), True),  # too many for heads
        ((2, 4, 20, 16), (2, 4, 0, 16), True),
        ((2, 4, 2, 16), (2, 4, 8, 16), True),
        ((2, 20, 8, 16), (2, 20, 2, 16), False),  # nothing is masked
    ],
    ids=str,
)
def test_other_shapes_are_taken_as_they_are(
    query: tuple[int, ...], key: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_has_warned_of_layout", False)
    keys = normal(2, *key)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.attention(normal(1, *query), keys, keys, causal=causal)


def test_what_was_transposed_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_has_warned_of_layout", False)
    query, key = normal(1, 2, 8, 4, 16), normal(2, 2, 2, 4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = fastattn.attention(query.transpose(1, 2), key.transpose(1, 2), key.transpose(1, 2), causal=True)
        assert torch.equal(flash_attn.flash_attn_func(query, key, key, causal=True), out.transpose(1, 2))
