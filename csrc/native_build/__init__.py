"""How the sources of this folder become the native library. setup.py and the tests' emulator build with it."""
