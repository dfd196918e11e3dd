"""Merges the results of attention over two sets of keys (Liu et al., "Ring attention", 2023, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import reference
from fastattn.checks import FLOATING, check_dtype, check_same_device, check_shape, check_tensor, expect
from fastattn.dispatch.choose import choose
from fastattn.dispatch.device import facts
from fastattn.dispatch.reasons import reason_against
from fastattn.dispatch.recording import note
from fastattn.dispatch.request import Request
from fastattn.dispatch.thread_state import thread
from fastattn.functional.autocast import without_autocast
from fastattn.functional.checked_once import CheckedOnce
from fastattn.ops.describe import describe_merge
from fastattn.ops.merge import Merge, MergeInto, differentiable_merge, merge_attention_into
from fastattn.ops.merge import merge_attention as merge_by_kernel


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two results of attention, over keys a and over keys b, into output and lse over the keys of both.

    The output is float32, so a chain of merges does not add up rounding errors: round once, after the last merge. The
    merge is differentiable in all four arguments. If a row sees no key of one set (lse -inf), that set's output is
    ignored. If a row sees no key of either set, its output is 0 and its lse is -inf. On a GPU one Triton kernel merges
    and another computes gradients; each kernel reads its arguments once, in any layout.

    Args:
        out_a, out_b: ``[B, Hq, Sq, Dv]``, or packed ``[total, Hq, Dv]``.
        lse_a, lse_b: ``[B, Hq, Sq]``, or packed ``[Hq, total]``, as ``return_lse`` gives them. At most one of them
            includes a sink.

    Returns:
        Output and lse of the same shapes, in float32, or in float64 if an argument is float64.

    Raises:
        InputError, TypeError: the shapes do not match or are none of the above, or the devices differ.
    """
    merge, request = _check_once(Merge(out_a, lse_a, out_b, lse_b))
    choice = choose(request)
    if choice.backend == "torch":
        with without_autocast(request.device.type):
            results = reference.merge_attention(*merge)
    elif "gradients" in request.features:
        results = differentiable_merge(choice.backend, merge)
    else:
        results = merge_by_kernel(choice.backend, merge)
    note(request.op.name, choice.backend, choice.kernel)
    return results


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges a block's results with ``out`` and ``lse``, in place and without gradients.

    The merge is a step of a larger call. If the user forces a backend other than Triton for that call, or if no kernel
    takes the tensors, PyTorch merges, and no error is raised.
    """
    _, request = _check_once(Merge(out, lse, block_out, block_lse))
    with torch.no_grad():
        if thread.forced in (None, "triton") and reason_against("triton", request, facts(request.device)) is None:
            merge_attention_into("triton", MergeInto(out, lse, block_out, block_lse))
            return
        merged = reference.merge_attention(out, lse, block_out, block_lse)
        for total, result in zip((out, lse), merged, strict=True):
            total.copy_(result)


def _check(merge: Merge) -> tuple[Merge, Request]:
    for name, tensor in merge._asdict().items():
        check_tensor(name, tensor)
        check_dtype(name, tensor, FLOATING)
        check_same_device(name, tensor, merge.out_a.device)
    out_a, lse_a, out_b, lse_b = merge
    expect(out_a.dim() in (3, 4), "out_a", "[B, Hq, Sq, Dv] or [total, Hq, Dv]", list(out_a.shape))
    check_shape("out_b", out_b, out_a.shape, "of out_a")
    is_packed = out_a.dim() == 3
    rows = (out_a.shape[1], out_a.shape[0]) if is_packed else out_a.shape[:3]
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_shape(name, lse, rows, "[Hq, total]" if is_packed else "[B, Hq, Sq]")
    return merge, describe_merge(*merge)


_check_once = CheckedOnce(_check, Merge)
