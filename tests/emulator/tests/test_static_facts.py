"""Tests of the facts from machine code: loops, classes of instructions, registers and spills."""

from __future__ import annotations

import pytest

from emulator import static_facts
from emulator.static_facts import LOCAL_MEMORY, KernelFacts, full_opcode, loops, mix, opcode, sass_class

with_tools = pytest.mark.skipif(not static_facts.has_tools(), reason="needs ptxas, cuobjdump and nvdisasm")


def test_the_inspection_itself() -> None:
    """Checks that a loop includes its out-of-line block, and that straight code and forward branches are no loops."""
    lines = [
        "MOV R1, c[0x0][0x28] ;",
        ".L_x_0:",
        "@!P0 BRA `(.L_x_2) ;",
        "HMMA.16816.F32 R4, R8, R12, R4 ;",
        ".L_x_1:",
        "@P1 BRA `(.L_x_0) ;",
        "STL [R1], R4 ;",
        "EXIT ;",
        ".L_x_2:",
        "LDL R4, [R1] ;",
        "BRA `(.L_x_1) ;",
    ]
    assert [opcode(line) for line in lines][3] == "HMMA"
    assert loops(lines) == [frozenset({1, 2, 3, 4, 5, 8, 9, 10})]
    assert [index for index, line in enumerate(lines) if opcode(line) in LOCAL_MEMORY] == [6, 9]


LINES = (
    "S2R R0, SR_TID.X ;",
    ".L_x_0:",
    "LDL R4, [R1] ;",
    ".L_x_1:",
    "@!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;",
    "@P1 BRA `(.L_x_1) ;",
    "@UP0 STL [R1], R4 ;",
    "@P2 BRA `(.L_x_0) ;",
    ".L_x_2:",
    "FADD R4, R4, R4 ;",
    "@P2 BRA `(.L_x_2) ;",
    "EXIT ;",
)


def test_the_main_loop_is_the_innermost_with_matrix_instructions() -> None:
    facts = KernelFacts("k", 40, 8, 0, LINES)
    assert [facts.opcodes_of(body) for body in facts.main_loops] == [["HMMA.16816.F32.BF16", "BRA"]]
    assert facts.tensor_core == {"HMMA": 1}
    assert (facts.local_in_loops, facts.local_outside) == (0, 2)
    without = KernelFacts("k", 40, 8, 0, tuple(line for line in LINES if "HMMA" not in line))
    assert [without.opcodes_of(body) for body in without.main_loops] == [["LDL", "BRA", "STL", "BRA"], ["FADD", "BRA"]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HGMMA.64x128x16.F32.BF16", "tensor core"),
        ("IMAD.MOV.U32", "move"),
        ("IMAD.WIDE", "integer"),
        ("UIADD3", "integer"),
        ("USEL", "compare"),
        ("UTMALDG.4D", "async"),
        ("UBLKCP.S.G", "async"),
        ("MUFU.EX2", "special function"),
        ("LDSM.16.MT88.4", "matrix load"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "barrier"),
        ("ISOMETHING", "other"),
    ],
)
def test_classes(name: str, expected: str) -> None:
    assert sass_class(name) == expected


def test_the_mix_counts_instructions() -> None:
    assert mix([full_opcode(line) for line in LINES if not line.startswith(".")])["local"] == 2


PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry spilling(.param .u64 out)
.maxntid 1024, 1, 1
{
    .reg .b32 %r<100>;
    .reg .b64 %rd<3>;
    .shared .align 4 .b8 buffer[1000];
    ld.param.u64 %rd0, [out];
    mov.u32 %r0, buffer;
    @LOADS@
    bar.sync 0;
    @STORES@
    ret;
}
.visible .entry plain(.param .u64 out)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [out];
    st.global.u32 [%rd0], 1;
    ret;
}"""


@with_tools
def test_what_ptxas_says() -> None:
    """Checks a kernel that keeps 90 words across a barrier with at most 64 registers."""
    loads = "".join(f"ld.volatile.global.u32 %r{i}, [%rd0+{4 * i}];" for i in range(1, 91))
    stores = "".join(f"st.volatile.global.u32 [%rd0+{4 * i}], %r{91 - i};" for i in range(1, 91))
    facts = static_facts.of_ptx(PTX.replace("@LOADS@", loads).replace("@STORES@", stores))
    assert set(facts) == {"spilling", "plain"}
    spilling, plain = facts["spilling"], facts["plain"]
    assert spilling.registers <= 64 and spilling.stack_bytes > 0
    assert spilling.spill_store_bytes and spilling.spill_load_bytes and spilling.local_outside > 0
    assert (plain.stack_bytes, plain.spill_store_bytes, plain.spill_load_bytes, plain.local_outside) == (0, 0, 0, 0)
    assert 0 < plain.registers < spilling.registers
    assert "STG.E" in plain.instructions and plain.main_loops == []


@with_tools
def test_another_target() -> None:
    text = PTX.replace("@LOADS@", "").replace("@STORES@", "")
    assert static_facts.of_ptx(text, "sm_90")["plain"].instructions != static_facts.of_ptx(text)["plain"].instructions


def test_a_missing_or_failing_tool_is_said() -> None:
    with pytest.raises(RuntimeError, match="there is no nvnothing"):
        static_facts.run("nvnothing")
    if static_facts.has_tools():
        with pytest.raises(RuntimeError, match="failed"):
            static_facts.of_ptx(".version 8.0\n.target sm_80\nnonsense")
