"""Checkpoints that several test modules read."""

from __future__ import annotations

from pathlib import Path

import pytest

# fastattn is imported in the fixtures: before the tests are collected, ../conftest.py chooses its library.


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32."""
    from tiny_models import make_model

    path = tmp_path_factory.mktemp("llama")
    make_model("llama", "eager").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def int8_llama(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in int8."""
    from fastattn.integrations.transformers import Int8Config
    from int8_checkpoints import load

    path = tmp_path_factory.mktemp("int8_llama")
    load(llama, Int8Config()).save_pretrained(path)
    return path
