"""The time of a kernel on a GPU, without measurement: from counted terms and the card's rates.

    seconds = start + waves x (fill + main loop + results)

A wave is as many blocks as the card holds at once. A step of the main loop takes as long as the slowest of tensor
cores, the other units and shared memory takes for all blocks of a multiprocessor, or as memory takes for all blocks of
the card; unless too few steps are under way to hide how long a load takes (ALCOP's condition):

    load <= (stages under way x blocks of a multiprocessor - 1) x use:   a step takes use
    otherwise:                                                           (load + use) / stages under way
"""

from __future__ import annotations

import math

from tilewright.errors import InternalError
from tilewright.hw.gpu import GpuMachine
from tilewright.space.terms import Counted, GpuTerms, Roofline

# What the vendor does not publish is fitted to the times of 1,700 kernels on one H200: the tasks of
# `benchmarks/gpu_gemm.py`, for each the first of this model's ranking and as many random ones. Those
# that differ between cards, launches and latencies among them, are in `hw/gpu.py`.
_TOGETHER = 2.0e-6  # seconds more where blocks form clusters
_ISSUE_CLOCK = 1.4  # instructions that a multiprocessor begins, beside all that it waits for
_ORDINARY_CLOCK = 2.8  # of those that wait for nothing
_COPY_CLOCK = 0.44  # copies to shared memory that it begins
_WARPS = 6.4  # warps of a multiprocessor that keep its tensor cores busy
_STEP = 70.0  # clocks of a barrier and what it leaves idle
_MEMORY_SHARE = 0.92  # of the data sheet's bandwidth
_WRITE_SHARE = 0.9  # the same while results are written
_WRITE_CLOCKS = 4100.0  # before the first result is written
_OVERLAPPED = 1.1  # how much less they count where a block begins the next tile before it ends one
_HIDDEN = 0.18  # power of the number of blocks beside a block that hide its beginning and end

# A library's call is known by its totals alone. Shares of what the data sheet promises, as large calls of cuBLASLt and
# cuDNN reached them on an H200 (benchmarks/results/gpu_gemm.md).
_CALL_TENSOR, _CALL_MEMORY = 0.6, 0.73
_SCALAR_SHARE = 0.5  # of the ordinary units' multiply-adds, by a library
_LOOP_SHARE = 0.1  # of them, by a loop that loads both operands of every multiply-add
_LOOP_CLOCKS = 20.0  # of one of its steps, where one thread's must follow each other
_STREAM_SHARE = 0.8  # of the bandwidth, by a kernel that computes each element by itself
_FMA_CLOCK = 256.0  # operations of the ordinary units of a multiprocessor in a clock
_TENSOR_CLOCK = 2048.0  # of its tensor cores, 16-bit operands, where there is no wgmma


def seconds(terms: Counted, machine: GpuMachine) -> float:
    """Infinite where not one block fits."""
    if isinstance(terms, tuple):
        return sum(seconds(each, machine) for each in terms)
    if isinstance(terms, Roofline):
        return _roofline(terms, machine)
    if not isinstance(terms, GpuTerms):
        raise InternalError("terms of a processor for a GPU")
    most = machine.resident_blocks(terms.threads, terms.registers, terms.shared_bytes)
    if not most:
        return math.inf
    at_once = machine.sms * most
    waves, rest = divmod(terms.blocks, at_once)
    clocks = waves * _wave(terms, machine, most, at_once, more=waves > 1)
    if rest:
        clocks += _wave(terms, machine, -(-rest // machine.sms), rest, more=waves > 0)
    start = machine.launch_seconds + (_TOGETHER if terms.cluster > 1 else 0.0)
    least = terms.memory / (_MEMORY_SHARE * machine.memory_bytes_per_second)
    return start + max(clocks / _clock(machine), least)


def _roofline(terms: Roofline, machine: GpuMachine) -> float:
    clocks = machine.sms * _clock(machine)
    busy = max(terms.busy, 1e-3)
    if terms.unit == "scalar":
        share = _LOOP_SHARE if terms.chain else _SCALAR_SHARE
        rate = share * _FMA_CLOCK * clocks
    else:
        tensor = (machine.wgmma_flops_clock or _TENSOR_CLOCK) * clocks
        rate = _CALL_TENSOR * tensor * (1.0 if terms.unit == "tensor16" else 0.5)
    share = _CALL_MEMORY if terms.is_call else _STREAM_SHARE
    # Memory is kept busy by fewer blocks than the multipliers need.
    moved = terms.bytes / (share * machine.memory_bytes_per_second * min(1.0, 2 * busy))
    launch = machine.rates.library_launch_seconds if terms.is_call else machine.launch_seconds
    start = terms.launches * launch
    chained = terms.chain * _LOOP_CLOCKS / _clock(machine)
    return start + max(terms.flops / (rate * busy), moved, chained)


def _wave(terms: GpuTerms, machine: GpuMachine, resident: int, blocks: int, more: bool) -> float:
    """Clocks of so many blocks at once, `resident` on a multiprocessor. Where there are more of them, what is before
    and behind the main loop of one block is hidden by those beside it."""
    rates = machine.rates
    busy = min(1.0, resident * terms.threads / 32 / _WARPS)
    work = max(
        terms.flops / (machine.tensor_flops_clock * busy),
        terms.shared_traffic / rates.shared_bytes_clock,
        terms.scalar / _ISSUE_CLOCK + terms.ordinary / _ORDINARY_CLOCK,
        terms.copies / _COPY_CLOCK,
    )
    use = work + _STEP / resident  # of a step, in a block's share of the multiprocessor
    cache = machine.l2_bytes_clock
    memory = machine.memory_bytes_per_second / _clock(machine)
    loaded = terms.loaded * blocks
    total = terms.loaded * terms.blocks * terms.steps
    first = min(
        1.0, max(0.0, terms.memory - terms.written * terms.blocks) / max(1.0, total)
    )  # from memory, of all
    arriving = max(loaded / cache, loaded * first / (_MEMORY_SHARE * memory))
    load = max(rates.l2_latency, rates.memory_latency * first) + arriving
    under_way = terms.stages - 1
    step = resident * use
    if load > (under_way * resident - 1) * use:
        step = max(step, (load + use) / max(1, under_way))
    loop = terms.steps * max(step, arriving)
    results = resident * terms.write_shared / rates.shared_bytes_clock + _WRITE_CLOCKS
    results += blocks * (terms.written + terms.write_loaded) / (_WRITE_SHARE * memory)
    hidden = resident**_HIDDEN if more else 1.0
    if terms.persistent and more:
        hidden *= _OVERLAPPED
    return loop + (rates.memory_latency + arriving + results) / hidden


def _clock(machine: GpuMachine) -> float:
    return machine.clock_mhz * 1e6
