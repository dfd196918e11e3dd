"""What a model's own code does with masks and attention: transformers says it nowhere else.

transformers reads the code for the same purpose (``PreTrainedModel._can_set_attn_implementation``). It is found beside
the config's, as ``modeling_…`` beside ``configuration_…``.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from inspect import getsource
from typing import Any

import torch

from fastattn.errors import InputError


def check_uses_interface(config: Any) -> None:
    """Raises where the layers would take a mask of ours for one of their own, and attend to what they must not see."""
    if _ignores_interface(type(config).__module__):
        raise InputError(
            f"attn_implementation: expected one that {config.model_type} has, got {config._attn_implementation!r}; its "
            'layers do not use the AttentionInterface of transformers. Set attn_implementation="eager"'
        )


def has_attention_of_its_own(config: Any) -> bool:
    """Whether some layers use the interface and others do not: these add their mask to their scores."""
    return _has_own_softmax(type(config).__module__)


def tells_its_window(config: Any) -> bool:
    """Whether the layers pass their ``sliding_window`` to the attention function.

    Some put it into the mask alone. Then there has to be a mask.
    """
    return _contains(type(config).__module__, "sliding_window=")


def wants_whole_masks(config: Any) -> bool:
    """Whether the model works on its masks itself, and asks for whole ones by ``allow_is_causal_skip=False``."""
    module = type(config).__module__
    is_indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    return is_indexed or not _contains(module, "") or _contains(module, "allow_is_causal_skip")


# The tracer of torch.compile would go into the cached function otherwise.
@torch.compiler.assume_constant_result
def _contains(config_module: str, words: str) -> bool:
    code = _model_code(config_module)
    return code is not None and words in code


@torch.compiler.assume_constant_result
def _ignores_interface(config_module: str) -> bool:
    code = _model_code(config_module)
    has_layers = code is not None and re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE)
    return bool(has_layers) and not _contains(config_module, "ALL_ATTENTION_FUNCTIONS.get_interface(")


@torch.compiler.assume_constant_result
def _has_own_softmax(config_module: str) -> bool:
    classes = re.split(r"^(?=class )", _model_code(config_module) or "", flags=re.MULTILINE)
    layers = [code for code in classes if re.match(r"class \w*Attention\w*\(nn\.Module\):", code)]
    return any("softmax(" in code and ".get_interface(" not in code for code in layers)


def _model_code(config_module: str) -> str | None:
    module = sys.modules.get(config_module.replace("configuration_", "modeling_"))
    return None if module is None else _source(module.__name__)


@lru_cache
def _source(module: str) -> str | None:
    try:
        return getsource(sys.modules[module])
    except (OSError, TypeError):
        return None
