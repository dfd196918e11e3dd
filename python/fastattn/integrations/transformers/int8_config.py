"""Defines ``Int8Config``, which ``from_pretrained(quantization_config=…)`` takes and ``config.json`` stores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from fastattn.checks import check_choice
from fastattn.errors import InputError
from fastattn.functional.int8_linear import INPUT_PRECISIONS
from fastattn.functional.int8_weight import check_granularity

QUANT_METHOD = "fastattn_int8"


class Int8Config(QuantizationConfigMixin):
    """Makes the linear layers of a transformers model int8::

        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=Int8Config())
        model.save_pretrained(path_of_int8)
        model = AutoModelForCausalLM.from_pretrained(path_of_int8)  # the same bits

    Each ``nn.Linear`` becomes a ``fastattn.nn.Int8Linear`` when its weight is loaded from the checkpoint, on the
    weight's device. These layers stay as they are: the head (everything outside ``model.base_model``, the output
    embedding), layers that share a weight with others or that the model keeps in float32, and layers that are not
    ``nn.Linear`` (GPT-2's ``Conv1D``, experts whose weights are one 3-D parameter). ``model.hf_quantizer.stays`` lists
    each with its reason.

    Args:
        granularity: which values share one scale, as in ``fastattn.quantize_int8``.
        input_precision: ``"16bit"`` or ``"int8"``, as in ``fastattn.int8_linear``.
        modules_to_not_convert: names of further modules that stay, with everything inside them: whole names
            (``"model.layers.0.mlp"``) or parts of them (``"q_proj"``, ``"layers.0"``); ``*`` matches any text
            without a dot.
        modules_to_convert: names of layers that would stay by default but become int8, ``"lm_head"`` for example. A
            layer that both arguments name stays.

    Raises:
        InputError, TypeError: an option is wrong. An option that does not suit a model raises ``InputError`` when the
            model is loaded.
    """

    def __init__(
        self,
        granularity: str | int = "channel",
        input_precision: str = "16bit",
        modules_to_not_convert: Iterable[str] | None = None,
        modules_to_convert: Iterable[str] | None = None,
        **unknown: Any,
    ) -> None:
        quant_method = unknown.pop("quant_method", QUANT_METHOD)
        if quant_method != QUANT_METHOD:
            raise InputError(f"quant_method: expected {QUANT_METHOD!r}, got {quant_method!r}; leave it out")
        if unknown:
            raise TypeError(
                f"Int8Config has no option {', '.join(map(repr, unknown))}; help(Int8Config) lists the options of this "
                "version, and a later fastattn may have more"
            )
        check_granularity(granularity, 0)
        check_choice("input_precision", input_precision, INPUT_PRECISIONS)
        self.quant_method = QUANT_METHOD
        self.granularity = granularity
        self.input_precision = input_precision
        self.modules_to_not_convert = _names("modules_to_not_convert", modules_to_not_convert)
        self.modules_to_convert = _names("modules_to_convert", modules_to_convert)


def _names(argument: str, names: Iterable[str] | None) -> list[str] | None:
    """Checks names and returns them as a list, which JSON can store."""
    if names is None:
        return None
    listed = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in listed):
        advice = f"; pass [{names!r}]" if isinstance(names, str) else ""
        raise TypeError(f"{argument}: expected a list of names of modules, got {names!r}{advice}")
    return listed
