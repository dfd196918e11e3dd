"""Trains a small LLaMA-style decoder on text, in packed batches without padding.

    python examples/train_decoder.py
    python examples/train_decoder.py --text book.txt --steps 1000 --dtype bfloat16 --checkpoint --share-layers

Writes the weights (decoder.pt) and the loss curve (loss.png) into the output folder; generate.py reads the weights.
Exits with 1 if one of the checks that it prints at the end failed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

# Set this before torch is imported. By default, torch's threads spin while they wait, and slow each other down if all
# cores are busy: on two cores with six other processes, training took eight times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import fastattn
from arguments import existing_file, positive, present_device
from checks import CheckList
from decoder import Decoder, DecoderConfig, PackedAttention, PaddedAttention
from text_data import (
    IGNORED,
    VOCAB_SIZE,
    PackedBatch,
    bucketed_batches,
    cut_into_passages,
    entropies,
    read_documents,
    split,
)

LossOf: TypeAlias = Callable[[Decoder, PackedBatch], Tensor]
MODEL_SIZES = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Options:
    """Holds the options of the command line; ``--help`` describes them."""

    text: Path | None = None
    out: Path = Path("demo_output")
    device: torch.device = field(default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    dtype: torch.dtype | None = None
    checkpoint: bool = False
    steps: int = 120
    token_budget: int = 2048
    max_length: int = 255
    learning_rate: float = 4e-3
    seed: int = 0
    config: DecoderConfig = field(default_factory=lambda: DecoderConfig(VOCAB_SIZE))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Returns the dtype of matmuls and attention: GPU kernels take 16-bit floats, a CPU is fastest with 32-bit
        floats."""
        return self.dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)


@dataclass
class History:
    """Holds losses in nats per token: ``training`` of each step's batch, ``held_out`` of the held-out text by step."""

    training: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """Holds a trained model, the held-out text, and the losses during training."""

    model: Decoder
    held_out: list[bytes]
    history: History


def packed_loss(model: Decoder, batch: PackedBatch) -> Tensor:
    """Returns the mean cross entropy over the tokens of a packed batch, with ``fastattn.attention_varlen``."""
    logits = model(batch.tokens, batch.positions, PackedAttention(batch.cu_seqlens, batch.max_seqlen))
    return F.cross_entropy(logits.float(), batch.targets)


def padded_loss(model: Decoder, padded: PackedBatch) -> Tensor:
    """Returns the mean cross entropy over the tokens of a ``padded()`` batch, with PyTorch's own attention."""
    logits = model(padded.tokens, padded.positions, PaddedAttention(len(padded.cu_seqlens) - 1))
    return F.cross_entropy(logits.float(), padded.targets)


def autocast(options: Options) -> torch.autocast:
    dtype = options.compute_dtype
    return torch.autocast(options.device.type, dtype, enabled=dtype != torch.float32)


@torch.no_grad()
def evaluate(model: Decoder, batches: list[PackedBatch]) -> float:
    """Returns the mean cross entropy over all tokens of the batches, in nats per token."""
    total = sum(packed_loss(model, batch).item() * batch.num_tokens for batch in batches)
    return total / sum(batch.num_tokens for batch in batches)


def endless_batches(passages: list[bytes], options: Options) -> Iterator[PackedBatch]:
    rng = random.Random(options.seed)
    while True:
        for batch in bucketed_batches(passages, options.token_budget, rng):
            yield batch.to(options.device)


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Returns a factor on the learning rate, which rises to 1 in a tenth of the steps, then falls to 0 by a cosine."""
    warm_up = max(1, steps // 10)
    return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * step / steps)) / 2


def train(model: Decoder, passages: list[bytes], held_out: list[PackedBatch], options: Options) -> History:
    """Trains with AdamW. The weights stay fp32; matmuls and attention compute in ``options.compute_dtype``."""
    model.use_checkpoints = options.checkpoint
    # In so few steps, less momentum than the usual 0.9 reaches a lower loss.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.85, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, options.steps))
    # Gradients of fp16 losses vanish below 6e-8 unless they are scaled; bf16 has the exponents of fp32.
    scaler = torch.amp.GradScaler(options.device.type, enabled=options.compute_dtype == torch.float16)
    history = History()
    evaluate_every = math.ceil(options.steps / 6)

    batches = endless_batches(passages, options)
    # In a log file each update of the bar is a new line: a line every ten seconds is enough.
    seconds_between = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(range(options.steps), desc="training", unit="step", mininterval=seconds_between) as progress:
        for step in progress:
            if step % evaluate_every == 0:
                with autocast(options):
                    history.held_out[step] = evaluate(model, held_out)
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
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    with autocast(options):
        history.held_out[options.steps] = evaluate(model, held_out)
    model.use_checkpoints = False
    return history


def gradients(model: Decoder, loss_of: LossOf, batch: PackedBatch, options: Options) -> tuple[float, Tensor]:
    """Returns the loss, and all gradients of 1024 * loss, concatenated. Unscaled, small gradients vanish in fp16."""
    with autocast(options):
        loss = loss_of(model, batch)
    rows = torch.autograd.grad(1024 * loss, list(model.parameters()))
    return loss.item(), torch.cat([row.flatten() for row in rows])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def check_attention(model: Decoder, batch: PackedBatch, options: Options, checks: CheckList) -> None:
    """Checks packed attention against plain PyTorch, training with against without checkpointing, and causality."""
    # In fp32, the two sum thousands of tokens in different orders; in 16 bits, every matmul rounds to 2^-8 or 2^-11.
    bound = 1e-4 if options.compute_dtype == torch.float32 else 0.03
    loss, packed = gradients(model, packed_loss, batch, options)
    plain_loss, padded = gradients(model, padded_loss, batch.padded(), options)
    checks.at_most("decoder: loss, packed against padded plain PyTorch", abs(loss - plain_loss), bound)
    checks.at_most("decoder: gradients, packed against padded plain PyTorch", relative_error(packed, padded), bound)

    model.use_checkpoints = True
    _, recomputed = gradients(model, packed_loss, batch, options)
    model.use_checkpoints = False
    # Both runs compute the same from the same numbers; on a GPU, sums by atomics may differ in their last bits.
    what = "decoder: gradients with against without checkpointing"
    checks.at_most(what, relative_error(recomputed, packed), bound if options.device.type == "cuda" else 1e-6)

    attend = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
    middle = batch.num_tokens // 2
    changed = batch.tokens.clone()
    changed[middle:] = (changed[middle:] + 1) % 256
    with torch.no_grad(), autocast(options):
        before = model(batch.tokens, batch.positions, attend)[:middle]
        after = model(changed, batch.positions, attend)[:middle]
    checks.at_most("decoder: logits before a change in the text move by", (after - before).abs().max().item(), 1e-6)


def measure(model: Decoder, loss_of: LossOf, batches: list[PackedBatch], options: Options) -> tuple[float, float]:
    """Runs forward and backward. Returns tokens per second without padding, and on a GPU the peak MiB (else NaN)."""
    on_gpu = options.device.type == "cuda"
    num_tokens = sum(int((batch.targets != IGNORED).sum()) for batch in batches)

    def step(batch: PackedBatch) -> None:
        with autocast(options):
            loss = loss_of(model, batch)
        torch.autograd.grad(loss, list(model.parameters()))  # no optimiser: its step would take equally long in both

    for batch in batches:  # warm up: the first steps compile kernels and allocate memory
        step(batch)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else math.nan
    return num_tokens / seconds, peak


def compare_speed(model: Decoder, passages: list[bytes], options: Options) -> None:
    """Prints speed and memory of training, packed with fastattn and padded with plain PyTorch.

    The batches are 16 times as large as in training, because small batches would only measure kernel launches.
    """
    batches = bucketed_batches(passages, 16 * options.token_budget, random.Random(options.seed))
    batches = [batch.to(options.device) for batch in batches]
    print(f"\nForward and backward of {len(batches)} batches of up to {16 * options.token_budget:,} tokens")
    padded = [batch.padded() for batch in batches]
    candidates = {"fastattn, packed": (packed_loss, batches), "plain PyTorch, padded": (padded_loss, padded)}
    for name, (loss_of, inputs) in candidates.items():
        tokens_per_second, peak = measure(model, loss_of, inputs, options)
        print(f"  {name:22} {tokens_per_second:12,.0f} tokens/s   peak memory {peak:8,.0f} MiB")


def plot(history: History, unigram: float, bigram: float, path: Path) -> None:
    """Draws the loss curve, with the entropies that it has to beat, into the file ``path``."""
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


def save(model: Decoder, held_out: list[bytes], path: Path) -> None:
    """Writes the model and the passages that it was not trained on, for generate.py."""
    torch.save({"config": asdict(model.config), "weights": model.state_dict(), "held_out": held_out}, path)


def run(options: Options, checks: CheckList) -> Trained:
    """Trains a decoder, writes its weights and the loss curve to ``options.out``, and checks the decoder."""
    torch.manual_seed(options.seed)
    documents = read_documents(options.text)
    passages, held_out_passages = split(cut_into_passages(documents, options.max_length), 0.05, options.seed)
    held_out = bucketed_batches(held_out_passages, options.token_budget, random.Random(options.seed))
    held_out = [batch.to(options.device) for batch in held_out]
    unigram, bigram = entropies(held_out_passages)
    model = Decoder(options.config).to(options.device)

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sharing = " that share their weights" if options.config.share_layers else ""
    dtype_name = str(options.compute_dtype).removeprefix("torch.")
    print(f"{num_parameters:,} parameters, {options.config.num_layers} layers{sharing}; {options.device}, {dtype_name}")
    print(
        f"{sum(map(len, passages)):,} bytes of text in {len(passages)} passages; {len(held_out_passages)} more held out"
    )
    with torch.no_grad(), autocast(options):
        print(f"Attention runs on {fastattn.explain(packed_loss, model, held_out[0])}")

    history = train(model, passages, held_out, options)
    print("\n  step  held-out loss, nats per token")
    for step, loss in history.held_out.items():
        print(f"{step:6}  {loss:.3f} {'#' * round(8 * loss)}")
    print(f"  Entropy of a byte of that text: {unigram:.3f}; given the byte before it: {bigram:.3f}")

    options.out.mkdir(parents=True, exist_ok=True)
    plot(history, unigram, bigram, options.out / "loss.png")
    save(model, held_out_passages, options.out / "decoder.pt")
    print(f"Wrote {options.out / 'loss.png'} and {options.out / 'decoder.pt'}")
    if options.device.type == "cuda":
        compare_speed(model, passages, options)

    last = history.held_out[options.steps]
    checks.at_most("decoder: held-out loss, against the entropy of a byte", last, unigram)
    checks.at_most("decoder: held-out loss, against the best without attention", last, bigram)
    check_attention(model, held_out[0], options, checks)
    return Trained(model, held_out_passages, history)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``options_from`` reads."""
    default = Options()
    parser.add_argument("--text", type=existing_file, help="a text file (default: Python's language reference)")
    parser.add_argument("--out", type=Path, default=default.out, help="folder for results (default: %(default)s)")
    parser.add_argument("--device", type=present_device, default=default.device, help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="compute in this dtype by autocast (default: bfloat16 on a GPU, else float32)"
    )
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer in backward: less memory")
    parser.add_argument("--share-layers", action="store_true", help="all layers share one set of weights, as in ALBERT")
    parser.add_argument(
        "--token-budget", type=positive, default=default.token_budget, help="tokens in a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--max-length",
        type=positive,
        default=default.max_length,
        help="the most bytes in a passage (default: %(default)s)",
    )
    training = {"steps": default.steps, "learning_rate": default.learning_rate, "seed": default.seed}
    model = {name.removeprefix("num_"): getattr(default.config, name) for name in MODEL_SIZES}
    for name, value in (training | model).items():
        flag = "--" + name.replace("_", "-")
        kind = positive if isinstance(value, int) and name != "seed" else type(value)
        parser.add_argument(flag, type=kind, default=value, help="default: %(default)s")


def options_from(parser: argparse.ArgumentParser) -> Options:
    """Returns the options on the command line. Model sizes that do not fit together end the program with an error."""
    arguments = parser.parse_args()
    given = vars(arguments).copy()
    sizes = {name: given.pop(name.removeprefix("num_")) for name in (*MODEL_SIZES, "share_layers")}
    try:
        config = DecoderConfig(VOCAB_SIZE, max_positions=2 * (arguments.max_length + 1), **sizes)
    except ValueError as error:
        parser.error(f"--dim, --heads, --kv-heads: {error}")
    dtype = DTYPES.get(given.pop("dtype"))
    return Options(**given, dtype=dtype, config=config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    checks = CheckList()
    run(options_from(parser), checks)
    return checks.finish("train_decoder")


if __name__ == "__main__":
    sys.exit(main())
