"""Fails every test under ``.venv-cuda`` in which the emulated runtime refused a call, or memory was damaged.

    pytest -p cuda_torch.plugin [--cuda-device 1] ...

Host code may ignore an error that CUDA returns; a test may not. ``@pytest.mark.refused`` marks tests that provoke
errors.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from emulator.native import native


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda-device", type=int, default=0, help="the current device: 0 is an H100, 1 an A100")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "refused: provokes errors of the emulated CUDA runtime")
    torch.cuda.set_device(config.getoption("--cuda-device"))


@pytest.fixture(autouse=True)
def _nothing_is_refused(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.cuda.current_device()
    native.runtime.take_failures()
    yield
    refused, damages = native.runtime.take_failures(), native.allocations.verify()
    assert torch.cuda.current_device() == before, "the test left another device current"
    assert not damages, f"memory was {'; '.join(damages)}"
    if request.node.get_closest_marker("refused") is None:
        assert not refused, "the CUDA runtime refused: " + "\n".join(dict.fromkeys(refused))
