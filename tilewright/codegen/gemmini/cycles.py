"""Simulates the cycles of a program: load, execute and store units with a reservation station, and one bus to DRAM.

No data are computed, and the simulation does not step through cycles. An operation's times follow from those of earlier
operations: it enters the station when an entry is free, is issued when its dependences are complete, and runs when its
unit is free. Only the bus is simulated in order when a load and a store share it: they alternate, beat by beat. Times
that are not known yet are determined when the next operation leaves the bus.

The constants are those of `hw/gemmini_timing.py`. With them, the cycles equal those of the RTL in this repository.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_timing import GemminiTiming
from tilewright.runtime.gemmini.isa import (
    ACCUMULATOR,
    COMPUTES,
    FULL,
    LOOPS,
    MVINS,
    NONE,
    ROW_MASK,
    Instruction,
    encode,
)
from tilewright.runtime.gemmini.unroll import decoded
from tilewright.runtime.gemmini.verify import verify_table
from tilewright.runtime.gemmini.words import WordTable
from tilewright.support.arith import ceil_div

_LOAD, _EXECUTE, _STORE = range(3)
_NEVER = 1 << 62
_Range = tuple[int, int]  # rows from the first on, before the last
_NOTHING: _Range = (0, 0)


class _Op:
    """An operation of a unit. `beats`: of one burst on the bus; before each burst, a store gathers data for `gather`
    cycles."""

    __slots__ = (
        "accumulator",
        "bank",
        "beats",
        "bursts",
        "done",
        "gather",
        "preload",
        "ready",
        "rows",
        "scratchpad",
        "unit",
        "waits",
    )

    def __init__(self, unit: int, scratchpad: _Range, accumulator: _Range) -> None:
        self.unit = unit
        self.scratchpad = scratchpad
        self.accumulator = accumulator
        self.rows = 0
        self.preload = False
        self.bank = (0, 0)  # of the scratchpad: the first and the last that it reads
        self.beats = 0
        self.bursts = 1
        self.gather = 0
        self.ready = 0  # when it may be issued, as far as is known
        self.waits: list[_Op] = []  # what it depends on, of unknown end
        self.done = -1  # -1: not known


@dataclass(frozen=True)
class Cycles:
    """`busy`: cycles of the array (`execute`) and beats on the bus (`load`, `store`)."""

    total: int
    instructions: int
    busy: dict[str, int] = field(default_factory=dict)

    def share(self, unit: str) -> float:
        """The share of all cycles in which the unit is busy: the array computes, or the bus moves data."""
        return self.busy[unit] / max(self.total, 1)


def simulate(
    program: Sequence[Instruction] | np.ndarray, machine: GemminiMachine, timing: GemminiTiming | None = None
) -> Cycles:
    """The cycles of a program, given as instructions or as their words. Raises InstructionError if the machine cannot
    execute it."""
    table = WordTable(program if isinstance(program, np.ndarray) else encode(program))
    verify_table(table, machine)
    return _Simulation(machine, timing or GemminiTiming()).run(_operations(table, machine))


# -- operations -------------------------------------------------------------------------------------------------------

_FENCE = "fence"


def _operations(table: WordTable, machine: GemminiMachine) -> list[_Op | str | None]:
    """The decoder's result in each cycle: an operation for a unit, a fence, or nothing that takes time."""
    if not table.positions(*LOOPS).size:
        return _primitive(table, machine)
    steps = list(decoded(table.instructions(), machine))
    plain = WordTable(encode(step for step in steps if step is not None))
    made = iter(_primitive(plain, machine))
    return [None if step is None else next(made) for step in steps]


def _primitive(table: WordTable, machine: GemminiMachine) -> list[_Op | str | None]:
    made: list[_Op | str | None] = [None] * len(table)
    for at in table.positions(_FENCE, "flush").tolist():
        made[at] = _FENCE
    bank = ceil_div(machine.scratchpad_rows, machine.scratchpad_banks)
    _computes(table, bank, made)
    for slot, name in enumerate(MVINS):
        _loads(table, slot, name, machine, made)
    _stores(table, machine, made)
    return made


def _computes(table: WordTable, bank: int, made: list[_Op | str | None]) -> None:
    loaded, weights = table.positions("preload"), table.fields("preload")
    own = weights["b"] != NONE
    b, rows = weights["b"][own], weights["rows"][own]
    preloads = (loaded[own], b, b + rows, b // bank, (b + rows - 1) // bank)
    for at, first, last, low, high in zip(*(column.tolist() for column in preloads), strict=True):
        made[at] = op = _Op(_EXECUTE, (first, last), _NOTHING)
        op.preload = True
        op.bank = (low, high)

    at_computes = table.positions(*COMPUTES)
    found = table.fields(COMPUTES[0], at_computes)
    target = weights["c"][np.searchsorted(loaded, at_computes) - 1] & ROW_MASK
    # A flush sets the stride to 1.
    changes, strides = table.positions("config_ex", "flush"), np.ones(1, np.int64)
    if changes.size:
        of = np.searchsorted(table.positions("config_ex"), changes)
        given = np.append(table.fields("config_ex")["a_stride"], 1)
        strides = np.append(strides, np.where(table.named("flush", changes), 1, given[of]))
    stride = strides[np.searchsorted(changes, at_computes)]
    a, rows = found["a"], found["rows"]
    last = a + (rows - 1) * stride
    columns = (at_computes, a, last, target, rows, a // bank, last // bank)
    for at, first, end, row, count, low, high in zip(*(column.tolist() for column in columns), strict=True):
        made[at] = op = _Op(_EXECUTE, (first, end + 1), (row, row + count))
        op.rows = count
        op.bank = (low, high)


def _loads(
    table: WordTable, slot: int, name: str, machine: GemminiMachine, made: list[_Op | str | None]
) -> None:
    at, found = table.positions(name), table.fields(name)
    if not at.size:
        return
    dim, bus = machine.dim, machine.bus_bytes
    configured, config = table.positions("config_ld"), table.fields("config_ld")
    mine = config["slot"] == slot
    of = np.searchsorted(configured[mine], at) - 1
    rows, cols, local = found["rows"], found["cols"], found["local"]
    blocks, first = -(-cols // dim), local & ROW_MASK
    last = first + (blocks - 1) * config["block_stride"][mine][of] + rows
    inside = local & ACCUMULATOR != 0
    element = np.where(inside & (config["shrunk"][mine][of] == 0), 4, 1)
    whole, rest = np.divmod(cols, dim)
    beats = whole * -(-dim * element // bus) + -(-rest * element // bus)
    beats = rows * np.where(found["dram"] != 0, beats, blocks)
    columns = (at, first, last, inside, beats)
    for number, low, high, in_accumulator, count in zip(*(each.tolist() for each in columns), strict=True):
        held = (low, high)
        op = _Op(_LOAD, _NOTHING, held) if in_accumulator else _Op(_LOAD, held, _NOTHING)
        op.beats = count
        made[number] = op


def _stores(table: WordTable, machine: GemminiMachine, made: list[_Op | str | None]) -> None:
    at, found = table.positions("mvout"), table.fields("mvout")
    if not at.size:
        return
    bus = machine.bus_bytes
    config = table.fields("config_st")
    of = np.searchsorted(table.positions("config_st"), at) - 1
    pool = config["pool_size"][of]
    local, rows = found["local"], found["rows"]
    first = local & ROW_MASK
    last = first + np.where(pool > 0, config["rows_in"][of] * config["cols_in"][of], rows)
    inside = local & ACCUMULATOR != 0
    beats = -(-found["cols"] * np.where(inside & (local & FULL != 0), 4, 1) // bus)
    beats = np.where(pool > 0, beats, beats * rows)
    bursts = np.where(pool > 0, config["rows_out"][of] * config["cols_out"][of], 1)
    columns = (at, first, last, inside, beats, bursts, pool * pool)
    for number, low, high, in_accumulator, count, times, gather in zip(
        *(each.tolist() for each in columns), strict=True
    ):
        held = (low, high)
        op = _Op(_STORE, _NOTHING, held) if in_accumulator else _Op(_STORE, held, _NOTHING)
        op.beats, op.bursts, op.gather = count, times, gather
        made[number] = op


# -- time -------------------------------------------------------------------------------------------------------------


class _Simulation:
    def __init__(self, machine: GemminiMachine, timing: GemminiTiming) -> None:
        self.dim, self.latency = machine.dim, timing.dram_latency
        self.size = (timing.load_entries, timing.execute_entries, timing.store_entries)
        # Of each unit: its last operations in the station, those that are not issued, and when an entry becomes free.
        self.held: tuple[deque[_Op], ...] = tuple(deque(maxlen=size) for size in self.size)
        self.queue: tuple[deque[_Op], ...] = (deque(), deque(), deque())
        self.freed: tuple[deque[int], ...] = (deque(), deque(), deque())
        self.pending: tuple[deque[_Op], ...] = (deque(), deque(), deque())
        self.last_freed = [-1, -1, -1]
        self.entered = [0, 0, 0]
        self.busy: Counter[str] = Counter()
        # The execute unit: the operation that started last, when, when the array is free, and two that were before it.
        self.before: _Op | None = None
        self.issued = -1
        self.started = [-1, -1]
        self.free = -1
        # The bus: its next free cycle, whose turn it is, and the operations of the load and the store unit.
        self.bus = 0
        self.store_first = False
        self.current: list[_Op | None] = [None, None]
        self.active = [_NEVER, _NEVER]  # from when on they want the bus
        self.beats = [0, 0]
        self.unit_free = [-1, -1]

    def run(self, operations: Iterable[_Op | str | None]) -> Cycles:
        now = -1  # when the last instruction was decoded
        count = 0
        for op in operations:
            count += 1
            if op is None:
                now += 1
            elif isinstance(op, str):
                self._settle()
                now = max(now, *self.last_freed) + 1
            else:
                now = self._enter(op, now + 1)
        self._settle()
        return Cycles(max(now, *self.last_freed) + 1, count, dict(self.busy))

    # -- the station ----------------------------------------------------------------------------------------------

    def _enter(self, op: _Op, now: int) -> int:
        """The first cycle from `now` on in which the operation can enter the station."""
        unit = op.unit
        if self.entered[unit] >= self.size[unit]:
            freed = self.freed[unit]
            while not freed:
                self._advance()
            now = max(now, freed.popleft() + 1)
        self.entered[unit] += 1
        low, high = op.scratchpad
        acc_low, acc_high = op.accumulator
        ready = now + 1
        waits = op.waits
        for other in range(3):
            if other == unit:
                continue
            both = other == _LOAD or unit == _LOAD
            for held in self.held[other]:
                if 0 <= held.done < ready:
                    continue
                first, last = held.accumulator
                if not (first < acc_high and acc_low < last):
                    first, last = held.scratchpad
                    if not (both and first < high and low < last):
                        continue
                if held.done < 0:
                    waits.append(held)
                else:
                    ready = held.done + 1
        op.ready = ready
        self.held[unit].append(op)
        self.queue[unit].append(op)
        self.pending[unit].append(op)
        self._issue_all()
        return now

    def _ends(self, op: _Op, done: int) -> None:
        """Entries become free in order, one per cycle."""
        op.done = done
        unit, pending = op.unit, self.pending[op.unit]
        while pending and pending[0].done >= 0:
            at = max(pending.popleft().done, self.last_freed[unit]) + 1
            self.last_freed[unit] = at
            self.freed[unit].append(at)

    # -- units ----------------------------------------------------------------------------------------------------

    def _issue_all(self) -> None:
        """Determine all times that do not depend on the bus."""
        queue = self.queue[_EXECUTE]
        while queue and _is_known(queue[0]):
            self._execute(queue.popleft())
        for at, unit in enumerate((_LOAD, _STORE)):
            queue = self.queue[unit]
            if self.current[at] is None and queue and _is_known(queue[0]):
                op = queue.popleft()
                issued = max(op.ready, self.unit_free[at])
                self.current[at] = op
                self.active[at] = issued + 1 + op.gather
                self.beats[at] = op.beats

    def _execute(self, op: _Op) -> None:
        """Two operations can wait at the array. A compute and the following preload start together if both are waiting
        and they read different banks."""
        issued = max(op.ready, self.issued + 1, self.started[0])
        before = self.before
        start = max(issued + 1, self.free)
        if op.preload:
            if before is not None and not before.preload and issued < self.started[1]:
                a, b = before.bank, op.bank
                if a[1] < b[0] or b[1] < a[0]:
                    start = self.started[1]
                    self.busy["execute"] -= before.rows
            length = self.dim
            done = start + length
        else:
            length = op.rows
            done = start + length + 2 * self.dim + 1
        self.busy["execute"] += length
        self.free = start + length
        self.issued = issued
        self.started = [self.started[1], start]
        self.before = op
        self._ends(op, done)

    # -- the bus --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Simulate until every operation in the station is complete."""
        while any(self.pending):
            self._advance()

    def _advance(self) -> None:
        """Complete the next operation on the bus."""
        at, last = self._next_on_bus()
        op = self.current[at]
        assert op is not None
        self.current[at] = None
        self.active[at] = _NEVER
        self.unit_free[at] = last
        self.busy["store" if at else "load"] += op.beats * op.bursts
        self._ends(op, last + self.latency)
        self._issue_all()

    def _next_on_bus(self) -> tuple[int, int]:
        """The unit whose operation has its last beat next, and when."""
        while True:
            load, store = max(self.bus, self.active[0]), max(self.bus, self.active[1])
            if load == store:
                finished, last = self._in_turns(load)
            else:
                finished, other = (0, store) if load < store else (1, load)
                start = min(load, store)
                count = min(self.beats[finished], other - start)
                self.beats[finished] -= count
                self.store_first = finished == 0
                self.bus = start + count
                if self.beats[finished]:
                    continue
                last = self.bus - 1
            op = self.current[finished]
            assert op is not None
            if finished and op.bursts > 1:  # counted down: an operation passes here once
                op.bursts -= 1
                self.busy["store"] += op.beats
                self.beats[1] = op.beats
                self.active[1] = last + 1 + op.gather
                continue
            return finished, last

    def _in_turns(self, start: int) -> tuple[int, int]:
        """Alternate the beats of two operations until one of them is complete."""
        first = int(self.store_first)
        second = 1 - first
        if self.beats[first] <= self.beats[second]:
            finished, taken = first, self.beats[first]
            self.beats[second] -= taken - 1
            self.bus = start + 2 * taken - 1
        else:
            finished, taken = second, self.beats[second]
            self.beats[first] -= taken
            self.bus = start + 2 * taken
        self.beats[finished] = 0
        self.store_first = finished == 0
        return finished, self.bus - 1


def _is_known(op: _Op) -> bool:
    """Whether the ends of all its dependences are known."""
    waits = op.waits
    while waits:
        done = waits[-1].done
        if done < 0:
            return False
        op.ready = max(op.ready, done + 1)
        waits.pop()
    return True
