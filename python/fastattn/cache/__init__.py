"""Provides contiguous and paged caches of keys and values."""
