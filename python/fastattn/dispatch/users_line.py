"""Warns at the line of the user's code, whatever path leads from there to fastattn."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType, ModuleType

import torch

# Torch's frames count as not the user's too: ``nn.Module.__call__`` calls our layers, ``nn.MultiheadAttention`` the
# drop-in.
_NOT_THE_USERS = tuple(str(Path(path).parent) + os.sep for path in (Path(__file__).parent, torch.__file__))


def warn_at_users_line(message: str, category: type[Warning], *packages: ModuleType) -> None:
    """Warns at the innermost frame that is not in fastattn, PyTorch or one of ``packages``."""
    others = tuple(str(Path(package.__file__).parent) + os.sep for package in packages if package.__file__)
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS + others):
        outermost, frame = frame, frame.f_back
    frame = frame or outermost  # a thread of autograd has no line of the user's
    assert frame is not None
    # warnings.warn counts frames in its own way (skip_file_prefixes needs Python 3.12), so pass the frame's place.
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
