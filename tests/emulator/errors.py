"""The error that the emulator raises for a kernel's mistake."""

from __future__ import annotations

from typing import Any


class EmulatorError(RuntimeError):
    """A mistake of a kernel or of a launch, or PTX that the emulator does not support.

    ``kind`` is one of ``"syntax"``, ``"unsupported"``, ``"arguments"``, ``"out-of-bounds"``, ``"misaligned"``,
    ``"uninitialised"``, ``"barrier"``, ``"mbarrier"``, ``"cluster"``, ``"wgmma"``, ``"race"``, ``"proxy"``,
    ``"divergence"``, ``"deadlock"``, ``"limit"``, ``"call"``, ``"assert"``, ``"trap"``. ``line`` is the line number in
    the PTX, from 1, and ``text`` is that line. ``source`` is ``"file:line"`` of the kernel's source, if the PTX names
    it. ``cta`` and ``thread`` are (x, y, z). Attributes that are unknown or do not apply are None.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        kernel: str = "",
        line: int = -1,
        text: str = "",
        source: str = "",
        cta: tuple[int, int, int] = (-1, -1, -1),
        thread: tuple[int, int, int] = (-1, -1, -1),
    ) -> None:
        self.kind = kind
        self.message = message
        self.kernel = kernel or None
        self.line = line if line >= 0 else None
        self.text = text.strip() or None
        self.source = source or None
        self.cta = cta if cta[0] >= 0 else None
        self.thread = thread if thread[0] >= 0 else None
        places = {
            "kernel": self.kernel,
            "PTX line": None if self.line is None else f"{self.line}: {self.text}",
            "source": self.source,
            "CTA": self.cta,
            "thread": self.thread,
        }
        known = [f"  {name} {value}" for name, value in places.items() if value is not None]
        super().__init__("\n".join([f"{kind}: {message}", *known]))

    @classmethod
    def of(cls, fault: Exception) -> EmulatorError:
        """Converts the exception of the C++ library."""
        arguments: Any = fault.args
        return cls(*arguments)
