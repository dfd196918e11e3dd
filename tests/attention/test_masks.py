"""Compares the ranges of visible keys that `fastattn.masks` makes with the masks that they represent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastattn
from fastattn import masks


def lower(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal: bool) -> None:
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    document = torch.tensor([0] * 3 + [2] * 5)
    expected = document[:, None] == document
    found = masks.documents(offsets, causal=causal)
    assert found.shape == (1, 1, 8, 1, 2) and found.dtype == torch.int32
    assert torch.equal(masks.to_bool(found, 8)[0, 0], expected & lower(8) if causal else expected)
    padded = masks.to_bool(masks.documents(offsets, causal=causal, seqlen=11), 11)[0, 0]
    assert torch.equal(padded[:8, :8], masks.to_bool(found, 8)[0, 0])
    assert not padded[8:].any() and not padded[:, 8:].any()
    cut = masks.documents(torch.tensor([2, 4, 9], dtype=torch.int32), causal=causal, seqlen=6)
    assert not masks.to_bool(cut, 6)[0, 0, :2].any() and masks.to_bool(cut, 6)[0, 0, 2:].diagonal(2).all()
    fastattn.attention(*(torch.ones(1, 1, 6, 8) for _ in range(3)), key_ranges=cut)  # checks the ranges


def test_documents_see_what_packed_sequences_see() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(11, 2, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    offsets = torch.tensor([0, 4, 11], dtype=torch.int32)
    packed = fastattn.attention_varlen(query, key, value, offsets, offsets, 7, 7, causal=True)
    dense = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    found = fastattn.attention(*dense, key_ranges=masks.documents(offsets))
    torch.testing.assert_close(found[0].transpose(0, 1), packed)


def test_prefix() -> None:
    found = masks.to_bool(masks.prefix(torch.tensor([0, 3, 9]), 6), 6)
    key = torch.arange(6)
    for mask, length in zip(found[:, 0], (0, 3, 9), strict=True):
        assert torch.equal(mask, lower(6) | (key < length))
    assert torch.equal(masks.prefix(3, 6)[0], masks.prefix(torch.tensor([3]), 6)[0])


@pytest.mark.parametrize(("prompt", "answers"), [(4, [3, 0, 2]), (0, [2, 2]), (5, [])], ids=str)
def test_shared_prompt(prompt: int, answers: list[int]) -> None:
    size = prompt + sum(answers)
    part = torch.tensor([0] * prompt + [i + 1 for i, length in enumerate(answers) for _ in range(length)])
    expected = lower(size) & ((part[:, None] == part) | (part == 0))
    assert torch.equal(masks.to_bool(masks.shared_prompt(prompt, answers), size)[0, 0], expected)


def test_answers_of_a_shared_prompt_are_as_if_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 2, 12, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    found = fastattn.attention(query, key, value, key_ranges=masks.shared_prompt(5, [3, 4]))
    for rows in (slice(5, 8), slice(8, 12)):
        alone = [torch.cat([t[..., :5, :], t[..., rows, :]], dim=-2) for t in (query, key, value)]
        torch.testing.assert_close(found[..., rows, :], fastattn.attention(*alone, causal=True)[..., 5:, :])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_global", [0, 2, 20])
@pytest.mark.parametrize("window", [(3, 1), (0, 0), (-1, 2), (2, -1), (-1, -1)], ids=str)
def test_window_and_global(window: tuple[int, int], num_global: int, causal: bool) -> None:
    size, (left, right) = 9, window
    query, key = torch.arange(size)[:, None], torch.arange(size)
    near = (left < 0) | (key >= query - left)
    near = near & ((right < 0) | (key <= query + right))
    expected = near | (key < num_global) | (query < num_global)
    expected = expected & lower(size) if causal else expected
    found = masks.window_and_global(size, window, num_global, causal=causal)
    assert torch.equal(masks.to_bool(found, size)[0, 0], expected)
    tensors = [torch.ones(1, 1, size, 8) for _ in range(3)]
    fastattn.attention(*tensors, key_ranges=found)  # checks on the CPU that ranges do not overlap


def test_what_is_no_block_mask_is_refused() -> None:
    for other in (torch.ones(2, 2, dtype=torch.bool), None):
        with pytest.raises(TypeError, match="block_mask: expected a BlockMask"):
            masks.from_block_mask(other)


def test_tree() -> None:
    parents = [-1, 0, 1, 1, 3, 0, -1, 6]
    expected = torch.eye(8, dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            expected[token] |= expected[parent]
    found = masks.tree(parents)
    assert torch.equal(masks.to_bool(found, 8)[0, 0], expected)
    assert found.shape[-2] == 2
    with pytest.raises(fastattn.InputError, match="parents: expected -1 or an earlier token for token 1, got 1"):
        masks.tree([-1, 1])
    with pytest.raises(
        fastattn.InputError, match="parents: expected at most 4 ranges of visible keys per query, got 5 for query 8"
    ):
        masks.tree([-1, -1, 0, -1, 2, -1, 4, -1, 6])
    assert masks.tree([]).shape == (1, 1, 0, 1, 2)
    assert torch.equal(masks.tree(torch.tensor(parents)), found)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(rows=st.integers(0, 9), keys=st.integers(0, 9), seed=st.integers(0, 10**6))
def test_from_bool_and_back(rows: int, keys: int, seed: int) -> None:
    mask = torch.rand(2, 1, rows, keys, generator=torch.Generator().manual_seed(seed)) < 0.7
    edges = mask.int().diff(dim=-1, prepend=torch.zeros(2, 1, rows, 1, dtype=torch.int32)) == 1
    if rows and keys and edges.sum(-1).max() > 4:
        with pytest.raises(fastattn.InputError, match="at most 4 ranges"):
            masks.from_bool(mask)
    else:
        assert torch.equal(masks.to_bool(masks.from_bool(mask), keys), mask)


def test_from_bool_names_the_first_query() -> None:
    mask = torch.zeros(1, 1, 4, 10, dtype=torch.bool)
    mask[..., 2:, ::2] = True
    with pytest.raises(fastattn.InputError, match="at most 4 ranges of visible keys per query, got 5 for query 2"):
        masks.from_bool(mask)


def test_from_block_mask() -> None:
    """Blocks are full, partial or absent, over two heads; the last blocks are cut off."""
    from torch.nn.attention.flex_attention import create_block_mask

    document = torch.tensor([0] * 70 + [1] * 130)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (document[query] == document[key]) & ((key <= query) | (head == 1))

    block_mask = create_block_mask(sees, None, 2, 200, 200, device="cpu", BLOCK_SIZE=32)
    found = masks.from_block_mask(block_mask)
    expected = (document[:, None] == document) & torch.stack([lower(200), torch.ones(200, 200, dtype=torch.bool)])
    assert torch.equal(masks.to_bool(found, 200), expected[None])

    def comb(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query < 50) | (key % 2 == 0)

    with pytest.raises(fastattn.InputError, match=r"got 100 for query 50; pass the mask as bias"):
        masks.from_block_mask(create_block_mask(comb, None, None, 200, 200, device="cpu", BLOCK_SIZE=32))


def test_show() -> None:
    assert masks.show(masks.shared_prompt(2, [1, 1]), num_keys=4) == "█···\n██··\n███·\n██·█"
    assert masks.show(masks.documents(torch.tensor([0, 4, 8]), causal=True), 8, width=4) == "▒···\n█▒··\n··▒·\n··█▒"
