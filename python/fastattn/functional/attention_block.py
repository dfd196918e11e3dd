"""A block of attention: some rows over some keys of a larger call, whose result is the merge of its blocks.

Nothing is rounded to 16 bits before the merge: output and gradients are float32 (float64 for float64 inputs). Autograd
does not differentiate a block: whoever merges blocks also computes their gradients, with the output and the lse of the
whole (Liu et al., "Ring attention", 2023, section 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import reference, run
from fastattn.dispatch.call import Choice
from fastattn.dispatch.choose import choose
from fastattn.dispatch.recording import note
from fastattn.functional.attend import is_deterministic
from fastattn.functional.attention_backward import through_the_block
from fastattn.functional.attention_checks import CheckedCall, Options, check_call
from fastattn.functional.autocast import without_autocast
from fastattn.functional.checked_once import CheckedOnce
from fastattn.ops.attention import AttentionArguments, AttentionBackwardArguments


class Place(NamedTuple):
    """The place of a block's first row, key and head in the whole; with dropout ``key`` is a multiple of 4."""

    row: int
    key: int
    head: int = 0


class BackwardTensors(NamedTuple):
    """The inputs for the gradients of a block: its query, key and value, the output and lse of its rows over all keys,
    and the gradients of these two."""

    grad_out: Tensor
    grad_lse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor

    def of(self, rows: slice, keys: slice) -> BackwardTensors:
        """Returns the tensors of a smaller block."""
        grad_out, grad_lse, query, out, lse = (
            tensor[:, :, rows] for tensor in (self.grad_out, self.grad_lse, self.query, self.out, self.lse)
        )
        return BackwardTensors(grad_out, grad_lse, query, self.key[:, :, keys], self.value[:, :, keys], out, lse)


class BlockOptions(NamedTuple):
    """The options of ``fastattn.attention``, by places in the whole; a causal mask is part of the window."""

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    scale: float | None = None
    deterministic: bool | None = None

    def of_reference(self, place: Place) -> dict[str, Any]:
        options = self._asdict()
        del options["deterministic"]
        first_row, first_key, first_head = place
        return {**options, "first_row": first_row, "first_key": first_key, "first_head": first_head, "exact_out": True}


def attention_block(
    query: Tensor, key: Tensor, value: Tensor, options: BlockOptions, place: Place
) -> tuple[Tensor, Tensor]:
    """Returns output ``[B, Hq, Sq, Dv]`` and lse ``[B, Hq, Sq]``, to be merged with the results over other keys."""
    with torch.no_grad(), without_autocast(query.device.type):
        checked, choice = _chosen([query, key, value], options)
        if choice.backend == "torch":
            out, lse = reference.attention(query, key, value, **options.of_reference(place))
        else:
            arguments = AttentionArguments(
                query,
                key,
                value,
                alibi_slopes=_slopes(options),
                dropout_seed=options.dropout_seed,
                scale=checked.scale,
                window_left=options.window[0],
                window_right=options.window[1],
                first_row=place.row,
                first_key=place.key,
                first_head=place.head,
                softcap=checked.softcap,
                dropout_p=checked.dropout_p,
                exact_out=True,
            )
            out, lse, _ = run.attention(choice, arguments, needs_grad=False, deterministic=False)
        note(checked.call.op, choice.backend, choice.kernel)
    return out, lse


def add_gradients_of_block(
    sums: tuple[Tensor, Tensor, Tensor],
    slopes_sum: Tensor | None,
    tensors: BackwardTensors,
    options: BlockOptions,
    place: Place,
) -> None:
    """Adds the gradients of query, key and value to ``sums``, and that of the slopes to ``slopes_sum`` unless it is
    None.

    ``out`` and its gradient have the query's dtype. ``sums`` have the dtype of the lse and contiguous rows.
    ``slopes_sum`` has the slopes' shape.
    """
    grad_out, grad_lse, query, key, value, out, lse = tensors
    slopes = None if slopes_sum is None else options.alibi_slopes
    inputs = [t.detach().requires_grad_() for t in (query, key, value, *([] if slopes is None else [slopes]))]
    with torch.enable_grad(), without_autocast(query.device.type):
        checked, choice = _chosen(inputs, options if slopes is None else options._replace(alibi_slopes=inputs[3]))
        if choice.backend == "torch":
            exact = tuple(t.detach().to(lse.dtype).requires_grad_() for t in inputs)  # for gradients in that dtype
            if slopes is not None:
                options = options._replace(alibi_slopes=exact[3])
            found = reference.attention(*exact[:3], **options.of_reference(place))
            grads = through_the_block(grad_out, grad_lse, exact, out, lse, *found)
            for total, grad in zip((*sums, slopes_sum), grads, strict=False):
                if total is not None:
                    total += grad
            return
    arguments = AttentionBackwardArguments(
        grad_out=grad_out,
        grad_lse=grad_lse,
        query=query.detach(),
        key=key.detach(),
        value=value.detach(),
        out=out.detach(),
        lse=lse.detach(),
        bias=None,
        alibi_slopes=_slopes(options),
        sinks=None,
        dropout_seed=options.dropout_seed,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=0,
        max_seqlen_k=0,
        scale=checked.scale,
        window_left=options.window[0],
        window_right=options.window[1],
        first_row=place.row,
        first_key=place.key,
        first_head=place.head,
        softcap=checked.softcap,
        dropout_p=checked.dropout_p,
        deterministic=is_deterministic(options.deterministic),
        bias_grad=False,
        slopes_grad=slopes_sum is not None,
    )
    grad_slopes = run.attention_backward_add(choice, sums, arguments)
    if slopes_sum is not None:
        slopes_sum += grad_slopes.view_as(slopes_sum)


_checked_calls = CheckedOnce(check_call)


def _chosen(inputs: list[Tensor], options: BlockOptions) -> tuple[CheckedCall, Choice]:
    query, key, value = inputs[:3]
    checked = _checked_calls.get(
        (query, key, value, None, options.alibi_slopes, None, None, None, None),
        Options(0, 0, False, options.window, options.softcap, options.dropout_p, options.scale),
    )
    return checked, choose(checked.call._replace(may_decode=False))


def _slopes(options: BlockOptions) -> Tensor | None:
    return None if options.alibi_slopes is None else torch.atleast_2d(options.alibi_slopes.detach().float())
