"""Runs fastattn's own kernels: embeds two sentences, generates a few tokens, and compares the results with PyTorch's.

    python examples/own_kernels.py                                        # on an NVIDIA GPU
    PYTHONPATH=tests python -m emulator run examples/own_kernels.py       # without a GPU, on an emulated one

On the CPU, the emulator executes the PTX of the same kernels that a GPU runs, instruction by instruction. It shows that
the kernels' results are right, but says nothing about their speed. Exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.utils import logging

import fastattn
import fastattn.nn
import generate
from arguments import positive
from checks import CheckList
from fastattn import native
from fastattn.dispatch.device import is_emulated
from sentence_embeddings import SENTENCES, embed, load_model
from train_decoder import Options, autocast

PROMPTS = [b"The ", b"A class is"]


def where(device: torch.device) -> str:
    """Returns a sentence or two that say what the kernels run on."""
    if device.type == "cuda":
        return f"The kernels run on this machine's {torch.cuda.get_device_name(device)}."
    return (
        "There is no NVIDIA GPU here. The kernels run on an EMULATED one: their compiled PTX is executed on the CPU,\n"
        "instruction by instruction, with every memory access checked. The results are a GPU's; the speed is not."
    )


@contextlib.contextmanager
def kernels_listed(backend: str) -> Iterator[None]:
    """Runs the block only on ``backend`` and prints which kernels ran, how often, and what the emulator counted."""
    emulator = sys.modules.get("emulator.launches") if is_emulated() else None
    counted = emulator.recorded() if emulator else contextlib.nullcontext([])
    with fastattn.use_backend(backend), fastattn.record() as calls, counted as launches:
        yield
    for kernel, number in collections.Counter(call.kernel for call in calls).items():
        print(f"  {number:4} x {kernel}")
    if launches:
        executed = sum(sum(launch.report.instructions.values()) for launch in launches)
        print(f"  emulated: {len(launches)} launches, {executed:,} warp instructions")


def run_sentences(device: torch.device, backend: str, checks: CheckList) -> None:
    """Embeds two sentences with the attention kernels of ``backend``; with "cuda", again with int8 linear layers."""
    tokenizer, model = load_model(device, torch.float16)
    inputs = dict(tokenizer(list(SENTENCES[:2]), padding=True, return_tensors="pt").to(device))
    expected = embed(model.float(), inputs)
    model.half()
    print(f"\nTwo sentences, patch_sdpa(), {backend}:")
    with fastattn.patch_sdpa(), kernels_listed(backend):
        patched = embed(model, inputs)
    deviation = (patched - expected).abs().max().item()
    print(f"  largest deviation from PyTorch in float32: {deviation:.1e}")
    checks.at_most(f"kernels, {backend}: a sentence's element, against PyTorch in float32", deviation, 2e-3)
    if backend == "cuda":
        fastattn.nn.quantize_model(model)
        print("\nThe same after quantize_model():")
        with fastattn.patch_sdpa(), kernels_listed(backend):
            quantized = embed(model, inputs)
        cosine = (quantized * expected).sum(-1).min().item()
        print(f"  cosine to PyTorch in float32: {cosine:.4f}")
        checks.at_least(f"kernels, {backend}: cosine of int8 sentences to PyTorch in float32", cosine, 0.99)


def run_generation(device: torch.device, path: Path, num_tokens: int, checks: CheckList) -> None:
    """Continues two prompts with the trained, quantised decoder over a KV cache, in bfloat16."""
    model, _ = generate.load(path, device)
    fastattn.nn.quantize_model(model.eval())
    options = Options(device=device, dtype=torch.bfloat16)
    print("\nA decoder with int8 layers continues two prompts:")
    with kernels_listed("cuda"), autocast(options):
        generated = generate.generate_cached(model, PROMPTS, num_tokens, torch.bfloat16)
    with fastattn.use_backend("torch"):
        expected = generate.logits_uncached(model, PROMPTS, generated.tokens)
    for row, prompt in enumerate(PROMPTS):
        print(f"  {prompt.decode()!r} → {generated.text(row)!r}")
    deviation = (generated.logits - expected).abs().max().item()
    print(f"  largest deviation of a logit from PyTorch in float32, without a cache: {deviation:.1e}")
    generate.check_generation("the kernels against PyTorch", generated, expected, torch.bfloat16, checks)


def run(device: torch.device, path: Path, num_tokens: int, checks: CheckList) -> None:
    """Runs the sentences and the generation with the CUDA C++ kernels, if built, and the sentences with Triton's."""
    logging.disable_progress_bar()  # the weights load too quickly for a bar
    torch.manual_seed(0)
    print(where(device))
    if native.BUILD["archs"]:
        run_sentences(device, "cuda", checks)
        if path.is_file():
            run_generation(device, path, num_tokens, checks)
        else:
            print(f"\nThere is no {path}: nothing is generated. `python examples/train_decoder.py` writes it.")
    else:
        print("\nThe CUDA C++ kernels were not built: `python -m fastattn` says what to do.")
    run_sentences(device, "triton", checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Options()
    parser.add_argument("--model", type=Path, default=default.out / "decoder.pt", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=4, help="how many to generate (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not is_emulated():
        parser.error(
            "there is no NVIDIA GPU; to emulate one, run "
            "`PYTHONPATH=tests python -m emulator run examples/own_kernels.py`"
        )
    checks = CheckList()
    run(default.device, arguments.model, arguments.tokens, checks)
    return checks.finish("kernels")


if __name__ == "__main__":
    sys.exit(main())
