"""Chooses a backend for a call, gives reasons, lists what kernels take, and records what ran."""
