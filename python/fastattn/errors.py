"""Defines the exceptions that fastattn raises."""

from __future__ import annotations


class InputError(ValueError, RuntimeError):
    """Reports an argument that has the wrong shape, dtype, device or value.

    It is both a ``ValueError`` and a ``RuntimeError``, so that code that catches the errors of
    ``torch.nn.functional.scaled_dot_product_attention`` catches it. The message names the argument, what was expected
    and what came.
    """


class CacheFull(RuntimeError):
    """Reports that new tokens do not fit into a key-value cache. The call leaves the cache unchanged."""
