"""The versions that a record depends on, besides the task and the machine, and which of them are part of its key.

A record has the time of a config's machine code. Three things determine that code:

    Config --(templates, loops, emitters)--> LLVM IR or CUDA C++ --(LLVM, NVRTC)--> machine code --(machine)--> time

- The version of LLVM or NVRTC is in the key. Another version may compile the same text differently.
- Tilewright's own sources are not. They change with every release, mostly without effect on a given config. A
  decision has the fingerprint of the winning text, its `code`, and is valid as long as its config still generates
  that text. To avoid generating it, a fingerprint of the sources is stored too: if that is unchanged, so is the text.
- A trial has only the fingerprint of the sources, because there are many trials. If the sources have changed, it
  counts as experience, like the trials of other tasks, and its config may be measured again.

So a new template or knob invalidates no decision, nor does an edit that does not change a winner's code. An outdated
decision is not an error either: a config is checked for legality before use, and its code is generated again. The
versions of Tilewright and Python are recorded for information.
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
    "tile",
)  # from a task and a config to the compiled text


class Versions(msgspec.Struct, frozen=True):
    tilewright: str
    python: str
    sources: str  # fingerprint of the packages that generate this text from a config

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
    """Whether `implementation` still compiles to what was timed under these versions."""
    from tilewright.codegen.generator import code_of

    return versions.sources == sources() or (
        code != "" and code == code_of(implementation, machine, numerics)
    )
