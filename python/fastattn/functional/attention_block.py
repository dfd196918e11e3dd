"""Computes a block of attention: some rows over some keys of a larger call. The caller merges the blocks.

Outputs and gradients of blocks are float32 (float64 for float64 inputs), so that nothing is rounded to 16 bits before
the merge. Autograd does not differentiate a block. The caller that merges blocks also computes the gradients of each
block, from the output and the lse of the larger call (Liu et al., "Ring attention", 2023, section 3).

A block is an ``AttentionCall`` with ``first_row``, ``first_key`` and ``first_head``, its positions in the larger call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import reference, run
from fastattn.call import AttentionCall, on_record
from fastattn.dispatch.choose import choose
from fastattn.dispatch.recording import note
from fastattn.functional.attention_backward import through_the_block
from fastattn.functional.attention_checks import check_once
from fastattn.functional.autocast import without_autocast
from fastattn.ops.attention import AttentionBackward, is_deterministic


class BackwardTensors(NamedTuple):
    """Holds what the gradients of a block need: its query, key and value; the output and lse of its rows over all keys
    of the larger call; and the gradients of that output and lse."""

    grad_out: Tensor
    grad_lse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor

    def of(self, heads: slice, rows: slice, keys: slice) -> BackwardTensors:
        """Returns the tensors of a smaller block: only ``rows`` of the query heads ``heads``, and only ``keys``."""
        grad_out, grad_lse, query, out, lse = (
            tensor[:, heads, rows] for tensor in (self.grad_out, self.grad_lse, self.query, self.out, self.lse)
        )
        return BackwardTensors(grad_out, grad_lse, query, self.key[:, :, keys], self.value[:, :, keys], out, lse)


def attention_block(block: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns output ``[B, Hq, Sq, Dv]`` and lse ``[B, Hq, Sq]``, to be merged with the results over other keys."""
    with torch.no_grad(), without_autocast(block.query.device.type):
        call, request = check_once(block._replace(exact_out=True))
        choice = choose(request)
        if choice.backend == "torch":
            out, lse = _by_reference(call)
        else:
            out, lse, _ = run.attention(choice, call, needs_grad=False)
        note(request.op.name, choice.backend, choice.kernel)
    return out, lse


_by_reference = on_record(reference.attention, AttentionCall)


def add_gradients_of_block(
    sums: tuple[Tensor, Tensor, Tensor],
    slopes_sum: Tensor | None,
    tensors: BackwardTensors,
    block: AttentionCall,
) -> None:
    """Adds a block's gradients of query, key and value to ``sums``, and its gradient of the slopes to ``slopes_sum``
    unless ``slopes_sum`` is None.

    The query, key and value are those of ``tensors``, not of ``block``. ``tensors.out`` and ``tensors.grad_out`` have
    the query's dtype. ``sums`` have the dtype of the lse and contiguous rows. ``slopes_sum`` has the slopes' shape.
    """
    grad_out, grad_lse, query, key, value, out, lse = tensors
    slopes = None if slopes_sum is None else block.alibi_slopes
    inputs = [t.detach().requires_grad_() for t in (query, key, value, *([] if slopes is None else [slopes]))]
    with torch.enable_grad(), without_autocast(query.device.type):
        call, request = check_once(_with_inputs(block._replace(exact_out=True), inputs))
        choice = choose(request)
        if choice.backend == "torch":
            exact = [t.detach().to(lse.dtype).requires_grad_() for t in inputs]  # so that gradients are exact too
            found = _by_reference(_with_inputs(call, exact))
            grads = through_the_block(grad_out, grad_lse, tuple(exact), out, lse, *found)
            for total, grad in zip((*sums, slopes_sum), grads, strict=False):
                if total is not None:
                    total += grad
            return
    with torch.no_grad():
        given = call, grad_out, grad_lse, out, lse, is_deterministic(call)
        backward = AttentionBackward(*given, slopes_grad=slopes_sum is not None)
        grad_slopes = run.attention_backward_add(choice, sums, backward)
        if slopes_sum is not None:
            slopes_sum += grad_slopes.view_as(slopes_sum)


def _with_inputs(call: AttentionCall, inputs: list[Tensor]) -> AttentionCall:
    """Returns the call with the query, key, value and, if given, slopes of ``inputs``."""
    query, key, value, *slopes = inputs
    return call._replace(query=query, key=key, value=value, alibi_slopes=slopes[0] if slopes else call.alibi_slopes)
