"""PTX kernels for the tests of bulk and tensor copies."""

from __future__ import annotations

from emulator import Module

HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k({parameters})
{{
    .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<60>; .reg .b64 %rd<40>;
    .shared .align 1024 .b8 box[{shared}];
    .shared .align 8 .b64 bar;
    mov.u32 %r0, %tid.x; mov.u32 %r1, box; mov.u32 %r2, bar; setp.ne.u32 %p1, %r0, 0;
    {loads}
    {body}
    ret;
}}"""

# All threads copy the box's 4-byte words to or from global memory at the pointer.
COPY = """
    mul.lo.u32 %r50, %r0, 4; add.u32 %r50, %r50, %r1; mul.wide.u32 %rd30, %r0, 4; add.u64 %rd30, %rd30, {pointer};
    mov.u32 %r51, %r0;
{label}:
    setp.ge.u32 %p8, %r51, {words};
    @%p8 bra {label}_END;
    {move}
    add.u32 %r50, %r50, 128; add.u64 %rd30, %rd30, 128; add.u32 %r51, %r51, 32;
    bra {label};
{label}_END:
"""


def copy_out(pointer: str, size: int) -> str:
    move = "ld.shared.b32 %r52, [%r50]; st.global.b32 [%rd30], %r52;"
    return COPY.format(pointer=pointer, words=size // 4, move=move, label="OUT")


def copy_in(pointer: str, size: int) -> str:
    move = "ld.global.b32 %r52, [%rd30]; st.shared.b32 [%r50], %r52;"
    return COPY.format(pointer=pointer, words=size // 4, move=move, label="IN")


def build(body: str, shared: int, pointers: int = 1, integers: int = 0, *, has_map: bool = True) -> Module:
    """Returns a module with a kernel `k` for one warp. %rd0 holds a tensor map's address, %rd1, … pointers, %r10, …
    integers, %r0 the thread, %r1 the address of `shared` bytes, %r2 that of an mbarrier; %p1 is false in thread 0."""
    parameters = [".param .align 64 .b8 map[128]"] if has_map else []
    loads = ["mov.b64 %rd0, map; cvta.param.u64 %rd0, %rd0;"] if has_map else []
    for i in range(pointers):
        parameters.append(f".param .u64 pointer{i}")
        loads.append(f"ld.param.u64 %rd{i + 1}, [pointer{i}];")
    for i in range(integers):
        parameters.append(f".param .s32 integer{i}")
        loads.append(f"ld.param.s32 %r{i + 10}, [integer{i}];")
    return Module(
        HEAD.format(parameters=", ".join(parameters), loads="\n".join(loads), shared=max(shared, 128), body=body)
    )


WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], {parity};
    @!%p2 bra WAIT;
"""
