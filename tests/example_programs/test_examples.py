"""Tests small versions of the examples: their results, and that their checks fail where something is wrong."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn.nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo
import generate
import lora_int8
import sentence_embeddings
import text_data
import train_decoder
from checks import CheckList
from decoder import Decoder, DecoderConfig, PackedAttention, Rotary
from text_data import BOUNDARY, VOCAB_SIZE, PackedBatch

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CONFIG = DecoderConfig(VOCAB_SIZE, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, max_positions=64)
OPTIONS = train_decoder.Options(device=CPU, token_budget=64, max_length=31, steps=3, config=CONFIG)
PASSAGES = [b"a", b"hello", b"packed rows", b"no token sees a later one"]
TEXT = "\n\n".join(f"Paragraph {number} says {number * number}, which is the square." for number in range(60))

both_sharings = pytest.mark.parametrize("share_layers", [False, True], ids=["own layers", "shared layers"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def tiny_decoder(share_layers: bool = False) -> Decoder:
    """Returns a decoder with random weights larger than initial ones, so that attention is far from uniform."""
    model = Decoder(replace(CONFIG, share_layers=share_layers))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def logits_of(model: Decoder, batch: PackedBatch) -> Tensor:
    with torch.no_grad():
        return model(batch.tokens, batch.positions, PackedAttention(batch.cu_seqlens, batch.max_seqlen))


def test_passages_hold_the_whole_text_and_no_more_than_max_length() -> None:
    text = "one\n\ntwo\n\n\n\n" + "x" * 70 + "\n\nthree"
    passages = text_data.cut_into_passages([text, "", "four"], max_length=20)
    assert max(map(len, passages)) == 20
    assert b"".join(passages).replace(b"\n", b"").decode() == text.replace("\n", "") + "four"
    assert passages[0] == b"one\n\ntwo"


def test_an_epoch_has_every_passage_once_in_batches_of_like_length_within_the_budget() -> None:
    rng = random.Random(5)
    passages = [rng.randbytes(rng.randint(1, 30)) for _ in range(200)]
    batches = text_data.bucketed_batches(passages, 64, rng)
    seen = []
    for batch in batches:
        assert batch.num_tokens <= 64
        for begin, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            assert batch.tokens[begin] == BOUNDARY
            assert batch.targets[end - 1] == BOUNDARY
            assert batch.tokens[begin + 1 : end].equal(batch.targets[begin : end - 1])
            assert batch.positions[begin:end].equal(torch.arange(end - begin))
            seen.append(bytes(batch.targets[begin : end - 1].tolist()))
    assert sorted(seen) == sorted(passages)
    padded = sum(batch.padded().num_tokens for batch in batches)
    assert padded <= 1.1 * sum(batch.num_tokens for batch in batches)
    longest = [batch.max_seqlen for batch in batches]
    assert longest != sorted(longest)  # shuffled, not sorted by length


def test_a_passage_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    batches = text_data.bucketed_batches([b"x" * 100, b"y"], 64, random.Random(0))
    assert sorted(batch.num_tokens for batch in batches) == [2, 101]


def test_held_out_passages_are_not_trained_on() -> None:
    passages = [b"%d" % number for number in range(100)]
    training, held_out = text_data.split(passages, 0.05, seed=3)
    assert len(held_out) == 5
    assert sorted(training + held_out) == sorted(passages)
    with pytest.raises(ValueError, match="too short"):
        text_data.split([b"one"], 0.05, seed=3)


def test_entropies_by_hand() -> None:
    # The next bytes are a, b, a, b, the boundary: 2/5, 2/5, 1/5. After b comes a or the boundary; the rest is certain.
    unigram, bigram = text_data.entropies([b"abab"])
    assert unigram == pytest.approx(-(0.8 * math.log(0.4) + 0.2 * math.log(0.2)))
    assert bigram == pytest.approx(2 / 5 * math.log(2))
    # Nothing is predicted across a boundary of passages.
    assert text_data.entropies([b"abab", b"abab"]) == pytest.approx((unigram, bigram))


@both_sharings
def test_a_packed_batch_is_each_document_alone(share_layers: bool) -> None:
    model = tiny_decoder(share_layers).double()
    together = logits_of(model, text_data.pack(PASSAGES))
    alone = torch.cat([logits_of(model, text_data.pack([passage])) for passage in PASSAGES])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=1e-10)


def test_a_changed_token_moves_its_own_document_from_there_on_and_nothing_else() -> None:
    model = tiny_decoder()
    batch = text_data.pack(PASSAGES)
    changed_at = int(batch.cu_seqlens[2]) + 4  # in the third document
    tokens = batch.tokens.clone()
    tokens[changed_at] = ord("?")
    moved = (logits_of(model, replace(batch, tokens=tokens)) != logits_of(model, batch)).any(dim=1)
    expected = torch.zeros_like(moved)
    expected[changed_at : int(batch.cu_seqlens[3])] = True
    assert moved.equal(expected)


def test_shared_layers_are_one_set_of_weights_also_in_int8() -> None:
    shared, own = tiny_decoder(share_layers=True), tiny_decoder()
    assert len(shared.layers) == 1
    assert len(own.layers) == CONFIG.num_layers
    deeper = Decoder(replace(CONFIG, share_layers=True, num_layers=9))
    assert sum(p.numel() for p in deeper.parameters()) == sum(p.numel() for p in shared.parameters())
    depths: list[int] = []
    shared.layers[0].register_forward_pre_hook(lambda _, arguments: depths.append(arguments[1]))
    logits_of(shared, text_data.pack(PASSAGES))
    assert depths == [0, 1, 2]
    assert len(fastattn.nn.quantize_model(shared).layers) == 7 + 1


@both_sharings
@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_generation_with_cache_equals_generation_without(share_layers: bool, int8: bool) -> None:
    model = tiny_decoder(share_layers)
    if int8:
        fastattn.nn.quantize_model(model)
    generated = generate.generate_cached(model, PASSAGES, 20, torch.float32)
    assert len(generated.tokens.unique()) > 10  # not always the same token
    checks = CheckList()
    uncached = generate.logits_uncached(model, PASSAGES, generated.tokens)
    generate.check_generation("tiny", generated, uncached, torch.float32, checks)
    assert not checks.failed
    assert len(checks.checks) == 2

    generated.tokens[1, 7] = (generated.tokens[1, 7] + 1) % VOCAB_SIZE
    generate.check_generation("tampered with", generated, uncached, torch.float32, checks)
    assert [check.what for check in checks.failed] == [
        "generation, tampered with: of 80 tokens, cached and uncached differ in"
    ]


def test_a_cache_that_keeps_the_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder()
    monkeypatch.setattr(fastattn.KVCache, "truncate", lambda self, lengths: None)
    generated = generate.generate_cached(model, PASSAGES, 20, torch.float32)
    checks = CheckList()
    uncached = generate.logits_uncached(model, PASSAGES, generated.tokens)
    generate.check_generation("padding kept", generated, uncached, torch.float32, checks)
    assert len(checks.failed) == 2


def test_checkpointing_computes_layers_again_and_gives_the_same_gradients() -> None:
    model, batch = tiny_decoder(), text_data.pack(PASSAGES)
    forwards: list[int] = []
    model.layers[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    _, plain = train_decoder.gradients(model, train_decoder.packed_loss, batch, OPTIONS)
    assert len(forwards) == 1
    model.use_checkpoints = True
    _, recomputed = train_decoder.gradients(model, train_decoder.packed_loss, batch, OPTIONS)
    assert len(forwards) == 3
    assert recomputed.equal(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_check_attention_holds(dtype: torch.dtype) -> None:
    checks = CheckList()
    options = replace(OPTIONS, dtype=dtype)
    train_decoder.check_attention(Decoder(CONFIG), text_data.pack(PASSAGES), options, checks)
    assert len(checks.checks) == 4
    assert not checks.failed


def sees_the_future(self: PackedAttention, depth: int, query: Tensor, key: Tensor, value: Tensor, _: Rotary) -> Tensor:
    lengths = (self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
    return fastattn.attention_varlen(query, key, value, *lengths)


def sees_other_documents(
    self: PackedAttention, depth: int, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary
) -> Tensor:
    total = query.shape[0]
    everything = torch.tensor([0, total], dtype=torch.int32)
    rotated = (rotary.rotate(query), rotary.rotate(key), value)
    return fastattn.attention_varlen(*rotated, everything, everything, total, total, causal=True)


@pytest.mark.parametrize("broken", [sees_the_future, sees_other_documents])
def test_check_attention_fails_where_attention_is_broken(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedAttention, "__call__", broken)
    checks = CheckList()
    train_decoder.check_attention(tiny_decoder(), text_data.pack(PASSAGES), OPTIONS, checks)
    failed = " ".join(check.what for check in checks.failed)
    assert "gradients, packed against padded" in failed
    assert ("a change in the text" in failed) == (broken is sees_the_future)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_training_lowers_the_loss(dtype: torch.dtype) -> None:
    options = replace(OPTIONS, dtype=dtype, steps=12, checkpoint=True, learning_rate=1e-2)
    passages = text_data.cut_into_passages([TEXT], options.max_length)
    held_out = [text_data.pack(passages[:2])]
    history = train_decoder.train(Decoder(CONFIG), passages[2:], held_out, options)
    assert len(history.training) == 12
    assert history.held_out[12] < history.held_out[0] - 0.5


def test_learning_rate_warms_up_and_comes_down() -> None:
    factors = [train_decoder.warm_up_then_cosine(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == 1.0
    assert factors[-1] < 1e-3


def test_speed_comparison_leaves_the_model_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_decoder()
    before = [parameter.clone() for parameter in model.parameters()]
    train_decoder.compare_speed(model, PASSAGES, OPTIONS)
    printed = capsys.readouterr().out
    assert "fastattn, packed" in printed
    assert "plain PyTorch, padded" in printed
    assert all(parameter.equal(old) for parameter, old in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


TINY = ["--steps", "3", "--max-length", "63", "--token-budget", "128", "--learning-rate", "0.001", "--device", "cpu"]
TINY += ["--dim", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn-dim", "48"]


@pytest.mark.parametrize("extra", [[], ["--dtype", "bfloat16", "--checkpoint", "--share-layers"]], ids=["plain", "all"])
def test_commands_train_and_generate(
    extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    monkeypatch.setattr(sys, "argv", ["train_decoder.py", "--text", str(text), "--out", str(tmp_path), *TINY, *extra])
    status = train_decoder.main()
    printed = capsys.readouterr().out
    # Three steps teach nothing that needs attention: only the checks of that fail.
    assert status == 1
    assert "against the best without attention" in printed.splitlines()[-1]
    failed = [line for line in printed.splitlines()[:-1] if line.endswith("FAILED")]
    assert failed
    assert all("held-out loss, against" in line for line in failed)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    command = ["generate.py", "--model", str(tmp_path / "decoder.pt"), "--tokens", "6", "--device", "cpu"]
    command += ["--prompt", "Paragraph", "--prompt", "The", *(["--int8-cache", "--page-size", "8"] if extra else [])]
    monkeypatch.setattr(sys, "argv", command)
    assert generate.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "generate: ok"


def test_a_prompt_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_decoder.save(tiny_decoder(), PASSAGES, tmp_path / "decoder.pt")
    command = ["generate.py", "--model", str(tmp_path / "decoder.pt"), "--device", "cpu", "--prompt", "x" * 60]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        generate.main()


def test_files_that_are_not_there_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, option in ((train_decoder, "--text"), (generate, "--model")):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", option, "no-such-file"])
        with pytest.raises(SystemExit, match="2"):
            module.main()
        assert "there is no file no-such-file" in capsys.readouterr().err


def test_sentence_model_in_fastattn_and_int8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = CheckList()
    sentence_embeddings.run(CPU, checks)
    assert len(checks.checks) == 9
    assert not checks.failed
    assert "Attention in fastattn runs on torch" in capsys.readouterr().out

    # An int8 model with other weights than its original.
    quantize_model = fastattn.nn.quantize_model

    def quantize_badly(model: torch.nn.Module) -> fastattn.nn.QuantizationReport:
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.mul_(1.5)
        return quantize_model(model)

    monkeypatch.setattr(fastattn.nn, "quantize_model", quantize_badly)
    sentence_embeddings.run(CPU, checks)
    assert any("cosine of int8" in check.what for check in checks.failed)


@pytest.mark.slow
def test_lora_over_int8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After three steps the model has learned nothing yet: only the check of that fails."""
    checks = CheckList()
    lora_int8.run(CPU, tmp_path, 3, checks)
    assert len(checks.checks) == 6
    assert [check.what for check in checks.failed] == ["lora: sorted correctly, against the commonest topic for all"]
    assert "trainable params: " in capsys.readouterr().out
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 2e6


def test_check_list(capsys: pytest.CaptureFixture[str]) -> None:
    checks = CheckList()
    assert checks.finish("nothing") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "nothing: FAILED (nothing was checked)"
    checks.at_most("small", 1.0, 1.0)
    checks.at_least("large", 2.0, 1.0)
    checks.equal("same", [1], [1])
    assert checks.finish("all") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all: ok"


@pytest.mark.parametrize(
    "fail",
    [
        lambda checks: checks.at_most("bad", 1.1, 1.0),
        lambda checks: checks.at_most("bad", math.nan, 1.0),
        lambda checks: checks.at_least("bad", 0.9, 1.0),
        lambda checks: checks.at_least("bad", math.nan, 1.0),
        lambda checks: checks.equal("bad", 1, 2),
    ],
    ids=["above", "NaN above", "below", "NaN below", "different"],
)
@pytest.mark.parametrize("part", range(5), ids=["sentence_embeddings", "lora", "train_decoder", "generate", "kernels"])
def test_one_failed_check_fails_the_demo(
    part: int, fail: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(fail)
    trained = train_decoder.Trained(tiny_decoder(), PASSAGES, train_decoder.History())

    def hold(*arguments: object) -> train_decoder.Trained:
        checks = arguments[-1]
        assert isinstance(checks, CheckList)
        checks.equal("good", 1, 1)
        return trained

    def hold_and_fail(*arguments: object) -> train_decoder.Trained:
        fail(arguments[-1])
        return hold(*arguments)

    modules = (sentence_embeddings, lora_int8, train_decoder, generate)
    parts = [*((module, "run") for module in modules), (demo, "run_kernels")]
    for module, name in parts:
        monkeypatch.setattr(module, name, hold)
    monkeypatch.setattr(demo, "Emulated", lambda log: None)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--device", "cpu"])
    assert demo.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "demo: ok"
    monkeypatch.setattr(*parts[part], hold_and_fail)
    assert demo.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "demo: FAILED (1 of 6 checks: bad)"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "gpu"], "argument --device: expected "),
        (["--steps", "0"], "argument --steps: expected an int of at least 1, got 0"),
        (["--heads", "3"], "--dim, --heads, --kv-heads: expected dim to be an even multiple of num_heads"),
        (["--text", "missing"], "argument --text: there is no file missing"),
    ],
)
def test_a_wrong_option_is_named(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_decoder.py", *flags])
    with pytest.raises(SystemExit):
        train_decoder.main()
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_kernels_example_says_what_to_run_where_there_is_no_gpu() -> None:
    command = [sys.executable, str(ROOT / "examples" / "own_kernels.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "PYTHONPATH=tests python -m emulator run examples/own_kernels.py" in done.stderr


@pytest.mark.parametrize("fails", ["build", "run"])
def test_the_kernels_on_the_emulated_gpu_fail_the_demo_where_they_fail(
    fails: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def start(command: list[str], env: dict[str, str], stdout: Any = None, stderr: Any = None) -> SimpleNamespace:
        commands.append(command)
        assert env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT / "tests")
        if stdout is not None:
            stdout.write(b"the compiler's words")
        status = int(command[3] == fails)
        return SimpleNamespace(returncode=status, poll=lambda: status, wait=lambda: status)

    monkeypatch.setattr(demo.subprocess, "Popen", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = CheckList()
    with tempfile.TemporaryFile() as log:
        demo.run_kernels(demo.Emulated(log), [], tmp_path / "decoder.pt", checks)
    assert [command[1:4] for command in commands] == [["-m", "emulator", "build"], ["-m", "emulator", "run"]]
    failed = {"build": "building the emulator", "run": "kernels on the emulated GPU"}[fails]
    assert [check.what for check in checks.failed] == [f"{failed}: exit status"]
    assert ("the compiler's words" in capsys.readouterr().out) == (fails == "build")
