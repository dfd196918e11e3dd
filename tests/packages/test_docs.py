"""Tests the site: the snippets of every page run in order. `make docs` tests that it builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


# Names that a page assumes: a reader's own model, its inputs and its path.
TAKEN_FOR_GRANTED = {
    "integrations.md": """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None)
path, path_of_int8 = "model", "int8"
LlamaForCausalLM(config).save_pretrained(path)
inputs = {"input_ids": torch.randint(64, (2, 7))}
""",
}
PEFTS_OWN = "`is_gradient_checkpointing` is deprecated"  # peft 0.21 with transformers 5.24 warns so
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if snippets(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_snippets_run_in_order(page: Path, tmp_path: Path) -> None:
    name = page.relative_to(DOCS).as_posix()
    script = tmp_path / "page.py"
    script.write_text("\n".join([TAKEN_FOR_GRANTED.get(name, ""), *snippets(page)]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # more threads would wait longer than they compute
    command = [sys.executable, "-W", "error::FutureWarning", "-W", f"ignore:{PEFTS_OWN}:FutureWarning", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


def test_every_variable_is_in_the_table() -> None:
    read = re.compile(r"(?:environ(?:\.get|\.setdefault)?[\[(]|getenv\(|VARIABLE = )\"(FASTATTN_\w+)\"")
    places = [ROOT / name for name in ("python", "csrc", "triton_kernels", "tests", "benchmarks", "examples")]
    paths = [path for place in places for ending in ("py", "cpp") for path in place.rglob(f"*.{ending}")]
    sources = [path.read_text() for path in paths if path != Path(__file__)]
    found = {name for source in sources for name in read.findall(source)}
    listed = set(re.findall(r"^\| `(FASTATTN_\w+)`", (DOCS / "environment.md").read_text(), re.MULTILINE))
    assert {"FASTATTN_CHECK", "FASTATTN_FALLBACK", "FASTATTN_LIBRARY", "FASTATTN_ARCHS"} <= listed
    assert found == listed


def test_every_page_is_in_the_contents() -> None:
    index = (DOCS / "index.md").read_text()
    for page in (*DOCS.rglob("*.md"), *DOCS.rglob("*.rst")):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        assert name == "index" or re.search(rf"^{re.escape(name)}$", index, re.MULTILINE), f"{name} is in no toctree"
