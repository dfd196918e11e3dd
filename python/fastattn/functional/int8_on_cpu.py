"""Computes ``x @ dequantize(weight)^T`` on a CPU, block by block: the whole weight never exists in floating point.

Each block of rows is converted into one buffer and multiplied while the buffer is still in the core's cache. This takes
about as long as PyTorch's product with a float32 weight, which reads four times the bytes from memory. Autograd saves
the int8 weight, and the backward pass converts the blocks again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.checks import is_readable

# 1 MB in float32 for each thread: half of the second-level cache of a core with 2 MB. In measurements with a weight of
# 4096 x 4096, blocks of 256 KB and of 4 MB took up to three times as long for few tokens, and as long for many tokens.
_BLOCK_ELEMENTS = 2**18


def can_multiply(scale: Tensor, *tensors: Tensor | None) -> bool:
    """Returns whether `product` supports a call with these tensors: they are on a CPU, nothing traces the call, there
    is no forward-mode differentiation, and the scale needs no gradient."""
    return is_readable(scale, *tensors) and not scale.requires_grad and forward_ad._current_level < 0


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Returns ``[..., N]`` in the dtype of ``x [..., K]``, float32 or float64; twice differentiable in ``x``."""
    y: Tensor = _Product.apply(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight, scale, False)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):
    """Computes ``x [M, K] @ W^T``, or ``x [M, N] @ W`` if ``is_gradient``. Each is the backward pass of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, is_gradient: bool) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.is_gradient = is_gradient
        (rows, columns), groups = weight.shape, scale.shape[1]
        scale = scale.to(x.dtype).expand(rows, groups)
        y = x.new_zeros(len(x), columns) if is_gradient else x.new_empty(len(x), rows)
        most = max(1, _BLOCK_ELEMENTS * torch.get_num_threads() // max(columns, 1))
        buffer = x.new_empty(min(most, rows), columns)
        for begin in range(0, rows, most):
            here = slice(begin, min(begin + most, rows))
            block = buffer[: here.stop - begin].copy_(weight[here])
            block.unflatten(1, (groups, columns // groups)).mul_(scale[here, :, None])
            if is_gradient:
                y.addmm_(x[:, here], block)
            else:
                torch.mm(x, block.transpose(0, 1), out=y[:, here])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Product.apply(grads[0], *ctx.saved_tensors, not ctx.is_gradient), None, None, None
