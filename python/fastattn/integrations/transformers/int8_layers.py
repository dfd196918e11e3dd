"""Decides which layers of a model of transformers become int8, and tells why other layers stay as they are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from fastattn.errors import InputError
from fastattn.integrations.transformers.int8_config import Int8Config
from fastattn.nn.quantize_model import check_granularity_of_layer, choose_layers, tied_to_others


def layers_to_convert(
    model: Any, config: Int8Config, names_must_exist: bool
) -> tuple[dict[nn.Linear, str], dict[str, str]]:
    """Returns the layers of ``model`` that ``config`` makes int8 → name, and the names of other layers → why they stay.

    Raises:
        InputError: ``config`` names a module that cannot be int8, or (if ``names_must_exist``) one that the model does
            not have; a group does not divide a layer's K; or no layer is left.
    """
    possible, stays = choose_layers(model)
    stays.update(_experts(model))
    tied = {possible[layer]: f"its weight is also {owner}" for layer, owner in _tied(model, possible).items()}
    by_default = _stay_by_default(model, possible.values()) | tied
    wanted, unwanted = (_named(model, names) for names in (config.modules_to_convert, config.modules_to_not_convert))
    if names_must_exist:
        _check_known(model, "modules_to_convert", wanted)
        _check_known(model, "modules_to_not_convert", unwanted)
    wanted_names = set().union(*wanted.values())
    unwanted_names = set().union(*unwanted.values())
    _check_possible(wanted, set(possible.values()) | set(stays), stays | tied, unwanted_names)

    chosen: dict[nn.Linear, str] = {}
    for layer, name in possible.items():
        if name in unwanted_names:
            stays[name] = "modules_to_not_convert names it"
        elif name in by_default and name not in wanted_names:
            stays[name] = by_default[name]
        else:
            check_granularity_of_layer(config.granularity, name, layer, f"modules_to_not_convert=[{name!r}]")
            chosen[layer] = name
    if not chosen:
        reasons = "".join(f"; {group}" for group in by_reason(stays))
        raise InputError(
            "quantization_config: expected a model with nn.Linear layers that can be int8, got "
            f"{type(model).__name__}, of which nothing would be int8; load it without Int8Config{reasons}"
        )
    return chosen, stays


def by_reason(stays: dict[str, str]) -> list[str]:
    """Returns a phrase for each reason why layers stay as they are."""
    names: dict[str, list[str]] = {}
    for name, reason in stays.items():
        names.setdefault(reason, []).append(name)
    return [
        f"{some[0]} stays: {reason}" if len(some) == 1 else f"{len(some)} modules stay, {some[0]} and others: {reason}"
        for reason, some in names.items()
    ]


def _experts(model: nn.Module) -> dict[str, str]:
    """Returns the modules that hold the weights of many experts in one parameter, with the reason to leave them."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if "expert" in type(module).__name__.lower() or hasattr(module, "num_experts"):
            shapes = [list(p.shape) for p in module.parameters(recurse=False) if p.dim() == 3]
            if shapes:
                found[name] = (
                    f"it is a {type(module).__name__}, whose weights {shapes[0]} are 3-D; no kernel takes them"
                )
    return found


def _tied(model: Any, layers: dict[nn.Linear, str]) -> dict[nn.Linear, str]:
    """Returns the layers whose weight is tied to another parameter → the name of this parameter.

    Tied weights are one object, or the model declares that they will be (``all_tied_weights_keys``).
    """
    declared: dict[str, str] = {}
    for target, source in model.all_tied_weights_keys.items():
        declared[target] = source
        declared.setdefault(source, target)
    found = tied_to_others(model, layers)
    for layer, name in layers.items():
        if f"{name}.weight" in declared:
            found.setdefault(layer, declared[f"{name}.weight"])
    return found


def _stay_by_default(model: Any, names: Iterable[str]) -> dict[str, str]:
    output = model.get_output_embeddings()
    outputs = {name for name, module in model.named_modules() if module is output}
    base = f"{model.base_model_prefix}." if model.base_model is not model else ""
    in_float32 = (getattr(model, "_keep_in_fp32_modules", None), getattr(model, "_keep_in_fp32_modules_strict", None))
    patterns = [pattern for some in in_float32 for pattern in some or ()]
    reasons: dict[str, str] = {}
    for name in names:
        if name in outputs:
            reasons[name] = "it is the output embedding (modules_to_convert can name it)"
        elif not name.startswith(base):
            reasons[name] = "it belongs to the head (modules_to_convert can name it)"
        elif any(_pattern(pattern).search(name) for pattern in patterns):
            reasons[name] = "the model keeps it in float32 (modules_to_convert can name it)"
    return reasons


def _pattern(name: str) -> re.Pattern[str]:
    """Returns a pattern for a whole name or whole words of it between dots. ``*`` matches any text without a dot."""
    return re.compile(rf"(?:^|\.){re.escape(name).replace(re.escape('*'), '[^.]*')}(?:\.|$)")


def _named(model: Any, names: Iterable[str] | None) -> dict[str, set[str]]:
    """Returns for each of ``names`` the modules of ``model`` that it names, and the modules inside them.

    In a base model, names may also begin with the prefix that they have in a model with a head.
    """
    own = [name for name, _ in model.named_modules()]
    whole = {name: f"{model.base_model_prefix}.{name}" if model.base_model is model else name for name in own}
    return {wanted: {name for name in own if name and _pattern(wanted).search(whole[name])} for wanted in names or ()}


def _check_known(model: nn.Module, argument: str, named: dict[str, set[str]]) -> None:
    unknown = [name for name, modules in named.items() if not modules]
    if not unknown:
        return
    own = [name for name, _ in model.named_modules()]
    words = {word for name in own for word in name.split(".") if word and not word.isdigit()}
    alike = sorted({other for name in unknown for other in difflib.get_close_matches(name, [*own, *words], 2)})
    advice = f"; did you mean {', '.join(map(repr, alike))}?" if alike else "; model.named_modules() lists them"
    raise InputError(f"{argument}: expected names of modules of {type(model).__name__}, got {unknown}{advice}")


def _check_possible(
    wanted: dict[str, set[str]], layers: set[str], impossible: dict[str, str], unwanted: set[str]
) -> None:
    for name, modules in wanted.items():
        for module in sorted(modules - unwanted):
            if module in impossible:
                raise InputError(f"modules_to_convert: {module!r} cannot be int8: {impossible[module]}; leave it out")
        if modules and not modules & layers:
            raise InputError(
                f"modules_to_convert: expected names of linear layers, got {name!r}, which has none; leave it out"
            )
