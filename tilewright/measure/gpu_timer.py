"""Validation and timing on an NVIDIA GPU: a candidate is loaded as a plan, validated on the GPU, and run as a CUDA
graph.

Every buffer lies between guards. Results, guards and the shared memory of all multiprocessors are filled with NaN
before each case, inputs must be unchanged afterwards, and every element is compared with its own bound, on the GPU. A
candidate without library calls must give the same bits again, also with other values in guards and shared memory. Only
then is it timed: a CUDA graph repeats it, so that launches do not count, and its operands are in L2 if they fit.

A candidate may crash, hang or corrupt its context: then the process ends, and one candidate is lost.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import DeviceError
from tilewright.measure.gpu_checks import Checks, Disturbance, Uploaded, guard_table
from tilewright.measure.gpu_reference import GpuReference
from tilewright.measure.kernels import packed
from tilewright.measure.single import Built, KernelRun, plan_of
from tilewright.measure.timing import (
    HEARTBEAT_SECONDS,
    RACE_ROUNDS,
    CandidateFailed,
    LoadTask,
    SendHeartbeat,
    Timed,
    Times,
)
from tilewright.measure.validation import CheckCase, OutOfBoundsWrite, Validation, WrongResult
from tilewright.runtime.cuda.device import Device
from tilewright.runtime.cuda.executor import GpuExecutor

_GUARD = 4096  # bytes on both sides of every buffer
_POISON = 0xFF
# Byte patterns for guards and shared memory: NaN, and very large positive and negative numbers in every float type,
# because a maximum or minimum that reads them may drop NaN.
SURROUNDINGS = (_POISON, 0x7B, 0xFB)
_GRAPH_SECONDS = 4e-4  # of one graph: a candidate is repeated until it takes about this long
_MAX_REPEATS = 20
_MAX_TURNS = 15  # of interleaved timing: the GPU's speed hardly changes
_KEPT = 48  # candidates that stay loaded
_KEPT_BYTES = 8 << 30  # of their buffers and of inputs on the GPU

# Error messages of the driver and the framework, and the kind of failure that each means.
_KINDS = {
    "out_of_memory": "memory",
    "out of memory": "memory",
    "illegal_address": "illegal",
    "illegal memory access": "illegal",
    "misaligned": "illegal",
    "invalid_address_space": "illegal",
    "invalid_pc": "illegal",
    "launch_failed": "crash",
    "unspecified launch failure": "crash",
    "illegal_instruction": "crash",
    "hardware_stack_error": "crash",
    "assert": "crash",
    "launch_timeout": "timeout",
}


@dataclass
class _Candidate:
    """A built candidate on the GPU. `timed`: the plan that repeats it, once it is timed."""

    built: Built
    once: GpuExecutor
    error: float
    repeats: int = 1
    timed: GpuExecutor | None = None

    @property
    def bytes(self) -> int:
        found = [self.once, *([] if self.timed is None else [self.timed])]
        return sum(executor.loaded().block.size for executor in found)


class GpuTimer:
    def __init__(self, task: LoadTask, validation: Validation, heartbeat: SendHeartbeat) -> None:
        self._task, self._validation, self._heartbeat = task, validation, heartbeat
        if task.machine.libraries:
            import torch  # the libraries come with it

            torch.empty(1, device=f"cuda:{task.device}")
        self._device = Device(task.device)
        self._disturbance = Disturbance(task.device)
        self._checks = Checks(task.device)
        self._reference = GpuReference(task.device)
        self._cases = [_CardCase(case, self._device, self._checks) for case in validation.cases]
        self._by_digest: OrderedDict[str, _Candidate] = OrderedDict()
        self._numbered: dict[int, str] = {}

    # -- requests -------------------------------------------------------------------------------------------------

    def check(self, number: int, built: Built, keep: Sequence[int]) -> float:
        digest = hashlib.sha256(msgspec.msgpack.encode(built)).hexdigest()
        self._numbered = {n: d for n, d in self._numbered.items() if n in keep}
        if digest not in self._by_digest:
            with self._failing():
                self._make_room()
                self._by_digest[digest] = self._checked(built)
        self._by_digest.move_to_end(digest)
        self._numbered[number] = digest
        return self._by_digest[digest].error

    def time(self, number: int, best: float | None) -> Timed:
        with self._failing():
            run = self._timed(number)
            times = Times(best)
            before = self._reference.seconds()
            begin = time.perf_counter()
            while not times.suffice(time.perf_counter() - begin):
                self._heartbeat(True)
                times.add(run(), before, True)
            reference = (before + self._reference.seconds()) / 2
            return msgspec.structs.replace(times.result(), reference=reference)

    def race(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]:
        with self._failing():
            runs = [self._timed(number) for number in numbers]
            times: list[list[float]] = [[] for _ in runs]
            begin, beaten = time.perf_counter(), 0.0
            while len(times[0]) < RACE_ROUNDS or (
                len(times[0]) < _MAX_TURNS and time.perf_counter() - begin < seconds
            ):
                for each, run in zip(times, runs, strict=True):
                    if time.perf_counter() - beaten > HEARTBEAT_SECONDS:
                        self._heartbeat(True)
                        beaten = time.perf_counter()
                    each.append(run())
            return tuple(map(tuple, times))

    # -- one candidate --------------------------------------------------------------------------------------------

    def _checked(self, built: Built) -> _Candidate:
        once = self._loaded(built, 1)
        same_twice = not built.uses_library
        errors = [
            self._run_case(case, built, once, same_twice and case is self._cases[0]) for case in self._cases
        ]
        self._heartbeat(False)
        return _Candidate(built, once, errors[0])

    def _loaded(self, built: Built, repeats: int) -> GpuExecutor:
        """Load it on the GPU and run its steps once. Libraries may first search for an algorithm, which takes
        time."""
        self._heartbeat(False)
        inputs = len(built.parameters) - 1
        runs = [KernelRun(built, range(inputs), 0)] * repeats
        plan, objects = plan_of(
            runs, self._task.machine, inputs=inputs, outputs=1, numerics=self._task.numerics
        )
        # In a model, its neighbours may be library calls, so the gain from overlapping must not count.
        executor = GpuExecutor(plan, [], objects, self._task.device, dependent_launch="off", guard=_GUARD)
        if not built.uses_library:
            self._heartbeat(True)
        executor.loaded()
        self._heartbeat(True)
        return executor

    def _run_case(self, case: _CardCase, built: Built, executor: GpuExecutor, twice: bool) -> float:
        loaded, checks = executor.loaded(), self._checks
        self._heartbeat(False)
        given = [
            case.input(source, packing) for source, packing in zip(built.sources, built.packings, strict=True)
        ]
        self._heartbeat(True)
        output = built.parameters[-1]
        dtype, size = DType.parse(output.dtype), math.prod(output.shape)
        addresses = [(each.address, False) for each in given]
        self._poison(executor)
        executor.run_addresses(addresses, [(loaded.results[0], False)], loaded.stream.handle)
        loaded.stream.synchronise()
        checks.clear()
        case.compare(loaded.results[0], dtype, size)
        for position, each in zip(loaded.inputs, given, strict=True):
            checks.inputs_differ(position, each.address, each.bytes)
        guards = [(loaded.block.address + offset, count) for offset, count in loaded.guards]
        table = Uploaded(self._device, guard_table(guards))
        checks.guards_touched(table, _POISON)
        wrong, changed, touched, error = checks.read()
        if changed:
            raise OutOfBoundsWrite("it writes into its inputs")
        if touched:
            raise OutOfBoundsWrite("it writes outside of its buffers")
        if wrong:
            case.explain(self._downloaded(executor, dtype, size))
        if twice:
            self._check_bits(executor, addresses, output.bytes)
        return case.checked_l2(error)

    def _check_bits(self, executor: GpuExecutor, addresses: list[tuple[int, bool]], size: int) -> None:
        loaded = executor.loaded()
        first = self._device.block(max(1, size))
        stream = loaded.stream.handle
        self._device.copy_on(stream, first.address, loaded.results[0], size)
        for surrounding, kind in [
            *((surrounding, None) for surrounding in SURROUNDINGS),
            *((_POISON, kind) for kind in Disturbance.KINDS),
        ]:
            self._poison(executor, surrounding)
            if kind is not None:
                self._disturbance.begin(kind)
            executor.run_addresses(addresses, [(loaded.results[0], False)], stream)
            loaded.stream.synchronise()
            if kind is not None:
                self._disturbance.end()
            self._checks.clear()
            self._checks.results_differ(loaded.results[0], first.address, size)
            if not self._checks.read()[0]:
                continue
            if kind is not None:
                raise WrongResult(
                    "it computes something else while another kernel runs: a race between its threads"
                )
            if surrounding == _POISON:
                raise WrongResult("it computes something else the second time")
            raise WrongResult(
                "it computes something else where other numbers are alongside its buffers, or in shared memory before"
            )

    def _poison(self, executor: GpuExecutor, byte: int = _POISON) -> None:
        """Nothing that the candidate reads before it writes is what it should be, or what its last launch left."""
        executor.poison(byte)
        self._checks.fill_shared(byte)

    def _downloaded(self, executor: GpuExecutor, dtype: DType, size: int) -> np.ndarray:
        result = np.empty(size, dtype.numpy)
        self._device.download(result.ctypes.data, executor.loaded().results[0], result.nbytes)
        return result

    def _timed(self, number: int) -> Callable[[], float]:
        """One run of the graph: the seconds of one repeat."""
        candidate = self._by_digest[self._numbered[number]]
        if candidate.timed is None:
            self._heartbeat(True)
            once = candidate.once
            seconds = min(once.seconds_of_graph() for _ in range(3))
            candidate.repeats = max(1, min(_MAX_REPEATS, int(_GRAPH_SECONDS / max(seconds, 1e-7))))
            candidate.timed = (
                once if candidate.repeats == 1 else self._loaded(candidate.built, candidate.repeats)
            )
            self._fill(candidate)
            candidate.timed.seconds_of_graph()
        executor, repeats = candidate.timed, candidate.repeats
        return lambda: executor.seconds_of_graph() / repeats

    def _fill(self, candidate: _Candidate) -> None:
        """Upload the ordinary inputs, which are also the timed ones."""
        assert candidate.timed is not None
        loaded, built = candidate.timed.loaded(), candidate.built
        given = [
            self._cases[0].input(source, packing)
            for source, packing in zip(built.sources, built.packings, strict=True)
        ]
        addresses = [(each.address, False) for each in given]
        candidate.timed.run_addresses(addresses, [(loaded.results[0], False)], loaded.stream.handle)
        loaded.stream.synchronise()

    # -- memory and failures --------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Evict the candidates that were checked longest ago, except numbered ones."""
        kept = set(self._numbered.values())
        for digest in list(self._by_digest):
            total = sum(each.bytes for each in self._by_digest.values())
            if len(self._by_digest) < _KEPT and total < _KEPT_BYTES:
                break
            if digest not in kept:
                del self._by_digest[digest]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (DeviceError, RuntimeError) as error:
            words = (error.message if isinstance(error, DeviceError) else str(error))[:300]
            raise CandidateFailed(_kind(error), words, corrupted=self._is_spoiled()) from None

    def _is_spoiled(self) -> bool:
        try:
            self._device.synchronise()
        except DeviceError:
            return True
        return False


def _kind(error: Exception) -> str:
    """A kernel that the GPU rejects counts as one that could not be built."""
    words = str(error).lower()
    return next((kind for said, kind in _KINDS.items() if said in words), "build")


class _CardCase:
    """A case of the validation with its arrays on the GPU, each uploaded once."""

    def __init__(self, case: CheckCase, device: Device, checks: Checks) -> None:
        self._case, self._device, self._checks = case, device, checks
        self._inputs: dict[tuple[int, object], Uploaded] = {}
        self._answer: tuple[Uploaded, Uploaded] | None = None
        self._rows: Uploaded | None = None

    def input(self, source: int, packing: object) -> Uploaded:
        key = source, packing
        if key not in self._inputs:
            self._inputs[key] = self._uploaded(source, packing)
        return self._inputs[key]

    def _uploaded(self, source: int, packing: object) -> Uploaded:
        repeats = self._case.repeats
        if packing is None and repeats is not None and repeats.shapes[source] is not None:
            few = Uploaded(self._device, self._case.stored[source])
            rows = self._repeated_rows()
            row_bytes = few.bytes // len(self._case.stored[source])
            whole = Uploaded(self._device, np.empty(0, np.uint8))
            whole.bytes = row_bytes * len(repeats.rows)
            whole.block = self._device.block(whole.bytes)
            self._checks.gather(whole.address, few, rows, row_bytes, whole.bytes)
            self._device.synchronise()
            return whole
        return Uploaded(self._device, packed(self._case.input(source), packing))  # type: ignore[arg-type]

    def _repeated_rows(self) -> Uploaded:
        assert self._case.repeats is not None
        if self._rows is None:
            self._rows = Uploaded(self._device, self._case.repeats.rows.astype(np.int64))
        return self._rows

    def compare(self, result: int, dtype: DType, size: int) -> None:
        if self._answer is None:
            reference = self._case.reference.astype(np.float64)
            self._answer = (
                Uploaded(self._device, reference),
                Uploaded(self._device, self._case.allowed.astype(np.float32)),
            )
        rows = None
        if self._case.repeats is not None:
            rows = self._repeated_rows(), size // len(self._case.repeats.rows)
        self._checks.compare(result, dtype, size, *self._answer, rows, self._case.nan_spreads)

    def explain(self, result: np.ndarray) -> None:
        """Raise WrongResult with an explanation. An InternalError would mean that GPU and host disagree."""
        self._case.error(result)
        raise WrongResult(f"some elements are wrong, on {self._case.name} inputs")

    def checked_l2(self, error: float) -> float:
        return 0.0 if math.isinf(self._case.l2_bound) else self._case.checked_l2(error)
