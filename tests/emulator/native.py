"""Loads the emulator's C++ library, as `native`."""

from __future__ import annotations

from emulator.build import load

native = load()
