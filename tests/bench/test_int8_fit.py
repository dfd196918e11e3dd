"""Tests the fit of the int8 matmul's model: it finds the constants that its input times were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.measure import int8_fit, timing
from benchmarks.measure.int8_fit import DEQUANTISED_TERMS, KERNEL_TERMS, Case, Kernel, Sample
from fastattn import native

NUM_SMS = 132
KERNEL_SECONDS = dict(zip(KERNEL_TERMS, (1.2e-6, 0.4e-6, 1.7e-6, 0.5e-6, 0.1e-6), strict=True))
DEQUANTISED_SECONDS = dict(zip(DEQUANTISED_TERMS, (4e-6, 1 / 4e12, 1 / 4e14), strict=True))


class LaunchSchedule(NamedTuple):
    ctas: int
    slots: int
    steps_of_full_gpu: float


class FakeGpu(int8_fit.CudaGpu):
    """A GPU that splits work as the library does where splits end with tiles. Its constants determine its times."""

    def __init__(self) -> None:
        self.arch, self.num_sms = 90, NUM_SMS

    def dealt(self, kernel: Kernel, case: Case) -> LaunchSchedule:
        team = {80: 1, 90: 2}[kernel.arch]
        resident, steps = (2 * NUM_SMS if team == 1 else NUM_SMS // 2), case.k // kernel.tile["block_k"]
        tiles = case.n // (team * kernel.tile["block_n"])
        if tiles % resident == 0:
            return LaunchSchedule(team * min(tiles, resident), 0, tiles // resident * steps)
        parts = min(resident // tiles, steps // 4)
        return LaunchSchedule(team * tiles * parts, team * tiles * parts, steps / parts)

    def terms(self, kernel: Kernel | None, case: Case) -> tuple[float, ...]:
        if kernel is None:
            return int8_fit.dequantised_terms(case)
        terms = int8_fit.kernel_terms(kernel, case, self.dealt(kernel, case), NUM_SMS)
        assert terms is not None
        return terms

    def seconds(self, kernel: Kernel | None, case: Case) -> float:
        constants = DEQUANTISED_SECONDS if kernel is None else KERNEL_SECONDS
        return sum(a * b for a, b in zip(self.terms(kernel, case), constants.values(), strict=True))

    def predicted(self, kernel: Kernel | None, case: Case) -> float | None:
        return self.seconds(kernel, case) / 1.25


NAMES = {
    "int8_matmul_sm80<16, bfloat16>": {"block_m": 16, "block_n": 128, "block_k": 128},
    "int8_matmul_sm80<128, float16>": {"block_m": 128, "block_n": 128, "block_k": 64},
    "int8_matmul_sm90<256, bfloat16>": {"block_m": 256, "block_n": 128, "block_k": 64},
    "int8_matmul_sm90<64, bfloat16, groups>": {"block_m": 64, "block_n": 128, "block_k": 64},
    "int8_matmul_s8_sm80<16, bfloat16>": {"block_m": 16, "block_n": 128, "block_k": 128},
    "decode_split_sm80<64, bfloat16>": None,
}
OWN = ("int8_matmul_sm80<16, bfloat16>", "int8_matmul_sm90<256, bfloat16>")


def test_constants_come_back() -> None:
    fits = int8_fit.fit_all(FakeGpu(), NAMES)
    assert list(fits) == [*OWN, native.DEQUANTISED]
    for name, fitted in fits.items():
        expected = DEQUANTISED_SECONDS if name == native.DEQUANTISED else KERNEL_SECONDS
        assert fitted["seconds"] == pytest.approx(expected, rel=1e-6)
        assert fitted["worst_relative_error"] < 1e-9
        assert fitted["measured_over_predicted"] == pytest.approx(1.25)
    text = int8_fit.as_text(fits)
    assert "step 400," in text and "1.25 of the predicted time" in text and len(text.splitlines()) == 3


def test_kernels_are_those_that_the_gpu_runs() -> None:
    assert [kernel.name for kernel in int8_fit.kernels(NAMES, 80)] == list(OWN[:1])
    assert [kernel.name for kernel in int8_fit.kernels(NAMES, 100)] == list(OWN[:1])
    assert [kernel.arch for kernel in int8_fit.kernels(NAMES, 90)] == [80, 90]


def test_terms_by_hand() -> None:
    """Clusters of two CTAs have 128 outputs per CTA; on 132 SMs, 66 clusters run at a time."""
    kernel = int8_fit.kernels(NAMES, 90)[1]
    whole = int8_fit.kernel_terms(kernel, Case(256, 132 * 256, 4096), LaunchSchedule(132, 0, 128), NUM_SMS)
    assert whole == (1, 2 * 64, 2, 0, 0)
    shared = int8_fit.kernel_terms(kernel, Case(256, 33 * 256, 4096), LaunchSchedule(132, 132, 32), NUM_SMS)
    assert shared == (1, 32, 1, 1, 1)
    ranges = int8_fit.kernel_terms(kernel, Case(256, 40 * 256, 4096), LaunchSchedule(132, 264, 40), NUM_SMS)
    assert ranges is None  # splits cross tiles
    assert int8_fit.dequantised_terms(Case(100, 8192, 8192)) == (2, 3 << 26, 100 << 26)


@pytest.mark.skipif(not native.BUILD["archs"], reason="the native library was built without kernels")
def test_the_terms_are_those_of_the_library() -> None:
    """Take the library's predictions for times: they are sums of the terms. cuBLAS's are, where its waves are full."""

    class Predicted(int8_fit.CudaGpu):
        def seconds(self, kernel: Kernel | None, case: Case) -> float:
            predicted = self.predicted(kernel, case)
            assert predicted is not None
            return predicted

    gpu = Predicted(native.NativeDeviceFacts(90, NUM_SMS, 50 << 20, 227 << 10), timing.CudaTimer(0))
    fits = int8_fit.fit_all(gpu, native.KERNELS)
    assert {name.partition("<")[0] for name in fits} == {"int8_matmul_sm80", "int8_matmul_sm90", native.DEQUANTISED}
    for name, fitted in fits.items():
        assert fitted["worst_relative_error"] < (0.05 if name == native.DEQUANTISED else 1e-6), name
        assert fitted["measured_over_predicted"] == pytest.approx(1)
        assert None not in fitted["seconds"].values(), name


def test_what_samples_do_not_tell_is_unknown() -> None:
    case = Case(1, 1, 1)
    whole = [Sample(case, (1.0, steps, waves, 0.0, 0.0), 1e-6 * (2 + steps + 3 * waves), None)
             for steps, waves in ((4, 1), (16, 1), (8, 2), (64, 2))]  # fmt: skip
    fitted = int8_fit.fit(KERNEL_TERMS, whole)
    assert fitted["seconds"] == pytest.approx(
        {"launch": 2e-6, "step": 1e-6, "piece": 3e-6, "shared": None, "part": None}
    )
    assert fitted["measured_over_predicted"] is None
    for too_few in (whole[:2], []):
        fitted = int8_fit.fit(KERNEL_TERMS, too_few)
        assert set(fitted["seconds"].values()) == {None} and fitted["worst_relative_error"] is None
    assert "step unknown" in int8_fit.as_text({"a kernel": fitted})


def test_noise_moves_the_fit_little() -> None:
    class Noisy(FakeGpu):
        generator = torch.Generator().manual_seed(3)

        def seconds(self, kernel: Kernel | None, case: Case) -> float:
            noise = 0.01 * float(torch.rand(1, generator=self.generator) - 0.5)
            return super().seconds(kernel, case) * (1 + noise)

    fits = int8_fit.fit_all(Noisy(), NAMES)
    for name in OWN:
        assert fits[name]["worst_relative_error"] < 0.01
        assert fits[name]["seconds"]["step"] == pytest.approx(KERNEL_SECONDS["step"], rel=0.02)


def test_without_a_gpu_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    int8_fit.main(["--json", str(tmp_path / "fit.json")])
    assert not list(tmp_path.iterdir())
    assert "no NVIDIA GPU here" in capsys.readouterr().out


def test_the_document_is_json() -> None:
    place: dict[str, Any] = {"gpu": "NVIDIA H200"}
    document = int8_fit.document_of(int8_fit.fit_all(FakeGpu(), NAMES), place)
    read = json.loads(json.dumps(document))
    assert read["schema"] == int8_fit.SCHEMA and set(read["ways"]) == {*OWN, native.DEQUANTISED}
    assert read["ways"][OWN[0]]["samples"][0]["case"] == {"m": 16, "n": 2 * NUM_SMS * 128, "k": 2048}
