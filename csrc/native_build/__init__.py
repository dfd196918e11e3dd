"""Builds the native library from the sources in csrc, for setup.py and the tests' emulator."""
