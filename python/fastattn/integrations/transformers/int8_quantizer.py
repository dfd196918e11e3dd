"""Defines the quantizer by which transformers loads, saves and dequantises a model with an ``Int8Config``."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from fastattn.checks import FLOATING, check_choice
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.errors import InputError
from fastattn.functional.int8_tensor import Int8Tensor
from fastattn.functional.int8_weight import quantize_int8, scale_shape
from fastattn.integrations.transformers import int8_loading
from fastattn.integrations.transformers.int8_config import QUANT_METHOD, Int8Config
from fastattn.integrations.transformers.int8_layers import by_reason, layers_to_convert
from fastattn.nn import Int8Linear, plain_state_dict
from fastattn.nn.quantize_model import replace_modules


class Int8Quantizer(HfQuantizer):
    """Replaces each chosen layer by an ``Int8Linear`` before the checkpoint is read.

    Until its weight is loaded, the new layer has the model's own floating parameter on the meta device, so that
    transformers plans memory, reports and initialises as for any model.

    Attributes:
        stays: the names of the layers that stay as they are → why.
    """

    quantization_config: Int8Config

    def __init__(self, quantization_config: Int8Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.stays: dict[str, str] = {}
        self._mismatched: set[str] = set()
        self._problems: list[str] = []
        self._left_out_conversions: list[Any] = []

    # --- before the weights are loaded -------------------------------------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuses offloading. transformers first passes the user's ``device_map``, then the map made for "auto"."""
        devices = set(device_map.values()) if isinstance(device_map, dict) else set()
        kinds = {"gpu" if isinstance(device, int) else str(device).partition(":")[0] for device in devices}
        if "disk" in kinds or ("cpu" in kinds and len(kinds) > 1):
            came = ", ".join(sorted(map(str, devices)))
            raise InputError(
                f"device_map: expected all layers on GPUs, or all on the CPU, since int8 weights are not offloaded; "
                f"got {came}: raise max_memory, or pass a device_map of your own"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        check_choice("dtype", dtype, FLOATING)
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise InputError(
                "tp_plan: expected None with Int8Config, got a tp_plan or distributed_config; load on one device, "
                "and shard the int8 layers with torch's parallelize_module or fully_shard"
            )
        if not self.pre_quantized:
            int8_loading.check_is_floating(checkpoint_files)
        config = self.quantization_config = copy.deepcopy(self.quantization_config)
        chosen, self.stays = layers_to_convert(model, config, names_must_exist=not self.pre_quantized)
        if not self.pre_quantized:
            _warn_about_others(model, self.stays)
        replacements = {}
        for linear in chosen:
            layer = Int8Linear(
                linear.in_features, linear.out_features, False, config.granularity,
                input_precision=config.input_precision, device="meta",
            )  # fmt: skip
            layer.weight, layer.bias = linear.weight, linear.bias
            replacements[linear] = layer.train(linear.training)
        replace_modules(model, replacements)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        self._left_out_conversions = [each for each in weight_conversions if int8_loading.concerns(each, model)]
        if not self.pre_quantized:
            return weight_conversions
        others = [each for each in weight_conversions if each not in self._left_out_conversions]
        assemble = int8_loading.Assemble(self._problems)
        return [*others, WeightConverter([int8_loading.WEIGHT, int8_loading.SCALE], int8_loading.WEIGHT, [assemble])]

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Returns the bytes of an element, including scales, by which transformers plans a ``device_map``."""
        layer = int8_loading.int8_layer(model, param_name)
        if layer is None or not param.numel():
            return param.element_size()
        rows, columns = scale_shape(param.shape, layer.granularity)
        return 1 + 4 * rows * columns / param.numel()

    # --- while the weights are loaded --------------------------------------------------------------------------------

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if self.pre_quantized or param_name in self._mismatched:
            return False
        return int8_loading.int8_layer(model, param_name) is not None

    def get_quantize_ops(self) -> int8_loading.Quantize:
        return int8_loading.Quantize(self._mismatched)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Returns the dtype to which to cast a tensor, or None if `Assemble` casts: scales must stay float32."""
        assemble = _assembling(converter)
        if assemble is None:
            return super().get_new_dtype(converter, param, dtype)
        assemble.dtype = dtype
        return None

    # --- after the weights are loaded --------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [
            each for each in conversions if each not in self._left_out_conversions and _assembling(each) is None
        ]
        layers = _int8_layers(model)
        floating = {name: layer for name, layer in layers.items() if not isinstance(layer.weight, Int8Tensor)}
        absent = {name: layer for name, layer in floating.items() if not hasattr(layer.weight, "_is_hf_initialized")}
        self._check_checkpoint(model, absent)
        for name, layer in floating.items():
            if name not in absent:
                quantized = quantize_int8(layer.weight, layer.granularity)
                layer.weight = int8_loading.as_parameter(quantized, layer.weight.dtype)
        if absent:
            config = self.quantization_config
            config.modules_to_not_convert = [*(config.modules_to_not_convert or ()), *absent]
            self.stays.update(dict.fromkeys(absent, "the checkpoint did not have it, so it is new, to be trained"))
            _replace(model, {layer: _linear_like(layer, layer.weight) for layer in absent.values()})
        for parameter in model.parameters():
            if isinstance(parameter, Int8Tensor):
                parameter.is_being_placed = False
        return model

    def _check_checkpoint(self, model: Any, absent: dict[str, Int8Linear]) -> None:
        """Raises ``InputError`` unless the checkpoint is complete; ``absent`` are the layers that it lacks."""
        if self._problems:
            listed = "".join(f"\n  {problem}" for problem in self._problems[:8])
            more = f"\n  and {len(self._problems) - 8} more" if len(self._problems) > 8 else ""
            raise InputError(
                "checkpoint: expected what save_pretrained wrote for this model and its quantization_config, got"
                f"{listed}{more}\nLoad the checkpoint with the config.json that it was saved with."
            )
        # A checkpoint of another class may lack layers of this class, a pooler for example. Such layers are new.
        own_class = self.pre_quantized and type(model).__name__ in (model.config.architectures or ())
        if absent and (own_class or len(absent) == len(_int8_layers(model))):
            raise InputError(
                f"checkpoint: expected the weights of {type(model).__name__}'s linear layers, got none for "
                f"{', '.join(list(absent)[:4])}{' and others' if len(absent) > 4 else ''}; load it with the class that "
                "saved it"
            )

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the plain tensors that ``save_pretrained`` writes with ``safetensors``."""
        return plain_state_dict(model.state_dict()), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Returns True, because adapters and biases can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Replaces every int8 layer by an ``nn.Linear``, inside adapters too.

        The new weights require gradients if all other parameters do.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        layers = _int8_layers(model).values()
        is_trained = all(each.requires_grad for each in model.parameters() if not isinstance(each, Int8Tensor))
        made: dict[int, nn.Parameter] = {}
        replacements = {}
        for layer in layers:
            if id(layer.weight) not in made:
                made[id(layer.weight)] = nn.Parameter(layer._int8_tensor().dequantize(dtype), is_trained)
            replacements[layer] = _linear_like(layer, made[id(layer.weight)])
        _replace(model, replacements)
        model._weight_conversions = [*getattr(model, "_weight_conversions", []), *self._left_out_conversions]
        return model


def _warn_about_others(model: nn.Module, stays: dict[str, str]) -> None:
    """Warns about layers that look linear but stay as they are because they are not plain ``nn.Linear``."""
    others = {name: reason for name, reason in stays.items() if type(model.get_submodule(name)) is not nn.Linear}
    for phrase in by_reason(others):
        warn_at_users_line(f"Int8Config, {type(model).__name__}: {phrase}", UserWarning, transformers)


def _assembling(converter: Any) -> int8_loading.Assemble | None:
    """Returns the operation of ``converter`` that assembles int8 weights, or None."""
    operations = getattr(converter, "operations", ())
    return next((each for each in operations if isinstance(each, int8_loading.Assemble)), None)


def _int8_layers(model: nn.Module) -> dict[str, Int8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}


def _linear_like(layer: Int8Linear, weight: Any) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, False, device="meta")
    linear.weight, linear.bias = weight, layer.bias
    return linear.train(layer.training)


def _replace(model: nn.Module, replacements: dict[Int8Linear, nn.Linear]) -> None:
    """Replaces layers and keeps the hooks by which accelerate moves a layer's input to its GPU."""
    replace_modules(model, replacements)
    for layer, linear in replacements.items():
        hook = getattr(layer, "_hf_hook", None)
        if hook is not None:
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(linear, hook)


def register_int8() -> None:
    """Makes ``quant_method: "fastattn_int8"`` known to transformers. Repeated calls and reloads are allowed."""
    for mapping, register, ours in (
        (AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config, Int8Config),
        (AUTO_QUANTIZER_MAPPING, register_quantizer, Int8Quantizer),
    ):
        registered = mapping.pop(QUANT_METHOD, ours)
        if registered.__module__ != ours.__module__:
            mapping[QUANT_METHOD] = registered
            raise InputError(
                f"quant_method: expected a free name in transformers, got {QUANT_METHOD!r}, registered for {registered}"
            )
        register(QUANT_METHOD)(ours)
