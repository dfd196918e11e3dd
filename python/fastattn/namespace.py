"""Under which names this copy of the package lives: a process may have the installed one and one from the Hub.

``NAMESPACE``  of its operators: ``torch.ops.fastattn`` holds the CUDA C++ kernels, ``torch.ops.fastattn_triton`` the
               Triton ones. A kernel repository has a file of its own here, with a namespace of its own
               (``csrc/native_build/hub_kernel.py``)
``PACKAGE``    the name under which it was imported
"""

from __future__ import annotations

NAMESPACE = "fastattn"
PACKAGE = __name__.rpartition(".")[0]
