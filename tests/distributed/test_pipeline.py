"""Tests that the stages of a pipeline, cut out of an exported decoder with attention and int8 layers, compute what one
process computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ranks

VOCABULARY, DIM, HEADS, LENGTH, BATCH, MICROBATCHES = 11, 32, 4, 12, 4, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.heads = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        import fastattn

        query, key, value = self.heads(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        attended = fastattn.attention(query, key, value, causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class SmallDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def decoder() -> SmallDecoder:
    """Returns a decoder whose two output projections, one per stage, are int8."""
    from fastattn.nn import quantize_model

    torch.manual_seed(4)
    model = SmallDecoder()
    report = quantize_model(model, filter=lambda name, _: name.endswith(".out"))
    assert len(report.layers) == 2
    return model


def renew_int8_parameters(stage: nn.Module) -> int:
    """Replaces int8 parameters: export leaves weak references, with which torch moves no tensor subclass."""
    from fastattn.nn import Int8Tensor

    renewed = 0
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, Int8Tensor):
                module.register_parameter(name, nn.Parameter(parameter.detach(), requires_grad=False))
                renewed += 1
    return renewed


# --- On each rank -----------------------------------------------------------------------------------------------------


def two_stages_are_one_process(rank: int, mesh: DeviceMesh) -> None:
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    expected = decoder()
    logits = expected(tokens)
    loss_of(logits, targets).backward()

    pipe = pipeline(
        decoder(),
        mb_args=(tokens[: BATCH // MICROBATCHES],),
        split_spec={"layers.1": SplitPoint.BEGINNING},
    )
    assert pipe.num_stages == 2
    int8_layers = renew_int8_parameters(pipe.get_stage_module(rank))
    assert int8_layers == 1
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of)
    if rank == 0:
        schedule.step(tokens)
    else:
        losses: list[Tensor] = []
        found = schedule.step(target=targets, losses=losses)
        torch.testing.assert_close(found, logits)
        torch.testing.assert_close(torch.stack(losses).mean(), loss_of(logits, targets))
    wanted = dict(expected.named_parameters())
    trained = 0  # all but the int8 weight
    for name, parameter in stage.submod.named_parameters():
        if wanted[name].grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[name].grad)
            trained += 1
    assert trained == (4 if rank == 0 else 5)


# --- Here -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_stages_are_one_process() -> None:
    ranks.run(__name__, two_stages_are_one_process.__name__, emulated=False)
