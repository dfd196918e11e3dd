"""The choice of a backend for a call, and the reasons: what a call depends on, what kernels take, what ran."""
