"""Defines the operators as PyTorch sees them, one file each: arguments, shapes, autograd, vmap, FLOPs."""
