"""Reads from the table in csrc/instances.json which kernels are compiled, and for which GPUs."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from native_build.errors import BuildError
from native_build.targets import TARGETS, Target

# DTYPE is a key of the table, but not a macro. Its values are always BOTH_DTYPES: a source compiles its kernels for
# both dtypes.
DTYPE, BOTH_DTYPES = "DTYPE", [["kFloat16", "kBFloat16"]]


@dataclass(frozen=True)
class Instance:
    """Describes one compilation of a source, which makes one or several kernels, as csrc/instances.json lists it."""

    source: str  # its path in csrc
    architecture: str
    code: tuple[str, ...]
    ptx: tuple[str, ...]  # what code is made from: the architecture's PTX, then later PTX that is also embedded
    values: tuple[tuple[str, str], ...] = ()  # (macro, value); values compiled at once are joined, "16,32"
    kernels: tuple[tuple[tuple[str, str], ...], ...] = ((),)  # the (name, value) pairs of each kernel

    @property
    def name(self) -> str:
        """Returns the instance's name, for example ``split_sm80.HEAD_DIM_64.BLOCK_M_16-32.CACHE_kInt8``."""
        return self._named(self.values).replace(",", "-")

    @property
    def kernel_names(self) -> list[str]:
        """Returns its kernels' names without dtypes, for example ``split_sm80.HEAD_DIM_64.BLOCK_M_16.CACHE_kInt8``."""
        named = (self._named([each for each in kernel if each[0] != DTYPE]) for kernel in self.kernels)
        return list(dict.fromkeys(named))

    def _named(self, values: Iterable[tuple[str, str]]) -> str:
        return ".".join([Path(self.source).stem, *(f"{name}_{value}" for name, value in values)])

    @property
    def object_path(self) -> Path:
        """Returns the object's path in the build folder; no other instance has the same."""
        return Path(self.source).with_name(f"{self.name}.o")

    @property
    def machine_code_path(self) -> Path:
        """Returns the path of the object with the instance's ``code``; the object at `object_path` has only PTX."""
        return Path(self.source).with_name(".".join([self.name, *self.code, "o"]))

    @property
    def defines(self) -> list[str]:
        """Returns nvcc's -D options, with a backslash before each comma, because nvcc would end the value there."""
        return [f"-DFASTATTN_{name}={value}".replace(",", r"\,") for name, value in self.values]

    def gencodes(self, code: Sequence[str] | None = None) -> list[str]:
        """Returns the values of nvcc's -gencode for ``code``, by default the instance's own.

        Code such as sm_90 is made from PTX with the same number (compute_90) if the instance has such PTX. Otherwise it
        is made from the architecture's PTX.
        """
        made: dict[str, list[str]] = {}
        for name in code or self.code:
            of_its_number = "compute_" + name.partition("_")[2]
            made.setdefault(of_its_number if of_its_number in self.ptx else self.ptx[0], []).append(name)
        return [f"arch={ptx},code=[{','.join(names)}]" for ptx, names in made.items()]


def named_values(names: str, values: Sequence[object]) -> list[list[tuple[str, str]]]:
    """Returns a list of (name, text in C++) pairs for each value of a key of the instance table; raises BuildError.

    A key may have several names, separated by spaces; each of its values is then a list with one value for each name.
    If a key has a single name, a list is one value, whose elements are joined by commas.
    """
    each = names.split()
    lists = [value if isinstance(value, list) else [value] for value in values]
    if not all(lists) or any(isinstance(one, list) for value in lists for one in value):
        raise BuildError(f"instances.json: {names!r} has an empty list, or lists in a list.")
    texts = [[str(each).lower() if isinstance(each, bool) else str(each) for each in value] for value in lists]
    if len(each) == 1:
        return [[(names, ",".join(text))] for text in texts]
    if wrong := [value for value in lists if len(value) != len(each)]:
        raise BuildError(f"instances.json: {names!r} has {len(each)} names, and {wrong[0]} as a value.")
    return [list(zip(each, text, strict=True)) for text in texts]


def all_instances(csrc: Path) -> list[Instance]:
    """Returns every instance in csrc/instances.json with all of its code, in the table's order; raises BuildError."""
    table = json.loads((csrc / "instances.json").read_text())
    instances: list[Instance] = []
    for row in table["kernels"]:
        source, architecture = row["source"], row["architecture"]
        axes = {names: values for names, values in row.items() if names not in ("source", "architecture", "code")}
        if unknown := [names for names in axes if not re.fullmatch("[A-Z][A-Z0-9_]*( [A-Z][A-Z0-9_]*)*", names)]:
            raise BuildError(f"instances.json: {source} has an unknown key, {unknown[0]!r}.")
        if row.get(DTYPE, BOTH_DTYPES) != BOTH_DTYPES:
            raise BuildError(f"instances.json: {source} must have DTYPE {BOTH_DTYPES}, or none.")
        if architecture not in table["architectures"]:
            raise BuildError(f"instances.json: {source} is for an unknown architecture, {architecture!r}.")
        if not (csrc / source).exists():
            raise BuildError(f"instances.json: {source} does not exist.")
        code = tuple(row.get("code", table["architectures"][architecture]["code"]))
        if unknown := [name for name in code if not any(name in target.code for target in TARGETS)]:
            raise BuildError(f"instances.json: {source} has unknown code, {unknown[0]!r}.")
        own = f"compute_{architecture}"
        ptx = (own, *(name for name in code if name.startswith("compute_") and name != own))
        for choice in itertools.product(*(named_values(*axis) for axis in axes.items())):
            values = tuple(itertools.chain(*choice))
            kernels = itertools.product(*([(name, each) for each in text.split(",")] for name, text in values))
            macros = tuple(value for value in values if value[0] != DTYPE)
            instances.append(Instance(source, architecture, code, ptx, macros, tuple(kernels)))
    kernels_of_all = Counter((each.source, kernel) for each in instances for kernel in each.kernels)
    if repeated := [kernel for kernel, count in kernels_of_all.items() if count > 1]:
        source, kernel_values = repeated[0]
        raise BuildError(f"instances.json: {source} with {dict(kernel_values)} is there twice.")
    sources = {instance.source for instance in instances}
    if left_out := {str(path.relative_to(csrc)) for path in csrc.glob("*/instances/*.cu")} - sources:
        raise BuildError(f"instances.json: there is no row for {sorted(left_out)[0]}.")
    return instances


def instances_for(csrc: Path, targets: Sequence[Target]) -> list[Instance]:
    """Returns the instances that have code for the targets, each with only its code for them."""
    wanted = {name for target in targets for name in target.code}
    chosen = [
        replace(instance, code=tuple(name for name in instance.code if name in wanted))
        for instance in all_instances(csrc)
    ]
    return [instance for instance in chosen if instance.code]
