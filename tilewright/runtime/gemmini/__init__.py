"""Gemmini's programs and what runs them: instructions, and a simulator that computes what the machine computes.

`isa.py` has the instructions as data, `words.py` programs as arrays of words, `verify.py` what a machine can execute;
`functional.py` runs a program in NumPy, bit for bit. They are part of the runtime because a saved model needs them;
timing and RTL are in `codegen/gemmini/`.
"""

from tilewright.runtime.gemmini.functional import Functional
from tilewright.runtime.gemmini.isa import Instruction, encode, make, text
from tilewright.runtime.gemmini.verify import verify
from tilewright.runtime.gemmini.words import decode

__all__ = ["Functional", "Instruction", "decode", "encode", "make", "text", "verify"]
