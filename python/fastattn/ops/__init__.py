"""The operators as PyTorch sees them: schemas, shapes, autograd, vmap, FLOPs."""
