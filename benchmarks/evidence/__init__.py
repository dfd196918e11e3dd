"""Runs the GPU check. Of its modules only `sanitizer_cases` imports torch, and only `pytest_record` imports pytest."""
