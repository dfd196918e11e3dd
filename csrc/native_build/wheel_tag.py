"""Chooses the platform tag of a wheel: manylinux_2_28, unless the library needs a newer system."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path

# The newest versions that manylinux_2_28 (PEP 600) allows a library to need: the versions in the oldest distribution
# that this tag includes.
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}


def needed_versions(library: Path) -> dict[str, tuple[int, ...]]:
    """Returns the highest version of each family (GLIBC, GLIBCXX, ...) that a 64-bit little-endian ELF library needs.

    Reads the section .gnu.version_r: System V ABI, symbol versioning (verneed and vernaux entries).
    """
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library} is not a 64-bit little-endian ELF file")
    section_table, *_, section_size, num_sections, _ = struct.unpack_from("<QIHHHHHH", data, 40)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_table + i * section_size) for i in range(num_sections)]
    newest: dict[str, tuple[int, ...]] = {}
    for _, kind, _, _, offset, _, link, num_needed, _, _ in sections:
        if kind != 0x6FFFFFFE:  # SHT_GNU_verneed
            continue
        names = sections[link][4]
        for _ in range(num_needed):
            _, num_entries, _, first_entry, next_needed = struct.unpack_from("<HHIII", data, offset)
            entry = offset + first_entry
            for _ in range(num_entries):
                _, _, _, name, next_entry = struct.unpack_from("<IHHII", data, entry)
                text = data[names + name : data.index(b"\0", names + name)].decode()
                family, _, version = text.rpartition("_")
                if re.fullmatch(r"\d+(\.\d+)*", version):
                    number = tuple(map(int, version.split(".")))
                    newest[family] = max(newest.get(family, ()), number)
                entry += next_entry
            offset += next_needed
    return newest


def wheel_platform(platform: str, needed: Mapping[str, tuple[int, ...]]) -> str:
    """Returns manylinux_2_28_x86_64 for linux_x86_64 if the needed versions allow it, else ``platform`` itself."""
    allowed = all(version <= MANYLINUX_2_28.get(family, ()) for family, version in needed.items())
    return re.sub(r"^linux_", "manylinux_2_28_", platform) if allowed else platform
