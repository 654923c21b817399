"""Barriers: where all threads of a block wait for each other, so that effects keep the order of the program.

A barrier stands before a step that reads what a step since the last barrier has written, or that writes what one has
read or written: other threads may be behind. A loop's body is walked again with what its end leaves behind, until no
more barriers are needed. Conditions of loops and branches are the same in all threads, so every thread comes to each
barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tilewright.tile.passes.shared_memory import CodeNode, GlobalAccess, ProgramStep, Resource

Conflict = Callable[[Resource, Resource], bool]


@dataclass(frozen=True)
class _State:
    """The accesses since the last barrier, on any path to this point."""

    read: frozenset[Resource] = frozenset()
    written: frozenset[Resource] = frozenset()

    def joined(self, other: _State) -> _State:
        return _State(self.read | other.read, self.written | other.written)

    def later(self) -> _State:
        """The state in another iteration: equal keys no longer mean equal addresses."""
        return _State(_without_keys(self.read), _without_keys(self.written))


def _without_keys(resources: Iterable[Resource]) -> frozenset[Resource]:
    return frozenset(replace(r, key=None) if isinstance(r, GlobalAccess) else r for r in resources)


def steps_after_barriers(nodes: Sequence[CodeNode], conflict: Conflict) -> set[ProgramStep]:
    """The steps that need a barrier before them. `conflict`: whether two accesses may touch the same bytes in different
    threads, and one of them writes."""
    walker = _Walker(conflict)
    walker.walk(nodes, _State())
    return walker.found


class _Walker:
    def __init__(self, conflict: Conflict) -> None:
        self.conflict = conflict
        self.found: set[ProgramStep] = set()

    def walk(self, nodes: Sequence[CodeNode], state: _State) -> _State:
        for node in nodes:
            if isinstance(node, ProgramStep):
                state = self.step(node, state)
                continue
            if not node.loop:
                ends = [self.walk(part.nodes, state) for part in node.parts]
                state = ends[0]
                for end in ends[1:]:
                    state = state.joined(end)
                continue
            while True:
                end = state
                exits = state
                for number, part in enumerate(node.parts):
                    end = self.walk(part.nodes, end)
                    exits = exits.joined(end) if number == 0 else exits
                joined = state.joined(end.later())
                if joined == state:
                    break
                state = joined
            state = state.joined(exits)
        return state

    def step(self, step: ProgramStep, state: _State) -> _State:
        if step in self.found or self._needs(step, state):
            self.found.add(step)
            state = _State()
        if step.barrier:
            return _State()
        return _State(state.read | set(step.reads), state.written | set(step.writes))

    def _needs(self, step: ProgramStep, state: _State) -> bool:
        reads = any(self.conflict(a, b) for a in step.reads for b in state.written)
        return reads or any(self.conflict(a, b) for a in step.writes for b in state.written | state.read)
