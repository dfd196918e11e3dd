"""Reads from a model's source how its layers use masks and attention, because transformers does not tell it otherwise.

transformers reads the source for the same purpose (``PreTrainedModel._can_set_attn_implementation``). The source of the
model is in ``modeling_…``, next to its config in ``configuration_…``.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from inspect import getsource
from typing import Any

import torch
from transformers import PreTrainedModel

from fastattn.errors import InputError


def check_uses_interface(config: Any) -> None:
    """Raises if the model's layers would read a mark as a mask, and attend to keys that they must not see."""
    if _ignores_interface((_module_of(config),)):
        raise _refusal(config.model_type, config._attn_implementation, 'Set attn_implementation="eager"')


def check_model(model: PreTrainedModel, implementation: str) -> None:
    """Raises if no layer of the model would call ``implementation``, a name of fastattn's attention function.

    One call is enough, in the module of the model's class, the module of a base class, or the module next to the
    model's config. A model whose source cannot be read is accepted.
    """
    bases = [base for base in type(model).__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel]
    modules = dict.fromkeys([*(base.__module__ for base in bases), _module_of(model.config)])
    if model._supports_attention_backend or not _ignores_interface(tuple(modules)):
        return
    other, how = ("sdpa", " and call it inside fastattn.patch_sdpa()") if model._supports_sdpa else ("eager", "")
    as_part = f'{{"": "{implementation}", "<config of this part>": "{other}"}}'
    with_part = f'{{"": "{other}", "<config of another part>": "{implementation}"}}'
    instead = f'Set attn_implementation="{other}"{how}. In a model of several parts, set {as_part} or {with_part}'
    raise _refusal(type(model).__name__, implementation, instead)


def _refusal(name: str, implementation: str, instead: str) -> InputError:
    return InputError(
        f"attn_implementation: expected one that {name} supports, got {implementation!r}; its layers do not use the "
        f"AttentionInterface of transformers. {instead}"
    )


def has_attention_of_its_own(config: Any) -> bool:
    """Returns whether some layers do not use the interface but add the mask to their scores themselves."""
    return _has_own_softmax(_module_of(config))


def tells_its_window(config: Any) -> bool:
    """Returns whether layers pass ``sliding_window`` to the attention function. If not, only masks contain it."""
    return _contains(_module_of(config), "sliding_window=")


def wants_whole_masks(config: Any) -> bool:
    """Returns whether the model edits its masks, for which it needs whole masks (``allow_is_causal_skip=False``)."""
    module = _module_of(config)
    is_indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    return is_indexed or not _contains(module, "") or _contains(module, "allow_is_causal_skip")


# Without this decorator, torch.compile would trace the cached function.
@torch.compiler.assume_constant_result
def _contains(module: str, words: str) -> bool:
    code = _code(module)
    return code is not None and words in code


@torch.compiler.assume_constant_result
def _ignores_interface(modules: tuple[str, ...]) -> bool:
    """Returns whether the code has attention layers, none of which calls a registered function."""
    codes = [code for code in map(_code, modules) if code is not None]
    has_layers = any(re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE) for code in codes)
    return has_layers and not any(re.search(r"\bALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)", code) for code in codes)


@torch.compiler.assume_constant_result
def _has_own_softmax(module: str) -> bool:
    classes = re.split(r"^(?=class )", _code(module) or "", flags=re.MULTILINE)
    layers = [code for code in classes if re.match(r"class \w*Attention\w*\(nn\.Module\):", code)]
    return any("softmax(" in code and ".get_interface(" not in code for code in layers)


def _module_of(config: Any) -> str:
    """Returns the name of the module that defines the model with this config."""
    return type(config).__module__.replace("configuration_", "modeling_")


def _code(module: str) -> str | None:
    return _source(module) if module in sys.modules else None


@lru_cache
def _source(module: str) -> str | None:
    try:
        return getsource(sys.modules[module])
    except (OSError, TypeError):
        return None
