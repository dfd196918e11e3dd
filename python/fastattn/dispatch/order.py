"""The order in which backends with kernels are tried for a call, and the reasons; no other file decides it."""

from __future__ import annotations

from typing import NamedTuple

from fastattn import native
from fastattn.dispatch.call import Call
from fastattn.dispatch.support import CHANGES_SCORES


class Order(NamedTuple):
    """An order of backends, of which the first that can run the call does, and the ``reason`` for the first one."""

    backends: tuple[str, ...]
    reason: str


def order_for(call: Call, arch: int) -> Order:
    """Returns the order for ``call`` on a GPU of compute capability ``arch`` (times ten)."""
    if arch == 90 and call.op == "attention" and call.features.isdisjoint(CHANGES_SCORES | {"paged"}):
        return _order_of_plain_attention_on_hopper(call)
    return _USUAL


# The same kind of prediction as below, CUDA C++ against Triton, supports this order. Clocks of both passes of attention
# on sm_80: 3095 and 3660 for 64 dims, 5364 and 7327 for 128. On sm_90 with ALiBi, Triton takes 8584 clocks for 64 dims
# and 12632 for 128; CUDA's backward pass takes 1450 and 2224, and its forward pass less than that. TFLOP/s of the int8
# matmul of 4096 tokens on sm_90: 433 and 438; 316 and 338 with scales for groups of 128; 385 and 307 for its gradient.
# Nothing is predicted for decoding, which waits for memory, or for other GPUs.
_USUAL = Order(
    ("cuda", "triton"), "no measurement, and no prediction to be trusted, says that a Triton kernel is faster"
)


class _Clocks(NamedTuple):
    """The clocks that an SM takes for 64 x 64 scores that are only scaled and masked by a window, in both passes."""

    cuda: int
    cuda_backward: int
    cuda_without_sm90a: int  # this and the next: kernels for sm_80, if the library has none for sm_90a
    cuda_backward_without_sm90a: int
    triton: int
    triton_backward: int


# Predicted from the machine code for an H100 in bf16; nothing is measured. The keys are the widest head dims of equal
# cost, as kernels pad narrower ones; Triton's have only powers of two as widths.
_CLOCKS_ON_HOPPER = {
    32: _Clocks(412, 1080, 432, 1031, triton=415, triton_backward=1118),
    63: _Clocks(412, 1080, 732, 1745, triton=631, triton_backward=1515),
    64: _Clocks(412, 1080, 732, 1745, triton=525, triton_backward=1511),
    96: _Clocks(539, 1571, 983, 2357, triton=1050, triton_backward=2824),
    127: _Clocks(664, 1829, 1181, 3053, triton=1050, triton_backward=2824),
    128: _Clocks(664, 1829, 1181, 3053, triton=1008, triton_backward=2762),
    192: _Clocks(928, 3646, 2039, 8651, triton=2333, triton_backward=10900),
    255: _Clocks(1194, 5014, 2665, 11476, triton=2333, triton_backward=10900),
    256: _Clocks(1194, 5014, 2665, 11476, triton=2074, triton_backward=11048),
}
_TRUSTED = 0.08  # predicted clocks that differ by less than this share of the larger decide nothing


def _order_of_plain_attention_on_hopper(call: Call) -> Order:
    """Returns the order by predicted clocks. A backward pass runs on its forward's backend, so both count together."""
    clocks = None
    for head_dim, row in _CLOCKS_ON_HOPPER.items():
        if call.head_dim <= head_dim and call.value_dim <= head_dim:
            clocks = row
            break
    if clocks is None:
        return _USUAL
    has_sm90a = "90a" in native.BUILD["archs"]
    cuda = clocks.cuda if has_sm90a else clocks.cuda_without_sm90a
    triton, passes = clocks.triton, "the forward pass is"
    if "gradients" in call.features:
        cuda += clocks.cuda_backward if has_sm90a else clocks.cuda_backward_without_sm90a
        triton += clocks.triton_backward
        passes = "the forward and the backward pass together are"
    saved = 1 - min(cuda, triton) / max(cuda, triton)
    if saved < _TRUSTED:
        return _USUAL
    backends = ("triton", "cuda") if triton < cuda else ("cuda", "triton")
    return Order(backends, f"{passes} predicted, not measured, to take {saved:.0%} less time on compute capability 9.0")
