"""What kernels cost, and how near to the machine's limits they came."""
