"""Replaces a model's ``nn.Linear`` layers with ``Int8Linear``, and reports the changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Never

from fastattn.checks import FLOATING, check_bool, check_choice, refuse_keywords, type_name
from fastattn.errors import InputError
from fastattn.functional.int8_linear import INPUT_PRECISIONS
from fastattn.functional.int8_tensor import Int8Tensor
from fastattn.functional.int8_weight import check_granularity, quantize_int8
from fastattn.nn.int8_linear import Int8Linear


@dataclass(frozen=True)
class QuantizedLayer:
    """Describes a layer that was quantised; ``bytes_before`` and ``bytes_after`` count its weight.

    ``relative_error`` is ``|W - dequantised W| / |W|`` in the Frobenius norm, NaN on the meta device.
    """

    name: str
    shape: tuple[int, int]
    granularity: str | int
    relative_error: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizationReport:
    """Reports which layers ``quantize_model`` replaced and skipped; ``print`` shows a table.

    Attributes:
        layers: the replaced layers, in the model's order. If several share a weight, only the first counts its bytes.
        skipped: name → reason, for linear layers that were not replaced, and for modules that look like a linear layer
            (``Conv1D`` of transformers). Layers that the filter left out are not listed.
        bytes_before, bytes_after: the bytes of the whole model, parameters and buffers, each tensor counted once.
    """

    layers: list[QuantizedLayer] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        stays = [f"{name} stays: {reason}" for name, reason in self.skipped.items()]
        if not self.layers:
            none = "the model has no nn.Linear that is not int8 yet, or filter(name, module) returned False for each"
            return "\n".join(["No layer was replaced.", *stays] if stays else [f"No layer was replaced: {none}."])
        width = max(len(name) for name in ("layer", *(layer.name for layer in self.layers)))
        lines = [f"{'layer':{width}}  {'shape':>14}  {'scales':>8}  {'error':>7}  {'before':>10}  {'after':>10}"]
        for layer in self.layers:
            shape = " x ".join(map(str, layer.shape))
            lines.append(
                f"{layer.name:{width}}  {shape:>14}  {layer.granularity!s:>8}  {layer.relative_error:>7.3%}  "
                f"{_megabytes(layer.bytes_before):>10}  {_megabytes(layer.bytes_after):>10}"
            )
        before = _megabytes(sum(layer.bytes_before for layer in self.layers))
        after = _megabytes(sum(layer.bytes_after for layer in self.layers))
        whole = f"whole model {_megabytes(self.bytes_before)} -> {_megabytes(self.bytes_after)}"
        return "\n".join([*lines, *stays, f"{len(self.layers)} layers: weights {before} -> {after}; {whole}"])


def quantize_model(
    model: nn.Module,
    granularity: str | int = "channel",
    filter: Callable[[str, nn.Module], bool] | None = None,
    *,
    input_precision: str = "16bit",
    include_tied: bool = False,
    **unknown: Never,
) -> QuantizationReport:
    """Replaces the ``nn.Linear`` layers inside ``model`` with ``Int8Linear``, in place.

    - The head (``lm_head``) is replaced too; leave it out with ``filter``.
    - A layer that the model uses in several places stays one layer; layers that share one weight share one int8 weight.
    - A layer that shares its weight with another module (an embedding, say) is not replaced, and the report says so.
      ``include_tied=True`` replaces such a layer too; the other module keeps its floating weight.
    - Subclasses of ``nn.Linear`` are not replaced, because other modules may use them in their own way
      (``nn.MultiheadAttention`` reads the weight of its ``out_proj``). Layers with hooks are not replaced, because the
      new layer would lose the hooks.
    - A module that looks like a linear layer but is not an ``nn.Linear`` (GPT-2's ``Conv1D``) is not replaced, and the
      report says so.
    - If no layer was replaced and no layer is int8 already, a warning says so.

    Args:
        model: the module that holds the layers. If your model is itself an ``nn.Linear``, use
            ``Int8Linear.from_linear``.
        granularity: as in ``quantize_int8``; it must suit every layer that is replaced.
        filter: called with the name and the module of each ``nn.Linear``; if ``filter`` returns False, the layer is not
            replaced.
        input_precision: ``"16bit"`` or ``"int8"``, as in ``int8_linear``.
        include_tied: whether to quantise layers that share their weight with another module.

    Returns:
        The report. ``model`` is changed in place.

    Raises:
        InputError, TypeError: an argument is wrong, or a group does not divide a layer's K; the model is unchanged.
    """
    if unknown:
        refuse_keywords(quantize_model, unknown)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type_name(model)}")
    if isinstance(model, nn.Linear):
        is_int8 = isinstance(model, Int8Linear)
        advice = ", which is int8 already" if is_int8 else "; use fastattn.nn.Int8Linear.from_linear(model)"
        raise InputError(
            f"model: expected a module that holds nn.Linear layers, got such a layer: {type(model).__name__}{advice}"
        )
    if filter is not None and not callable(filter):
        came = f"{type_name(filter)}; filter(name, module) returns whether to replace a layer"
        raise TypeError(f"filter: expected a callable or None, got {came}")
    check_choice("input_precision", input_precision, INPUT_PRECISIONS)
    check_bool("include_tied", include_tied)
    check_granularity(granularity, 0)

    chosen, skipped = choose_layers(model, filter)
    tied = tied_to_others(model, chosen)
    if not include_tied:
        for module, owner in tied.items():
            skipped[chosen.pop(module)] = f"its weight is also {owner} (include_tied=True quantises it all the same)"
    for module, name in chosen.items():
        check_granularity_of_layer(granularity, name, module, f"filter=lambda name, module: name != {name!r}")

    bytes_before = _model_bytes(model)
    layers, replacements = _quantize(chosen, granularity, input_precision)
    replace_modules(model, replacements)
    report = QuantizationReport(layers, skipped, bytes_before, _model_bytes(model))
    if not layers and not any(isinstance(module, Int8Linear) for module in model.modules()):
        warnings.warn(f"quantize_model: {report}", stacklevel=2)
    return report


def choose_layers(
    model: nn.Module, filter: Callable[[str, nn.Module], bool] | None = None
) -> tuple[dict[nn.Linear, str], dict[str, str]]:
    """Returns the layers inside ``model`` that can become ``Int8Linear`` with their names, and the names of the other
    linear layers with the reasons why they stay."""
    chosen: dict[nn.Linear, str] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            continue
        if not isinstance(module, nn.Linear):
            reason = _reason_if_like_linear(module)
            if reason is not None:
                skipped[name] = reason
        elif filter is None or _is_chosen(filter, name, module):
            reason = _reason_to_stay(module)
            if reason is None:
                chosen[module] = name
            else:
                skipped[name] = reason
    return chosen, skipped


def _is_chosen(filter: Callable[[str, nn.Module], bool], name: str, module: nn.Module) -> bool:
    try:
        return filter(name, module)
    except TypeError as error:
        raise TypeError(f"filter: expected a function of (name, module), got one that raised: {error}") from error


def check_granularity_of_layer(granularity: str | int, name: str, layer: nn.Linear, way_out: str) -> None:
    """Checks ``granularity`` for a layer. The error names the layer, and ``way_out``, the argument that leaves the
    layer out."""
    try:
        check_granularity(granularity, layer.in_features)
    except InputError as error:
        raise InputError(f"{error} in layer {name!r}; to leave it out, pass {way_out}") from None


def replace_modules(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> None:
    """Replaces each module inside ``model`` that is a key of ``replacements``, everywhere in the model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])


def _reason_if_like_linear(module: nn.Module) -> str | None:
    """Returns why a module that looks like a linear layer is not replaced. Returns None for other modules."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        return None
    kind, shape = type(module).__name__, tuple(weight.shape)
    if shape[1] == getattr(module, "nf", None):  # Conv1D of transformers
        return f"it is a {kind}, whose weight is [in, out], and only nn.Linear layers are replaced"
    if shape == (getattr(module, "out_features", None), getattr(module, "in_features", None)):
        return f"it is a {kind}, which is not an nn.Linear"
    return None


def _reason_to_stay(linear: nn.Linear) -> str | None:
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, a subclass of nn.Linear, which its owner may use in its own way"
    if "weight" not in linear._parameters:
        return "its weight is computed from other parameters"
    if linear.weight.dtype not in FLOATING:
        return f"its weight is {linear.weight.dtype}"
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    if any(hooks) or "forward" in vars(linear):
        return "it has hooks, which would be lost"
    return None


def tied_to_others(model: nn.Module, chosen: dict[nn.Linear, str]) -> dict[nn.Linear, str]:
    """Returns the chosen layers whose weight is also a parameter elsewhere, with that parameter's name."""
    elsewhere: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not (module in chosen and name == "weight"):
                elsewhere[id(parameter)] = f"{module_name}.{name}".lstrip(".")
    return {linear: elsewhere[id(linear.weight)] for linear in chosen if id(linear.weight) in elsewhere}


def _quantize(
    chosen: dict[nn.Linear, str], granularity: str | int, input_precision: str
) -> tuple[list[QuantizedLayer], dict[nn.Linear, Int8Linear]]:
    layers: list[QuantizedLayer] = []
    replacements: dict[nn.Linear, Int8Linear] = {}
    done: dict[Tensor, tuple[nn.Parameter, float]] = {}
    for linear, name in chosen.items():
        parameter = linear.weight
        is_first = parameter not in done
        if is_first:
            quantized = Int8Tensor.from_weight(quantize_int8(parameter, granularity), parameter.dtype)
            shared = nn.Parameter(quantized, requires_grad=False)
            done[parameter] = shared, _relative_error(parameter.detach(), quantized)
        weight, error = done[parameter]
        replacements[linear] = Int8Linear.from_weight(
            weight, linear.bias, input_precision=input_precision, training=linear.training
        )
        sizes = (parameter.nbytes, weight.nbytes) if is_first else (0, 0)
        layers.append(QuantizedLayer(name, (weight.shape[0], weight.shape[1]), granularity, error, *sizes))
    return layers, replacements


def _relative_error(weight: Tensor, quantized: Int8Tensor) -> float:
    if weight.is_meta:
        return float("nan")
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    size = wide.norm()
    error = (wide - quantized.dequantize(wide.dtype)).norm()
    return torch.where(size == 0, 0.0, error / size).item()


def _model_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
