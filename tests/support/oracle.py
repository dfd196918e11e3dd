"""Decides whether a kernel's result is right, by one rule for every operation.

The oracle is ``fastattn.reference`` in float64. A result passes when its worst error is at most twice the worst error
of PyTorch's own composite computation in the kernel's dtype on the same inputs, plus one rounding of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

import proof


def one_rounding(oracle: Tensor, dtype: torch.dtype) -> float:
    """Returns the largest error that rounding the finite oracle to ``dtype`` can make."""
    finite = oracle[oracle.isfinite()].double()
    if finite.numel() == 0:
        return 0.0
    info = torch.finfo(dtype)
    return max(finite.abs().max().item() * info.eps / 2, info.smallest_normal * info.eps)


def worst_error(actual: Tensor, oracle: Tensor) -> float:
    """Returns the largest absolute difference where both are finite."""
    both = actual.isfinite() & oracle.isfinite()
    if not bool(both.any()):
        return 0.0
    return (actual.double() - oracle.double())[both].abs().max().item()


def check_against_oracle(
    name: str, actual: Tensor, oracle: Tensor, composite: Tensor, *, allowance: float = 1.0
) -> None:
    """Asserts that ``actual`` is as good as ``composite`` by the rule above; ``oracle`` is float64, of the same shape.

    ``allowance`` multiplies the rule's bound: the composite's worst error of a few numbers may be small by luck. Shapes
    that are written down in tests need no allowance; shapes that are drawn do. On failure the message gives the worst
    element: its position, what came and what was expected.
    """
    proof.compared()
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
    actual, oracle, composite = actual.detach().cpu(), oracle.detach().cpu(), composite.detach().cpu()
    wide = actual.double()
    for kind, found, expected in (
        ("NaN", wide.isnan(), oracle.isnan()),
        ("+inf", wide == torch.inf, oracle == torch.inf),
        ("-inf", wide == -torch.inf, oracle == -torch.inf),
    ):
        if not torch.equal(found, expected):
            where = tuple(int(i) for i in (found != expected).nonzero()[0])
            raise AssertionError(
                f"{name}: {kind} positions differ, first at {where}: got {wide[where].item()}, "
                f"expected {oracle[where].item()}"
            )
    bound = allowance * (2 * worst_error(composite, oracle) + one_rounding(oracle, actual.dtype))
    error = (wide - oracle).abs().nan_to_num(nan=0.0, posinf=0.0)
    if error.numel() and error.max().item() > bound:
        where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{name}: worst error {error.max().item():.3e} exceeds {bound:.3e} at {where}: "
            f"got {wide[where].item():.8g}, expected {oracle[where].item():.8g}"
        )
