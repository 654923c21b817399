"""Whether a kernel's innermost loops keep vectors on the stack: read from its assembly."""

from __future__ import annotations

import re

from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Program

_LABEL = re.compile(r"^(\.?L?BB\d+_\d+):", re.MULTILINE)
_MULTIPLY = re.compile(r"\bvf?n?madd|\bfmla|\bvpdpbusd|\busdot")
_SPILL = re.compile(r"(%[xyz]mm\d|\b[qv]\d+).*\b(Spill|Reload)\b|Folded (Spill|Reload)")


def spilled_vectors_in_loops(program: Program, machine: CpuMachine) -> int:
    """Instructions that save a vector on the stack or fetch it back within the innermost loops that multiply. Scratch
    memory is on the stack too, but is no spill."""
    text = toolchain.assembly(llvm_ir(program, machine, "fast", "kernel"), machine, comments=True)
    parts = _LABEL.split(text)
    blocks = list(zip(parts[1::2], parts[2::2], strict=True))
    loops = [body for label, body in blocks for body in _looping(label, body)]
    # A tile that is written out in full is part of a loop that has others inside.
    hot = _multiplying(loops) or _multiplying([body for _, body in blocks])
    assert hot, "nothing multiplies"
    return sum(bool(_SPILL.search(line)) for body in hot for line in body.splitlines())


def _looping(label: str, body: str) -> list[str]:
    """The instructions of a block up to its jump back to its own label; what follows runs once, after the loop."""
    jump = re.search(rf"^\s*[jb][\w.]*\s+{re.escape(label)}\b", body, re.MULTILINE)
    return [] if jump is None else [body[: jump.end()]]


def _multiplying(bodies: list[str]) -> list[str]:
    return [body for body in bodies if _MULTIPLY.search(body)]
