"""What transformers does with a weight between the checkpoint and an int8 layer: quantise it, or put it together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from fastattn.checks import FLOATING, check_dtype, expect
from fastattn.errors import InputError
from fastattn.functional.int8_tensor import Int8Tensor
from fastattn.functional.int8_weight import Int8Weight, quantize_int8
from fastattn.layout import with_aligned_rows
from fastattn.nn import Int8Linear

# What a file has for an int8 layer, as plain_state_dict of fastattn.nn writes it: int8 [1, N, K] and float32 scales.
WEIGHT, SCALE = "weight", "weight_scale"


def int8_layer(model: nn.Module, parameter: str) -> Int8Linear | None:
    """The ``Int8Linear`` of whose weight ``parameter`` is the name."""
    module_name, _, name = parameter.rpartition(".")
    if name != WEIGHT:
        return None
    module = model.get_submodule(module_name)
    return module if isinstance(module, Int8Linear) else None


def as_parameter(weight: Int8Weight, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(Int8Tensor.from_weight(weight, dtype), requires_grad=False)


class Quantize(ConversionOps):  # type: ignore[misc]
    """A floating weight to an int8 one. A weight of another shape goes on as it is, and transformers reports it."""

    def __init__(self, mismatched: set[str]) -> None:
        self.mismatched = mismatched

    def convert(self, input_dict: dict[str, Any], *args: Any, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        for name, found in input_dict.items():
            weight = found[0] if isinstance(found, list) else found
            layer = int8_layer(model, name)
            if layer is None:
                converted[name] = weight
                continue
            check_dtype(name, weight, FLOATING)
            if tuple(weight.shape) == (layer.out_features, layer.in_features):
                weight = as_parameter(quantize_int8(weight, layer.granularity), weight.dtype)
            else:
                self.mismatched.add(name)
            converted[name] = weight
        return converted


class Assemble(ConversionOps):  # type: ignore[misc]
    """int8 values and their scales to an int8 weight. Every other ``weight`` of the checkpoint passes through.

    transformers gives each parameter a copy of this.

    Attributes:
        dtype: what floating weights become, and what the int8 weight stands for.
    """

    dtype: torch.dtype | None = None

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        weight, scale = found.get(WEIGHT), found.get(SCALE)
        layer = int8_layer(model, full_layer_name)
        if layer is None:
            is_plain = scale is None and weight is not None and weight.dtype != torch.int8
            expect(is_plain, full_layer_name, "a floating weight of a layer that stays as it is", _description(found))
            assert weight is not None
            return {WEIGHT: weight.to(self.dtype) if weight.is_floating_point() else weight}
        shape = (1, layer.out_features, layer.in_features)
        if weight is None or scale is None or weight.dtype != torch.int8 or tuple(weight.shape) != shape:
            raise InputError(
                f"{full_layer_name}: expected int8 {list(shape)} and its weight_scale, got {_description(found)}; the "
                "checkpoint is not what save_pretrained wrote for this model and its quantization_config"
            )
        int8_weight = Int8Weight(with_aligned_rows(weight[0]), scale, layer.granularity)
        return {WEIGHT: as_parameter(int8_weight, self.dtype or torch.get_default_dtype())}


def _description(found: dict[str, Tensor]) -> str:
    return " and ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in found.items())


def assembling_converter() -> Any:
    return WeightConverter([WEIGHT, SCALE], WEIGHT, [Assemble()])


def concerns(converter: Any, model: nn.Module) -> bool:
    """Whether ``converter``, one of the model's own (one file weight for q, k and v, say), makes the weight of an int8
    layer. It cannot be undone on int8 weights: files have these under the model's own names."""
    if not isinstance(converter, WeightConverter):
        return False
    backwards = converter.copy(
        list(converter._original_target_patterns),
        list(converter._original_source_patterns),
        operations=list(converter.operations),
    )
    names = [f"{name}.{WEIGHT}" for name, module in model.named_modules() if isinstance(module, Int8Linear)]
    return any(backwards.rename_source_key(name)[1] is not None for name in names)
