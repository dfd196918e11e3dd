"""Prepares other libraries' linear layers with int8 weights, and cuBLAS with 16-bit weights as their baseline.

A peer that quantises by itself gets fastattn's dequantised weight, so that its int8 values are the same up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure.cases.int8 import Int8Case, Int8Inputs, prepare_gradient
from benchmarks.measure.implementations import (
    CUBLAS,
    Implementation,
    Prepare,
    Prepared,
    installed,
    require,
    torch_version,
)

Linear = Callable[[Tensor], Tensor]


def _through(make_linear: Callable[[Int8Case, Int8Inputs], Linear], differentiable: bool) -> Prepare:
    """Returns a function that prepares a layer's forward pass or, if ``differentiable``, its input gradient."""

    def prepare(case: Int8Case, inputs: Int8Inputs) -> Prepared:
        require(differentiable or not case.gradient, "gradient of the input")
        linear = make_linear(case, inputs)
        if case.gradient:
            return prepare_gradient(inputs, linear)
        return Prepared(lambda: linear(inputs.x), lambda y: (y,))

    return prepare


def _cublas(case: Int8Case, inputs: Int8Inputs) -> Linear:
    weight = inputs.weight.dequantize(case.torch_dtype)
    return lambda x: F.linear(x, weight)


def _dequantize_then_matmul(case: Int8Case, inputs: Int8Inputs) -> Prepared:
    """Prepares a call that dequantises the weight to 16 bits every time, forward or backward."""
    weight, dtype = inputs.weight, case.torch_dtype
    scale = weight.scale.to(dtype)

    def dequantized() -> Tensor:
        grouped = weight.data.view(case.n, scale.shape[1], -1).to(dtype) * scale[..., None]
        return grouped.view(case.n, case.k)

    if case.gradient:
        return Prepared(lambda: inputs.grad_out @ dequantized(), lambda grad: (grad,))
    return Prepared(lambda: F.linear(inputs.x, dequantized()), lambda y: (y,))


def _int8pack(case: Int8Case, inputs: Int8Inputs) -> Linear:
    require(case.group is None, "scales per group")
    scale = inputs.weight.scale[:, 0].to(case.torch_dtype)
    return lambda x: torch._weight_int8pack_mm(x, inputs.weight.data, scale)


def _as_layer(case: Int8Case, inputs: Int8Inputs) -> torch.nn.Linear:
    layer = torch.nn.Linear(case.k, case.n, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(inputs.weight.dequantize(case.torch_dtype), requires_grad=False)
    return layer


def _torchao(case: Int8Case, inputs: Int8Inputs) -> Linear:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = _as_layer(case, inputs)
    if case.group is None:
        config = Int8WeightOnlyConfig()
    else:
        from torchao.quantization import PerGroup

        config = Int8WeightOnlyConfig(granularity=PerGroup(case.group))
    quantize_(layer, config)
    weight = layer.weight
    compiled = _compiled_linear()
    return lambda x: compiled(x, weight)


@functools.cache
def _compiled_linear() -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a compiled linear layer, as torchao expects. One graph serves all inputs: the weight is an argument."""
    return torch.compile(F.linear, dynamic=False)


def _bitsandbytes(case: Int8Case, inputs: Int8Inputs) -> Linear:
    """Returns a layer of LLM.int8() without outliers, which rounds the activations to int8 too."""
    import bitsandbytes

    require(case.group is None, "scales per group")
    layer = bitsandbytes.nn.Linear8bitLt(case.k, case.n, bias=False, has_fp16_weights=False, threshold=0.0)
    weight = inputs.weight.dequantize(torch.float16).cpu()
    layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return layer.to(inputs.x.device)  # moving it to the GPU quantises the weight


def _gemlite(case: Int8Case, inputs: Int8Inputs) -> Linear:
    from gemlite import helper

    device, dtype, weight = str(inputs.x.device), case.torch_dtype, inputs.weight
    if case.group is None:
        return helper.A16W8_INT8(device=device, dtype=dtype).from_weights(weight.data, scales=weight.scale)
    shifted = (weight.data.to(torch.int16) + 128).to(torch.uint8)
    zeros = torch.full_like(weight.scale, 128)
    groups = helper.A16W8_HQQ_INT(device=device, dtype=dtype)
    return groups.from_weights(shifted, weight.scale.to(dtype), zeros.to(dtype))


def peers() -> list[Implementation]:
    """Returns every peer that can be imported."""
    version = torch_version()
    found = [
        Implementation(CUBLAS, version, _through(_cublas, differentiable=True)),
        Implementation("dequantise, then matmul", version, _dequantize_then_matmul),
        Implementation("torch._weight_int8pack_mm", version, _through(_int8pack, differentiable=False)),
    ]
    packages = {
        "torchao": _through(_torchao, differentiable=True),
        "bitsandbytes": _through(_bitsandbytes, differentiable=True),
        "gemlite": _through(_gemlite, differentiable=False),
    }
    return found + installed((name, name, (name,), prepare) for name, prepare in packages.items())
