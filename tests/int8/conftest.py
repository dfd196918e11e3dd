"""Holds the fixtures of the int8 matmul's tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Any:
    """Returns the family of kernels that `int8_kernels.on` names."""
    from int8_kernels import Kernels  # imports fastattn, so not before ../conftest.py has chosen its library

    return Kernels(request.param)
