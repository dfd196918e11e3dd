"""Quantises a trained decoder to int8 and generates text with it, using a key-value cache.

    python examples/train_decoder.py
    python examples/generate.py --prompt "The iterator" --prompt "A class" --tokens 200
    python examples/generate.py --int8-cache --page-size 16

Each token's logits are also computed without a cache, from the whole text before the token, and must choose the same
token.
Exits with 1 if one of the checks that it prints at the end failed.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import fastattn
import fastattn.nn
from arguments import positive, present_device
from checks import CheckList
from decoder import CachedAttention, Decoder, DecoderConfig, PackedAttention, PagedBatch
from text_data import BOUNDARY, bucketed_batches
from train_decoder import DTYPES, Options, autocast, evaluate


@dataclass(frozen=True)
class Generated:
    """Holds the generated ``tokens [B, n]``, and the ``logits [B, n, vocab_size]`` from which they were chosen."""

    tokens: Tensor
    logits: Tensor

    def text(self, row: int) -> str:
        """Returns the text of one row, up to the token with which the model ended it."""
        tokens = self.tokens[row].tolist()
        end = tokens.index(BOUNDARY) if BOUNDARY in tokens else len(tokens)
        return bytes(tokens[:end]).decode(errors="replace")


@dataclass(frozen=True)
class CacheOptions:
    """Says whether the cache stores keys and values in int8, and whether in pages of ``page_size`` tokens."""

    quantized: bool = False
    page_size: int | None = None


def make_cache(
    model: Decoder, batch: int, capacity: int, dtype: torch.dtype, options: CacheOptions
) -> fastattn.KVCache | PagedBatch:
    """Returns an empty cache with room for ``capacity`` tokens of each of ``batch`` sequences."""
    config = model.config
    storage: dict[str, Any] = {
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "dtype": dtype,
        "device": model.rotary_cos.device,
        "quantized": options.quantized,
    }
    if options.page_size is None:
        return fastattn.KVCache(config.num_layers, batch, capacity=capacity, **storage)
    num_pages = batch * -(-capacity // options.page_size)
    pages = fastattn.PagedKVCache(config.num_layers, num_pages, page_size=options.page_size, **storage)
    return PagedBatch(pages, batch)


@torch.no_grad()
def generate_cached(
    model: Decoder,
    prompts: list[bytes],
    num_tokens: int,
    dtype: torch.dtype,
    options: CacheOptions = CacheOptions(),
) -> Generated:
    """Continues prompts of different lengths greedily: one pass over the prompts, then one token at a time.

    ``dtype`` is the dtype of queries, keys and values: under autocast, autocast's dtype.
    """
    device = model.rotary_cos.device
    rows = [torch.tensor([BOUNDARY, *prompt], device=device) for prompt in prompts]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    cache = make_cache(model, len(prompts), max(map(len, rows)) + num_tokens, dtype, options)

    def attend(num_new: int) -> CachedAttention:
        return CachedAttention(cache.step(num_new) if isinstance(cache, PagedBatch) else cache)

    padded = pad_sequence(rows, batch_first=True, padding_value=BOUNDARY)
    positions = torch.arange(padded.shape[1], device=device).repeat(len(prompts))
    prompt_logits = model(padded.flatten(), positions, attend(padded.shape[1])).unflatten(0, padded.shape)
    cache.truncate(lengths)  # drop the padding
    logits = [prompt_logits[torch.arange(len(prompts), device=device), lengths - 1]]
    tokens = [logits[-1].argmax(-1)]
    for step in range(num_tokens - 1):
        logits.append(model(tokens[-1], lengths + step, attend(1)))
        tokens.append(logits[-1].argmax(-1))
    return Generated(torch.stack(tokens, dim=1), torch.stack(logits, dim=1))


@torch.no_grad()
def logits_uncached(model: Decoder, prompts: list[bytes], tokens: Tensor) -> Tensor:
    """Returns the logits ``[B, n, vocab_size]`` of ``tokens [B, n]``, computed without a cache.

    For every token the model reads the whole text before it again, all sequences packed one after the other.
    """
    device = tokens.device
    steps = []
    for step in range(tokens.shape[1]):
        texts = [[BOUNDARY, *prompt, *row[:step]] for prompt, row in zip(prompts, tokens.tolist(), strict=True)]
        packed = torch.tensor([token for text in texts for token in text], device=device)
        lengths = torch.tensor([len(text) for text in texts], device=device)
        positions = torch.cat([torch.arange(len(text), device=device) for text in texts])
        ends = lengths.cumsum(0)
        cu_seqlens = F.pad(ends, (1, 0)).to(torch.int32)
        logits = model(packed, positions, PackedAttention(cu_seqlens, max(map(len, texts))))
        steps.append(logits[ends - 1])
    return torch.stack(steps, dim=1)


def check_generation(
    name: str, generated: Generated, uncached: Tensor, rounds_to: torch.dtype, checks: CheckList
) -> None:
    """Checks that the model with a cache chooses the same tokens as without one.

    The two computations round differently. In 32 bits that changes no choice. In 16 bits, and with an int8 cache, the
    two best tokens may be tied, so a token counts as different only if its uncached logit is below the best logit by
    more than rounding explains (a few times 2^-8 of logits up to 16). ``rounds_to`` is the least precise dtype in
    either computation.
    """
    bound, tie = (1e-3, 0.0) if rounds_to == torch.float32 else (0.25, 0.25)
    chosen = uncached.gather(-1, generated.tokens[..., None]).squeeze(-1)
    num_different = int((uncached.amax(-1) - chosen > tie).sum())
    what = f"generation, {name}: of {generated.tokens.numel()} tokens, cached and uncached differ in"
    checks.equal(what, num_different, 0)
    deviation = (generated.logits - uncached).abs().max().item()
    checks.at_most(f"generation, {name}: logits, cached against uncached", deviation, bound)


def run(
    model: Decoder,
    held_out: list[bytes],
    prompts: list[bytes],
    num_tokens: int,
    options: Options,
    cache: CacheOptions,
    checks: CheckList,
) -> None:
    """Quantises a copy of ``model``, generates with both, and checks losses and cached against uncached logits."""
    dtype = options.compute_dtype
    quantized = copy.deepcopy(model)
    report = fastattn.nn.quantize_model(quantized)
    print(str(report).splitlines()[-1])  # the last line of the report is the total

    batches = bucketed_batches(held_out, options.token_budget, random.Random(options.seed))
    batches = [batch.to(options.device) for batch in batches]
    losses, num_int8_calls = {}, {}
    for name, candidate in {dtype_name(dtype): model, "int8": quantized}.items():
        candidate.eval()
        with autocast(options):
            losses[name] = evaluate(candidate, batches)
            with fastattn.record() as calls:
                generated = generate_cached(candidate, prompts, num_tokens, dtype, cache)
            uncached = logits_uncached(candidate, prompts, generated.tokens)

        print(f"\nThe {name} model, held-out loss {losses[name]:.4f} nats per token, continues the prompts:")
        for row, prompt in enumerate(prompts):
            print(f"  {prompt.decode(errors='replace')!r} → {generated.text(row)!r}")
        for call in dict.fromkeys(calls):
            print(f"  {call.op} ran on {call.backend}: {call.kernel}, {calls.count(call)} times")
        num_int8_calls[name] = sum(call.op == "int8_matmul" for call in calls)
        check_generation(name, generated, uncached, torch.int8 if cache.quantized else dtype, checks)

    linears = 7 * model.config.num_layers + 1  # per layer: four in attention, three in SwiGLU; and the head
    checks.equal("int8: int8 matmuls while it generated", num_int8_calls["int8"], linears * num_tokens)
    before, after = (sum(getattr(layer, f"bytes_{when}") for layer in report.layers) for when in ("before", "after"))
    # Each weight takes one byte instead of four, and each row of at least min(dim, ffn_dim) weights a float32 scale.
    bound = 1 / 4 + 1 / min(model.config.dim, model.config.ffn_dim)
    checks.at_most("int8: size of the linear layers / size before", after / before, bound)
    change = abs(losses["int8"] - losses[dtype_name(dtype)])
    checks.at_most("int8: change of the held-out loss, nats per token", change, 0.01)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def prompts_from(held_out: list[bytes]) -> list[bytes]:
    """Returns the first 8, 16, 24 and 32 bytes of long passages, preferably of passages that begin with a capital."""
    by_preference = sorted(held_out, key=lambda passage: (passage[:1].isupper(), len(passage)), reverse=True)
    return [passage[: 8 * (number + 1)] for number, passage in enumerate(by_preference[:4])]


def load(path: Path, device: torch.device) -> tuple[Decoder, list[bytes]]:
    """Returns the model that train_decoder.py saved, and the passages that it was not trained on."""
    saved = torch.load(path, map_location=device)
    model = Decoder(DecoderConfig(**saved["config"])).to(device)
    model.load_state_dict(saved["weights"])
    return model, saved["held_out"]


def main() -> int:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=default.out / "decoder.pt", help="from train_decoder.py (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        type=os.fsencode,
        help="text to continue; may be repeated (default: held-out text)",
    )
    parser.add_argument("--tokens", type=positive, default=96, help="how many to generate (default: %(default)s)")
    parser.add_argument("--int8-cache", action="store_true", help="store keys and values as int8")
    parser.add_argument("--page-size", type=positive, metavar="TOKENS", help="store them in pages, in a PagedKVCache")
    parser.add_argument("--device", type=present_device, default=default.device, help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, else float32")
    arguments = parser.parse_args()
    if not arguments.model.is_file():
        parser.error(f"--model: there is no file {arguments.model}; run `python examples/train_decoder.py` to make it")
    model, held_out = load(arguments.model, arguments.device)
    prompts = arguments.prompt or prompts_from(held_out)
    if max(map(len, prompts)) + 1 + arguments.tokens > model.config.max_positions:
        most = model.config.max_positions - 1
        longest = max(map(len, prompts))
        parser.error(f"--tokens: expected at most {most - longest} after a prompt of {longest}, got {arguments.tokens}")

    options = Options(device=arguments.device, dtype=DTYPES[arguments.dtype] if arguments.dtype else None)
    checks = CheckList()
    cache = CacheOptions(arguments.int8_cache, arguments.page_size)
    run(model, held_out, prompts, arguments.tokens, options, cache, checks)
    return checks.finish("generate")


if __name__ == "__main__":
    sys.exit(main())
