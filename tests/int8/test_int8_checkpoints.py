"""Tests that checkpoints of sharded int8 layers, saved by four ranks, load on fewer ranks and in other shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ranks
from test_int8_distributed import model_of

# hidden features, outer features, granularity; four ranks divide the rows of the first three evenly
SIZES: tuple[tuple[int, int, str | int], ...] = ((64, 128, "tensor"), (128, 64, 32), (48, 40, "channel"))
UNEVEN: tuple[int, int, str | int] = (45, 39, "channel")
FOLDER = "FASTATTN_TEST_CHECKPOINTS"


def cases(*others: tuple[int, int, str | int]) -> Iterator[tuple[nn.Sequential, nn.Sequential, str]]:
    """Yields a model that was saved, one with other weights, and the folder of the checkpoint."""
    for seed, sizes in enumerate((*SIZES, *others)):
        yield model_of(*sizes, seed), model_of(*sizes, seed + 100), str(Path(os.environ[FOLDER]) / str(seed))


def shard_rows(model: nn.Sequential, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)


def load_and_compare(model: nn.Module, saved: nn.Module, folder: str) -> None:
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    from fastattn.nn import Int8Tensor

    state = get_model_state_dict(model)
    checkpoints.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    for (name, actual), wanted in zip(model.named_parameters(), saved.parameters(), strict=True):
        whole = actual.full_tensor() if isinstance(actual, DTensor) else actual
        assert isinstance(whole, Int8Tensor) == isinstance(wanted, Int8Tensor)
        assert torch.equal(whole, wanted), f"{name} of {folder}"


# --- On each rank -----------------------------------------------------------------------------------------------------


def save(rank: int, mesh: DeviceMesh) -> None:
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    for model, _, folder in cases(UNEVEN):
        shard_rows(model, mesh)
        checkpoints.save(get_model_state_dict(model), checkpoint_id=folder)


def load_rows(rank: int, mesh: DeviceMesh) -> None:
    for saved, model, folder in cases(UNEVEN):
        shard_rows(model, mesh)
        load_and_compare(model, saved, folder)


def load_for_tensor_parallel(rank: int, mesh: DeviceMesh) -> None:
    """The first layer is sharded by rows, the second by columns."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for saved, model, folder in cases():
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        load_and_compare(model, saved, folder)


def load_whole(rank: int, mesh: DeviceMesh) -> None:
    for saved, model, folder in cases(UNEVEN):
        load_and_compare(model, saved, folder)
        x = torch.randn(3, model[0].in_features)
        torch.testing.assert_close(model(x), saved(x))


# --- Here -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_ranks_save_and_fewer_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    ranks.run(__name__, save.__name__, world_size=4, emulated=False)
    for world_size, loads in ((2, (load_rows, load_for_tensor_parallel)), (1, (load_rows, load_whole))):
        ranks.run(__name__, *(load.__name__ for load in loads), world_size=world_size, emulated=False)
