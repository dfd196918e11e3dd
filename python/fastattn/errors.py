"""Defines the exceptions that fastattn raises."""

from __future__ import annotations


class InputError(ValueError, RuntimeError):
    """An argument has the wrong shape, dtype, device or value.

    It is a ``ValueError`` by its meaning, and also a ``RuntimeError``, so that code that catches the error of
    ``torch.nn.functional.scaled_dot_product_attention`` catches this one. The message names the argument, what was
    expected and what came.
    """


class CacheFull(RuntimeError):
    """A key-value cache has no room for the new tokens. The cache is as it was before the call."""
