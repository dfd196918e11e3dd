"""int8 linear layers as modules, and the replacement of a model's ``nn.Linear`` layers by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.checks import FLOATING, check_bool, check_choice, check_int
from fastattn.errors import InputError
from fastattn.functional.int8_linear import (
    ACTIVATION_PRECISIONS,
    Int8Weight,
    check_granularity,
    linear_over,
    quantize_int8,
    scale_shape,
)
from fastattn.run.layout import SharedCopies, has_aligned_rows, with_aligned_rows

# Of weights on their way to state dicts and back: layers that share one weight share its copy.
_contiguous_copies = SharedCopies(Tensor.contiguous)
_aligned_copies = SharedCopies(with_aligned_rows)


class Int8Linear(nn.Module):
    """``nn.Linear`` with an int8 weight: ``y = x @ weight^T + bias``, the weight being dequantised on the fly.

    The weight is not trained; gradients flow to the input and the bias. It stays int8 with float32 scales whatever
    ``.half()`` or ``.to(dtype)`` do to the module. Loading a state dict whose ``weight`` is floating, as that of an
    ``nn.Linear`` is, quantises it.

    Args:
        in_features, out_features, bias, device, dtype: as of ``nn.Linear``; ``dtype`` is that of the bias.
        granularity: what shares one scale, as in ``quantize_int8``.
        activations: ``"16bit"`` or ``"int8"``, as in ``int8_linear``.

    Attributes:
        weight: int8 ``[out_features, in_features]``, a buffer; zeros until something is loaded. Where
            ``in_features`` is not a multiple of 16 its rows have room behind them, and state dicts hold a contiguous
            copy. ``torch.export.save`` loses that room on a GPU: such a model has to be exported on the CPU.
        weight_scale: float32, a buffer: ``[1, 1]``, ``[out_features, 1]`` or ``[out_features, in_features / group]``.
        bias: ``[out_features]``, a parameter, or None.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        granularity: str | int = "channel",
        *,
        activations: str = "16bit",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("in_features", in_features, minimum=0)
        check_int("out_features", out_features, minimum=0)
        check_bool("bias", bias)
        check_granularity(granularity, in_features)
        check_choice("activations", activations, ACTIVATION_PRECISIONS)
        self.in_features, self.out_features = in_features, out_features
        self.granularity, self.activations = granularity, activations
        shape = torch.Size((out_features, in_features))
        self.register_buffer("weight", with_aligned_rows(torch.zeros(shape, dtype=torch.int8, device=device)))
        scale = torch.ones(scale_shape(shape, granularity), dtype=torch.float32, device=device)
        self.register_buffer("weight_scale", scale)
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, granularity: str | int = "channel", *, activations: str = "16bit"
    ) -> Int8Linear:
        """Quantises ``linear``, which stays as it is; the bias is the same ``Parameter``."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: expected an nn.Linear, got {type(linear).__name__}")
        return cls.from_weight(
            quantize_int8(linear.weight, granularity), linear.bias, activations=activations, training=linear.training
        )

    @classmethod
    def from_weight(
        cls,
        weight: Int8Weight,
        bias: nn.Parameter | None = None,
        *,
        activations: str = "16bit",
        training: bool = True,
    ) -> Int8Linear:
        """A layer over ``weight`` and ``bias`` themselves: layers made from one weight share its memory."""
        rows, columns = weight.shape
        layer = cls(columns, rows, False, weight.granularity, activations=activations, device="meta")
        layer.weight, layer.weight_scale = weight.data, weight.scale
        layer.bias = bias
        return layer.train(training)

    @property
    def int8_weight(self) -> Int8Weight:
        """The weight as ``int8_linear`` takes it."""
        return Int8Weight(self.weight, self.weight_scale, self.granularity)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return linear_over(x, self.weight, self.weight_scale, self.bias, activations=self.activations)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"granularity={self.granularity!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Keeps the scales in float32, the weight's rows aligned, and layers that share a weight together.

        Tensors stay the same objects: ``nn.Module`` treats parameters so, but replaces buffers.
        """
        before = {"weight": self.weight, "weight_scale": self.weight_scale}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype != old.dtype:
                new = old.to(new.device)
            if name == "weight":
                new = with_aligned_rows(new)
            if old.is_meta or new.is_meta:  # tensors of different kinds cannot trade places
                setattr(self, name, new)
            else:
                old.data = new
                setattr(self, name, old)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape == self.weight.shape:
            quantized = quantize_int8(weight, self.granularity)
            parts = {prefix + "weight": quantized.data, prefix + "weight_scale": quantized.scale}
            state_dict = {**state_dict, **parts}
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not has_aligned_rows(self.weight):  # assign=True takes the state dict's own
            self.weight = _aligned_copies.of(self.weight)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and not self.weight.is_contiguous():  # safetensors takes contiguous tensors only
            destination[prefix + "weight"] = _contiguous_copies.of(self.weight)


@dataclass(frozen=True)
class QuantizedLayer:
    """What became of one layer; bytes are the weight's.

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
    """What ``quantize_model`` did. ``print`` it for a table.

    Attributes:
        layers: the replaced layers, in the model's order. Of those that share a weight only the first counts its bytes.
        skipped: name → why, for the linear layers that stay as they are.
        bytes_before, bytes_after: the whole model, parameters and buffers, each tensor counted once.
    """

    layers: list[QuantizedLayer] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers] + [len("layer")])
        lines = [f"{'layer':{width}}  {'shape':>14}  {'scales':>8}  {'error':>7}  {'before':>10}  {'after':>10}"]
        for layer in self.layers:
            shape = " x ".join(map(str, layer.shape))
            lines.append(
                f"{layer.name:{width}}  {shape:>14}  {layer.granularity!s:>8}  {layer.relative_error:>7.3%}  "
                f"{_megabytes(layer.bytes_before):>10}  {_megabytes(layer.bytes_after):>10}"
            )
        lines += [f"{name} stays: {reason}" for name, reason in self.skipped.items()]
        before, after = (
            _megabytes(sum(getattr(layer, f"bytes_{when}") for layer in self.layers)) for when in ("before", "after")
        )
        lines.append(
            f"{len(self.layers)} layers: weights {before} -> {after}; "
            f"whole model {_megabytes(self.bytes_before)} -> {_megabytes(self.bytes_after)}"
        )
        return "\n".join(lines)


def quantize_model(
    model: nn.Module,
    granularity: str | int = "channel",
    filter: Callable[[str, nn.Module], bool] | None = None,
    *,
    activations: str = "16bit",
    include_tied: bool = False,
) -> QuantizationReport:
    """Replaces the ``nn.Linear`` layers inside ``model`` by ``Int8Linear``, in place.

    - A layer that the model uses in several places stays one layer; layers that share one weight share one int8 weight.
    - A layer whose weight is also something else's (an embedding's, say) stays as it is, and the report says so;
      ``include_tied=True`` quantises it all the same, and the other keeps its floating weight.
    - Subclasses of ``nn.Linear`` stay, since their owners use them in their own ways (``nn.MultiheadAttention`` reads
      the weight of its ``out_proj``). So do layers with hooks, which a new module would not have.
    - In an ``nn.TransformerEncoderLayer`` the fused fast path, which reads the weights itself, is switched off.

    Args:
        model: what holds the layers. If it is itself an ``nn.Linear``, use ``Int8Linear.from_linear``.
        granularity: as in ``quantize_int8``; must suit every layer that is replaced.
        filter: called with the name and the module of each ``nn.Linear``; those with False stay as they are.
        activations: ``"16bit"`` or ``"int8"``, as in ``int8_linear``.

    Raises:
        InputError, TypeError: an argument is wrong, or a group does not divide a layer's K; the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.Linear):
        raise InputError("model: expected a module that holds nn.Linear layers, got one; use Int8Linear.from_linear")
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: expected a callable or None, got {type(filter).__name__}")
    check_choice("activations", activations, ACTIVATION_PRECISIONS)
    check_bool("include_tied", include_tied)
    check_granularity(granularity, 0)

    chosen: dict[nn.Linear, str] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (filter is None or filter(name, module)):
            reason = _reason_to_stay(module)
            if reason is None:
                chosen[module] = name
            else:
                skipped[name] = reason
    if not include_tied:
        for module, owner in _tied_to_others(model, chosen).items():
            skipped[chosen.pop(module)] = f"its weight is also {owner} (include_tied=True quantises it all the same)"
    for module, name in chosen.items():
        try:
            check_granularity(granularity, module.in_features)
        except InputError as error:
            raise InputError(f"{error} in layer {name!r} (a filter can leave it out)") from None

    bytes_before = _model_bytes(model)
    layers, replacements = _quantize(chosen, granularity, activations)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.Linear) and child in replacements:
                setattr(parent, name, replacements[child])
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0
    return QuantizationReport(layers, skipped, bytes_before, _model_bytes(model))


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


def _tied_to_others(model: nn.Module, chosen: dict[nn.Linear, str]) -> dict[nn.Linear, str]:
    """The chosen layers whose weight is also a parameter elsewhere, and that parameter's name."""
    elsewhere: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not (module in chosen and name == "weight"):
                elsewhere[id(parameter)] = f"{module_name}.{name}".lstrip(".")
    return {linear: elsewhere[id(linear.weight)] for linear in chosen if id(linear.weight) in elsewhere}


def _quantize(
    chosen: dict[nn.Linear, str], granularity: str | int, activations: str
) -> tuple[list[QuantizedLayer], dict[nn.Linear, Int8Linear]]:
    layers: list[QuantizedLayer] = []
    replacements: dict[nn.Linear, Int8Linear] = {}
    done: dict[Tensor, tuple[Int8Weight, float]] = {}
    for linear, name in chosen.items():
        parameter = linear.weight
        is_first = parameter not in done
        if is_first:
            quantized = quantize_int8(parameter, granularity)
            done[parameter] = quantized, _relative_error(parameter.detach(), quantized)
        weight, error = done[parameter]
        replacements[linear] = Int8Linear.from_weight(
            weight, linear.bias, activations=activations, training=linear.training
        )
        sizes = (parameter.nbytes, weight.nbytes) if is_first else (0, 0)
        layers.append(QuantizedLayer(name, (weight.shape[0], weight.shape[1]), granularity, error, *sizes))
    return layers, replacements


def _relative_error(weight: Tensor, quantized: Int8Weight) -> float:
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
