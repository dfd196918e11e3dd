"""The predicted curve of int8 layers: the page, and what the dispatch promises by its own model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.predict import int8_curve
from benchmarks.predict.int8_curve import FORMATS, GPUS, LAYERS, dense_tokens, predict
from cuda_kernels import HAS_KERNELS, NO_KERNELS

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)

H200, A100 = GPUS
# Over cuBLAS with bf16 weights, by the model. Sums of groups are scaled on their way, which costs most between few
# tokens, whose time memory takes, and many, for which dequantising pays.
LEAST_SPEEDUP = {("H200", False): 0.84, ("H200", True): 0.56, ("A100", False): 1.0, ("A100", True): 0.83}

each_layer = pytest.mark.parametrize("outputs, depth", LAYERS)


@each_layer
@pytest.mark.parametrize("has_groups", [False, True], ids=["channel", "groups"])
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_how_much_slower_than_cublas_a_call_may_be(
    gpu: int8_curve.Gpu, has_groups: bool, outputs: int, depth: int
) -> None:
    for tokens in dense_tokens():
        found = predict(gpu, "int8_matmul", tokens, outputs, depth, has_groups)
        assert found.speedup >= LEAST_SPEEDUP[gpu.name, has_groups], f"{tokens} tokens: {found}"


@each_layer
def test_few_tokens_take_little_more_than_half_the_time(outputs: int, depth: int) -> None:
    """Half the bytes."""
    for tokens in range(1, 17):
        assert predict(H200, "int8_matmul", tokens, outputs, depth).speedup >= (1.75 if outputs > 1024 else 1.5)


@each_layer
@pytest.mark.parametrize("op", FORMATS.values())
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_no_cliff(gpu: int8_curve.Gpu, op: str, outputs: int, depth: int) -> None:
    """One token more may begin a tile, or a wave of tiles. With int8 activations tiles are few, three on an A100, and
    on an H200 L2 binds: a second tile loads all weights once more."""
    most = 1.4 if op == "int8_matmul" else 1.8 if gpu == H200 else 2.8
    tokens = dense_tokens()
    times = [predict(gpu, op, m, outputs, depth).microseconds for m in tokens]
    for (m, time), (more, longer) in itertools.pairwise(zip(tokens, times, strict=True)):
        assert longer >= 0.9 * time, f"{more} tokens take {longer:.1f} us, {m} take {time:.1f}"
        assert longer <= most * time * more / m, f"{more} tokens take {longer:.1f} us, {m} take {time:.1f}"


def test_the_page_says_that_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert int8_curve.main(["--folder", str(tmp_path)]) == 0
    text = (tmp_path / "int8_speed.md").read_text()
    assert "**Nothing on this page is measured.**" in text
    assert text.count("| ") > len(int8_curve.TOKENS) * len(GPUS)
    assert (tmp_path / "int8_speed.svg").read_text().startswith("<?xml")
    assert "int8_speed.md" in capsys.readouterr().out


def test_the_page_is_of_this_version() -> None:
    """``python -m benchmarks int8-curve`` writes it again."""
    assert (int8_curve.DOCS / "int8_speed.md").read_text() == int8_curve.page()
