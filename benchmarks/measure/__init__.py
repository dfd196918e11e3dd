"""Measures kernels beside their peers: cases, peers, harness, tables, plots, and the page made from the figures."""
