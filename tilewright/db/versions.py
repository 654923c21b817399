"""What a record depends on besides the task and the machine, and which of it belongs to the key.

A record says how long the machine code of a config took. Three things make that code:

    Config --(templates, loops, our emitter)--> LLVM IR --(LLVM)--> machine code --(machine, threads)--> time

- LLVM's version is in the key. There is no way to tell what another version makes of the same IR.
- Our own sources are not. They change with every release, and mostly not for the config at hand. A decision carries the
  fingerprint of the IR that won, its `code`, and holds as long as its config still leads to that IR. To save making
  it, a fingerprint of the sources goes with it: where that is unchanged, so is the IR.
- A trial carries the fingerprint of the sources alone: of trials there are many. Where the sources have changed it
  counts as experience, as the trials of other tasks do, and its config may be measured again.

So a new template, a new knob or another config leaves all decisions as they are, and so does an edit that does not
reach a winner's code; no row is ever made useless. What does not hold any more is no error either: a config is checked
for legality before use, and the code is made anew. The versions of Tilewright and Python are written down for people.
"""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from pathlib import Path

import msgspec

from tilewright.codegen.llvm import toolchain as llvm
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Program
from tilewright.support.version import VERSION

_PACKAGE = Path(__file__).parents[1]
_ROOMS = ("codegen", "graph", "hw", "loops", "space", "te")  # from a task and a config to LLVM IR
_SYMBOL = "kernel"  # the same in all fingerprints; a real kernel's name depends on more than its code


class Versions(msgspec.Struct, frozen=True):
    tilewright: str
    python: str
    sources: str  # fingerprint of the rooms that make IR of a config

    @staticmethod
    def now() -> Versions:
        return Versions(VERSION, platform.python_version(), sources())


def toolchain() -> str:
    return llvm.version()


@lru_cache(maxsize=1)
def sources() -> str:
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_PACKAGE / room).rglob("*.py")):
            digest.update(path.relative_to(_PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def code_of(program: Program, machine: CpuMachine, numerics: str) -> str:
    """The fingerprint of what LLVM is given for a program."""
    return hashlib.sha256(llvm_ir(program, machine, numerics, _SYMBOL).encode()).hexdigest()[:32]


def holds(code: str, versions: Versions, program: Program, machine: CpuMachine, numerics: str) -> bool:
    """Whether what was timed under these versions is what `program` is compiled to today."""
    return versions.sources == sources() or (code != "" and code == code_of(program, machine, numerics))
