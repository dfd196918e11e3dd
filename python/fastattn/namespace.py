"""Names this copy of the package: a process may load the installed copy and one from the Hugging Face Hub.

``NAMESPACE``  the namespace of its operators: ``torch.ops.fastattn`` holds the CUDA C++ kernels,
               ``torch.ops.fastattn_triton`` the Triton ones. In a kernel repository, this file is replaced by one with
               its own namespace (``csrc/native_build/hub_kernel.py``)
``PACKAGE``    the name under which it was imported
"""

from __future__ import annotations

NAMESPACE = "fastattn"
PACKAGE = __name__.rpartition(".")[0]
