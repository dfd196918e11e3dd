"""Makes the native library from the sources in csrc. setup.py and the tests' emulator build with it."""
