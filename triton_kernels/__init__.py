"""Holds the Triton kernels of fastattn: attention forward and backward, flash-decoding, int8 matmul.

Importing this package does not import Triton; importing one of its kernel modules does.
"""
