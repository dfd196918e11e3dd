"""Runs the PTX that nvcc and Triton compile, as it is, on the CPU: see README.md."""

from emulator import allocations
from emulator.errors import EmulatorError
from emulator.module import Module
from emulator.report import InstructionCounts, Report
from emulator.tensor_map import TensorMap

__all__ = ["EmulatorError", "InstructionCounts", "Module", "Report", "TensorMap", "allocations"]
