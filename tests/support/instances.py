"""Lists the kernels' instances, as csrc/instances.json has them, for tests that go through all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from native_build.instances import all_instances

ALL_INSTANCES = all_instances(Path(__file__).parents[2] / "csrc")
DTYPES = ("float16", "bfloat16")  # in the order of the C++ enum DataType
_MEANINGS: dict[str, Any] = {
    "kFloat16": "float16",
    "kBFloat16": "bfloat16",
    "false": False,
    "true": True,
    "k16Bit": "16-bit",
    "kInt8": "int8",
    "kFp8": "fp8",
}


def rows_of(source: str) -> list[tuple[Any, ...]]:
    """Returns the template arguments of each instance of the kernel in ``csrc/source``, in ascending order."""
    found = [kernel for instance in ALL_INSTANCES if instance.source == source for kernel in instance.kernels]
    assert found, source
    return sorted(tuple(_meaning(text) for _, text in kernel) for kernel in found)


def kernels_of(folder: str) -> list[str]:
    """Returns the names of the kernels of ``csrc/<folder>`` that have instances, in the order of the table."""
    sources = dict.fromkeys(Path(instance.source) for instance in ALL_INSTANCES)
    return [source.stem for source in sources if source.parts[0] == folder]


def _meaning(text: str) -> Any:
    return int(text) if text.isdigit() else _MEANINGS[text]
