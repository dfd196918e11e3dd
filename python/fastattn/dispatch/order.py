"""In which order the backends with kernels are tried for a call, and why: the one place that says so."""

from __future__ import annotations

from typing import NamedTuple

from fastattn import native
from fastattn.dispatch.call import Call
from fastattn.dispatch.support import CHANGES_SCORES


class Order(NamedTuple):
    """The first of ``backends`` that can run the call does. ``reason``: what speaks for the one that comes first."""

    backends: tuple[str, ...]
    reason: str


def order_for(call: Call, arch: int) -> Order:
    """On compute capability ``arch``, times ten."""
    if arch == 90 and call.op == "attention" and call.features.isdisjoint(CHANGES_SCORES | {"paged"}):
        return _order_of_plain_attention_on_hopper(call)
    return _USUAL


# What the same kind of prediction as below says for it, CUDA C++ against Triton. Clocks of both passes of attention on
# sm_80, 64 dims: 3095, 3660; 128 dims: 5364, 7327. On sm_90 with ALiBi Triton takes 8584 and 12632, CUDA's backward
# pass alone 1450 and 2224, and its forward pass less than that. TFLOP/s of the int8 matmul of 4096 tokens on sm_90:
# 433, 438; with scales for groups of 128: 316, 338; of its gradient: 385, 307. Nothing is predicted of decoding, which
# waits for memory, and of other GPUs.
_USUAL = Order(
    ("cuda", "triton"), "no measurement, and no prediction to be trusted, says that a Triton kernel is faster"
)


class _Clocks(NamedTuple):
    """Of an SM for 64 x 64 scores that are only scaled and masked by a window, forward and backward."""

    cuda: int
    cuda_backward: int
    cuda_without_sm90a: int  # both for sm_80, where the library has no others
    cuda_backward_without_sm90a: int
    triton: int
    triton_backward: int


# Predicted from the machine code for an H100, bf16, nothing measured. By the widest head dim that costs as much, for
# kernels pad narrower ones; Triton's have no width between powers of two.
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
_TRUSTED = 0.08  # predicted clocks that differ by a smaller share of the larger say nothing


def _order_of_plain_attention_on_hopper(call: Call) -> Order:
    """A backward pass runs where its forward pass has run, so that the two count together."""
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
