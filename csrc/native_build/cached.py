"""Runs a compiler, or takes its result from a cache, which knows it by the contents of all that the compiler reads.

    python cached.py OUTPUT ABOUT INPUT … -- compiler option …

A result is known by the command without the repository's own path, by ABOUT (versions of what the command uses outside
of the repository), and by the contents of the inputs and of every file that they include in quotes, from the folders
that -I names. The cache's folder is FASTATTN_CACHE, by default fastattn in XDG_CACHE_HOME or ~/.cache. Where a file
cannot be written there, the compiler's result is what counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = {".cpp", ".cu", ".cuh", ".h"}
INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
# The lines of PTX that name its sources (nvcc -lineinfo) have the repository's path: without it results are those of
# any clone. What follows the name keeps the file's size.
SOURCE = re.compile(rb'"' + re.escape(str(ROOT).encode()) + rb'/([^"\n\0]+)"')
# What compilers read beside their arguments.
VARIABLES = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
DAYS_UNUSED = 60


def folder() -> Path | None:
    """Returns the cache's folder, or None where nobody names one and there is no home."""
    if given := os.environ.get("FASTATTN_CACHE"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastattn"
    except RuntimeError:
        return None


def include_folders(command: Sequence[str]) -> list[Path]:
    """Returns the folders of -I, in their order."""
    found = [argument[2:] for argument in command if argument.startswith("-I") and argument != "-I"]
    found += [command[i + 1] for i, argument in enumerate(command[:-1]) if argument == "-I"]
    return [Path(each) for each in found]


def read_files(inputs: Sequence[Path], folders: Sequence[Path]) -> dict[Path, bytes]:
    """Reads the inputs and all that they include in quotes, where that is found: what is not is the system's."""
    contents: dict[Path, bytes] = {}
    waiting = list(inputs)
    while waiting:
        path = waiting.pop()
        if path in contents:
            continue
        contents[path] = path.read_bytes()
        if path.suffix not in CODE:
            continue
        for name in INCLUDE.findall(contents[path]):
            places = (Path(os.path.normpath(each / name.decode())) for each in (path.parent, *folders))
            waiting += [place for place in places if place.is_file()][:1]
    return contents


def key(about: str, command: Sequence[str], contents: dict[Path, bytes]) -> str:
    """Returns the name under which the command's result is kept."""
    digest = hashlib.sha256()
    variables = [os.environ.get(name, "") for name in VARIABLES]
    for text in (about, *variables, *command):
        digest.update(text.replace(str(ROOT), "").encode() + b"\0")
    for path in sorted(contents):
        digest.update(str(path).replace(str(ROOT), "").encode() + b"\0")
        digest.update(hashlib.sha256(contents[path]).digest())
    return digest.hexdigest()


def write(path: Path, content: bytes) -> None:
    """Writes a file that other processes see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def kept(place: Path) -> bytes | None:
    """Returns the content that ``place`` keeps, or None where there is none, or not all of it."""
    with contextlib.suppress(OSError, zlib.error):
        content = zlib.decompress(place.read_bytes())
        os.utime(place)  # it was used: see `forget_unused`
        return content
    return None


def forget_unused() -> None:
    """Removes results that nobody has used for a long time."""
    cache = folder()
    for path in cache.glob("objects/*/*") if cache else ():
        with contextlib.suppress(OSError):  # another process has removed it
            if path.stat().st_mtime < time.time() - DAYS_UNUSED * 24 * 3600:
                path.unlink()


def run(output: Path, about: str, inputs: Sequence[Path], command: Sequence[str]) -> int:
    """Makes ``output`` and, where the command has one, the file of its dependencies; returns the exit status."""
    contents = read_files(inputs, include_folders(command))
    name = key(about, command, contents)
    cache = folder()
    place = cache / "objects" / name[:2] / name if cache else None
    content = kept(place) if place else None
    if content is None:
        status = subprocess.run(command).returncode
        if status != 0:
            return status
        made = output.read_bytes()
        content = SOURCE.sub(lambda found: (b'"%b"' % found[1]).ljust(len(found[0])), made)
        if place:
            with contextlib.suppress(OSError):
                write(place, zlib.compress(content, 1))
        if content == made:
            return 0
    else:
        needed = " ".join(re.sub(r"([ #$\\])", r"\\\1", str(path)) for path in sorted(contents))
        if "-MF" in command:
            Path(command[command.index("-MF") + 1]).write_text(f"{output}: {needed}\n")
    write(output, content)
    return 0


if __name__ == "__main__":
    end = sys.argv.index("--")
    output_path, about_it, *input_paths = sys.argv[1:end]
    sys.exit(run(Path(output_path), about_it, list(map(Path, input_paths)), sys.argv[end + 1 :]))
