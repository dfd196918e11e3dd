"""Makes dropout seeds as tensors on the device, which kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.checks import check_dtype, check_int, check_same_device, expect


def seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """Returns a dropout seed as an int64 tensor of one element on the device, without synchronising."""
    if isinstance(seed, Tensor):
        check_dtype("dropout_seed", seed, (torch.int64,))
        check_same_device("dropout_seed", seed, device)
        expect(seed.numel() == 1, "dropout_seed", "a tensor of one element", f"shape {list(seed.shape)}")
        return seed
    seed = check_int("dropout_seed", seed)
    expect(-(2**63) <= seed < 2**64, "dropout_seed", "an int from -2**63 to 2**64 - 1", seed)
    return torch.full((), seed if seed < 2**63 else seed - 2**64, dtype=torch.int64, device=device)


def draw_seed(device: torch.device) -> Tensor:
    """Draws a seed from torch's generator of the device, which ``torch.manual_seed`` and CUDA graphs control."""
    # The bounds and their difference must fit in int32: Inductor writes the bounds into a Triton kernel as int32, its
    # index type, and the kernel subtracts them. 31 bits are enough, because Philox turns neighbouring seeds into
    # unrelated patterns.
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int64, device=device)
