"""Kernels of which an edge of the happens-before order is left out, for the tests of races and of proxies. Not a test
module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from emulator import EmulatorError, Module

SEEDS = range(4)
AWAIT = "AGAIN: mbarrier.{}.shared.b64 %p3, [%bar], {}; @!%p3 bra AGAIN;"
TRY_WAIT = AWAIT.format("try_wait.parity", 0)


def kernel(body: str) -> Module:
    """A kernel ``k(out)`` for CTAs of 64 threads.

    ``%tid``: the thread; ``%cta``: the CTA; ``%mine``: its word of ``buffer``; ``%theirs``: that of the thread with its
    lane in the other warp; ``%flag``, ``%bar``: 16 bytes each; ``%out``: the argument; ``%w``: where the thread's word
    is in the first 256 bytes of it, ``%v``: that of the other warp's thread; ``%t0``: it is thread 0 of its CTA;
    ``%w0``: it is in warp 0; ``%c0``: in CTA 0.
    """
    return Module(f"""
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 parameter)
{{
    .reg .pred %t0, %w0, %c0, %p<4>;
    .reg .b16 %h<4>;
    .reg .b32 %tid, %cta, %mine, %theirs, %buffer, %flag, %bar, %r<9>;
    .reg .b64 %out, %w, %v, %rd<9>;
    .shared .align 128 .b8 buffer[1024];
    .shared .align 16 .b8 flag[16];
    .shared .align 16 .b8 bar[16];
    mov.u32 %tid, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %buffer, buffer;
    mov.u32 %flag, flag;
    mov.u32 %bar, bar;
    shl.b32 %r0, %tid, 2;
    add.u32 %mine, %buffer, %r0;
    xor.b32 %r1, %r0, 128;
    add.u32 %theirs, %buffer, %r1;
    ld.param.u64 %out, [parameter];
    cvt.u64.u32 %w, %r0;
    add.u64 %w, %w, %out;
    cvt.u64.u32 %v, %r1;
    add.u64 %v, %v, %out;
    setp.eq.u32 %t0, %tid, 0;
    setp.lt.u32 %w0, %tid, 32;
    setp.eq.u32 %c0, %cta, 0;
    {body}
    cp.async.bulk.wait_group 0;  // bulk copies that nobody has waited for are an error of another kind
    ret;
}}""")


@dataclass(frozen=True)
class Case:
    """``body`` is right with each of ``right`` for its $0, $1, … and wrong with each of ``wrong``; with each of
    ``unfenced`` it only lacks a fence between proxies, with each of ``narrow`` a scope that includes both CTAs.
    """

    body: str
    right: tuple[tuple[str, ...], ...]
    wrong: tuple[tuple[str, ...], ...]
    unfenced: tuple[tuple[str, ...], ...] = ()
    narrow: tuple[tuple[str, ...], ...] = ()
    grid: int = 1
    cluster: int = 1

    def fill(self, parts: tuple[str, ...]) -> Module:
        body = self.body
        for index, part in enumerate(parts):
            body = body.replace(f"${index}", part)
        return kernel(body)

    def launch(self, module: Module, seed: int, **options: bool) -> None:
        out = torch.zeros(512, dtype=torch.int32)
        cluster = (self.cluster, 1, 1)
        module.launch("k", (self.grid,), (64,), [out], cluster=cluster, seed=seed, instruction_limit=1 << 22, **options)

    def check(self, parts: tuple[str, ...], **options: bool) -> None:
        """Right at every seed."""
        module = self.fill(parts)
        for seed in SEEDS:
            self.launch(module, seed, **options)

    def check_wrong(self, parts: tuple[str, ...], kind: str, message: str, **options: bool) -> None:
        """Found at every seed, and nothing else is wrong."""
        module = self.fill(parts)
        for seed in SEEDS:
            with pytest.raises(EmulatorError, match=message) as caught:
                self.launch(module, seed, **options)
            assert caught.value.kind == kind and caught.value.line is not None and caught.value.thread is not None
            self.launch(module, seed, **{**options, "races": False})


def fillings(cases: Mapping[str, Case], of: str) -> list[Any]:
    """(case, filling) for each of the cases' ``right``, ``wrong``, ``unfenced`` or ``narrow``."""
    return [
        pytest.param(case, filling, id=f"{name}-{index}")
        for name, case in cases.items()
        for index, filling in enumerate(getattr(case, of))
    ]
