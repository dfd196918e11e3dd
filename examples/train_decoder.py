"""Train a small LLaMA-style decoder on text, on packed batches without padding.

    python examples/train_decoder.py --steps 300 --out demo_output
    python examples/train_decoder.py --text book.txt --dtype bfloat16 --checkpoint --share-layers

Writes the weights (decoder.pt) and the loss curve (loss.png) into the output folder; generate.py goes on from there.
Exits with 1 if one of the checks that it prints at the end failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from checks import CheckList
from decoder import Decoder, DecoderConfig, PackedAttention, PaddedAttention
from text_data import VOCAB_SIZE, Batch, bucketed_batches, cut_into_passages, entropies, pack, read_documents, split
from torch import Tensor
from tqdm import tqdm

import fastattn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Options:
    """What the command line says; see ``--help``."""

    text: Path | None = None
    out: Path = Path("demo_output")
    device: torch.device = field(default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    dtype: torch.dtype | None = None
    checkpoint: bool = False
    steps: int = 300
    token_budget: int = 2048
    max_length: int = 255
    learning_rate: float = 4e-3
    seed: int = 0
    config: DecoderConfig = field(default_factory=lambda: DecoderConfig(VOCAB_SIZE))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matmuls and attention; the kernels take 16-bit floats, a CPU is fastest with 32."""
        return self.dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)


@dataclass
class History:
    """Losses in nats per token: of each step's own batch, and of the held-out text every now and then."""

    training: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    model: Decoder
    held_out: list[Batch]
    history: History


def packed_loss(model: Decoder, batch: Batch) -> Tensor:
    """Mean cross entropy over the tokens of a packed batch, through ``fastattn.attention_varlen``."""
    logits = model(batch.tokens, batch.positions, PackedAttention(batch.cu_seqlens, batch.max_seqlen))
    return F.cross_entropy(logits.float(), batch.targets)


def padded_loss(model: Decoder, batch: Batch) -> Tensor:
    """The same over padded documents, through PyTorch's own attention."""
    padded = batch.padded()
    logits = model(padded.tokens, padded.positions, PaddedAttention(len(padded.cu_seqlens) - 1))
    return F.cross_entropy(logits.float(), padded.targets)


def autocast(options: Options) -> torch.autocast:
    dtype = options.compute_dtype
    return torch.autocast(options.device.type, dtype, enabled=dtype != torch.float32)


@torch.no_grad()
def evaluate(model: Decoder, batches: list[Batch]) -> float:
    """Mean cross entropy over all tokens of the batches, nats per token."""
    total = sum(packed_loss(model, batch).item() * batch.num_tokens for batch in batches)
    return total / sum(batch.num_tokens for batch in batches)


def endless_batches(passages: list[bytes], options: Options) -> Iterator[Batch]:
    rng = random.Random(options.seed)
    while True:
        for batch in bucketed_batches(passages, options.token_budget, rng):
            yield batch.to(options.device)


def train(model: Decoder, passages: list[bytes], held_out: list[Batch], options: Options) -> History:
    """AdamW with one cycle of the learning rate; the weights stay fp32, the compute is in ``options.compute_dtype``."""
    model.use_checkpoints = options.checkpoint
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, options.steps, pct_start=0.1)
    # Gradients of fp16 losses vanish below 6e-8 unless they are scaled; bf16 has the exponents of fp32.
    scaler = torch.amp.GradScaler(options.device.type, enabled=options.compute_dtype == torch.float16)
    history = History()
    evaluate_every = max(1, options.steps // 6)

    batches = endless_batches(passages, options)
    with tqdm(range(1, options.steps + 1), desc="training", unit="step", disable=None) as progress:
        for step in progress:
            if step == 1 or step % evaluate_every == 0:
                with autocast(options):
                    history.held_out[step - 1] = evaluate(model, held_out)
            with autocast(options):
                loss = packed_loss(model, next(batches))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            history.training.append(loss.item())
            progress.set_postfix(loss=f"{loss.item():.3f}")
    with autocast(options):
        history.held_out[options.steps] = evaluate(model, held_out)
    model.use_checkpoints = False
    return history


def gradients(model: Decoder, loss_of: Callable[[Decoder, Batch], Tensor], batch: Batch) -> tuple[float, Tensor]:
    """Loss and all gradients in one row; leaves none behind."""
    loss = loss_of(model, batch)
    rows = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([row.flatten() for row in rows])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def check_attention(model: Decoder, batch: Batch, options: Options, checks: CheckList) -> None:
    """Packed against padded plain PyTorch, with and without gradient checkpoints, and that no token sees a later one."""
    # A 16-bit dtype rounds to 2^-8 (bf16) or 2^-11 (fp16) at each of some ten roundings in a row.
    bound = 1e-5 if options.compute_dtype == torch.float32 else 0.03
    with autocast(options):
        loss, packed = gradients(model, packed_loss, batch)
        plain_loss, padded = gradients(model, padded_loss, batch)
        checks.at_most("decoder: loss, packed against padded plain PyTorch", abs(loss - plain_loss), bound)
        checks.at_most("decoder: gradients, packed against padded plain PyTorch", relative_error(packed, padded), bound)

        model.use_checkpoints = True
        _, recomputed = gradients(model, packed_loss, batch)
        model.use_checkpoints = False
        # The same kernels run on the same numbers; on a GPU, sums by atomics may differ in their last bits.
        what = "decoder: gradients with against without checkpointing"
        checks.at_most(what, relative_error(recomputed, packed), bound if options.device.type == "cuda" else 0.0)

        attend = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
        middle = batch.num_tokens // 2
        changed = batch.tokens.clone()
        changed[middle:] = (changed[middle:] + 1) % 256
        with torch.no_grad():
            before = model(batch.tokens, batch.positions, attend)[:middle]
            after = model(changed, batch.positions, attend)[:middle]
        checks.at_most("decoder: logits before a change in the text move by", (after - before).abs().max().item(), 1e-6)


def compare_speed(model: Decoder, batches: list[Batch], options: Options) -> None:
    """Tokens per second and peak memory of training steps, packed with fastattn and padded with plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # lr 0: the trained weights stay
    on_gpu = options.device.type == "cuda"
    print(f"\nTraining steps on {torch.cuda.get_device_name() if on_gpu else 'the CPU'}, {len(batches)} batches")
    for name, loss_of in {"fastattn, packed": packed_loss, "plain PyTorch, padded": padded_loss}.items():
        for batch in [batches[0], *batches]:  # the first one warms up
            if batch is batches[0]:
                if on_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
            with autocast(options):
                loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        tokens_per_second = sum(batch.num_tokens for batch in batches) / (time.perf_counter() - start)
        memory = f", peak memory {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB" if on_gpu else ""
        print(f"  {name:22} {tokens_per_second:12,.0f} tokens/s{memory}")


def plot(history: History, unigram: float, bigram: float, path: Path) -> None:
    """The loss curve, with the entropies that it has to beat."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(1, len(history.training) + 1), history.training, linewidth=0.8, alpha=0.6, label="training batch")
    axes.plot(list(history.held_out), list(history.held_out.values()), marker="o", label="held-out text")
    axes.axhline(unigram, color="grey", linestyle=":", label="entropy of a byte")
    axes.axhline(bigram, color="black", linestyle="--", label="… given the byte before: the best without attention")
    axes.set(xlabel="step", ylabel="loss, nats per token", title="Decoder trained with fastattn.attention_varlen")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(options: Options, checks: CheckList) -> Trained:
    """Train, check, and write weights and loss curve to ``options.out``."""
    torch.manual_seed(options.seed)
    passages, held_out_passages = split(
        cut_into_passages(read_documents(options.text), options.max_length), held_out=0.05, seed=options.seed
    )
    held_out = [
        batch.to(options.device)
        for batch in bucketed_batches(held_out_passages, options.token_budget, random.Random(options.seed))
    ]
    unigram, bigram = entropies(held_out_passages)
    model = Decoder(options.config).to(options.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{num_parameters:,} parameters, {options.config.num_layers} layers"
        f"{' that share their weights' if options.config.share_layers else ''}; "
        f"{sum(map(len, passages)):,} bytes to train on in {len(passages)} passages, {len(held_out_passages)} held out; "
        f"{options.device.type}, {str(options.compute_dtype).removeprefix('torch.')}"
    )

    with fastattn.record() as calls, torch.no_grad(), autocast(options):
        packed_loss(model, held_out[0])
    print(f"Attention runs on: {calls[0]}")

    history = train(model, passages, held_out, options)
    first, last = history.held_out[0], history.held_out[options.steps]

    print("\n    step   held-out loss (nats per token)")
    for step, loss in history.held_out.items():
        print(f"  {step:6}   {loss:.3f} {'#' * round(8 * loss)}")
    print(f"  of the held-out text: entropy of a byte {unigram:.3f}; of a byte given the one before {bigram:.3f}")

    options.out.mkdir(parents=True, exist_ok=True)
    plot(history, unigram, bigram, options.out / "loss.png")
    torch.save({"config": asdict(options.config), "weights": model.state_dict()}, options.out / "decoder.pt")
    print(f"Wrote {options.out / 'loss.png'} and {options.out / 'decoder.pt'}")

    checks.at_most("decoder: held-out loss, against what a byte alone tells", last, min(first, unigram))
    checks.at_most("decoder: held-out loss, against the best without attention", last, bigram)
    check_attention(model, held_out[0], options, checks)
    if options.device.type == "cuda":
        compare_speed(model, held_out, options)
    return Trained(model, held_out, history)
