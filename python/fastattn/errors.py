"""The exceptions that fastattn raises."""

from __future__ import annotations


class InputError(ValueError, RuntimeError):
    """An argument has the wrong shape, dtype, device or value.

    It is a ``ValueError`` because that is what it means, and a ``RuntimeError`` because that is what
    ``torch.nn.functional.scaled_dot_product_attention`` raises, so that code which catches torch's error catches this
    one.
    The message names the argument, what was expected and what came.
    """


class CacheFull(RuntimeError):
    """A key-value cache has no room for what was to be appended. The cache is as it was before the call."""
