"""Gemmini's programs and what runs them: instructions, and a simulator that computes what the machine computes.

`isa.py` has the instructions as data, `functional.py` runs a program in NumPy, bit for bit. Both are part of the
runtime because a saved model needs them; timing and RTL are in `codegen/gemmini/`.
"""

from tilewright.runtime.gemmini.functional import Functional
from tilewright.runtime.gemmini.isa import Instruction, decode, encode, make, text, verify

__all__ = ["Functional", "Instruction", "decode", "encode", "make", "text", "verify"]
