"""Packs the evidence into a few files of limited size. A note replaces the middle of a long log."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

MOST_FILES = 8
MOST_BYTES = 15 * 2**20  # per file; stays below 16 MB whether a megabyte has 10**6 or 2**20 bytes
LOG_BYTES = 2 * 2**20  # per log within an archive
_TEXT = (".log", ".jsonl", ".txt")


def without_middle(data: bytes, limit: int) -> bytes:
    """Returns ``data``, or if it exceeds ``limit`` bytes, that many bytes: its beginning, a note and its end."""
    if len(data) <= limit:
        return data
    note = f"\n\n[… {len(data)} bytes in all: the middle is left out …]\n\n".encode()
    kept = max(0, limit - len(note))
    tail = kept - kept // 2
    return (data[: kept // 2] + note + data[len(data) - tail :])[:limit]


def pack(members: Mapping[str, Path], archive: Path, limit: int = MOST_BYTES, log_bytes: int = LOG_BYTES) -> list[str]:
    """Writes ``archive`` (tar.gz) of at most ``limit`` bytes and returns the names and sizes of the files left out.

    While the archive is too large, this first cuts the logs further, then leaves out the largest of the other files.
    """
    contents = {name: path.read_bytes() for name, path in sorted(members.items())}
    left_out: list[str] = []
    while True:
        data = _tar({name: _bounded(name, content, log_bytes) for name, content in contents.items()})
        if len(data) <= limit or not contents:
            break
        sizes = {name: len(content) for name, content in contents.items()}
        others = [name for name in sizes if not name.endswith(_TEXT)]
        if log_bytes > 4096 and len(others) < len(sizes):
            log_bytes //= 4
        else:
            largest = max(others or sizes, key=lambda name: sizes[name])
            left_out.append(f"{largest} ({len(contents.pop(largest))} bytes)")
    archive.write_bytes(data)
    return left_out


def _bounded(name: str, content: bytes, log_bytes: int) -> bytes:
    return without_middle(content, log_bytes) if name.endswith(_TEXT) else content


def _tar(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def files_below(folder: Path, prefix: str) -> dict[str, Path]:
    """Maps the name of each file below ``folder`` in an archive, ``<prefix>/<path from folder>``, to its path."""
    found = (path for path in folder.rglob("*") if path.is_file()) if folder.exists() else ()
    return {f"{prefix}/{path.relative_to(folder)}": path for path in found}
