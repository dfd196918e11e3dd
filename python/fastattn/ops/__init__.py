"""The operators as PyTorch sees them, a file each: arguments, shapes, autograd, vmap, FLOPs."""
