"""What `benchmarks/gpu_check.py` is made of. Importable without torch, and but for `pytest_record` without pytest."""
