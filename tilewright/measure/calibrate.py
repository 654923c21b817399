"""Measures this machine's peak arithmetic and memory rates, through Tilewright's own code generator and threads.

The peak is measured by a loop of independent FMAs on registers, and bandwidth by summing (reads) and copying (reads
and writes) arrays. Cache sizes are measured by latency: each line of an array contains the index of the next one to
read, in random order. Over growing arrays the latency rises in steps, by a factor of three and more, while the
bandwidth of a plain loop hardly changes between L2 and L3.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np

from tilewright import knobs, te
from tilewright.dtypes import DType
from tilewright.hw import Caches, CpuMachine
from tilewright.loops.default import default_program
from tilewright.loops.formula import formula_of
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Store, block, nest
from tilewright.measure.calibration import (
    VERSION,
    Calibration,
    Capacities,
    Speeds,
    keep,
    machine_key,
)
from tilewright.measure.single import SingleKernel
from tilewright.runtime.executor import aligned_empty

_ACCUMULATORS = 12  # two ports with a latency of four or five cycles, and a margin; fits sixteen registers
# A call takes milliseconds, because starting and joining threads takes tens of microseconds.
_STEPS = 2_000_000
_ARRAY_BYTES = 256 << 20

_READ_AT_ONCE = 8  # vectors, each into its own register
_READ_BYTES = 256 << 20  # per call, whatever the array's size: milliseconds again
_SMALLEST_ARRAY = 8 << 10
_LARGEST_FIRST = 256 << 10  # bytes: no L1 is larger
_PASSES = 4  # over all sizes: the fastest counts
MIN_SHARE = 0.9  # of the processor

_POSITION = 8  # bytes of the index of the next line
_FOLLOWED = 1 << 18  # lines followed per call: half a millisecond or more
_HUGE_PAGE = 2 << 20
_CLEAR_STEP = 1.5  # a smaller change in latency says nothing about a capacity
_AGREEMENT = 1.5  # sizes grow by sqrt(2): within this factor, the system's value is more accurate


def calibrate(machine: CpuMachine) -> Calibration:
    """Measure, which takes about 15 seconds, and store the result unless the machine was busy, because stored results
    are used for a long time. It retries once, in case other work was just ending."""
    result = _measured(machine)
    if result.share < MIN_SHARE:
        result = max(result, _measured(machine), key=lambda each: each.share)
    if result.share >= MIN_SHARE:
        keep(machine, result)
    return result


def _measured(machine: CpuMachine) -> Calibration:
    before = share_of_processor(machine)
    capacities = measured_capacities(machine)
    one, every = (speeds(machine, capacities, threads) for threads in (1, machine.cores))
    share = min(before, share_of_processor(machine))
    return Calibration(VERSION, machine_key(machine), True, capacities, one, every, share)


def share_of_processor(machine: CpuMachine) -> float:
    """The share of this process's CPU time that busy threads actually get: less than 1 if others compete."""
    kernel, operands, _ = peak_kernel(machine, machine.cores)
    kernel(operands)
    begin, used = time.perf_counter(), time.process_time()
    kernel.seconds(operands)
    allowed = min(machine.cores, knobs.cgroup_cpus() or machine.cores)
    return (time.process_time() - used) / (time.perf_counter() - begin) / allowed


def speeds(machine: CpuMachine, capacities: Capacities, threads: int) -> Speeds:
    """Each thread reads its own array; that of a shared level is divided among them."""
    l2, l3 = capacities.l2, capacities.l3 or capacities.l2
    sizes = [
        capacities.l1 // 2,
        _between(capacities.l1, l2),
        max(_between(l2, l3) // threads, l3 // 4 // threads),
    ]
    l1, second, third = _read_speeds(machine, [max(size, _SMALLEST_ARRAY) for size in sizes], threads)
    memory, copy = bandwidths(machine, threads)
    flops = max(peak_flops(machine, threads) for _ in range(_PASSES))
    return Speeds(threads, flops, l1, second, third, memory, copy)


def _between(smaller: int, larger: int) -> int:
    return math.isqrt(smaller * larger)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def peak_flops(machine: CpuMachine, threads: int) -> float:
    """fp32 operations per second of plain FMAs on all `threads`."""
    kernel, operands, operations = peak_kernel(machine, threads)
    return operations / kernel.seconds(operands)


def peak_kernel(machine: CpuMachine, threads: int) -> tuple[SingleKernel, list[np.ndarray], int]:
    """The loop of FMAs, its inputs, and the operations of one call."""
    lanes = machine.lanes(DType.F32)
    kernel = SingleKernel(fma_program(lanes, threads, _STEPS), machine, threads=threads)
    operands = [np.full(lanes, 1.0, np.float32), np.full(lanes, 1e-9, np.float32)]
    return kernel, operands, 2 * lanes * _ACCUMULATORS * _STEPS * threads


def fma_program(lanes: int, iterations: int, steps: int) -> Program:
    x, y = Buffer("x", DType.F32, lanes), Buffer("y", DType.F32, lanes)
    out = Buffer("out", DType.F32, iterations * lanes * _ACCUMULATORS)
    kept = Buffer("acc", DType.F32, lanes * _ACCUMULATORS, Scope.REGISTER)
    part, step = te.Var("p", iterations), te.Var("k", steps)
    which, lane = te.Var("u", _ACCUMULATORS), te.Var("v", lanes)
    element = which * lanes + lane
    tile = [(which, Kind.UNROLL), (lane, Kind.VECTOR)]
    update = te.call("fma", te.Load(x, (lane,)), te.Load(y, (lane,)), te.Load(kept, (element,)))
    body = block(
        nest(tile, Store(kept, element, te.const(0, DType.F32))),
        nest([(step, Kind.SERIAL), *tile], Store(kept, element, update)),
        nest(tile, Store(out, part * (lanes * _ACCUMULATORS) + element, te.Load(kept, (element,)))),
    )
    return Program("multiply_add", (x, y, out), For(part, Kind.PARALLEL, body))


# -- larger than the last-level cache ---------------------------------------------------------------------------------


def bandwidths(machine: CpuMachine, threads: int) -> tuple[float, float]:
    """(read, copy) bytes per second for arrays larger than the last-level cache."""
    (reading, array), (copying, _) = read_kernel(machine, threads), copy_kernel(machine, threads)
    return array.nbytes / reading.seconds([array]), 2 * array.nbytes / copying.seconds([array])


def read_kernel(machine: CpuMachine, threads: int) -> tuple[SingleKernel, np.ndarray]:
    """A kernel that sums the rows of a large array, and the array: each call reads it once."""
    x = _large_tensor()
    (axis,) = te.reduce_axes([x.shape[1]])
    total = te.compute("total", x.shape[:1], DType.F32, lambda i: te.reduce_over("sum", x[i, axis], [axis]))
    return _of_large_array(machine, threads, total, x)


def copy_kernel(machine: CpuMachine, threads: int) -> tuple[SingleKernel, np.ndarray]:
    """A kernel that copies a large array, and the array: each call reads as many bytes as it writes."""
    x = _large_tensor()
    copy = te.compute("copy", x.shape, DType.F32, lambda i, j: x[i, j])
    return _of_large_array(machine, threads, copy, x)


def _large_tensor() -> te.Tensor:
    rows = 512
    return te.Tensor("x", (rows, _ARRAY_BYTES // 4 // rows), DType.F32)


def _of_large_array(
    machine: CpuMachine, threads: int, output: te.Tensor, x: te.Tensor
) -> tuple[SingleKernel, np.ndarray]:
    program = default_program(formula_of(output, [x]), machine)
    return SingleKernel(program, machine, threads=threads), np.ones(math.prod(x.shape), np.float32)


# -- the levels -------------------------------------------------------------------------------------------------------


def measured_capacities(machine: CpuMachine) -> Capacities:
    """The usable cache sizes of one thread."""
    sizes = _growing_sizes(machine.caches, machine.line_bytes)
    return believed(machine.caches, sizes, waits(machine, sizes))


def _growing_sizes(caches: Caches, line: int) -> list[int]:
    """Whole lines, from what every L1 holds to well beyond the last level, growing by about sqrt(2)."""
    largest = min(max(4 * caches.last, 64 << 20), _ARRAY_BYTES)
    steps = math.floor(2 * math.log2(largest / _SMALLEST_ARRAY))
    return [line * round(_SMALLEST_ARRAY / line * 2 ** (step / 2)) for step in range(steps + 1)]


def believed(caches: Caches, sizes: Sequence[int], waits: Sequence[float]) -> Capacities:
    """The system's cache sizes if the measured latencies rise near them, or show nothing; otherwise the measured
    sizes."""
    said = [caches.l1, caches.l2] + ([caches.l3] if caches.l3 else [])
    logs = never_falling(np.log(np.asarray(waits, np.float64)))
    near: list[int | None] = []
    for size in said:
        cut = _rise_near(size, sizes, logs)
        near.append(None if cut in near else cut)  # a step belongs to one level only
    result: list[int] = []
    for stated, found, (shown, ratio) in zip(said, near, steps_up(sizes, logs, near), strict=True):
        agree = found is not None or max(stated, shown) < _AGREEMENT * min(stated, shown)
        # A step below twice the previous level belongs to that level.
        silent = ratio < _CLEAR_STEP or (bool(result) and not _rises_beyond(2 * result[-1], sizes, logs))
        size = stated if agree or silent else shown
        result.append(max([size, *result]))
    return Capacities(result[0], result[1], result[2] if caches.l3 else 0)


def _rise_near(stated: int, sizes: Sequence[int], logs: np.ndarray) -> int | None:
    """The index of the size before which the latency rises, if near the stated size: between a quarter and four times
    it, the latency rises clearly and is half way up about there."""
    positions = np.log(np.asarray(sizes, np.float64))
    below, above = np.interp(np.log([stated / 4, stated * 4]), positions, logs)
    if above - below < math.log(_CLEAR_STEP):
        return None
    middle = (below + above) / 2
    cut = int(np.searchsorted(logs, middle))
    midpoint = np.interp(middle, logs[cut - 1 : cut + 1], positions[cut - 1 : cut + 1])
    return cut if abs(midpoint - math.log(stated)) < math.log(_AGREEMENT) else None


def _rises_beyond(size: int, sizes: Sequence[int], logs: np.ndarray) -> bool:
    here = np.interp(math.log(size), np.log(np.asarray(sizes, np.float64)), logs)
    return bool(logs[-1] - here >= math.log(_CLEAR_STEP))


def steps_up(sizes: Sequence[int], logs: np.ndarray, known: Sequence[int | None]) -> list[tuple[int, float]]:
    """Steps of the latency as (size, factor), from log latencies: a step before each `known` index, and the others
    where plateaus fit best by least squares. The size is the midpoint between neighbours."""
    sums, squares = (np.concatenate([[0.0], np.cumsum(values)]) for values in (logs, logs**2))

    def spread(first: int, last: int) -> float:
        total = sums[last] - sums[first]
        return float(squares[last] - squares[first] - total * total / (last - first))

    def misfit(cuts: tuple[int, ...]) -> float:
        return sum(spread(first, last) for first, last in itertools.pairwise((0, *cuts, len(logs))))

    def departures(cuts: tuple[int, ...]) -> int:
        return sum(given is not None and cut != given for cut, given in zip(cuts, known, strict=True))

    everywhere = itertools.combinations(range(1, len(logs)), len(known))
    positions = (cuts for cuts in everywhere if sizes[cuts[0]] <= _LARGEST_FIRST)
    cuts = min(positions, key=lambda cuts: (departures(cuts), misfit(cuts)))
    plateaus = [logs[first:last].mean() for first, last in itertools.pairwise((0, *cuts, len(logs)))]
    return [
        (_between(sizes[cut - 1], sizes[cut]), math.exp(after - before))
        for cut, (before, after) in zip(cuts, itertools.pairwise(plateaus), strict=True)
    ]


def never_falling(values: np.ndarray) -> np.ndarray:
    """The nearest non-decreasing sequence, because a larger array cannot have a lower latency."""
    blocks: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean, count = (mean * count + before * many) / (count + many), count + many
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def waits(machine: CpuMachine, sizes: Sequence[int]) -> list[float]:
    """Seconds per line when following the chain through all lines of the first bytes of an array, for each size."""
    memory = aligned_empty(max(sizes) + _HUGE_PAGE)
    begin = -memory.ctypes.data % _HUGE_PAGE
    chain = memory[begin : begin + max(sizes)].view(np.int64)
    position, reached = (aligned_empty(machine.line_bytes).view(np.int64)[:1] for _ in range(2))
    kernel = SingleKernel(follow_program(chain.size, _FOLLOWED), machine, threads=1)
    random = np.random.default_rng(0)

    def follow() -> float:
        start = time.perf_counter()
        kernel([chain, position], reached)
        seconds = time.perf_counter() - start
        position[:] = reached
        return seconds

    least = [math.inf] * len(sizes)
    for _ in range(_PASSES):
        for number, size in enumerate(sizes):
            order = random.permutation(size // machine.line_bytes) * (machine.line_bytes // _POSITION)
            chain[order] = np.roll(order, -1)
            position[:] = order[0]
            for _ in range(-(-order.size // _FOLLOWED)):  # all of it once, to warm the cache
                follow()
            least[number] = min(least[number], follow() / _FOLLOWED)
    return least


def follow_program(positions: int, steps: int) -> Program:
    """for k < steps: at = chain[at], from the given index to the final one."""
    chain, start = Buffer("chain", DType.I64, positions), Buffer("start", DType.I64, 1)
    end, at = Buffer("end", DType.I64, 1), Buffer("at", DType.I64, 1, Scope.REGISTER)
    first = te.const(0, DType.I64)
    here = te.Load(at, (first,))
    body = block(
        Store(at, first, te.Load(start, (first,))),
        nest([(te.Var("k", steps), Kind.SERIAL)], Store(at, first, te.Load(chain, (here,)))),
        Store(end, first, here),
    )
    return Program("follow", (chain, start, end), For(te.Var("p", 1), Kind.PARALLEL, body))


def _read_speeds(machine: CpuMachine, sizes: Sequence[int], threads: int) -> list[float]:
    """Bytes per second of all threads while each repeatedly reads its own array of about each size."""
    block_bytes = machine.vector_bytes * _READ_AT_ONCE
    kernels = []
    for size in sizes:
        blocks = max(1, size // block_bytes)
        times = max(2, _READ_BYTES // (blocks * block_bytes))
        program = _read_program(machine.lanes(DType.F32), blocks, times, threads)
        kernels.append(
            (SingleKernel(program, machine, threads=threads), blocks * block_bytes * threads, times)
        )
    array = aligned_empty(max(size for _, size, _ in kernels)).view(np.float32)
    array[:] = 0
    fastest = [math.inf] * len(kernels)
    for _ in range(_PASSES):
        for number, (kernel, size, _) in enumerate(kernels):
            inputs = [array[: size // 4]]
            output = kernel(inputs)
            begin = time.perf_counter()
            kernel(inputs, output)
            fastest[number] = min(fastest[number], time.perf_counter() - begin)
    return [size * times / seconds for (_, size, times), seconds in zip(kernels, fastest, strict=True)]


def _read_program(lanes: int, blocks: int, times: int, threads: int) -> Program:
    """for p (parallel): for t < times: for b < blocks: acc[u] += x[p, b, u] for u (unrolled), in lanes."""
    at_once = lanes * _READ_AT_ONCE
    x = Buffer("x", DType.F32, threads * blocks * at_once)
    out = Buffer("out", DType.F32, threads * at_once)
    kept = Buffer("acc", DType.F32, at_once, Scope.REGISTER)
    part, again, number = te.Var("p", threads), te.Var("t", times), te.Var("b", blocks)
    which, lane = te.Var("u", _READ_AT_ONCE), te.Var("v", lanes)
    element = which * lanes + lane
    tile = [(which, Kind.UNROLL), (lane, Kind.VECTOR)]
    read = te.Load(x, ((part * blocks + number) * at_once + element,))
    total = te.call("add", te.Load(kept, (element,)), read)
    body = block(
        nest(tile, Store(kept, element, te.const(0, DType.F32))),
        nest([(again, Kind.SERIAL), (number, Kind.SERIAL), *tile], Store(kept, element, total)),
        nest(tile, Store(out, part * at_once + element, te.Load(kept, (element,)))),
    )
    return Program("read", (x, out), For(part, Kind.PARALLEL, body))
