"""Multiplies by int8 weights that are dequantised in registers, and computes the input gradient.

    forward         Y[M, N]  = act(X[M, K] W^T + bias) + residual         W = scale * int8[N, K]
                    SwiGLU: the first N of W's 2 N rows are gates, the others ups; Y = silu(gate) * up + residual
    grad_input      dX[M, K] = dY[M, N] W

One CTA computes a tile of the result over one split of the reduction: int8 weights come through shared memory, become
16-bit numbers in registers (all of -127 … 127 are exact in fp16 and bf16) and go into an MMA with an fp32 accumulator.
Scales per tensor and per output channel multiply the finished sum. With scales per group along K, a step of the loop
is within one group, whose scale multiplies the step's sum. In grad_input the scales vary along the reduction: see
`grad_input_kernel`. If the result has too few tiles to fill the GPU, split_k CTAs share a tile and store fp32 partial
sums; `merge_kernel` adds them in a fixed order, so that bits repeat, and does the epilogue. Everything is fp32 up to
one rounding at the end.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.activations import result_columns
from fastattn.dispatch.device import kernel_facts
from fastattn.layout import contiguous, sum_over_tokens

from .device_math import tanh
from .tiles import Int8MatmulTile, ceil_div, int8_matmul_tile

SQRT_HALF = tl.constexpr(math.sqrt(0.5))
SQRT_2_OVER_PI = tl.constexpr(math.sqrt(2 / math.pi))

# The number of weight blocks (of up to 128 rows) that stay in L2 while neighbouring CTAs multiply the blocks by all
# tokens.
SUPERGROUP = tl.constexpr(8)

MERGE_BLOCK = 1024


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Applies the epilogue's activation to fp32 values; NaN stays NaN."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        x = 0.5 * x * (1.0 + tanh((x + 0.044715 * x * x * x) * SQRT_2_OVER_PI))
    elif ACTIVATION == "silu" or ACTIVATION == "swiglu":  # with SwiGLU, x are the gates
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def tile_of_program(pid, num_m_blocks, num_n_blocks):
    """Returns a program's (m_block, n_block): all token blocks pass over SUPERGROUP weight blocks, then over the
    next."""
    group_size = SUPERGROUP * num_m_blocks
    first_n_block = pid // group_size * SUPERGROUP
    width = tl.minimum(num_n_blocks - first_n_block, SUPERGROUP)
    return pid % group_size // width, first_n_block + pid % group_size % width


@triton.jit
def split_range(split_idx, num_splits, num_steps):
    """Returns the begin and end of a split's steps of the reduction."""
    return split_idx * num_steps // num_splits, (split_idx + 1) * num_steps // num_splits


@triton.jit
def scale_and_add_bias(acc, row, mask, scale, scale_stride, bias, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Returns the sums ``acc`` of weight rows ``row``, scaled and with the bias added."""
    if HAS_SCALE:
        acc *= tl.load(scale + row * scale_stride, mask=mask, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def finish(
    acc,  # fp32 sums before scale, bias, activation and residual; with SwiGLU those of the gates
    up,  # like acc, those of the ups; used with SwiGLU only
    m, n, mask,  # int64 indices that broadcast to the shape of acc, and which of them exist
    scale, scale_stride,  # fp32, one for each row of the weight, or [1] with stride 0
    bias,  # one for each row of the weight, or None
    residual, residual_stride,  # [M, N], or None
    out, N,  # [M, N] contiguous
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Applies scale, bias, activation and residual in this order, and rounds once."""
    acc = scale_and_add_bias(acc, n, n < N, scale, scale_stride, bias, HAS_SCALE, HAS_BIAS)
    acc = activate(acc, ACTIVATION)
    if ACTIVATION == "swiglu":
        acc *= scale_and_add_bias(up, n + N, n < N, scale, scale_stride, bias, HAS_SCALE, HAS_BIAS)
    if HAS_RESIDUAL:
        acc += tl.load(residual + m * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m * N + n, acc.to(out.dtype.element_ty), mask=mask)


# The number of tokens changes from call to call, so it is not specialised. N and K belong to a layer; where they are
# multiples of 16, loads that they mask take 16 bytes at a time.
@triton.jit(do_not_specialize=["M", "num_splits"])
def forward_kernel(
    x, x_stride,  # [M, K]
    weight, weight_stride,  # [N, K] int8, or [2 N, K] for SwiGLU
    scale, scale_stride,  # fp32 [rows of the weight, K / GROUP] if GROUP, else [rows of the weight] or [1]
    bias, residual, residual_stride,
    out,  # [M, N]
    partial,  # [num_splits, M, rows of the weight] fp32 if SPLIT
    M, N, K, num_splits,  # N: columns of the result
    GROUP: tl.constexpr,  # a multiple of BLOCK_K, or 0
    HAS_SCALE: tl.constexpr,  # per tensor or channel
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # With SwiGLU, the rows of a weight tile alternate between the gate and the up of each output.
    SUMS: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1  # for each output
    OUTPUTS: tl.constexpr = BLOCK_N // SUMS
    num_m_blocks, num_n_blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, OUTPUTS)
    pid = tl.program_id(0)
    m_block, n_block = tile_of_program(pid % (num_m_blocks * num_n_blocks), num_m_blocks, num_n_blocks)
    split_idx = pid // (num_m_blocks * num_n_blocks)
    begin, end = split_range(split_idx, num_splits, tl.cdiv(K, BLOCK_K))

    m = m_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_block.to(tl.int64) * OUTPUTS + tl.arange(0, BLOCK_N) // SUMS
    row = n + tl.arange(0, BLOCK_N) % SUMS * N  # the row of the weight
    x_rows = x + m[:, None] * x_stride
    w_rows = weight + row[:, None] * weight_stride

    # The tile is computed transposed, W X^T, so that the weights are the MMA's first operand, which may be in
    # registers.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(begin, end):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x_tile = tl.load(x_rows + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        w_tile = tl.load(w_rows + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0)
        w_tile = w_tile.to(x_tile.dtype)
        if GROUP:
            group_scale = tl.load(scale + row * scale_stride + step * BLOCK_K // GROUP, mask=n < N, other=0.0)
            acc += tl.dot(w_tile, tl.trans(x_tile), input_precision="ieee") * group_scale[:, None]
        else:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")

    mask = (n < N)[:, None] & (m < M)[None, :]
    if SPLIT:
        partial_rows = partial + (split_idx.to(tl.int64) * M + m[None, :]) * (SUMS * N)
        tl.store(partial_rows + row[:, None], acc, mask=mask)
    else:
        up = acc
        if SUMS == 2:
            acc, up = tl.split(tl.permute(tl.reshape(acc, [OUTPUTS, 2, BLOCK_M]), [0, 2, 1]))
            n = n_block.to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
            mask = (n < N)[:, None] & (m < M)[None, :]
        finish(
            acc, up, m[None, :], n[:, None], mask, scale, scale_stride, bias, residual, residual_stride, out, N,
            HAS_SCALE, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "num_splits"])
def grad_input_kernel(
    grad_out, grad_out_stride,  # [M, N]
    weight, weight_stride,  # [N, K] int8
    scale, scale_stride,  # [N, K / GROUP] fp32 if GROUP, [N] if PER_CHANNEL, else [1]
    largest_scale,  # [1] fp32
    out,  # [M, K], or [num_splits, M, K] fp32
    M, N, K, num_splits,
    GROUP: tl.constexpr, PER_CHANNEL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,  # BLOCK_N: depth of a step
):  # fmt: skip
    """Computes dX = dY W. A channel's or group's scale varies along the reduction, so it must go into an operand, which
    is rounded.

    The scale goes into the weights, as in a dequantised copy. In dY it would cost one rounding too, but gradients are
    small: times a scale of 1e-3 they fall below fp16's normal range. For the same reason, the weights' factors are
    fractions of the largest scale, which multiplies the finished sum in fp32. With a scale per tensor, the factor is 1,
    and the weights stay exact integers.
    """
    num_m_blocks, num_k_blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    m_block, k_block = tile_of_program(pid % (num_m_blocks * num_k_blocks), num_m_blocks, num_k_blocks)
    split_idx = pid // (num_m_blocks * num_k_blocks)
    begin, end = split_range(split_idx, num_splits, tl.cdiv(N, BLOCK_N))

    m = m_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = k_block.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    largest = tl.load(largest_scale)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for step in range(begin, end):
        n = step * BLOCK_N + tl.arange(0, BLOCK_N)
        dy_mask = (m < M)[:, None] & (n < N)[None, :]
        dy_tile = tl.load(grad_out + m[:, None] * grad_out_stride + n[None, :], mask=dy_mask, other=0.0)
        w_mask = (n < N)[:, None] & (k < K)[None, :]
        w_tile = tl.load(weight + n.to(tl.int64)[:, None] * weight_stride + k[None, :], mask=w_mask, other=0)
        if GROUP:
            # Load one column for each group that the tile touches, then spread it over the group's columns.
            GROUPS: tl.constexpr = max(1, BLOCK_K // GROUP)
            group = k_block * BLOCK_K // GROUP + tl.arange(0, GROUPS)
            scale_mask = (n < N)[:, None] & (group * GROUP < K)[None, :]
            ratio = tl.load(scale + n.to(tl.int64)[:, None] * scale_stride + group[None, :], mask=scale_mask, other=0.0)
            ratio = tl.broadcast_to((ratio / largest)[:, :, None], [BLOCK_N, GROUPS, BLOCK_K // GROUPS])
            w_tile = w_tile.to(tl.float32) * tl.reshape(ratio, [BLOCK_N, BLOCK_K])
        elif PER_CHANNEL:
            ratio = tl.load(scale + n * scale_stride, mask=n < N, other=0.0) / largest
            w_tile = w_tile.to(tl.float32) * ratio[:, None]
        acc = tl.dot(dy_tile, w_tile.to(dy_tile.dtype), acc, input_precision="ieee")

    mask = (m < M)[:, None] & (k < K)[None, :]
    out_rows = out + (split_idx.to(tl.int64) * M + m[:, None]) * K
    tl.store(out_rows + k[None, :], (acc * largest).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "num_splits"])
def merge_kernel(
    partial,  # [num_splits, M, N] fp32, or [num_splits, M, 2 N] of SwiGLU
    scale, scale_stride, bias, residual, residual_stride,
    out,  # [M, N]
    M, N, num_splits,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the splits of BLOCK elements of one row of the result in order, then does the epilogue."""
    num_n_blocks = tl.cdiv(N, BLOCK)
    m = (tl.program_id(0) // num_n_blocks).to(tl.int64)
    n = (tl.program_id(0) % num_n_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    SUMS: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    acc, up = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for split_idx in range(num_splits):
        partial_row = partial + (split_idx * M + m) * (SUMS * N)
        acc += tl.load(partial_row + n, mask=mask, other=0.0)
        if SUMS == 2:
            up += tl.load(partial_row + N + n, mask=mask, other=0.0)
    finish(
        acc, up, m, n, mask, scale, scale_stride, bias, residual, residual_stride, out, N,
        HAS_SCALE, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
    )  # fmt: skip


def _rows(tensor: Tensor, width: int) -> Tensor:
    """Returns ``[..., width]`` as ``[rows, width]`` with contiguous rows, and copies only where no such view exists."""
    rows = tensor.reshape(math.prod(tensor.shape[:-1]), width)
    return rows if rows.stride(1) == 1 or width <= 1 else rows.contiguous()


def _tile(device: torch.device, m: int, n: int, k: int, group: int) -> Int8MatmulTile:
    known = kernel_facts(device)
    return int8_matmul_tile(known.arch, m, n, k, group, known.shared_memory_bytes, known.num_sms)


def _launch_options(tile: Int8MatmulTile) -> dict[str, Any]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}


def int8_matmul(given: Any) -> Tensor:
    """Returns ``act(x @ dequantize(weight)^T + bias) + residual``, ``[..., N]``, for ``x [..., K]`` and int8 ``weight
    [N, K]``.

    ``given`` is a record of the call, whose fields have these names and have been checked. ``scale`` is fp32, ``[1,
    1]``, ``[N, 1]`` or, with groups of 32, 64 or 128 columns, ``[N, K / group]``. ``act`` is given.activation: none,
    relu, gelu, gelu_tanh, silu or swiglu; with swiglu the result has N / 2 columns. ``bias`` has shape ``[N]`` and
    ``residual`` that of the result; both have the dtype of x, as the result has.
    """
    if given.int8_activations:
        raise NotImplementedError("int8_activations: expected False, got True; only the CUDA C++ operator takes True")
    x, weight, scale, activation = given.x, given.weight, given.scale, given.activation
    n, k = weight.shape
    columns = result_columns(activation, n)
    out = x.new_empty((*x.shape[:-1], columns))
    if out.numel() == 0:
        return out
    x = _rows(x, k)
    m = x.shape[0]
    weight, scale = _rows(weight, k), scale.contiguous()
    bias = contiguous(given.bias)
    residual = None if given.residual is None else _rows(given.residual, columns)
    residual_stride = 0 if residual is None else residual.stride(0)
    group = k // scale.shape[1] if scale.shape[1] > 1 else 0  # no groups: a scale per channel or tensor
    has_scale = group == 0 and k > 0
    scale_stride = scale.shape[1] if scale.shape[0] > 1 else 0
    tile = _tile(x.device, m, n, k, group)
    is_split = tile.split_k > 1
    partial = x.new_empty((tile.split_k, m, n), dtype=torch.float32) if is_split else None
    forward_kernel[(ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n) * tile.split_k,)](
        x, x.stride(0), weight, weight.stride(0), scale, scale_stride, bias, residual, residual_stride, out, partial,
        m, columns, k, tile.split_k,
        GROUP=group, HAS_SCALE=has_scale, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation, SPLIT=is_split,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        **_launch_options(tile),
    )  # fmt: skip
    if partial is not None:
        _merge(partial, scale if has_scale else None, scale_stride, bias, residual, residual_stride, out, activation)
    return out


def _merge(
    partial: Tensor,
    scale: Tensor | None,
    scale_stride: int,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_stride: int,
    out: Tensor,
    activation: str,
) -> None:
    """Writes ``act(scale * sum(partial) + bias) + residual`` to ``out [..., N]``; ``partial [splits, M, N or 2 N]``."""
    (num_splits, m, _), n = partial.shape, out.shape[-1]
    merge_kernel[(m * ceil_div(n, MERGE_BLOCK),)](
        partial, scale, scale_stride, bias, residual, residual_stride, out, m, n, num_splits,
        HAS_SCALE=scale is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation, BLOCK=MERGE_BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def int8_matmul_grad_input(given: Any) -> tuple[Tensor, Tensor]:
    """Returns ``grad_out [..., N] @ dequantize(weight)``, ``[..., K]``, without a dequantised copy of the weight.

    With ``bias_grad``, the second result is ``grad_out`` summed to ``[N]`` by PyTorch. Otherwise it is empty, ``[0]``.
    """
    grad_out, weight, scale = given.grad_out, given.weight, given.scale
    grad_bias = sum_over_tokens(grad_out) if given.bias_grad else grad_out.new_empty(0)
    n, k = weight.shape
    out = grad_out.new_empty((*grad_out.shape[:-1], k))
    if out.numel() == 0 or n == 0:
        return out.zero_(), grad_bias
    grad_out = _rows(grad_out, n)
    m = grad_out.shape[0]
    weight, scale = _rows(weight, k), scale.contiguous()
    group = k // scale.shape[1] if scale.shape[1] > 1 else 0
    tile = _tile(grad_out.device, m, k, n, 0)
    is_split = tile.split_k > 1
    partial = grad_out.new_empty((tile.split_k, m, k), dtype=torch.float32) if is_split else None
    grad_input_kernel[(ceil_div(m, tile.block_m) * ceil_div(k, tile.block_n) * tile.split_k,)](
        grad_out, grad_out.stride(0), weight, weight.stride(0), scale, scale.shape[1],
        scale.amax().clamp(min=torch.finfo(torch.float32).tiny),  # if all scales are 0: 0 / tiny, not 0 / 0
        out if partial is None else partial, m, n, k, tile.split_k,
        GROUP=group, PER_CHANNEL=scale.numel() > 1,
        BLOCK_M=tile.block_m, BLOCK_K=tile.block_n, BLOCK_N=tile.block_k,
        **_launch_options(tile),
    )  # fmt: skip
    if partial is not None:
        _merge(partial, None, 0, None, None, 0, out, "none")
    return out, grad_bias
