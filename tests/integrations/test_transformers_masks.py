"""Tests that the integration's mask function means what transformers' own bool mask means, in less memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, masking_utils
from transformers.masking_utils import sdpa_mask
from transformers.models.mistral import modeling_mistral  # noqa: F401 # its code makes masks, and is read

import tiny_models  # noqa: F401 # before transformers asks the Hub
from fastattn.integrations.transformers import masks
from fastattn.integrations.transformers.marks import Keys, Lengths, Offsets, Ranges, read
from fastattn.integrations.transformers.masks import make_mask
from fastattn.masks import to_bool

BATCH = 2
WINDOW = 3


def as_whole_mask(mask: Tensor | None, q_length: int, kv_length: int, *, causal: bool, window: int | None) -> Tensor:
    """Returns the bool mask ``[BATCH, 1, q_length, kv_length]`` that the attention function derives from ``mask``.

    ``window`` is the window of a causal model's layers.
    """
    mark = None if mask is None else read(mask)
    assert mask is not None or q_length == 1
    column, row = torch.arange(kv_length), torch.arange(q_length)[:, None]
    if mask is not None and mark is None:
        assert mask.dtype == torch.bool
        return mask.expand(BATCH, 1, q_length, kv_length)
    if isinstance(mark, Ranges):
        return to_bool(mark.key_ranges, kv_length).expand(BATCH, 1, q_length, kv_length)
    if isinstance(mark, Offsets):
        ids = torch.searchsorted(mark.cu_seqlens, torch.arange(BATCH * q_length), right=True).view(BATCH, -1)
        visible = (ids[:, :, None] == ids[:, None, :]) & (column <= row)
        assert mark.max_seqlen == mark.cu_seqlens.diff().max()
        end = torch.full((BATCH, 1, 1), kv_length)
    elif isinstance(mark, Lengths):
        end = mark.lengths.view(BATCH, 1, 1)
        visible = column < end
    else:
        mark = mark or Keys(kv_length, None, None if causal else -1)
        end = torch.full((BATCH, 1, 1), mark.num_keys)
        present = torch.ones(1, mark.num_keys, dtype=torch.bool) if mark.present is None else mark.present[:, 0, 0]
        visible = torch.nn.functional.pad(present, (0, kv_length - mark.num_keys))[:, None, :].expand(
            BATCH, q_length, -1
        )
        distance = column - (row + end - q_length)
        if mark.reach is None:
            visible = visible & (distance <= 0)
        elif mark.reach >= 0:
            return (visible & (distance.abs() <= mark.reach))[:, None]
        else:
            return visible[:, None]
    if window is not None:
        visible = visible & (column > row + end - q_length - window)
    return visible.expand(BATCH, q_length, kv_length)[:, None]


def causal() -> Callable[..., Any]:
    return masking_utils.causal_mask_function


def sliding() -> Callable[..., Any]:
    return masking_utils.sliding_window_causal_mask_function(WINDOW)


def both_ways() -> Callable[..., Any]:
    return masking_utils.bidirectional_mask_function


def sliding_both_ways() -> Callable[..., Any]:
    return masking_utils.sliding_window_bidirectional_mask_function(WINDOW)


# (queries, keys, offset of the queries, offset of the keys): a prompt; a later chunk; a step; a sliding cache; a static
# cache that is empty, partly filled (by an int or a tensor), or read in steps; more positions than keys.
PLACES: list[tuple[int, int, int | Tensor, int]] = [
    (6, 6, 0, 0),
    (3, 9, 6, 0),
    (1, 9, 8, 0),
    (2, 4, 6, 4),
    (6, 10, 0, 0),
    (3, 10, 4, 0),
    (3, 10, torch.tensor(4), 0),
    (1, 10, torch.tensor(4), 0),
    (1, 10, 4, 0),
    (3, 5, 4, 0),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(str(int(part)) for part in place))
@pytest.mark.parametrize("padding", ["none", "ones", "left", "right", "static"])
@pytest.mark.parametrize("pattern", [causal, sliding, both_ways, sliding_both_ways])
def test_says_what_the_whole_mask_says(
    pattern: Callable[[], Callable[..., Any]], padding: str, place: tuple[int, int, int | Tensor, int]
) -> None:
    q_length, kv_length, q_offset, kv_offset = place
    attention_mask = None
    if padding != "none":
        attention_mask = torch.ones(BATCH, int(q_offset) + q_length, dtype=torch.bool)
        attention_mask[1, {"left": slice(0, 2), "right": slice(-1, None)}.get(padding, slice(0))] = False
        if padding == "static":
            attention_mask = torch.nn.functional.pad(attention_mask, (0, kv_offset + kv_length - int(q_offset) - 1))
    is_causal = pattern in (causal, sliding)
    where = {
        "batch_size": BATCH,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "attention_mask": attention_mask,
        "mask_function": pattern(),
    }
    wanted = sdpa_mask(**where, allow_is_causal_skip=False)
    mask = make_mask(
        **where,
        allow_is_causal_skip=is_causal,
        allow_is_bidirectional_skip=not is_causal,
        local_size=WINDOW if pattern in (sliding, sliding_both_ways) else None,
        config=MistralConfig(sliding_window=WINDOW),
    )
    layers_window = WINDOW if pattern is sliding else None
    came = as_whole_mask(mask, q_length, kv_length, causal=is_causal, window=layers_window)
    is_token = torch.ones(BATCH, q_length, dtype=torch.bool)
    if attention_mask is not None:  # rows of padding do not matter
        is_token = attention_mask[:, int(q_offset) : int(q_offset) + q_length]
    rows = is_token[:, None, :, None] & torch.ones_like(wanted)
    assert torch.equal(came & rows, wanted & rows)
    if pattern is not sliding_both_ways and int(q_offset) + q_length <= kv_offset + kv_length:
        assert mask is None or mask.shape[2] == 1


@pytest.mark.parametrize("packed_first", [True, False], ids=["as in 5.23", "as from 5.24 on"])
def test_packed_sequences_become_offsets(packed_first: bool) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    packed = masking_utils.packed_sequence_mask_function(masking_utils.find_packed_sequence_indices(positions))
    for window in (None, WINDOW):
        config = MistralConfig(sliding_window=WINDOW)
        pattern = causal() if window is None else sliding()
        remapped = masking_utils.remap_positions_for_packed_sequence(pattern, positions)
        where = {
            "batch_size": BATCH,
            "q_length": 6,
            "kv_length": 6,
            "mask_function": masking_utils.and_masks(*((packed, remapped) if packed_first else (remapped, packed))),
            "allow_is_causal_skip": False,
        }
        mask = make_mask(**where, config=config)
        assert isinstance(read(mask), Offsets)
        came = as_whole_mask(mask, 6, 6, causal=True, window=window)
        assert torch.equal(came, sdpa_mask(**where))


def custom(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query + key) % 3 != batch


@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**24], ids=["row by row", "at once"])
@pytest.mark.parametrize("q_offset", [0, torch.tensor(3)], ids=str)
def test_what_is_not_recognised_becomes_ranges(
    q_offset: int | Tensor, at_once: int, use_vmap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MOST_MASKED_AT_ONCE", at_once)
    padding = torch.ones(BATCH, 9, dtype=torch.bool)
    padding[1, :2] = False
    functions = {
        "custom": custom,
        "union": masking_utils.or_masks(causal(), custom),
        "intersection": masking_utils.and_masks(sliding(), custom),
        "chunks": masking_utils.chunked_causal_mask_function(2, torch.zeros(BATCH, dtype=torch.int64)),
        "blocks": masking_utils.or_masks(
            causal(), masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, 1, 1, -1, 2, 2]] * BATCH))
        ),
    }
    for (name, function), attention_mask in itertools.product(functions.items(), (None, padding)):
        where = {
            "batch_size": BATCH,
            "q_length": 6,
            "kv_length": 9,
            "q_offset": q_offset,
            "mask_function": function,
            "attention_mask": attention_mask,
            "use_vmap": use_vmap,
            "allow_is_causal_skip": False,
        }
        mask = make_mask(**where, config=MistralConfig())
        assert isinstance(read(mask), Ranges), name
        assert torch.equal(as_whole_mask(mask, 6, 9, causal=False, window=None), sdpa_mask(**where)), name


def test_too_many_ranges_or_a_model_that_works_on_masks_get_a_whole_mask() -> None:
    def comb(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query < 3) | (key % 2 == 0)

    where = {"batch_size": BATCH, "q_length": 9, "kv_length": 9, "allow_is_causal_skip": False}
    assert torch.equal(
        make_mask(**where, mask_function=comb, config=MistralConfig()), sdpa_mask(**where, mask_function=comb)
    )
    of_unread_code = type("Config", (), {"__module__": "nowhere"})()
    mask = make_mask(**where, mask_function=custom, config=of_unread_code)
    assert torch.equal(mask, sdpa_mask(**where, mask_function=custom))


def test_chunks_that_are_longer_than_everything_are_causal() -> None:
    chunks = masking_utils.chunked_causal_mask_function(6, torch.zeros(BATCH, dtype=torch.int64))
    mask = make_mask(BATCH, 6, 6, mask_function=chunks, local_size=6, config=LlamaConfig())
    assert read(mask) == Keys(6, None, None)


def test_who_asks_for_a_whole_mask_gets_one() -> None:
    for pattern in (causal, sliding, both_ways):
        mask = make_mask(BATCH, 6, 6, mask_function=pattern(), allow_is_causal_skip=False, config=LlamaConfig())
        assert mask.shape == (BATCH, 1, 6, 6)


def test_a_window_that_the_layers_keep_to_themselves_is_in_the_mask() -> None:
    unknown = SimpleNamespace(sliding_window=WINDOW)
    for config, kind in ((MistralConfig(sliding_window=WINDOW), Keys), (unknown, type(None))):
        mask = make_mask(BATCH, 6, 6, mask_function=sliding(), local_size=WINDOW, config=config)
        assert isinstance(read(mask), kind)


def test_marks_survive_what_generate_does_to_masks() -> None:
    padding = torch.ones(BATCH, 6, dtype=torch.bool)
    padding[1, 0] = False
    for attention_mask in (None, padding):
        mask = make_mask(BATCH, 6, 10, 0, 0, attention_mask=attention_mask, config=LlamaConfig())
        before, after = (as_whole_mask(m, 6, 10, causal=True, window=None) for m in (mask, mask.contiguous()))
        assert torch.equal(before, after)
