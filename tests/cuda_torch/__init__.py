"""torch's CUDA build over the emulated device: see README.md."""
