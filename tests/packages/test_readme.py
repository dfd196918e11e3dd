"""Tests the README: its snippets run in order, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastattn import reference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("*/README.md"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.slow
def test_the_snippets_run_in_order_as_a_new_user_would_run_them(tmp_path: Path) -> None:
    assert len(SNIPPETS) >= 6
    script = tmp_path / "readme.py"
    script.write_text("\n".join(SNIPPETS))
    command = [sys.executable, "-W", "error::FutureWarning", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not torch" in done.stdout or "torch: PyTorch" in done.stdout  # explain's output
    assert "RecordedCall(" in done.stdout


def test_the_masks_are_those_of_attention() -> None:
    """Each matrix shows the pairs of query and key that the options above it leave visible."""
    heading, *rows = re.search(r"<!-- masks -->\n```text\n(.*?)\n```", README, re.DOTALL)[1].splitlines()
    starts = [found.start() for found in re.finditer(r"(?<!, )\b(?:causal|window)", heading)]
    assert len(starts) == 3 and len(rows) == 4
    for begin, end in zip(starts, [*starts[1:], None], strict=True):
        options = eval(f"dict({heading[begin:end]})")
        shown = torch.tensor([[int(pair) for pair in row[begin:end].split()] for row in rows])
        query, key, one_hot = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 6, 8), torch.eye(6)[None, None]
        weights, _ = reference.attention(query, key, one_hot, **options)
        assert torch.equal(shown, (weights[0, 0] > 0).int())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # code contains ](, too
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} points at {target}"


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named <= targets and {"demo", "test"} <= set(re.findall(r"make ([a-z-]+)", README))
