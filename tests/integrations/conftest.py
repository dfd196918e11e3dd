"""What several test modules have in common: checkpoints, and torch's flash attention operators in our hands."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture
def flash_overrides() -> Iterator[None]:
    """Our implementations of torch's flash attention operators, under the dispatch key of the tests' device."""
    import fastattn
    from cuda_kernels import checked
    from fastattn.integrations.torch_flash.switch import Overrides
    from kernel_device import DEVICE

    overrides = Overrides(DEVICE.upper())
    with fastattn.use_backend("cuda"), checked():
        yield
    overrides.remove()
