"""``torch.vmap`` rules of the operators.

The mapped dimension joins the heads, which every kernel treats alike (``v * Hq + h`` reads KV head ``v * Hkv + h //
group``), so that a mapped call is one launch. Rules take the operator's overload and return what
``torch.library.register_vmap`` wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.run.layout import sum_over_tokens


def _fold(tensor: Tensor | None, mapped: int | None, size: int, heads_dim: int) -> Tensor | None:
    """Join the mapped dimension with dimension ``heads_dim`` (counted without it); repeat a tensor that has none."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)
    return tensor.movedim(0, heads_dim).flatten(heads_dim, heads_dim + 1)


def _unfold(tensor: Tensor, size: int, heads_dim: int) -> Tensor:
    """Undo ``_fold``: the mapped dimension comes first."""
    return tensor.unflatten(heads_dim, (size, -1)).movedim(heads_dim, 0)


def _fold_bias(bias: Tensor | None, mapped: int | None, size: int, heads: int) -> Tensor | None:
    """A bias that is one for all heads has to be repeated for them, or the mapped dimension would not fit."""
    if bias is None or (mapped is None and bias.shape[1] == 1):
        return bias
    bias_heads = bias.shape[1] if mapped is None else bias.movedim(mapped, 0).shape[2]
    folded = _fold(bias, mapped, size, heads_dim=1)
    assert folded is not None
    return folded if bias_heads == heads else folded.repeat_interleave(heads, dim=1)


def _unmapped(names: Sequence[str], dims: Sequence[int | None]) -> None:
    for name, dim in zip(names, dims, strict=True):
        if dim is not None:
            raise NotImplementedError(
                f"{name}: torch.vmap over it is not supported; it must be the same for every sample"
            )


def attention_forward_rule(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        size, (q_dim, k_dim, v_dim, bias_dim, slopes_dim, sinks_dim) = info.batch_size, in_dims[:6]
        _unmapped(("dropout_seed", "cu_seqlens_q", "cu_seqlens_k"), in_dims[6:9])
        _unmapped(("block_table",), in_dims[17:18] or (None,))  # torch leaves an argument out that has its default
        query, key, value, bias, slopes, sinks, *options = args
        packed = options[1] is not None
        axis = 1
        heads = (query if q_dim is None else query.movedim(q_dim, 0)[0]).shape[axis]
        out, lse = overload(
            _fold(query, q_dim, size, axis),
            _fold(key, k_dim, size, axis),
            _fold(value, v_dim, size, axis),
            _fold_bias(bias, bias_dim, size, heads),
            _fold(slopes, slopes_dim, size, 1),
            _fold(sinks, sinks_dim, size, 0),
            *options,
        )
        return (_unfold(out, size, axis), _unfold(lse, size, 0 if packed else 1)), (0, 0)

    return rule


def attention_backward_rule(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        size = info.batch_size
        grad_out, grad_lse, query, key, value, out, lse, bias, slopes, sinks, *options = args
        _unmapped(("dropout_seed", "cu_seqlens_q", "cu_seqlens_k"), in_dims[10:13])
        packed, bias_grad = options[1] is not None, options[-1]
        lse_axis = 0 if packed else 1
        heads = (query if in_dims[2] is None else query.movedim(in_dims[2], 0)[0]).shape[1]
        bias_shape = None if bias is None else (bias if in_dims[7] is None else bias.movedim(in_dims[7], 0)[0]).shape
        if bias_grad and bias is not None and in_dims[7] is None:
            bias = bias.unsqueeze(0).expand(size, *bias.shape)  # every sample wants a gradient of its own
            in_dims = (*in_dims[:7], 0, *in_dims[8:])
        grads = overload(
            _fold(grad_out, in_dims[0], size, 1),
            _fold(grad_lse, in_dims[1], size, lse_axis),
            _fold(query, in_dims[2], size, 1),
            _fold(key, in_dims[3], size, 1),
            _fold(value, in_dims[4], size, 1),
            _fold(out, in_dims[5], size, 1),
            _fold(lse, in_dims[6], size, lse_axis),
            _fold_bias(bias, in_dims[7], size, heads),
            _fold(slopes, in_dims[8], size, 1),
            _fold(sinks, in_dims[9], size, 0),
            *options,
        )
        grad_query, grad_key, grad_value, grad_bias, grad_sinks = grads
        if bias_grad and bias_shape is not None:
            grad_bias = _unfold(grad_bias, size, 1)
            grad_bias = grad_bias.sum(2, keepdim=True) if bias_shape[1] == 1 else grad_bias
        else:
            grad_bias = grad_bias.expand(size, 0)
        grad_sinks = grad_sinks.expand(size, 0) if sinks is None else _unfold(grad_sinks, size, 0)
        unfolded = (_unfold(grad_query, size, 1), _unfold(grad_key, size, 1), _unfold(grad_value, size, 1))
        return (*unfolded, grad_bias, grad_sinks), (0, 0, 0, 0, 0)

    return rule


def matmul_rule(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """For the matmuls: only ``x`` (and the residual) may be mapped, and any leading dimensions are rows to them."""

    def rule(info: Any, in_dims: Sequence[int | None], x: Tensor, weight: Tensor, scale: Tensor, *rest: Any) -> Any:
        _unmapped(("weight", "scale"), in_dims[1:3])
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if rest:
            bias, residual, *options = rest
            _unmapped(("bias",), in_dims[3:4])
            if residual is not None and in_dims[4] is None:
                residual = residual.unsqueeze(0).expand(info.batch_size, *residual.shape)
            elif residual is not None:
                residual = residual.movedim(in_dims[4], 0)
            rest = (bias, residual, *options)
        return overload(x, weight, scale, *rest), 0

    return rule


def matmul_grad_input_rule(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """As ``matmul_rule``; a bias has a gradient for each sample, which the operator would add up."""

    def rule(info: Any, in_dims: Sequence[int | None], grad_out: Tensor, *rest: Any) -> Any:
        weight, scale, bias_grad = rest
        _unmapped(("weight", "scale"), in_dims[1:3])
        assert in_dims[0] is not None  # nothing else is mapped
        grad_out = grad_out.movedim(in_dims[0], 0)
        grad_input, nothing = overload(grad_out, weight, scale, False)
        grad_bias = sum_over_tokens(grad_out, samples=1) if bias_grad else nothing.expand(info.batch_size, 0)
        return (grad_input, grad_bias), (0, 0)

    return rule
