"""Whether a kernel's innermost loops keep vectors on the stack: read from its assembly."""

from __future__ import annotations

import re

from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Program

_LABEL = re.compile(r"^(\.?L?BB\d+_\d+):", re.MULTILINE)
_MULTIPLY = re.compile(r"\bvf?n?madd|\bfmla|\bvpdpbusd|\busdot")
_VECTOR_ON_STACK = re.compile(r"\(%rsp[,)].*%[yz]mm\d|%[yz]mm\d.*\(%rsp\)|\[sp.*\bq\d+|\bq\d+,.*\[sp")


def stack_vectors_in_loops(program: Program, machine: CpuMachine) -> int:
    """Instructions that move a vector to or from the stack within the loops that multiply most."""
    text = toolchain.assembly(llvm_ir(program, machine, "fast", "kernel"), machine)
    parts = _LABEL.split(text)
    blocks = list(zip(parts[1::2], parts[2::2], strict=True))
    loops = [body for label, body in blocks if re.search(rf"\bj\w+\s+{re.escape(label)}\b", body)]
    # A tile that is written out in full is part of a loop that has others inside.
    hot = _multiplying_most(loops) or _multiplying_most([body for _, body in blocks])
    assert hot, "nothing multiplies"
    return sum(bool(_VECTOR_ON_STACK.search(line)) for body in hot for line in body.splitlines())


def _multiplying_most(bodies: list[str]) -> list[str]:
    multiplied = [len(_MULTIPLY.findall(body)) for body in bodies]
    most = max(multiplied, default=0)
    return [body for body, count in zip(bodies, multiplied, strict=True) if most and count == most]
