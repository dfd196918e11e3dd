"""Writes, reads, compares and breaks tiny checkpoints, for the tests of ``Int8Config``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastattn.nn import Int8Linear
from tiny_models import FAMILIES


def load(path: Path, config: Any = None, family: str = "llama", **options: Any) -> Any:
    """Loads the model of a checkpoint, quantised as ``config`` says."""
    if config is not None:
        options["quantization_config"] = config
    return getattr(transformers, FAMILIES[family][0]).from_pretrained(path, **options)


def int8_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Int8Linear)}


def check_same(model: nn.Module, other: nn.Module) -> None:
    """Asserts that two models have the same bits in tensors of the same types."""
    ours, others = model.state_dict(), other.state_dict()
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert type(tensor) is type(others[name]), name
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


def edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Copies a checkpoint and changes its tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def replaced(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Returns an edit that changes one tensor."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[key] = change(tensors[key]).contiguous()

    return edit


def dropped(*keys: str) -> Callable[[dict[str, Tensor]], None]:
    """Returns an edit that drops tensors."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for key in keys:
            del tensors[key]

    return edit
