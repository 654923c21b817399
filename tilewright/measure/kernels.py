"""Kernels in the timing process: they are loaded, checked on guarded memory, and called in rounds.

Constants are weights, which come from memory in a model, not from a cache: calls cycle through copies that together
are larger than the caches. Other inputs were just written when a model runs, and stay in place; in cold mode they and
the output cycle too.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from tilewright.hw import CpuMachine
from tilewright.measure.guarded_memory import BlockPool, GuardedMemory, GuardPages
from tilewright.measure.reference_kernel import LARGE, NAN, DriftMonitor, poison
from tilewright.measure.single import Built, KernelRun, executor_of
from tilewright.measure.timing import SendHeartbeat
from tilewright.measure.validation import CheckCase, WrongResult
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import aligned

_SLOW_CHECK = 0.25  # seconds of one run above which the check is not repeated
_BEYOND_CACHES = 1.25  # times the last-level cache: cycled copies are evicted before they are used again
_MAX_COPIES = 64
_MAX_COPIED_BYTES = 256 << 20
_WARM_SECONDS = 0.001  # of calls before the first that counts

# In a kernel's plan: two steps of the reference kernel, one of its own, and so on.
_CALL_STEP, _STEPS_OF_A_CALL = 2, 3
_ENTRY_SECONDS = 0.003  # of consecutive calls in native code
_ENTRY_CALLS = 16  # for a kernel without cycled buffers

Layout = tuple[tuple[int, ...], tuple[bool, ...]]  # sizes of buffers, and which of them cycle


class TimingSetup(Protocol):
    """The inputs and buffers that a task is timed on."""

    @property
    def machine(self) -> CpuMachine: ...

    @property
    def threads(self) -> int: ...

    @property
    def constants(self) -> tuple[int, ...]: ...

    @property
    def cold(self) -> bool: ...


class TimedKernel:
    """Object code with the task's inputs in the kernel's layout.

    Its plan is a round of calls, one per copy of the cycled buffers, with two calls of the reference kernel before
    each and after the last. All run in one entry into native code, so that no thread falls asleep. The first of the
    two wakes threads that waited for a slower one; the second counts.
    """

    def __init__(
        self,
        built: Built,
        task: TimingSetup,
        ordinary: CheckCase,
        blocks: BlockPool,
        drift_monitor: DriftMonitor,
    ) -> None:
        self._task, self._blocks, self._built = task, blocks, built
        self._ordinary = ordinary
        self._constants = frozenset(n for n, source in enumerate(built.sources) if source in task.constants)
        sizes = [aligned(spec.bytes) for spec in built.parameters]
        self._goes_round = [
            task.cold or (number in self._constants and number < len(sizes) - 1)
            for number in range(len(sizes))
        ]
        self._sizes = list(map(_roomy, sizes))
        self._copies = _copies(self._round_bytes, task.machine)
        self.round_length = self._copies if self._copies > 1 else _ENTRY_CALLS

        width = len(sizes) - 1
        reference = KernelRun(
            drift_monitor.built,
            range(self.round_length * width, self.round_length * width + 2),
            self.round_length,
        )
        steps = [reference, reference]
        for number in range(self.round_length):
            steps.append(KernelRun(built, range(number * width, (number + 1) * width), number))
            steps += [reference, reference]
        self._drift = drift_monitor
        self._executor = executor_of(
            steps,
            task.machine,
            task.threads,
            inputs=self.round_length * width + 2,
            outputs=self.round_length + 1,
        )
        self._addresses: tuple[list[int], list[int]] | None = None
        self._own: np.ndarray | None = None
        self.position = 0
        self._entry = 1  # calls per entry into native code

    @property
    def _round_bytes(self) -> int:
        return sum(size for size, goes in zip(self._sizes, self._goes_round, strict=True) if goes)

    @cached_property
    def _packed(self) -> dict[int, np.ndarray]:
        return {number: self._as_wanted(number, self._ordinary) for number in sorted(self._constants)}

    def _as_wanted(self, number: int, case: CheckCase) -> np.ndarray:
        return packed(case.input(self._built.sources[number]), self._built.packings[number])

    def _inputs(self, case: CheckCase) -> list[np.ndarray]:
        return [
            self._packed[number]
            if number in self._packed and _is_same(case.stored[source], self._ordinary.stored[source])
            else self._as_wanted(number, case)
            for number, source in enumerate(self._built.sources)
        ]

    def check(self, cases: Sequence[CheckCase], heartbeat: SendHeartbeat) -> float:
        """Run every case, and return the relative error of the first. Raises WrongResult."""
        threads, specs = self._task.threads, self._built.parameters
        guarded = GuardedMemory(self._blocks, specs)
        errors, first, quick = [], b"", True
        for case, nonsense in zip(cases, itertools.cycle((NAN, LARGE)), strict=False):
            begin = time.perf_counter()
            self._run_guarded(guarded, case, threads, nonsense, heartbeat)
            errors.append(case.error(guarded.output))
            if case is cases[0]:
                first, quick = guarded.output.tobytes(), time.perf_counter() - begin < _SLOW_CHECK
        if quick:
            other = GuardedMemory(self._blocks, specs, shifted=True, aligned_ones=self._constants)
            self._run_guarded(other, cases[0], 2 if threads == 1 else 1, LARGE, heartbeat)
            if other.output.tobytes() != first:
                raise WrongResult(
                    "it computes something else on another number of threads, or reads what it has not written"
                )
            other.release()
            inputs = self._inputs(cases[0])
            for at_end in (True, False):
                with _guard_pages().around(
                    specs, inputs, at_end=at_end, aligned_ones=self._constants
                ) as fenced:
                    addresses, output = fenced
                    self._run(addresses, threads, NAN, heartbeat)
                    if output.tobytes() != first:
                        raise WrongResult(
                            "it computes something else where other memory is alongside its buffers"
                        )
        guarded.release()
        self._executor.threads = threads
        heartbeat(False)
        return errors[0]

    def _run_guarded(
        self, guarded: GuardedMemory, case: CheckCase, threads: int, nonsense: float, heartbeat: SendHeartbeat
    ) -> None:
        inputs = self._inputs(case)
        guarded.fill(inputs)
        self._run(guarded.addresses, threads, nonsense, heartbeat)
        guarded.verify(inputs)

    def _run(self, addresses: Sequence[int], threads: int, nonsense: float, heartbeat: SendHeartbeat) -> None:
        """One call, with poisoned stacks."""
        poison(self._task.machine, threads, nonsense).run()
        heartbeat(True)
        self._executor.threads = threads
        self._executor.time_range(
            *self._filled_up([addresses] * self.round_length), _CALL_STEP, _CALL_STEP + 1
        )
        heartbeat(False)

    def _filled_up(self, sets: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The addresses of the plan's inputs and outputs: those of each call, then the reference kernel's."""
        *inputs, output = self._drift.addresses
        return (
            [address for addresses in sets for address in addresses[:-1]] + inputs,
            [*(addresses[-1] for addresses in sets), output],
        )

    @property
    def layout(self) -> Layout:
        return tuple(self._sizes), tuple(self._goes_round)

    def prepare(self, rounds: Rounds | None) -> None:
        """Make copies of the cycled buffers that together are larger than the last-level cache, or reuse those of
        another kernel of the task from `rounds`."""
        each = self._round_bytes
        size = sum(self._sizes) - each + self._copies * each
        if rounds is not None:
            memory, filled = rounds.take(self.layout, size)
        elif self._own is not None:
            return
        else:
            memory, filled = self._blocks.take(size), False
            self._own = memory
        inputs = [] if filled else self._inputs(self._ordinary)
        firsts: dict[int, np.ndarray] = {}
        end = 0

        def placed(number: int) -> int:
            nonlocal end
            begin, end = end, end + self._sizes[number]
            if number in firsts:
                memory[begin:end] = firsts[number]
            elif number < len(inputs) and inputs[number].size:
                memory[begin:end] = np.resize(inputs[number].reshape(-1).view(np.uint8), end - begin)
                firsts[number] = memory[begin:end]
            return int(memory.ctypes.data) + begin

        fixed = {number: placed(number) for number, goes in enumerate(self._goes_round) if not goes}
        numbers = range(len(self._sizes))
        sets = [[fixed[n] if n in fixed else placed(n) for n in numbers] for _ in range(self._copies)]
        self._addresses = self._filled_up(sets if self._copies > 1 else sets * self.round_length)

    def warm_up(self) -> None:
        """Run some calls that do not count, and find how many fit into one entry."""
        begin = time.perf_counter()
        spent = 0.0
        while spent < _WARM_SECONDS:
            (((taken, _, _),), spent) = self.calls(1), time.perf_counter() - begin
        self._entry = max(1, int(_ENTRY_SECONDS / max(taken, 1e-9)))

    def calls(self, most: int | None = None) -> list[tuple[float, float, float]]:
        """The next calls of the round: the seconds of each, and of the reference kernel just before and after it."""
        assert self._addresses is not None
        first = self.position
        last = min(first + (most or self._entry), self.round_length)
        self.position = last % self.round_length
        begin, end = first * _STEPS_OF_A_CALL, last * _STEPS_OF_A_CALL + _CALL_STEP
        times = self._executor.time_range(*self._addresses, begin, end)
        return [
            (times[at], times[at - 1], times[at + 2])
            for at in range(_CALL_STEP, len(times), _STEPS_OF_A_CALL)
        ]

    def release(self) -> None:
        if self._own is not None:
            self._blocks.give_back(self._own)


class Rounds:
    """The memory that kernels of a task are timed on. A second kernel with the same buffer sizes reuses the first
    one's data: the same numbers in another order, which take as long to multiply."""

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self._layout: object = None
        self._block: np.ndarray | None = None

    def release(self) -> None:
        if self._block is not None:
            self._blocks.give_back(self._block)
        self._block = None

    def take(self, layout: object, size: int) -> tuple[np.ndarray, bool]:
        """Memory, and whether it was already filled for this layout."""
        if self._block is not None and self._layout == layout:
            return self._block, True
        self.release()
        self._block, self._layout = self._blocks.take(size), layout
        return self._block, False


def packed(values: np.ndarray, packing: Packing | None) -> np.ndarray:
    """In the kernel's layout, flat."""
    return values.reshape(-1) if packing is None else packing.pack(values)


def _is_same(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether both are one array in shared memory."""
    return array.ctypes.data == other.ctypes.data


def _roomy(size: int) -> int:
    """Rounded up by at most an eighth, because a weight's size varies a little between packings."""
    return -(-size // (step := aligned(max(1, 1 << max(0, size.bit_length() - 4))))) * step


def _copies(size: int, machine: CpuMachine) -> int:
    """The number of copies that together exceed the last-level cache."""
    if not size:
        return 1
    wanted = math.ceil(_BEYOND_CACHES * machine.caches.last / size)
    return max(1, min(wanted, _MAX_COPIES, _MAX_COPIED_BYTES // size))


@lru_cache(maxsize=1)
def _guard_pages() -> GuardPages:
    return GuardPages()
