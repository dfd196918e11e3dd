"""Profiles kernels: says what each kernel cost, and how near it came to the machine's limits."""
