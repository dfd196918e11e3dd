"""Trains the decoder on long sequences, each spread over several processes.

    torchrun --nproc-per-node 4 examples/train_long_context.py
    torchrun --nproc-per-node 4 examples/train_long_context.py --context 4 --length 8192 --batch 1 --profile

The processes form a mesh, data x context: the processes of a row split the same sequences, and every row has other
sequences. The last check compares loss and gradients with the loss and gradients of one process. ``--profile`` writes
traces of one step (trace_rank0.json, …, for chrome://tracing or Perfetto) and draws how messages and compute overlap in
this step (overlap.png). Messages use NCCL on GPUs, and gloo on CPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from arguments import existing_file, positive
from checks import CheckList
from decoder import Decoder, DecoderConfig, PaddedAttention, Rotary, by_sequence, by_token
from fastattn.distributed import context_parallel_attention, shard_sequence
from fastattn.distributed.arguments import STRATEGIES
from overlap import Timeline, plot, print_table
from text_data import BOUNDARY, VOCAB_SIZE, read_documents
from train_decoder import DTYPES, relative_error, warm_up_then_cosine

LAYOUT = "zigzag"  # gives all ranks the same work under a causal mask


@dataclass(frozen=True)
class Options:
    """Holds the options of the command line; ``--help`` describes them."""

    text: Path | None = None
    out: Path = Path("demo_output")
    context: int = 2
    strategy: str = "ring"
    length: int = 1024
    batch: int = 4
    steps: int = 40
    learning_rate: float = 4e-3
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    checkpoint: bool = False
    profile: bool = False
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    seed: int = 0

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(
            VOCAB_SIZE,
            dim=self.dim,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            ffn_dim=11 * self.dim // 4,
            max_positions=self.length,
        )

    def check(self, world_size: int) -> None:
        """Raises ValueError if the work does not divide evenly among the ranks."""
        data, left = divmod(world_size, self.context)
        if left:
            raise ValueError(f"--context: expected a divisor of the {world_size} processes, got {self.context}")
        if self.batch % data:
            raise ValueError(f"--batch: expected a multiple of {data}, got {self.batch}: {data} groups divide it")
        if self.length % (2 * self.context):  # zigzag: two parts for each rank
            divided = "the processes of --context take two parts each"
            raise ValueError(f"--length: expected a multiple of {2 * self.context}, got {self.length}: {divided}")
        try:
            _ = self.config
        except ValueError as error:
            raise ValueError(f"--dim, --heads, --kv-heads: {error}") from None


@dataclass(frozen=True)
class ShardedAttention:
    """Attends over ``batch`` sequences of one length that are split among the ranks of ``group``."""

    batch: int
    group: DeviceMesh
    strategy: str

    def __call__(self, depth: int, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (by_sequence(x, self.batch) for x in (rotary.rotate(query), rotary.rotate(key), value))
        out = context_parallel_attention(q, k, v, group=self.group, strategy=self.strategy, layout=LAYOUT, causal=True)
        return by_token(out)


@dataclass(frozen=True)
class Batch:
    """Holds whole sequences of tokens, and the next token of each, ``[B, length]``."""

    tokens: Tensor
    targets: Tensor

    @classmethod
    def draw(cls, text: Tensor, batch: int, length: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator).to(text.device)
        rows = text[starts + torch.arange(length + 1, device=text.device)]
        return cls(rows[:, :-1], rows[:, 1:])

    @property
    def positions(self) -> Tensor:
        """Returns the position of each token in its sequence, ``[B, length]``."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)


class Trainer:
    """Trains a model, with a copy on every rank. ``mesh`` has the dimensions "data" and "context"."""

    def __init__(self, options: Options, mesh: DeviceMesh) -> None:
        self.options, self.data, self.context = options, mesh["data"], mesh["context"]
        self.device = torch.device(mesh.device_type)
        torch.manual_seed(options.seed)
        self.model = Decoder(options.config).to(self.device)
        self.model.use_checkpoints = options.checkpoint
        # DDP averages gradients over all ranks, in both dimensions of the mesh. Each rank's loss is the mean over the
        # same number of tokens, so the average is the gradient of the whole batch's loss.
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate, betas=(0.85, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: warm_up_then_cosine(step, options.steps)
        )

    def own_loss(self, batch: Batch) -> Tensor:
        """Returns the mean cross entropy over this rank's tokens: its shards of its mesh row's sequences."""

        def own(whole: Tensor) -> Tensor:
            of_row = whole.chunk(self.data.size())[self.data.get_local_rank()]
            return shard_sequence(of_row, 1, group=self.context, layout=LAYOUT)

        tokens = own(batch.tokens)
        attend = ShardedAttention(len(tokens), self.context, self.options.strategy)
        with self.autocast():
            logits = self.parallel(tokens.flatten(), own(batch.positions).flatten(), attend)
        return F.cross_entropy(logits.float(), own(batch.targets).flatten())

    def loss_in_one_process(self, batch: Batch) -> Tensor:
        """Returns the mean cross entropy over all tokens of the batch, with PyTorch's own attention."""
        attend = PaddedAttention(len(batch.tokens))
        with self.autocast():
            logits = self.model(batch.tokens.flatten(), batch.positions.flatten(), attend)
        return F.cross_entropy(logits.float(), batch.targets.flatten())

    def backward(self, batch: Batch) -> float:
        """Computes the gradients of the whole batch on every rank, and returns the batch's loss."""
        self.optimizer.zero_grad()
        loss = self.own_loss(batch)
        loss.backward()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def step(self, batch: Batch) -> float:
        loss = self.backward(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.options.dtype]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)


def as_tokens(documents: list[str], device: torch.device) -> Tensor:
    """Returns the documents as one row of byte tokens, with ``BOUNDARY`` before each document."""
    return torch.cat([torch.tensor([BOUNDARY, *document.encode()]) for document in documents]).to(device)


def profile_step(trainer: Trainer, batch: Batch, out: Path) -> None:
    """Writes each rank's trace of one step. Prints and draws how much communication overlaps with compute."""
    activities = [ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    dist.barrier()
    with profile(activities=activities) as profiler:
        trainer.step(batch)
    out.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(out / f"trace_rank{dist.get_rank()}.json"))
    timelines = [Timeline()] * dist.get_world_size()
    dist.all_gather_object(timelines, Timeline.of(profiler.events(), trainer.device))
    if dist.get_rank() == 0:
        print_table(timelines)
        plot(timelines, f"One training step, strategy {trainer.options.strategy!r}", out / "overlap.png")
        print(f"Wrote {out / 'overlap.png'} and a trace of each rank")


def check_against_one_process(trainer: Trainer, batch: Batch, checks: CheckList) -> None:
    """Checks the loss and gradients of all ranks together against the loss and gradients that rank 0 computes alone."""
    loss = trainer.backward(batch)
    if dist.get_rank() != 0:
        return
    parameters = list(trainer.model.parameters())
    gradients = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
    expected_loss = trainer.loss_in_one_process(batch)
    expected = torch.cat([row.flatten() for row in torch.autograd.grad(expected_loss, parameters)])
    # In float32, the two computations sum in different orders; in 16 bits, every matmul rounds.
    bound = 1e-4 if trainer.options.dtype == "float32" else 0.03
    checks.at_most("long context: loss, of all ranks against one process", abs(loss - expected_loss.item()), bound)
    checks.at_most(
        "long context: gradients, of all ranks against one process", relative_error(gradients, expected), bound
    )


def run(options: Options, mesh: DeviceMesh, checks: CheckList) -> None:
    """Trains, profiles if asked to, and checks. Only rank 0 prints and adds to ``checks``."""
    is_first = dist.get_rank() == 0
    trainer = Trainer(options, mesh)
    text = as_tokens(read_documents(options.text), trainer.device)
    generator = torch.Generator().manual_seed(options.seed)
    if is_first:
        print(
            f"{trainer.data.size()} x {trainer.context.size()} ranks (data x context) on {trainer.device}, "
            f"{options.dtype}: {options.batch} sequences of {options.length:,} tokens at once, "
            f"{options.batch * options.length // mesh.size():,} tokens on each rank; strategy {options.strategy!r}"
        )

    losses = []
    start = time.perf_counter()
    for step in range(options.steps):
        losses.append(trainer.step(Batch.draw(text, options.batch, options.length, generator)))
        if is_first and (step % max(1, options.steps // 8) == 0 or step == options.steps - 1):
            print(f"step {step + 1:6}  loss {losses[-1]:.3f}  {time.perf_counter() - start:8.1f} s", flush=True)
    if options.profile:
        profile_step(trainer, Batch.draw(text, options.batch, options.length, generator), options.out)

    if is_first:
        checks.at_most("long context: loss of the last step, against the first", losses[-1], losses[0])
    # Use short sequences, because one process has to hold them; 256 tokens per rank are enough for distinct shards.
    length = min(options.length, 256 * options.context)
    check_against_one_process(trainer, Batch.draw(text, options.batch, length, generator), checks)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Options()
    parser.add_argument("--text", type=existing_file, help="a text file (default: Python's language reference)")
    parser.add_argument("--out", type=Path, default=default.out, help="folder for traces (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="trace one step, and draw what overlaps")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer in backward: less memory")
    parser.add_argument("--strategy", choices=STRATEGIES, default=default.strategy, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=default.dtype, help="default: %(default)s")
    helps = {
        "context": "number of processes that share a sequence",
        "length": "tokens of a sequence",
        "batch": "sequences in a step, over all processes",
        "steps": "number of training steps",
        "learning_rate": "the highest learning rate",
        "dim": "hidden size of the model",
        "layers": "number of layers",
        "heads": "number of query heads",
        "kv_heads": "number of heads of keys and values",
        "seed": "seed of weights and batches",
    }
    for name, text in helps.items():
        value = getattr(default, name)
        flag = "--" + name.replace("_", "-")
        kind = positive if isinstance(value, int) and name != "seed" else type(value)
        parser.add_argument(flag, type=kind, default=value, help=f"{text} (default: %(default)s)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    options = Options(**vars(parser.parse_args()))
    if not dist.is_torchelastic_launched():
        parser.error("start this program with `torchrun --nproc-per-node 4 examples/train_long_context.py`")
    world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    try:
        options.check(world_size)
    except ValueError as error:
        parser.error(str(error))

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            parser.error(
                f"expected at most {count} processes, one for each GPU, got {world_size}; use `torchrun "
                f"--nproc-per-node {count}`, or run on the CPU with CUDA_VISIBLE_DEVICES= before torchrun"
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group()
    shape = world_size // options.context, options.context
    checks = CheckList()
    run(options, init_device_mesh(device_type, shape, mesh_dim_names=("data", "context")), checks)
    status = checks.finish("train_long_context") if dist.get_rank() == 0 else 0
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
