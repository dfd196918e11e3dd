"""Reads which kernels are compiled, and for what, from the table in csrc/instances.json."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from native_build.errors import BuildError
from native_build.targets import TARGETS, Target

# The values of this name, always these: the kernels of both are compiled at once.
COMPILED_TOGETHER, BOTH_DTYPES = "DTYPE", ["kFloat16", "kBFloat16"]


@dataclass(frozen=True)
class Instance:
    """Describes one compilation of a kernel's source: what csrc/instances.json says of it, and one choice of values."""

    source: str  # in csrc
    architecture: str
    code: tuple[str, ...]
    ptx: tuple[str, ...]  # from which that is made: of the architecture, and what the table embeds of later ones
    values: tuple[tuple[str, str], ...] = ()
    kernels: tuple[tuple[tuple[str, str], ...], ...] = ((),)  # all values of each kernel that it makes

    @property
    def name(self) -> str:
        """Returns, for example, ``forward_options_sm80.HEAD_DIM_32.PAGED_false``."""
        return ".".join([Path(self.source).stem, *(f"{name}_{value}" for name, value in self.values)])

    @property
    def object_path(self) -> Path:
        """Returns the object's path in the build folder, which no other instance has."""
        return Path(self.source).with_name(f"{self.name}.o")

    @property
    def machine_code_path(self) -> Path:
        """Returns the path of the object that has the instance's code in place of PTX alone."""
        return Path(self.source).with_name(".".join([self.name, *self.code, "o"]))

    @property
    def defines(self) -> list[str]:
        return [f"-DFASTATTN_{name}={value}" for name, value in self.values]

    def gencodes(self, code: Sequence[str] | None = None) -> list[str]:
        """Returns nvcc's -gencode for ``code``, by default the instance's own.

        Machine code comes from the PTX of its number where that is there, else from that of the architecture.
        """
        made: dict[str, list[str]] = {}
        for name in code or self.code:
            of_its_number = "compute_" + name.partition("_")[2]
            made.setdefault(of_its_number if of_its_number in self.ptx else self.ptx[0], []).append(name)
        return [f"arch={ptx},code=[{','.join(names)}]" for ptx, names in made.items()]


def named_values(names: str, values: Sequence[object]) -> list[list[tuple[str, str]]]:
    """Returns (name, text in C++) for each value of a key of the instance table, or for each list of several names."""
    each = names.split()
    lists = [value if isinstance(value, list) else [value] for value in values]
    if wrong := [value for value in lists if len(value) != len(each)]:
        raise BuildError(f"instances.json: {names!r} has {len(each)} names, and {wrong[0]} as a value.")
    texts = ([str(each).lower() if isinstance(each, bool) else str(each) for each in value] for value in lists)
    return [list(zip(each, text, strict=True)) for text in texts]


def all_instances(csrc: Path) -> list[Instance]:
    """Returns every instance in csrc/instances.json with all of its code, in the order of the table."""
    table = json.loads((csrc / "instances.json").read_text())
    instances: list[Instance] = []
    for row in table["kernels"]:
        source, architecture = row["source"], row["architecture"]
        axes = {names: values for names, values in row.items() if names not in ("source", "architecture", "code")}
        if unknown := [names for names in axes if not re.fullmatch("[A-Z][A-Z0-9_]*( [A-Z][A-Z0-9_]*)*", names)]:
            raise BuildError(f"instances.json: {source} has an unknown key, {unknown[0]!r}.")
        if row.get(COMPILED_TOGETHER, BOTH_DTYPES) != BOTH_DTYPES:
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
        together: dict[tuple[tuple[str, str], ...], list[tuple[tuple[str, str], ...]]] = {}
        for choice in itertools.product(*(named_values(*axis) for axis in axes.items())):
            kernel = tuple(itertools.chain(*choice))
            together.setdefault(tuple(each for each in kernel if each[0] != COMPILED_TOGETHER), []).append(kernel)
        for values, kernels in together.items():
            instances.append(Instance(source, architecture, code, ptx, values, tuple(kernels)))
    paths = Counter(instance.object_path for instance in instances)
    if repeated := [path for path, count in paths.items() if count > 1]:
        raise BuildError(f"instances.json: {repeated[0].with_suffix('')} is there twice.")
    sources = {instance.source for instance in instances}
    if left_out := {str(path.relative_to(csrc)) for path in csrc.glob("*/instances/*.cu")} - sources:
        raise BuildError(f"instances.json: there is no row for {sorted(left_out)[0]}.")
    return instances


def instances_for(csrc: Path, targets: Sequence[Target]) -> list[Instance]:
    """Returns the instances that have code for one of the targets, with that code alone."""
    wanted = {name for target in targets for name in target.code}
    chosen = [
        replace(instance, code=tuple(name for name in instance.code if name in wanted))
        for instance in all_instances(csrc)
    ]
    return [instance for instance in chosen if instance.code]
