"""Warns at the line of the user's code that led to fastattn."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType, ModuleType

import torch

# PyTorch's frames are not the user's either: ``nn.Module.__call__`` calls our layers, and ``nn.MultiheadAttention``
# calls our replacement of ``scaled_dot_product_attention``.
_NOT_THE_USERS = tuple(str(Path(path).parent) + os.sep for path in (Path(__file__).parent, torch.__file__))


def warn_at_users_line(message: str, category: type[Warning], *packages: ModuleType) -> None:
    """Warns at the innermost frame that is not in fastattn, PyTorch or one of ``packages``."""
    others = tuple(str(Path(package.__file__).parent) + os.sep for package in packages if package.__file__)
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS + others):
        outermost, frame = frame, frame.f_back
    frame = frame or outermost  # autograd's threads have no frame of the user's code
    assert frame is not None
    # Names the file and line, because warnings.warn cannot skip frames by file before Python 3.12.
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
