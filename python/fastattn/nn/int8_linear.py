"""Defines ``Int8Linear``, a module that runs ``int8_linear``, and its state dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.call import Int8Call
from fastattn.checks import (
    FLOATING,
    check_bool,
    check_choice,
    check_dtype,
    check_int,
    check_torch_dtype,
    checked_device,
    expect,
    is_distributed,
    type_name,
)
from fastattn.errors import InputError
from fastattn.functional.int8_linear import INPUT_PRECISIONS, linear_over
from fastattn.functional.int8_tensor import Int8Tensor, new_weight
from fastattn.functional.int8_weight import Int8Weight, advice_on_weight, check_granularity, quantize_int8
from fastattn.layout import SharedCopies, with_aligned_rows

# The copies that saving (contiguous) and loading (aligned) of plain state dicts make. Layers that share a weight share
# the copy.
_contiguous_copies = SharedCopies(Tensor.contiguous)
_aligned_copies = SharedCopies(with_aligned_rows)


class Int8Linear(nn.Linear):
    """Computes ``x @ weight^T + bias``, like ``nn.Linear``, with an int8 weight.

    The weight is dequantised on the fly. With ``input_precision="int8"``, the int8 weight is multiplied with quantised
    inputs instead. Gradients flow to the input and the bias; the weight is a parameter that is not trained. The weight
    stays int8 with float32 scales under ``.half()`` and ``.to(dtype)``. Loading a state dict with a floating
    ``weight``, like that of an ``nn.Linear``, quantises it. Conversely, an ``nn.Linear`` that loads the state dict of
    this layer gets the dequantised weight, or the int8 weight with ``assign=True``.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``; ``dtype`` is the dtype of the bias, and
            what ``weight.dtype`` reports.
        granularity: which values share one scale, as in ``quantize_int8``.
        input_precision: ``"16bit"`` or ``"int8"``, as in ``int8_linear``.

    Attributes:
        weight: ``Int8Tensor [out_features, in_features]``, a parameter; zeros until a weight is loaded. If
            ``in_features`` is not a multiple of 16, the int8 rows are padded. ``torch.export.save`` loses the padding
            of a weight on a GPU, and each call would then copy the weight: export such a model on the CPU.
        bias: ``[out_features]``, a parameter, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        granularity: str | int = "channel",
        *,
        input_precision: str = "16bit",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would make a floating weight
        check_int("in_features", in_features, minimum=0)
        check_int("out_features", out_features, minimum=0)
        check_bool("bias", bias)
        check_granularity(granularity, in_features)
        check_choice("input_precision", input_precision, INPUT_PRECISIONS)
        if dtype is not None:
            check_torch_dtype(dtype)
        self.in_features, self.out_features = in_features, out_features
        self.granularity, self.input_precision = granularity, input_precision
        zeros = torch.zeros(out_features, device=checked_device(device), dtype=dtype)
        weight = new_weight(out_features, in_features, granularity, zeros.dtype, zeros.device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", nn.Parameter(zeros) if bias else None)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, granularity: str | int = "channel", *, input_precision: str = "16bit"
    ) -> Int8Linear:
        """Makes a quantised copy of ``linear``, without changing ``linear``. Both layers share the bias
        ``Parameter``."""
        if not isinstance(linear, nn.Linear) or isinstance(linear, Int8Linear):
            advice = "; it is int8 already" if isinstance(linear, Int8Linear) else ""
            raise TypeError(f"linear: expected an nn.Linear, got {type_name(linear)}{advice}")
        weight = Int8Tensor.from_weight(quantize_int8(linear.weight, granularity), linear.weight.dtype)
        return cls.from_weight(weight, linear.bias, input_precision=input_precision, training=linear.training)

    @classmethod
    def from_weight(
        cls,
        weight: Int8Weight | Tensor,
        bias: nn.Parameter | None = None,
        *,
        input_precision: str = "16bit",
        training: bool = True,
    ) -> Int8Linear:
        """Makes a layer from ``weight`` and ``bias``, without copying them.

        Layers that are made from one ``Int8Weight`` share its memory. Layers that are made from the ``weight`` of
        another layer share that parameter, and so still share memory after the model was moved.
        """
        if isinstance(weight, Int8Weight):
            weight = Int8Tensor.from_weight(weight, torch.get_default_dtype() if bias is None else bias.dtype)
        if not isinstance(weight, Int8Tensor):
            came = f"{type_name(weight)}{advice_on_weight(weight)}"
            raise TypeError(f"weight: expected an Int8Weight or an Int8Tensor, got {came}")
        rows, columns = weight.shape
        layer = cls(columns, rows, False, weight.granularity, input_precision=input_precision, device="meta")
        layer.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        layer.register_parameter("bias", bias)
        return layer.train(training)

    @property
    def weight_scale(self) -> Tensor:
        """Returns the scales, float32 ``[1, 1]``, ``[out_features, 1]`` or ``[out_features, in_features / group]``."""
        return self._int8_tensor().int8_scale

    @property
    def int8_weight(self) -> Int8Weight:
        """Returns the weight as ``int8_linear`` takes it."""
        return self._int8_tensor().int8_weight

    def _int8_tensor(self) -> Int8Tensor:
        if not isinstance(self.weight, Int8Tensor):
            came = f"a {type(self.weight).__name__} of {self.weight.dtype}"
            advice = "for a sharded weight, use weight.to_local()"
            if not is_distributed(self.weight):
                advice = "make the layer with Int8Linear.from_weight(fastattn.quantize_int8(layer.weight), layer.bias)"
            raise InputError(f"weight: expected an Int8Tensor, got {came}; {advice}")
        return self.weight

    def reset_parameters(self) -> None:
        """Sets the weight and the bias to zeros, as in a new layer."""
        with torch.no_grad():
            self.weight.zero_()
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Computes ``x @ weight^T + bias``, ``[..., out_features]``, for ``x [..., in_features]``."""
        weight = self.weight
        if isinstance(weight, Int8Tensor):
            call = Int8Call(x, weight.int8_data, weight.int8_scale, self.bias, input_precision=self.input_precision)
            return linear_over(call)
        if self.input_precision != "16bit":
            came = f"{self.input_precision!r} over a {type(weight).__name__}"
            expected, advice = "'16bit' for a weight that is sharded or not int8", 'set it to "16bit" in the layer'
            raise InputError(f"input_precision: expected {expected}, got {came}; {advice}")
        return F.linear(x, weight, self.bias)  # a DTensor calls Int8Tensor's operators on its shard

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"granularity={self.granularity!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Applies ``fn`` as ``nn.Module`` does, but changes the weight in place. ``nn.Module`` would swap the weight,
        which raises an error after ``torch.compile``."""
        weight = self._parameters.get("weight")
        if not isinstance(weight, Int8Tensor):
            return super()._apply(fn, recurse)
        self._parameters["weight"] = None
        try:
            super()._apply(fn, recurse)
            with torch.no_grad():
                weight = _changed_in_place(weight, fn(weight))
        finally:
            self._parameters["weight"] = weight
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        errors: list[str] = args[-1]
        weight_key, scale_key = prefix + "weight", prefix + "weight_scale"
        found = state_dict.get(weight_key)
        if found is not None and type(found) in (Tensor, nn.Parameter, Int8Tensor):
            state_dict = dict(state_dict)
            try:
                state_dict[weight_key] = self._as_own_weight(found, state_dict.pop(scale_key, None))
            except InputError as error:
                errors.append(f"While loading {weight_key!r}: {error}")
                state_dict[weight_key] = self.weight  # so that torch does not also call the weight missing
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _as_own_weight(self, found: Tensor, scale: Tensor | None) -> Tensor:
        """Returns the weight of a state dict as an ``Int8Tensor``: quantised, joined with its scales, or unchanged."""
        if isinstance(found, Int8Tensor):
            came = f"{found.granularity!r}; make the layer with granularity={found.granularity!r}"
            expect(found.granularity == self.granularity, "granularity", repr(self.granularity), came)
            return found
        if found.dtype == torch.int8:
            if scale is None:
                raise InputError(
                    "weight_scale: expected the scales of the int8 weight in the same state dict, got none; save with "
                    "fastattn.nn.plain_state_dict(model.state_dict())"
                )
            data = found[0] if found.dim() == 3 else found
            weight = Int8Weight(_aligned_copies.of(data), scale, self.granularity)
            return Int8Tensor.from_weight(weight, self.weight.dtype)
        check_dtype("weight", found, FLOATING, "; load the weights as they were before another library quantised them")
        if found.shape != self.weight.shape:
            return found  # nn.Module reports the wrong shape
        return Int8Tensor.from_weight(quantize_int8(found, self.granularity), found.dtype)


def _changed_in_place(parameter: Any, changed: Tensor) -> Any:
    """Gives ``parameter`` the contents of ``changed`` and returns ``parameter``, so that layers still share it. Returns
    another object only if a compiled graph prevents that."""
    if changed is parameter:
        return parameter
    is_alike = (changed.dtype, changed.device) == (parameter.dtype, parameter.device)
    if isinstance(parameter, Int8Tensor) and isinstance(changed, Int8Tensor) and is_alike:
        parameter.int8_data, parameter.int8_scale = changed.int8_data, changed.int8_scale
        return parameter
    changed = nn.Parameter(changed, requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, changed)
    except RuntimeError:  # a compiled graph holds a reference to the parameter
        return changed
    return parameter


def plain_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state_dict`` without tensor subclasses, for formats that save only plain tensors, like safetensors.

    Each int8 ``weight [N, K]`` becomes an int8 ``weight [1, N, K]`` and a ``weight_scale``; tensors that shared memory
    still share memory. ``Int8Linear`` loads both forms. Other layers cannot load the result by
    mistake, because the weight has another shape.
    """
    plain: dict[str, Any] = {}
    for name, value in state_dict.items():
        if isinstance(value, Int8Tensor):
            plain[name] = _contiguous_copies.of(value.int8_data)[None]
            plain[name + "_scale"] = value.int8_scale
        else:
            plain[name] = value
    return plain
