"""Registers fastattn as an attention implementation of Hugging Face's ``transformers``, 5.23 or later::

    import fastattn.integrations.transformers

    fastattn.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fastattn")

attention.py has the function that models call, and masks.py decides what a model's mask becomes: patterns.py recognises
the mask that transformers means, and marks.py encodes it in a few numbers instead of a mask ``[B, 1, Sq, Sk]``.
model_code.py reads from a model's source what transformers does not tell, and model_setup.py uses it to refuse models.
cache.py has a cache for ``generate``, 8-bit or not, and eight_bit_cache.py attends over an 8-bit one.

int8_config.py has the config that makes a model's linear layers int8 while it is loaded: int8_layers.py chooses the
layers, int8_loading.py makes their weights, and int8_quantizer.py has the class that transformers calls. Importing this
package registers the config and this class with transformers, so that int8 checkpoints load.
"""

from __future__ import annotations

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sliding_window_bidirectional_overlay  # noqa: F401  # patterns.py needs it
except ImportError as error:
    raise ImportError(
        f"fastattn.integrations.transformers needs transformers 5.23 or later ({error}); "
        "run `pip install -U transformers`"
    ) from error

from fastattn.errors import InputError
from fastattn.integrations.transformers.attention import attend
from fastattn.integrations.transformers.cache import Cache
from fastattn.integrations.transformers.int8_config import Int8Config
from fastattn.integrations.transformers.int8_quantizer import register_int8
from fastattn.integrations.transformers.masks import make_mask
from fastattn.integrations.transformers.model_setup import check_models_at_setup

__all__ = ["Cache", "Int8Config", "register"]

register_int8()


def register(name: str = "fastattn") -> None:
    """Makes ``attn_implementation=name`` and ``model.set_attn_implementation(name)`` run attention in fastattn.

    It serves decoders, encoders and encoder-decoders, with causal masks, sliding windows, softcap, sinks (``s_aux``),
    position biases with their gradient, grouped queries (keys and values are not repeated), dropout, padding on either
    side, packed sequences, the user's own masks, and generation over any ``Cache``. A mask ``[B, 1, Sq, Sk]`` is never
    made only for padding and causality. Repeated calls are allowed.

    Models raise ``InputError`` for attention weights (``output_attentions=True``), continuous batching
    (``generate_batch``), and arguments of their attention that fastattn does not know. Models whose layers do not use
    transformers' ``AttentionInterface`` (BLOOM) are refused when they are made or set to ``name``.

    Raises:
        InputError: ``name`` already means something else to transformers.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"name: expected a name for attn_implementation, got {name!r}")
    if "flash" in name or "|" in name or "/" in name or name == "eager":
        raise InputError(
            f'name: expected one that means nothing else to transformers, got {name!r} (names with "flash" are taken '
            'for packages like flash-attn, those with "/" for kernels of the Hub, those with "|" for prefixes like '
            '"paged|", "eager" for the models\' own code)'
        )
    for interface, function in ((AttentionInterface, attend), (AttentionMaskInterface, make_mask)):
        registered = interface().get(name)
        if registered not in (None, function):
            raise InputError(
                f"name: expected one that is free in transformers, got {name!r}, which is registered for {registered}; "
                'call register("another_name")'
            )
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    check_models_at_setup()
    register_int8()
