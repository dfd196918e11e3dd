"""Whom fastattn is measured against: implementations by name and version."""
