"""Refuses models whose layers would never call the attention function, when models are made or later set to it.

At these times, transformers checks "sdpa" and "flex_attention" by flags of each model, but does not check names that
other packages have registered. So this module wraps two methods of transformers. For other names, the methods work as
before.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from transformers import AttentionInterface, PreTrainedModel

from fastattn.integrations.transformers.attention import attend
from fastattn.integrations.transformers.model_code import check_model


@cache
def check_models_at_setup() -> None:
    """Wraps two methods of ``PreTrainedModel`` for the rest of the process. A second call changes nothing."""
    choose, set_later = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation

    # Every model calls this method when it is made, as do the submodels of a model that changes its implementation.
    @wraps(choose)
    def get_correct_attn_implementation(self: PreTrainedModel, *arguments: Any, **options: Any) -> str:
        implementation: str = choose(self, *arguments, **options)
        _check(self, implementation)
        return implementation

    # For a model that cannot change, transformers' own method only warns and never calls the method above.
    @wraps(set_later)
    def set_attn_implementation(
        self: PreTrainedModel, attn_implementation: Any, *arguments: Any, **options: Any
    ) -> None:
        is_by_part = isinstance(attn_implementation, dict)
        _check(self, attn_implementation.get("") if is_by_part else attn_implementation)
        set_later(self, attn_implementation, *arguments, **options)

    setattr(PreTrainedModel, choose.__name__, get_correct_attn_implementation)
    setattr(PreTrainedModel, set_later.__name__, set_attn_implementation)


def _check(model: PreTrainedModel, implementation: Any) -> None:
    if isinstance(implementation, str) and AttentionInterface().get(implementation) is attend:
        check_model(model, implementation)
