"""Makes an int8 layer's weight while transformers loads a checkpoint: quantises it, or assembles it from int8 data."""

from __future__ import annotations

import zipfile
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from fastattn.errors import InputError
from fastattn.functional.int8_tensor import Int8Tensor
from fastattn.functional.int8_weight import Int8Weight, quantize_int8
from fastattn.layout import with_aligned_rows
from fastattn.nn import Int8Linear

# The names of an int8 layer's tensors in a file: int8 [1, N, K] and float32 scales, as fastattn.nn.plain_state_dict
# writes them.
WEIGHT, SCALE = "weight", "weight_scale"


def int8_layer(model: nn.Module, parameter: str) -> Int8Linear | None:
    """Returns the ``Int8Linear`` whose weight is named ``parameter``, or None."""
    module_name, _, name = parameter.rpartition(".")
    if name != WEIGHT:
        return None
    module = model.get_submodule(module_name)
    return module if isinstance(module, Int8Linear) else None


def as_parameter(weight: Int8Weight, dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(Int8Tensor.from_weight(weight, dtype), requires_grad=False)
    parameter.is_being_placed = True  # type: ignore[attr-defined]
    return parameter


class Quantize(ConversionOps):
    """Converts a floating weight to an int8 one.

    Attributes:
        mismatched: collects the names of weights with a wrong shape. They are passed on, and transformers reports them.
    """

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
            if tuple(weight.shape) == (layer.out_features, layer.in_features):
                weight = as_parameter(quantize_int8(weight, layer.granularity), weight.dtype)
            else:
                self.mismatched.add(name)
            converted[name] = weight
        return converted


class Assemble(ConversionOps):
    """Converts int8 values and their scales to an int8 weight. Every other ``weight`` passes through.

    Attributes:
        problems: collects what is wrong with the checkpoint. A wrong parameter is left out, and the quantizer reports
            all problems at the end, because an exception here would only reach transformers' log.
        dtype: the dtype to which floating weights are cast, and that an int8 weight has as its ``dtype``.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.dtype: torch.dtype | None = None

    def __deepcopy__(self, memo: Any) -> Assemble:
        """Returns a copy that shares ``problems``. transformers makes a copy for each parameter."""
        return Assemble(self.problems)

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        try:
            return {WEIGHT: self._weight(int8_layer(model, full_layer_name), **found)}
        except InputError as error:
            came = " and ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in found.items())
            self.problems.append(f"{full_layer_name}: {error}; the checkpoint has {came}")
            return {}

    def _weight(
        self, layer: Int8Linear | None, weight: Tensor | None = None, weight_scale: Tensor | None = None
    ) -> Tensor:
        if layer is None:
            if weight is None or weight_scale is not None or weight.dtype == torch.int8:
                raise InputError("expected a floating weight, because the quantization_config does not make it int8")
            return weight.to(self.dtype) if weight.is_floating_point() else weight
        shape = (1, layer.out_features, layer.in_features)
        is_int8 = weight is not None and weight.dtype == torch.int8 and tuple(weight.shape) == shape
        if weight is None or weight_scale is None or not is_int8:
            raise InputError(f"expected int8 {list(shape)} and its weight_scale")
        int8_weight = Int8Weight(with_aligned_rows(weight[0]), weight_scale, layer.granularity)
        return as_parameter(int8_weight, self.dtype or torch.get_default_dtype())


def check_is_floating(checkpoint_files: list[str] | None) -> None:
    """Raises ``InputError`` if a checkpoint is quantised although its config does not say so.

    transformers would cast its weights, and drop their scales.
    """
    for file in checkpoint_files or ():
        for name, dtype in _dtypes_in(file).items():
            if name.endswith(f".{WEIGHT}") and dtype not in ("F16", "BF16", "F32", "F64"):
                raise InputError(
                    f"checkpoint: expected floating weights to quantise, got {name} in {dtype}: it is quantised "
                    "already, and its config.json has no quantization_config; load the floating checkpoint"
                )


_SHORT = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}


def _dtypes_in(file: str) -> dict[str, str]:
    """Returns the dtypes of the tensors in a checkpoint's file, in safetensors' terms, without reading their data."""
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118  # no dict
    state = torch.load(file, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {name: _SHORT.get(t.dtype, str(t.dtype)) for name, t in state.items() if isinstance(t, Tensor)}


def concerns(converter: Any, model: nn.Module) -> bool:
    """Returns whether the result of ``converter``, which the model defines, is the weight of an int8 layer.

    Such a converter is applied only while a floating checkpoint is loaded. To save the model, transformers would have
    to reverse the converter, for example merge q, k and v into one weight again, which is impossible for int8 weights.
    So int8 checkpoints have the model's own names, and loading an int8 checkpoint leaves the converter out.
    """
    if not isinstance(converter, WeightConverter):
        return False
    backwards = converter.copy(
        list(converter._original_target_patterns),
        list(converter._original_source_patterns),
        operations=list(converter.operations),
    )
    names = [f"{name}.{WEIGHT}" for name, module in model.named_modules() if isinstance(module, Int8Linear)]
    return any(backwards.rename_source_key(name)[1] is not None for name in names)
