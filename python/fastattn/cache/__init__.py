"""Holds keys and values, in contiguous or in paged caches."""
