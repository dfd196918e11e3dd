"""The C++ part, loaded once."""

from __future__ import annotations

from emulator.build import load

native = load()
