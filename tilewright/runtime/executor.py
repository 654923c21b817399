"""Run a plan: bind constants and kernels once; each call is then one entry into native code.

Calls may come from several Python threads at once. Each uses its own `Frame` (an arena and the table of base
pointers) from a free list that grows as needed; the GIL is released while kernels run.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import mmap
import statistics
import struct
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import ModelSizeError, VerificationError
from tilewright.runtime import host, native, threads
from tilewright.runtime.loader import Library, load_objects
from tilewright.runtime.plan import ALIGNMENT, Place, Plan, Step, TensorSpec
from tilewright.support.memory import available_memory

_KEPT_FRAMES = 16  # arenas kept for reuse; more concurrent calls than this allocate and free
_SCARCE = 1 << 30  # from this size on, check first: overcommitted memory would end the process
_HUGE = 2 << 20  # from this size on, use huge pages if the system has them


def aligned_empty(size: int) -> np.ndarray:
    """`size` uninitialised bytes, 64-byte aligned."""
    if size >= _SCARCE and size > available_memory():
        raise _no_memory(size)
    if size >= _HUGE:
        # Private: memory shared with forked children would let parent and child overwrite each other.
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise _no_memory(size) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, dtype=np.uint8)
    slack = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -slack.ctypes.data % ALIGNMENT
    return slack[start : start + size]


def _no_memory(size: int) -> ModelSizeError:
    return ModelSizeError(
        f"{size} bytes of memory for a model's values are more than this process may take",
        remedy="free memory, or compile the model for a smaller batch",
    )


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """A contiguous copy, 64-byte aligned."""
    copy = aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def content_key(array: np.ndarray) -> Hashable:
    """Equal for arrays of equal type, shape and bytes, and for no others."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.dtype.name, array.shape, hashlib.sha256(data.data).digest()


class Frame:
    """The private state of one call."""

    def __init__(self, executor: Executor) -> None:
        self.arena = aligned_empty(max(executor.plan.memory.arena_bytes, ALIGNMENT))
        self.bases = (ctypes.c_void_p * executor.base_count)(*executor.fixed_bases)
        self.bases[executor.arena_base] = self.arena.ctypes.data
        code = native.native()
        self.call = native.NativeCall(
            threads=1,
            steps=ctypes.addressof(executor.steps),
            bases=ctypes.addressof(self.bases),
            most_arguments=executor.most_arguments,
            clock=code.clock,
            clock_id=code.clock_id,
        )
        self.address = ctypes.addressof(self.call)
        self.threads = 1  # requested from the launcher, in the type of `call`
        self.launcher: threads.Launcher | None = None

    def spread(self, count: int) -> None:
        """Use `count` threads of this process's launcher."""
        launcher = threads.launcher() if count > 1 else None
        if launcher is self.launcher and count == self.threads:
            return
        self.call.launcher = launcher.address if launcher else None
        self.call.threads = launcher.prepare(count) if launcher else count
        self.launcher, self.threads = launcher, count


class Executor:
    """A plan, ready to run. `objects`: digest -> object code."""

    def __init__(
        self,
        plan: Plan,
        constants: Sequence[np.ndarray],
        objects: Mapping[str, bytes],
        threads: int | None = None,
    ) -> None:
        plan.validate()
        self.plan = plan
        self._check_target()
        self.constants = _bind_constants(plan, constants)
        self._library = self._loaded(objects)
        self.objects = {digest: bytes(objects[digest]) for digest in sorted(set(plan.kernels.values()))}
        self.threads = threads or 0

        # Base pointers: inputs, outputs, the arena, constants.
        self._inputs, self._outputs = len(plan.inputs), len(plan.outputs)
        self.arena_base = self._inputs + self._outputs
        self.base_count = self.arena_base + 1 + len(self.constants)
        pointers = [constant.ctypes.data for constant in self.constants]
        self.fixed_bases = [None] * (self.arena_base + 1) + pointers
        self.most_arguments = max((len(step.arguments) for step in plan.steps), default=1)
        self._places: list[ctypes.Array[native.NativePlace]] = []
        self.steps = (native.NativeStep * max(len(plan.steps), 1))(*map(self._pack, plan.steps))

        self._store_bases = struct.Struct(f"{self.arena_base}P").pack_into
        self._run = native.native().run
        self._count = len(plan.steps)
        self._free: deque[Frame] = deque(maxlen=_KEPT_FRAMES)

    def _check_target(self) -> None:
        host.check(self.plan.target)

    def _loaded(self, objects: Mapping[str, bytes]) -> Mapping[str, int] | Library:
        """The address of each kernel, by its symbol."""
        return load_objects(objects, self.plan.kernels)

    def _run_range(self, frame: Frame, first: int, last: int) -> None:
        self._run(frame.address, first, last)

    @property
    def threads(self) -> int:
        """The number of threads of a call."""
        return self._threads

    @threads.setter
    def threads(self, count: int | None) -> None:
        self._threads = threads.resolve(count)

    def _pack(self, step: Step) -> native.NativeStep:
        places = (native.NativePlace * len(step.arguments))()
        for index, place in enumerate(step.arguments):
            places[index].base = self._base_of(place)
            places[index].offset = place.offset
        self._places.append(places)
        return native.NativeStep(
            self._library[step.kernel], step.extent, len(places), ctypes.addressof(places)
        )

    def _base_of(self, place: Place) -> int:
        if place.space == "input":
            return place.index
        if place.space == "output":
            return self._inputs + place.index
        if place.space == "arena":
            return self.arena_base
        return self.arena_base + 1 + place.index

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Compute `outputs` from `inputs`: contiguous arrays of the plan's types and shapes."""
        _check_arrays("input", self.plan.inputs, inputs)
        _check_arrays("output", self.plan.outputs, outputs)
        self.run_addresses(_addresses(inputs, outputs))

    def run_addresses(self, addresses: Sequence[int]) -> None:
        """Like `run`, with data addresses, inputs first, and no checks: the fast path of `CompiledModel`."""
        frame = self._take(addresses)
        try:
            self._run_range(frame, 0, self._count)
        finally:
            self._free.append(frame)

    def time_range(
        self, inputs: Sequence[int], outputs: Sequence[int], first: int = 0, last: int | None = None
    ) -> list[float]:
        """Like `run_addresses`, for the steps in [first, last); returns the seconds of each, measured in
        native code."""
        last = self._count if last is None else last
        times = (ctypes.c_int64 * max(self._count, 1))()
        frame = self._take([*inputs, *outputs])
        frame.call.times = ctypes.addressof(times)
        try:
            self._run_range(frame, first, last)
        finally:
            frame.call.times = None
            self._free.append(frame)
        return [nanoseconds * 1e-9 for nanoseconds in times[first:last]]

    def step_timer(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
    ) -> Callable[[], list[float]]:
        """A function that runs the plan on these arrays and returns the seconds of each step."""
        given, taken = ([array.ctypes.data for array in arrays] for arrays in (inputs, outputs))
        kept = (inputs, outputs)  # kept alive while their addresses are used

        def run() -> list[float]:
            assert kept
            return self.time_range(given, taken)

        return run

    def _take(self, addresses: Sequence[int]) -> Frame:
        try:
            frame = self._free.pop()  # the most recent one, whose arena is still in the caches
        except IndexError:
            frame = Frame(self)
        self._store_bases(frame.bases, 0, *addresses)
        frame.spread(self._threads)
        return frame

    def summary(self) -> str:
        """The part of the plan that an accelerator runs, for `explain`; "" if there is none."""
        return ""

    # -- looking inside --------------------------------------------------------------------------------------------

    def new_outputs(self) -> list[np.ndarray]:
        return [np.empty(spec.shape, DType.parse(spec.dtype).numpy) for spec in self.plan.outputs]

    def trace(self, inputs: Sequence[np.ndarray]) -> Iterator[tuple[Step, list[np.ndarray], np.ndarray]]:
        """Run step by step; yield each step with its inputs and its output.

        The arrays are views of the memory in use: they are valid until the next step; copy them to keep them.
        """
        _check_arrays("input", self.plan.inputs, inputs)
        outputs = self.new_outputs()
        frame = self._take(_addresses(inputs, outputs))
        spaces = {"input": inputs, "output": outputs, "constant": self.constants, "arena": (frame.arena,)}
        try:
            for index, step in enumerate(self.plan.steps):
                self._run_range(frame, index, index + 1)
                info = self.plan.tasks[step.task]
                views = [
                    _view(spaces[place.space][place.index], place.offset, spec)
                    for place, spec in zip(step.arguments, (*info.inputs, info.output), strict=True)
                ]
                yield step, views[:-1], views[-1]
        finally:
            self._free.append(frame)

    def time_steps(self, inputs: Sequence[np.ndarray], repeats: int = 10) -> list[float]:
        """Seconds per step, each the median over `repeats` runs of the whole plan, measured in native code."""
        _check_arrays("input", self.plan.inputs, inputs)
        outputs = self.new_outputs()
        addresses = _addresses(inputs, outputs)
        self.run_addresses(addresses)
        frame = self._take(addresses)
        times = np.zeros((max(repeats, 1), max(self._count, 1)), dtype=np.int64)
        try:
            for row in times:
                frame.call.times = row.ctypes.data
                self._run_range(frame, 0, self._count)
        finally:
            frame.call.times = None
            self._free.append(frame)
        return [statistics.median(times[:, index].tolist()) * 1e-9 for index in range(self._count)]


def _addresses(*groups: Sequence[np.ndarray]) -> list[int]:
    return [array.ctypes.data for arrays in groups for array in arrays]


def _view(memory: np.ndarray, offset: int, spec: TensorSpec) -> np.ndarray:
    flat = memory.reshape(-1).view(np.uint8)
    return flat[offset : offset + spec.bytes].view(DType.parse(spec.dtype).numpy).reshape(spec.shape)


def _bind_constants(plan: Plan, constants: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The constants, contiguous and aligned, copied only if necessary."""
    _check_arrays("constant", plan.constants, constants, dense=False)
    bound = []
    for constant in constants:
        ready = constant.flags.c_contiguous and constant.ctypes.data % ALIGNMENT == 0
        bound.append(constant if ready else aligned_copy(constant))
    return bound


def _check_arrays(
    what: str, specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], dense: bool = True
) -> None:
    if len(specs) != len(arrays):
        raise VerificationError(f"{len(arrays)} {what}s for a plan with {len(specs)}")
    for index, (spec, array) in enumerate(zip(specs, arrays, strict=True)):
        if array.dtype != DType.parse(spec.dtype).numpy or array.size != math.prod(spec.shape):
            raise VerificationError(
                f"{what} {index} ({spec.name}): expected {spec}, got {array.dtype}{array.shape}"
            )
        if dense and not array.flags.c_contiguous:
            raise VerificationError(f"{what} {index} ({spec.name}) is not contiguous")
