"""Refuses models whose layers would never call the attention function, when they are made or later set to it.

transformers refuses "sdpa" and "flex_attention" there by flags of each model, but does not check names that others
registered. So two of its methods are wrapped here; other names pass through them as before.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from transformers import AttentionInterface, PreTrainedModel

from fastattn.integrations.transformers.attention import attend
from fastattn.integrations.transformers.model_code import check_model


@cache
def check_models_at_setup() -> None:
    """Wraps the two methods for the rest of the process. A second call changes nothing."""
    choose, set_later = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation

    # Every model calls it while it is made, and so do the parts of a model that is set to another implementation.
    @wraps(choose)
    def get_correct_attn_implementation(self: PreTrainedModel, *arguments: Any, **options: Any) -> str:
        implementation: str = choose(self, *arguments, **options)
        _check(self, implementation)
        return implementation

    # transformers' own method warns about a model that cannot be set, leaves it as it is, and never calls the above.
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
