"""The versions that a record depends on besides the task and the machine, and which of them are part of its key.

A record says how long the machine code of a config took. Three things make that code:

    Config --(templates, loops, emitters)--> LLVM IR or CUDA C++ --(LLVM, NVRTC)--> machine code --(machine)--> time

- The version of LLVM or NVRTC is in the key. There is no way to tell what another makes of the same text.
- Our own sources are not. They change with every release, and mostly not for the config at hand. A decision carries the
  fingerprint of the text that won, its `code`, and holds as long as its config still leads to that text. To save making
  it, a fingerprint of the sources goes with it: where that is unchanged, so is the text.
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
from typing import TYPE_CHECKING

import msgspec

from tilewright.support.version import VERSION

if TYPE_CHECKING:
    from tilewright.hw import Machine
    from tilewright.space.implementation import Implementation

_PACKAGE = Path(__file__).parents[1]
_ROOMS = (
    "codegen",
    "graph",
    "hw",
    "loops",
    "space",
    "te",
)  # from a task and a config to the text that is compiled


class Versions(msgspec.Struct, frozen=True):
    tilewright: str
    python: str
    sources: str  # fingerprint of the packages that make that text of a config

    @staticmethod
    def now() -> Versions:
        return Versions(VERSION, platform.python_version(), sources())


@lru_cache(maxsize=1)
def sources() -> str:
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_PACKAGE / room).rglob("*")):
            if path.suffix not in (".py", ".cuh"):
                continue
            digest.update(path.relative_to(_PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def holds(
    code: str, versions: Versions, implementation: Implementation, machine: Machine, numerics: str
) -> bool:
    """Whether what was timed under these versions is what `implementation` is compiled to today."""
    from tilewright.codegen.generator import code_of

    return versions.sources == sources() or (
        code != "" and code == code_of(implementation, machine, numerics)
    )
