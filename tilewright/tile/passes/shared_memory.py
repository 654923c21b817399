"""Shared memory: what code for threads needs of it, and where in it each buffer lies.

Generated code is a list of nodes: a `Step` is some lines of code with the memory they read and write; a `Region` is a
loop or a branch of lists of nodes. A buffer lives from the first step that writes it to the last that reads it; where
a loop uses a buffer that was written before it, to the end of that loop. Buffers that do not live at the same time may
share memory; `barriers.py` keeps their accesses apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.support.source import SourceLocation

_ALIGNMENT = 128


@dataclass(frozen=True, eq=False)
class SharedBuffer:
    """A number of bytes of shared memory; `what` it is for, and the user's line that needs it."""

    name: str
    bytes: int
    what: str = ""
    where: SourceLocation | None = None
    ring: bool = False  # of slots for iterations of a loop, whose code keeps its accesses apart itself
    alignment: int = 0  # of its offset in bytes; 0: that of every buffer


@dataclass(frozen=True)
class GlobalAccess:
    """An access to tensors. `key`: accesses with equal keys, in one iteration of every loop, have the same address in
    each thread."""

    tensors: frozenset[str]
    key: object = None


Resource = SharedBuffer | GlobalAccess


@dataclass(eq=False)
class ProgramStep:
    lines: list[str]
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()
    barrier: bool = False  # its last line is one


@dataclass(eq=False)
class Lifespan:
    """`parts`: of a loop, run one after the other, again and again; of a branch, one of them runs. Each has its first
    and last lines."""

    loop: bool
    parts: list[ProgramPart]


@dataclass(eq=False)
class ProgramPart:
    head: list[str]
    nodes: list[CodeNode] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


CodeNode = ProgramStep | Lifespan


def allocate(nodes: Sequence[CodeNode]) -> tuple[dict[SharedBuffer, int], int]:
    """The offset of each buffer, and the total number of bytes."""
    lifetimes = _Lifetimes()
    lifetimes.visit(nodes)
    offsets: dict[SharedBuffer, int] = {}
    for buffer in sorted(lifetimes.spans, key=lambda each: (-each.bytes, lifetimes.spans[each])):
        first, last = lifetimes.spans[buffer]
        taken = sorted(
            (offsets[other], offsets[other] + _rounded(other.bytes))
            for other in offsets
            if lifetimes.spans[other][0] <= last and first <= lifetimes.spans[other][1]
        )
        offset = 0
        for begin, end in taken:
            if offset + _rounded(buffer.bytes) <= begin:
                break
            offset = _rounded(max(offset, end), buffer.alignment)
        offsets[buffer] = offset
    total = max((offset + buffer.bytes for buffer, offset in offsets.items()), default=0)
    return offsets, total


def live_together(nodes: Sequence[CodeNode], offsets: Mapping[SharedBuffer, int]) -> list[SharedBuffer]:
    """The buffers that are live at the point of maximum use, the largest first: an error lists them."""
    lifetimes = _Lifetimes()
    lifetimes.visit(nodes)
    last = max(offsets, key=lambda each: offsets[each] + each.bytes)
    first, end = lifetimes.spans[last]
    found = [b for b, (begin, stop) in lifetimes.spans.items() if begin <= end and first <= stop]
    return sorted(found, key=lambda each: -each.bytes)


def _rounded(size: int, alignment: int = 0) -> int:
    unit = max(alignment, _ALIGNMENT)
    return -(-size // unit) * unit


class _Lifetimes:
    """The first and the last step of each buffer, by number."""

    def __init__(self) -> None:
        self.spans: dict[SharedBuffer, tuple[int, int]] = {}
        self.count = 0

    def visit(self, nodes: Iterable[CodeNode]) -> None:
        for node in nodes:
            if isinstance(node, ProgramStep):
                self.count += 1
                for resource in (*node.reads, *node.writes):
                    if isinstance(resource, SharedBuffer):
                        first, _ = self.spans.get(resource, (self.count, 0))
                        self.spans[resource] = (first, self.count)
                continue
            self.count += 1
            begin = self.count
            for part in node.parts:
                self.visit(part.nodes)
            self.count += 1
            if node.loop:
                for buffer, (first, last) in self.spans.items():
                    if first < begin <= last:  # from before the loop: the next iteration reads it again
                        self.spans[buffer] = (first, self.count)
