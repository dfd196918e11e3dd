"""The choice of a backend for a call, the reasons for it, the calls that kernels take, and the record of what ran."""
