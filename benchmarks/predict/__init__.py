"""Predicts times without a GPU, from the kernels' machine code and what the tests' emulator counts."""
