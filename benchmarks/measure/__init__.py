"""Measures kernels and their peers, and makes tables, plots and docs/PERFORMANCE.md from the figures."""
