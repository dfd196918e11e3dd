"""Gathers all evidence that a GPU can give. It imports without torch; only `pytest_record` needs pytest."""
