"""Defines the benchmarks' cases of the int8 linear layer, with inputs, work and the results in float64."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn
from benchmarks.measure.accuracy import Expected
from benchmarks.measure.cases import OfDtype
from benchmarks.measure.implementations import Prepared
from fastattn import Int8Weight, reference
from fastattn.profiler import work
from fastattn.profiler.work import Work

# The linear layers of the LLaMA models, [N, K]. Layers that read the same input are merged into one.
LAYERS: dict[str, tuple[int, int]] = {
    "7B qkv": (12288, 4096),
    "7B out": (4096, 4096),
    "7B gate and up": (22016, 4096),
    "7B down": (4096, 11008),
    "13B qkv": (15360, 5120),
    "13B out": (5120, 5120),
    "13B gate and up": (27648, 5120),
    "13B down": (5120, 13824),
    "70B qkv": (10240, 8192),
    "70B out": (8192, 8192),
    "70B gate and up": (57344, 8192),
    "70B down": (8192, 28672),
}
CHECKED_ROWS = 128


@dataclass(frozen=True)
class Int8Case(OfDtype):
    """Describes a product of ``x [m, k]`` and a weight ``[n, k]``, or with ``gradient`` the gradient of ``x``.

    ``granularity`` is ``"channel"``, or the size of a group along K, as text.
    """

    layer: str
    m: int
    n: int
    k: int
    granularity: str = "channel"
    gradient: bool = False
    dtype: str = "bfloat16"

    @property
    def group(self) -> int | None:
        """Returns the number of weights along K that share a scale; None if a channel has one scale."""
        return None if self.granularity == "channel" else int(self.granularity)

    def work(self) -> Work:
        num_scales = self.n if self.group is None else self.n * self.k // self.group
        return work.int8_matmul(self.m, self.n, self.k, self.torch_dtype.itemsize, num_scales)


class Int8Inputs(NamedTuple):
    """Holds the inputs of a layer: ``x [m, k]``, ``grad_out [m, n]`` and the weight ``[n, k]``."""

    x: Tensor
    grad_out: Tensor
    weight: Int8Weight


def make_inputs(case: Int8Case, device: torch.device, seed: int) -> Int8Inputs:
    """Returns inputs of normally distributed random numbers; the weight is scaled by ``k**-0.5``, as a new layer's."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device, dtype=case.torch_dtype)
    weight = normal(case.n, case.k) * case.k**-0.5
    quantized = fastattn.quantize_int8(weight, case.group or "channel")
    return Int8Inputs(normal(case.m, case.k), normal(case.m, case.n), quantized)


def prepare(case: Int8Case, inputs: Int8Inputs) -> Prepared:
    """Prepares a call of fastattn's public function, or of its gradient through autograd, as in training."""
    if not case.gradient:
        return Prepared(lambda: fastattn.int8_linear(inputs.x, inputs.weight), lambda y: (y,))
    return prepare_gradient(inputs, lambda x: fastattn.int8_linear(x, inputs.weight))


def prepare_gradient(inputs: Int8Inputs, linear: Any) -> Prepared:
    """Runs ``linear`` forward, and prepares the gradient of ``x`` through it."""
    x = inputs.x.detach().requires_grad_()
    y = linear(x)
    return Prepared(lambda: torch.autograd.grad(y, x, inputs.grad_out, retain_graph=True), tuple)


def checked_slice(case: Int8Case, out: Tensor) -> Tensor:
    """Returns the last ``CHECKED_ROWS`` rows."""
    return out[-CHECKED_ROWS:]


def expected(case: Int8Case, inputs: Int8Inputs) -> Expected:
    """Returns the expected output of the checked rows, computed with the dequantised int8 weight."""

    def compute(dtype: torch.dtype) -> Tensor:
        weight = reference.dequantize_int8(inputs.weight.data, inputs.weight.scale, dtype)
        if case.gradient:
            return inputs.grad_out[-CHECKED_ROWS:].to(dtype) @ weight
        return inputs.x[-CHECKED_ROWS:].to(dtype) @ weight.T

    return Expected.from_composite([compute(torch.float64)], [compute(case.torch_dtype)], case.torch_dtype)


def _case(layer: str, m: int, granularity: str = "channel", gradient: bool = False) -> Int8Case:
    n, k = LAYERS[layer]
    return Int8Case(layer, m, n, k, granularity, gradient)


def quick_cases() -> list[Int8Case]:
    """Returns the quick grid, the most informative cases first: a run with a time limit may not reach the end."""
    square = [_case("70B out", m) for m in (1, 16, 64, 256, 2048, 8192)]
    grouped = [_case("70B out", m, "128") for m in (1, 16, 2048)]
    small = [_case(layer, 1) for layer in ("7B out", "7B gate and up", "7B down")]
    return [*square, *grouped, _case("70B out", 2048, gradient=True), *small]


def full_cases() -> list[Int8Case]:
    """Returns every layer, M and granularity; gradients only from 512 rows on, as in training."""
    return [
        _case(layer, m, granularity, gradient)
        for layer in LAYERS
        for granularity in ("channel", "128")
        for gradient in (False, True)
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
        if not gradient or m >= 512
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that keep only some cases of the grid."""
    parser.add_argument("--m", type=int, nargs="+", help="only these numbers of rows")
    parser.add_argument("--layer", metavar="TEXT", help="only layers whose name contains this, such as 70B")
    parser.add_argument("--granularity", choices=("channel", "128"), help="only this one")
    parser.add_argument("--direction", choices=("forward", "gradient"), help="only this one")


def chosen(options: argparse.Namespace) -> list[Int8Case]:
    """Returns the cases of the quick or the full grid that the options keep."""

    def is_kept(case: Int8Case) -> bool:
        return (
            (options.m is None or case.m in options.m)
            and (options.layer is None or options.layer.lower() in case.layer.lower())
            and options.granularity in (None, case.granularity)
            and options.direction in (None, "gradient" if case.gradient else "forward")
        )

    return [case for case in (full_cases() if options.full else quick_cases()) if is_kept(case)]
