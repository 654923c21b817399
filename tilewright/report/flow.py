"""Data flow in a plan: which kernel reads whose results, and how much of the arena is live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tilewright.runtime.plan import Place, Plan, aligned


@dataclass(frozen=True)
class Flow:
    """`reads`: for each step, the steps whose results it reads, and -1 for the model's inputs. `alive`: live bytes of
    the arena while the step runs."""

    reads: tuple[tuple[int, ...], ...]
    alive: tuple[int, ...]


@dataclass
class _Value:
    """A value in the arena, or in an output."""

    begin: int
    end: int
    writer: int
    last: int


def flow_of(plan: Plan) -> Flow:
    positions: dict[tuple[str, int], list[_Value]] = {}  # the current contents of each memory
    arena: list[_Value] = []
    reads: list[tuple[int, ...]] = []
    for number, step in enumerate(plan.steps):
        found: dict[int, None] = {}
        for position in step.arguments[:-1]:
            if position.space == "input":
                found[-1] = None
            elif value := _read(positions.get((position.space, position.index), []), position):
                value.last = number
                found[value.writer] = None
        reads.append(tuple(sorted(found)))
        output, size = step.arguments[-1], plan.tasks[step.task].output.bytes
        written = _Value(output.offset, output.offset + size, number, number)
        memory = positions.setdefault((output.space, output.index), [])
        memory[:] = [old for old in memory if old.end <= written.begin or written.end <= old.begin]
        memory.append(written)
        if output.space == "arena":
            arena.append(written)
    return Flow(tuple(reads), _alive(arena, len(plan.steps)))


def _read(values: Sequence[_Value], position: Place) -> _Value | None:
    return next(
        (value for value in values if value.begin <= position.offset < max(value.end, value.begin + 1)), None
    )


def _alive(values: Sequence[_Value], steps: int) -> tuple[int, ...]:
    """The live bytes while each step runs."""
    changes = [0] * (steps + 1)
    for value in values:
        size = aligned(value.end - value.begin)
        changes[value.writer] += size
        changes[value.last + 1] -= size
    return tuple(accumulate(changes[:-1]))
