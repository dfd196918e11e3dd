"""Warnings that point at the line of the user's code, whatever path led from there to fastattn."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType, ModuleType

import torch

# ``nn.Module.__call__`` stands between a user and our layers, ``nn.MultiheadAttention`` between one and the drop-in.
_NOT_THE_USERS = tuple(str(Path(path).parent) + os.sep for path in (Path(__file__).parent, torch.__file__))


def warn_at_users_line(message: str, category: type[Warning], *packages: ModuleType) -> None:
    """``warnings.warn``, at the innermost frame that is neither fastattn's nor PyTorch's nor that of ``packages``."""
    others = tuple(str(Path(package.__file__).parent) + os.sep for package in packages if package.__file__)
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS + others):
        outermost, frame = frame, frame.f_back
    frame = frame or outermost  # a thread of autograd's has no line of the user's
    assert frame is not None
    # By the frame itself: warnings.warn counts frames in a way of its own (skip_file_prefixes needs Python 3.12).
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
