"""Holds fixtures of several test modules: checkpoints, and our overrides of torch's flash attention operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

# The fixtures import fastattn, not this module: ../conftest.py chooses its library first.


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of a checkpoint in float32."""
    from tiny_models import make_model

    path = tmp_path_factory.mktemp("llama")
    make_model("llama", "eager").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def int8_llama(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of the same checkpoint, quantised to int8."""
    from fastattn.integrations.transformers import Int8Config
    from int8_checkpoints import load

    path = tmp_path_factory.mktemp("int8_llama")
    load(llama, Int8Config()).save_pretrained(path)
    return path


@pytest.fixture
def flash_overrides() -> Iterator[None]:
    """Registers our implementations of torch's flash attention operators under the tests' dispatch key."""
    import fastattn
    from cuda_kernels import checked
    from fastattn.integrations.torch_flash.switch import Overrides
    from kernel_device import DEVICE

    overrides = Overrides(DEVICE.upper())
    with fastattn.use_backend("cuda"), checked():
        yield
    overrides.remove()
