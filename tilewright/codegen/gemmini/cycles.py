"""How many cycles a program takes: load, execute and store units behind a reservation station, one bus to DRAM.

Nothing is computed, and time does not pass cycle by cycle. An operation's times follow from those of operations before
it: it enters the station when an entry is free, is issued when what it depends on is complete, and runs when its unit
is free. Only the bus has to be followed in order, where a load and a store share it: they take turns, beat by beat.
Whatever is not known yet waits for the next operation that leaves the bus.

The constants are those of `hw/gemmini_timing.py`. With them, cycles are those of our RTL.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_timing import GemminiTiming
from tilewright.runtime.gemmini.isa import ACCUMULATOR, FULL, MVINS, NONE, ROW_MASK, Instruction, make
from tilewright.runtime.gemmini.unroll import decoded
from tilewright.runtime.gemmini.verify import verify
from tilewright.support.arith import ceil_div

_LOAD, _EXECUTE, _STORE = range(3)
_NEVER = 1 << 62
_Range = tuple[int, int]  # rows from the first on, before the last
_NOTHING: _Range = (0, 0)


class _Op:
    """An operation of a unit. `beats`: of one burst on the bus, before which a store gathers for `gather` cycles."""

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
    program: Sequence[Instruction], machine: GemminiMachine, timing: GemminiTiming | None = None
) -> Cycles:
    """Raise InstructionError if the machine cannot execute the program."""
    verify(program, machine)
    return _Simulation(machine, timing or GemminiTiming()).run(_operations(program, machine))


# -- operations -------------------------------------------------------------------------------------------------------

_FENCE = "fence"


def _operations(program: Sequence[Instruction], machine: GemminiMachine) -> Iterator[_Op | str | None]:
    """What the decoder does in each cycle: an operation for a unit, a fence, or nothing that takes time."""
    dim, bus = machine.dim, int(machine.dram_bytes_per_cycle)
    bank = ceil_div(machine.scratchpad_rows, machine.scratchpad_banks)
    loads: dict[int, Instruction] = {}
    store = make("config_st")
    a_stride, target = 1, 0
    for instruction in decoded(program, machine):
        if instruction is None:
            yield None
            continue
        name = instruction.name
        if name == "compute_preloaded" or name == "compute_accumulated":
            a, _, rows, _ = instruction.values
            last = a + (rows - 1) * a_stride
            row = target & ROW_MASK
            op = _Op(_EXECUTE, (a, last + 1), (row, row + rows))
            op.rows = rows
            op.bank = (a // bank, last // bank)
            yield op
        elif name == "preload":
            b, _, rows, target, _, _ = instruction.values
            if b == NONE:
                yield None
                continue
            op = _Op(_EXECUTE, (b, b + rows), _NOTHING)
            op.preload = True
            op.bank = (b // bank, (b + rows - 1) // bank)
            yield op
        elif name in MVINS:
            dram, local, cols, rows = instruction.values
            config = loads[MVINS.index(name)]
            blocks = ceil_div(cols, dim)
            first = local & ROW_MASK
            held = (first, first + (blocks - 1) * config["block_stride"] + rows)
            in_accumulator = bool(local & ACCUMULATOR)
            op = _Op(_LOAD, _NOTHING, held) if in_accumulator else _Op(_LOAD, held, _NOTHING)
            element = 4 if in_accumulator and not config["shrunk"] else 1
            whole, rest = divmod(cols, dim)
            beats = whole * ceil_div(dim * element, bus) + ceil_div(rest * element, bus)
            op.beats = rows * (beats if dram else blocks)
            yield op
        elif name == "mvout":
            _, local, cols, rows = instruction.values
            pool = store["pool_size"]
            first = local & ROW_MASK
            held = (first, first + (store["rows_in"] * store["cols_in"] if pool else rows))
            op = _Op(_STORE, _NOTHING, held) if local & ACCUMULATOR else _Op(_STORE, held, _NOTHING)
            wide = local & ACCUMULATOR and local & FULL
            op.beats = ceil_div(cols * (4 if wide else 1), bus)
            if pool:
                op.bursts, op.gather = store["rows_out"] * store["cols_out"], pool * pool
            else:
                op.beats *= rows
            yield op
        elif name in (_FENCE, "flush"):
            a_stride = 1 if name == "flush" else a_stride
            yield _FENCE
        else:
            if name == "config_ex":
                a_stride = instruction["a_stride"]
            elif name == "config_ld":
                loads[instruction["slot"]] = instruction
            elif name == "config_st":
                store = instruction
            yield None


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
        # The bus: the next cycle that nobody has, whose turn it is, and the operations of the load and the store unit.
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
        """The cycle in which it enters the station, from `now` on."""
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
        """Entries become free in order, one a cycle."""
        op.done = done
        unit, pending = op.unit, self.pending[op.unit]
        while pending and pending[0].done >= 0:
            at = max(pending.popleft().done, self.last_freed[unit]) + 1
            self.last_freed[unit] = at
            self.freed[unit].append(at)

    # -- units ----------------------------------------------------------------------------------------------------

    def _issue_all(self) -> None:
        """All that can be told without the bus."""
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
        """Two operations wait in front of the array. A compute and the preload behind it start together where both
        wait and they read different banks."""
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
        """Until all that has entered is complete."""
        while any(self.pending):
            self._advance()

    def _advance(self) -> None:
        """One more operation leaves the bus."""
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
        """Which unit's operation has its last beat next, and when."""
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
        """Both want the bus, until one is done."""
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
    """Whether all that it depends on has an end."""
    waits = op.waits
    while waits:
        done = waits[-1].done
        if done < 0:
            return False
        op.ready = max(op.ready, done + 1)
        waits.pop()
    return True
