"""Kernels with and without an edge of the happens-before order, for the tests of races and proxies. No test module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from emulator import Module
from expected_errors import failing

SEEDS = range(4)
AWAIT = "AGAIN: mbarrier.{}.shared.b64 %p3, [%bar], {}; @!%p3 bra AGAIN;"
TRY_WAIT = AWAIT.format("try_wait.parity", 0)


def kernel(body: str) -> Module:
    """Returns a module with a kernel ``k(out)`` for CTAs of 64 threads.

    Its registers: ``%tid``, ``%cta``: the indices of thread and CTA. ``%mine``: the address of the thread's word of
    ``buffer`` in shared memory; ``%theirs``: the word of the same lane in the other warp. ``%flag``, ``%bar``:
    addresses of 16 bytes of shared memory. ``%out``: the argument. ``%w``, ``%v``: the same two words in its first 256
    bytes. Predicates ``%t0``, ``%w0``, ``%c0``: true in thread 0 of a CTA, in warp 0 of a CTA, in CTA 0.
    """
    return Module(f"""
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 parameter)
{{
    .reg .pred %t0, %w0, %c0, %p<4>; .reg .b16 %h<4>;
    .reg .b32 %tid, %cta, %mine, %theirs, %buffer, %flag, %bar, %r<9>; .reg .b64 %out, %w, %v, %rd<9>;
    .shared .align 128 .b8 buffer[1024]; .shared .align 16 .b8 flag[16]; .shared .align 16 .b8 bar[16];
    mov.u32 %tid, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %buffer, buffer; mov.u32 %flag, flag; mov.u32 %bar, bar;
    shl.b32 %r0, %tid, 2; add.u32 %mine, %buffer, %r0; xor.b32 %r1, %r0, 128; add.u32 %theirs, %buffer, %r1;
    ld.param.u64 %out, [parameter];
    cvt.u64.u32 %w, %r0; add.u64 %w, %w, %out; cvt.u64.u32 %v, %r1; add.u64 %v, %v, %out;
    setp.eq.u32 %t0, %tid, 0; setp.lt.u32 %w0, %tid, 32; setp.eq.u32 %c0, %cta, 0;
    {body}
    cp.async.bulk.wait_group 0;  // bulk copies that nobody has waited for are an error of another kind
    ret;
}}""")


@dataclass(frozen=True)
class Case:
    """A kernel whose ``body`` has gaps $0, $1, …, with fillings: ``right`` ones have no race, ``wrong`` ones have one;
    ``unfenced`` ones only lack a fence between proxies, ``narrow`` ones a scope that includes both CTAs."""

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
        """Checks that the kernel is right at every seed."""
        module = self.fill(parts)
        for seed in SEEDS:
            self.launch(module, seed, **options)

    def check_wrong(self, parts: tuple[str, ...], kind: str, message: str, **options: bool) -> None:
        """Checks that the error is found at every seed, and that nothing else is wrong."""
        module = self.fill(parts)
        for seed in SEEDS:
            with failing(kind, message) as caught:
                self.launch(module, seed, **options)
            assert caught.value.line is not None and caught.value.thread is not None
            self.launch(module, seed, **{**options, "races": False})


def fillings(cases: Mapping[str, Case], of: str) -> list[Any]:
    """Returns a parameter (case, filling) for each of the cases' ``right``, ``wrong``, ``unfenced`` or ``narrow``."""
    return [
        pytest.param(case, filling, id=f"{name}-{index}")
        for name, case in cases.items()
        for index, filling in enumerate(getattr(case, of))
    ]
