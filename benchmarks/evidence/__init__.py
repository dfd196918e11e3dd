"""All evidence that a GPU can give. Importable without torch, and but for `pytest_record` without pytest."""
