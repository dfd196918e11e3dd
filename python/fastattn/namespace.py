"""Names this copy of the package, because a process can load the installed copy and one from the Hugging Face Hub.

``NAMESPACE``  the namespace of this copy's operators: ``torch.ops.fastattn`` holds the CUDA C++ kernels,
               ``torch.ops.fastattn_triton`` the Triton ones. ``csrc/native_build/hub_kernel.py`` makes a kernel
               repository for the Hub, and writes this file there with another namespace
``PACKAGE``    the name under which this copy was imported
"""

from __future__ import annotations

NAMESPACE = "fastattn"
PACKAGE = __name__.rpartition(".")[0]
