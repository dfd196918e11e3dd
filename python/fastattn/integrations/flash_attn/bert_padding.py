"""Packs padded batches and pads them again, as flash-attn's helpers do. All functions are differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.integrations.flash_attn.conventions import offsets_of


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns rows ``indices`` of ``input [rows, ...]``."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns zeros ``[first_axis_dim, ...]`` with ``values`` as rows ``indices``."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows ``indices`` of ``input``, and ``input`` itself."""
    return input.index_select(0, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of ``hidden_states [B, S, ...]`` that ``attention_mask [B, S]`` or ``unused_mask [B, S]`` marks.

    ``unused_mask`` marks rows that are reserved for later tokens.

    Returns:
        ``(packed [total, ...], indices [total], cu_seqlens int32 [B + 1], max_seqlen, seqused int32 [B])``. The indices
        are into the flattened batch; ``seqused`` counts only the rows of ``attention_mask``.
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(dim=-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        offsets_of(lengths),
        int(lengths.max()),
        attention_mask.sum(dim=-1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs ``hidden_states [B, S, ...]`` if each of the B rows holds several sequences.

    Each row of ``attention_mask_in_length [B, S]`` holds the lengths of that row's sequences, followed by zeros.

    Returns:
        ``(packed, indices, cu_seqlens, max_seqlen)`` for all sequences of all rows.
    """
    row_lengths = attention_mask_in_length.sum(dim=-1, keepdim=True)
    is_token = torch.arange(attention_mask_in_length.shape[-1], device=row_lengths.device) < row_lengths
    lengths = attention_mask_in_length[attention_mask_in_length != 0].to(torch.int32)
    indices = is_token.flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, offsets_of(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undoes `unpad_input`: returns ``[batch, seqlen, ...]``, with zeros for padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
