"""Runs a compiler, or takes its result from a cache whose keys are hashes of all that the compiler reads.

    python cached.py OUTPUT ABOUT INPUT … -- compiler option …

The key covers the command without the repository's own path, ABOUT (the versions of what the command uses outside of
the repository), and the contents of the inputs and of every file that they include in quotes, from their own folder or
from one that -I names. The cache's folder is FASTATTN_CACHE, by default fastattn in XDG_CACHE_HOME or ~/.cache. If the
cache cannot be written, the output is still made.
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
# Matches the paths of sources in PTX (nvcc -lineinfo). The repository's path is removed from them, so that all clones
# have the same results. Spaces are added after each shortened path, so that the file keeps its size.
SOURCE = re.compile(rb'"' + re.escape(str(ROOT).encode()) + rb'/([^"\n\0]+)"')
# Environment variables that compilers read.
VARIABLES = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
DAYS_UNUSED = 60


def folder() -> Path | None:
    """Returns the cache's folder, or None if no variable names it and the user has no home."""
    if given := os.environ.get("FASTATTN_CACHE"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastattn"
    except RuntimeError:
        return None


def include_folders(command: Sequence[str]) -> list[Path]:
    """Returns the folders that -I names, in order."""
    found = [argument[2:] for argument in command if argument.startswith("-I") and argument != "-I"]
    found += [command[i + 1] for i, argument in enumerate(command[:-1]) if argument == "-I"]
    return [Path(each) for each in found]


def read_files(inputs: Sequence[Path], folders: Sequence[Path]) -> dict[Path, bytes]:
    """Returns the contents of the inputs and of all files that they include in quotes, except headers of the system."""
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
    """Returns the key of the command's result, a hash in hexadecimal."""
    digest = hashlib.sha256()
    variables = [os.environ.get(name, "") for name in VARIABLES]
    for text in (about, *variables, *command):
        digest.update(text.replace(str(ROOT), "").encode() + b"\0")
    for path in sorted(contents):
        digest.update(str(path).replace(str(ROOT), "").encode() + b"\0")
        digest.update(hashlib.sha256(contents[path]).digest())
    return digest.hexdigest()


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically: other processes see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def kept(place: Path) -> bytes | None:
    """Returns the content stored in ``place``, or None if it is missing or damaged."""
    with contextlib.suppress(OSError, zlib.error):
        content = zlib.decompress(place.read_bytes())
        os.utime(place)  # marks it as used, for `forget_unused`
        return content
    return None


def forget_unused() -> None:
    """Removes results that have not been used for ``DAYS_UNUSED`` days."""
    cache = folder()
    for path in cache.glob("objects/*/*") if cache else ():
        with contextlib.suppress(OSError):  # another process may have removed it
            if path.stat().st_mtime < time.time() - DAYS_UNUSED * 24 * 3600:
                path.unlink()


def run(output: Path, about: str, inputs: Sequence[Path], command: Sequence[str]) -> int:
    """Makes ``output``, by ``command`` or from the cache, and the file that -MF names; returns the exit status."""
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
