"""These tests need torch's CUDA build over the emulated device (`make test-cuda`): elsewhere they are not collected."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if "cuda_torch.autoload" in sys.modules else ["test_*.py"]
