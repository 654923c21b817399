"""Decoupled access and execute: three units of an accelerator that each run their own statements in order.

    load      fills a local buffer with elements of global memory, as they are
    execute   computes from local buffers
    store     writes global memory

Units wait for each other by tokens alone: `Push` says in a queue that what a unit did before it is complete, and `Pop`
waits for that. `Order` checks, while the interpreter runs the statements one after another, that tokens order every two
accesses of an element of which one writes it, and says when each unit would be done if all ran at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewright import te
from tilewright.loops.ir import Buffer, Copy, Pop, Push, Scope, Stmt, Store, Unit
from tilewright.loops.passes.accesses import loaded, read, written

UNITS: tuple[Unit, ...] = ("load", "execute", "store")


class UnorderedUnits(Exception):
    """Two units access an element and no token orders them."""


def unit_of(stmt: Stmt) -> Unit | None:
    """The unit that runs a leaf statement; None if no unit can: execute has no access to global memory."""
    target = written(stmt)
    if target is None:
        return None
    sources = {buffer.scope is Scope.GLOBAL for buffer in read(stmt)}
    if target[0].scope is Scope.GLOBAL:
        return None if True in sources else "store"
    if True not in sources:
        return "execute"
    return "load" if isinstance(stmt, Copy) or (isinstance(stmt, Store) and _only_moves(stmt.value)) else None


def _only_moves(value: te.Expr) -> bool:
    """An element of global memory, or a constant outside of it."""
    if isinstance(value, te.Select) and not loaded(value.cond) and isinstance(value.other, te.Const):
        value = value.then
    return isinstance(value, te.Load) and not any(map(te.loads, value.indices))


@dataclass(frozen=True)
class Timeline:
    """`cycles`: until the last unit is done. `busy`: how long each unit worked."""

    cycles: float
    busy: Mapping[Unit, float]


@dataclass
class Order:
    """The order between units. `cycles`: of one statement of each unit; one if it is not named."""

    cycles: Mapping[Unit, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unit: Unit | None = None
        self.done: dict[Unit, int] = dict.fromkeys(UNITS, 0)  # statements
        self.known: dict[Unit, dict[Unit, int]] = {unit: dict.fromkeys(UNITS, 0) for unit in UNITS}
        self.queues: dict[int, deque[tuple[dict[Unit, int], float]]] = defaultdict(deque)
        self.writes: dict[tuple[Buffer, int], tuple[Unit, int]] = {}
        self.reads: dict[tuple[Buffer, int], dict[Unit, int]] = defaultdict(dict)
        self.now: dict[Unit, float] = dict.fromkeys(UNITS, 0.0)
        self.busy: dict[Unit, float] = dict.fromkeys(UNITS, 0.0)

    @property
    def timeline(self) -> Timeline:
        return Timeline(max(self.now.values()), dict(self.busy))

    def begin(self, stmt: Stmt) -> None:
        """A leaf statement runs."""
        self.unit = unit_of(stmt)
        if self.unit is not None:
            self.done[self.unit] += 1
            self.known[self.unit][self.unit] = self.done[self.unit]
            self.now[self.unit] += self.cycles.get(self.unit, 1.0)
            self.busy[self.unit] += self.cycles.get(self.unit, 1.0)

    def push(self, stmt: Push) -> None:
        self.queues[stmt.queue].append((dict(self.known[stmt.source]), self.now[stmt.source]))

    def pop(self, stmt: Pop) -> None:
        if not self.queues[stmt.queue]:
            raise UnorderedUnits(
                f"{stmt.target} waits in queue {stmt.queue} for a token that {stmt.source} never pushes"
            )
        known, when = self.queues[stmt.queue].popleft()
        mine = self.known[stmt.target]
        for unit, count in known.items():
            mine[unit] = max(mine[unit], count)
        self.now[stmt.target] = max(self.now[stmt.target], when)

    def end(self) -> None:
        left = [queue for queue, tokens in self.queues.items() if tokens]
        if left:
            raise UnorderedUnits(f"tokens are left in queues {left}")

    def reads_element(self, buffer: Buffer, index: int) -> None:
        if self.unit is None:
            return
        self._check(buffer, index, [self.writes.get((buffer, index))], "written")
        self.reads[buffer, index][self.unit] = self.done[self.unit]

    def writes_element(self, buffer: Buffer, index: int) -> None:
        if self.unit is None:
            return
        key = buffer, index
        self._check(buffer, index, [self.writes.get(key)], "written")
        self._check(buffer, index, list(self.reads[key].items()), "read")
        self.writes[key] = self.unit, self.done[self.unit]
        self.reads[key].clear()

    def _check(self, buffer: Buffer, index: int, before: list[tuple[Unit, int] | None], what: str) -> None:
        assert self.unit is not None
        for each in before:
            if each is not None and self.known[self.unit][each[0]] < each[1]:
                raise UnorderedUnits(
                    f"{buffer.name}[{index}] was {what} by {each[0]} and is accessed by {self.unit} without waiting"
                )
