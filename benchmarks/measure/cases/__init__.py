"""Defines the cases that are measured: their sizes, inputs, expected results and least work."""
