"""Prepares the peers against which fastattn is measured: implementations with names and versions."""
