"""Predict the time of a kernel on a GPU from counted terms and the GPU's rates.

    seconds = start + waves x (fill + main loop + results)

A wave is the number of blocks that the GPU holds at once. A step of the main loop takes as long as the slowest of
tensor cores, other units and shared memory for all blocks of a multiprocessor, or as memory for all blocks of the
GPU, unless too few steps are in flight to hide the load latency (ALCOP's condition):

    load <= (stages under way x blocks of a multiprocessor - 1) x use:   a step takes use
    otherwise:                                                           (load + use) / stages under way

Where `terms.inner` describes the loads from shared memory into registers, the same condition gives the time of a step:
a part's load against its use, the stages of registers, and the warps of a scheduler instead of blocks. What a step of
concurrent blocks loads from memory is at most their working set (`terms.grid`).

With warps of their own for copies (`terms.roles`), what starts copies takes no time of those that compute, and a step
waits for one barrier of its slot instead of all threads of the block.
"""

from __future__ import annotations

import math

from tilewright.errors import InternalError
from tilewright.hw.gpu import WARP, GpuMachine
from tilewright.space.terms import Counted, GpuTerms, InnerLoop, Roofline, StreamTerms
from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, Truth, least, most, nowhere, power, select

# Unpublished constants are fitted to the times of 9,200 kernels on one H200, 18 tasks of `benchmarks/gpu_search.py`
# (`benchmarks/results/gpu_search.jsonl`), so that the fastest kernels rank first. Constants that differ between GPUs,
# such as launches and latencies, are in `hw/gpu.py`.
_TOGETHER = 2.0e-6  # additional seconds if blocks form clusters
_ISSUE_CLOCK = 1.7  # instructions that a multiprocessor issues per clock, with typical stalls
_ORDINARY_CLOCK = 2.4  # the same without stalls
_COPY_CLOCK = 0.43  # copies to shared memory issued per clock
_TENSOR_WARPS, _TENSOR_POWER = 9.3, 0.73  # warps per multiprocessor that saturate its tensor cores
_SCALAR_WARPS, _SCALAR_POWER = (
    12.0,
    0.3,
)  # the same for its other units; with fewer warps they slow down by this power
_STEP = 97.0  # clocks of a barrier and its idle time
# The register pipeline, fitted to the 900 kernels of `benchmarks/results/pipelining.json`, one H200.
_SCHEDULERS = 4  # of a multiprocessor; each has its own tensor core
_SHARED_LATENCY = 50.0  # clocks until a fragment has arrived from shared memory
_FIRST = 2.0  # such loads that a step waits for if its register pipeline is not fused with the tiles'
_INNER_STEP, _FUSED_STEP = 150.0, 75.0  # clocks of a barrier and its idle time, without and with fusion
_WRAP = 20.0  # additional clocks unless the number of stages is a power of two
_MEMORY_SHARE = 0.92  # share of the data sheet's bandwidth
_WRITE_SHARE = 0.95  # the same while results are written
_L2_SHARE = 0.92  # share of L2 in which tensors remain from the previous kernel
_L2_REACHED = 0.6  # share of its bandwidth for accesses that hit L2 instead of memory
_WRITE_CLOCKS = 3260.0  # clocks before the first result is written
_OVERLAPPED = 1.1  # exponent by which they shrink if a block starts the next tile before it finishes one
_HIDDEN = 0.19  # exponent of the number of concurrent blocks that hide a block's start and end

# Instructions of warpgroups: not calibrated, since no kernel of them was measured for it. The rate is what libraries,
# which use them, reach of the data sheet's; the others are guesses between a barrier of a block in each step, and none.
_WARPGROUP_SHARE = 0.75
_WARPGROUPS, _WARPGROUP_POWER = 2.0, 0.5  # of a multiprocessor that saturate its tensor cores
_SLOT_STEP, _ROLES_STEP = 60.0, 20.0  # clocks of a step's waits, without and with a producer of its own
# A library call is known only by its totals. These are shares of data-sheet rates that large calls of cuBLASLt and
# cuDNN reached on an H200 (benchmarks/results/gpu_gemm.md).
_CALL_TENSOR, _CALL_MEMORY = 0.75, 0.73
_SCALAR_SHARE = 0.7  # share of the ordinary units' FMA rate reached by a library
_LOOP_SHARE = 0.1  # the same for a loop that loads both operands of every FMA
_LOOP_CLOCKS = 20.0  # per step, if the steps of a thread depend on each other
_STREAM_SHARE = 0.8  # share of the bandwidth reached by an elementwise kernel
_SHARP = 3.0  # near the intersection of two bounds of a streaming kernel, neither is reached
_MAX_REGISTERS = 255  # of a thread
_SPILL = 3.0  # instructions for a register that does not fit, in each step
_BLOCK_CLOCKS = 300.0  # to start and end a block of a streaming kernel


def seconds(terms: Counted, machine: GpuMachine) -> Number:
    """The predicted seconds; infinite if not one block fits. Of many configs, whose counts are arrays, it is an
    array."""
    if isinstance(terms, tuple):
        return sum(seconds(each, machine) for each in terms)
    if isinstance(terms, Roofline):
        return _roofline(terms, machine)
    if isinstance(terms, StreamTerms):
        return _stream(terms, machine)
    if not isinstance(terms, GpuTerms):
        raise InternalError(f"expected GPU terms, got {type(terms).__name__}")
    fits = machine.resident_blocks(terms.threads, terms.registers, terms.shared_bytes)
    if nowhere(fits > 0):
        return math.inf
    resident = most(1, fits)
    at_once = machine.sms * resident
    waves, rest = divmod(terms.blocks, at_once)
    clocks = waves * _wave(terms, machine, resident, at_once, more=waves > 1)
    if not nowhere(rest > 0):
        left = most(1, rest)
        last = _wave(terms, machine, ceil_div(left, machine.sms), left, more=waves > 0)
        clocks = clocks + select(rest > 0, last, 0.0)
    start = machine.launch_seconds + select(terms.cluster > 1, _TOGETHER, 0.0)
    moved = terms.memory / _memory_bytes_clock(terms.memory, machine, _MEMORY_SHARE)
    return select(fits > 0, start + most(clocks, moved) / _clock(machine), math.inf)


def _memory_bytes_clock(tensors: Number, machine: GpuMachine, share: float) -> Number:
    """Bytes per clock of a kernel's tensors: from L2 as far as they fit, otherwise from memory."""
    memory = share * machine.memory_bytes_per_second / _clock(machine)
    cache = max(memory, _L2_REACHED * machine.l2_bytes_clock)
    cached = least(1.0, most(0.0, 2.0 - tensors / (_L2_SHARE * machine.l2)))
    return 1.0 / ((1.0 - cached) / memory + cached / cache)


def _roofline(terms: Roofline, machine: GpuMachine) -> float:
    busy = max(terms.busy, 1e-3)
    if terms.unit == "scalar":
        rate = machine.fma_flops * (_LOOP_SHARE if terms.chain else _SCALAR_SHARE)
    else:
        rate = machine.peak_tensor_flops * _CALL_TENSOR * (1.0 if terms.unit == "tensor16" else 0.5)
    share = _CALL_MEMORY if terms.is_call else _STREAM_SHARE
    # Fewer blocks saturate memory than the multipliers.
    memory = share * machine.memory_bytes_per_second / _clock(machine)
    if not terms.is_call:
        memory = _memory_bytes_clock(terms.bytes, machine, share)
    moved = terms.bytes / (memory * _clock(machine) * min(1.0, 2 * busy))
    launch = machine.rates.library_launch_seconds if terms.is_call else machine.launch_seconds
    start = terms.launches * launch
    chained = terms.chain * _LOOP_CLOCKS / _clock(machine)
    return start + max(terms.flops / (rate * busy), moved, chained)


def _stream(terms: StreamTerms, machine: GpuMachine) -> float:
    """The time of a streaming kernel: the slowest of memory, instructions and the latency of its steps, and more than
    either where two of them are close. Data that blocks load again come from L2 if the data of all concurrent blocks
    fit there."""
    kept = max(1, round(min(terms.registers, _MAX_REGISTERS)))
    resident = max(1, machine.resident_blocks(terms.threads, kept, 0))
    at_once = min(terms.blocks, machine.sms * resident)
    waves = -(-terms.blocks // (machine.sms * resident))
    busiest = -(-terms.blocks // machine.sms)  # blocks of the multiprocessor with the most
    memory = _MEMORY_SHARE * machine.memory_bytes_per_second / _clock(machine)
    again = max(0.0, terms.blocks * (terms.loaded + terms.written) - terms.memory)
    missed = min(1.0, max(0.0, at_once * terms.loaded / (_L2_SHARE * machine.l2) - 1.0))
    moved = (terms.memory + missed * again) / memory
    cached = (1.0 - missed) * again / (_L2_REACHED * machine.l2_bytes_clock)
    spilled = max(0.0, terms.registers - _MAX_REGISTERS) * terms.threads / WARP * terms.steps
    warps = min(busiest, resident) * terms.threads / WARP
    issued = busiest * (terms.scalar + _SPILL * spilled) / (_ORDINARY_CLOCK * min(1.0, warps / _SCALAR_WARPS))
    waited = waves * terms.steps * machine.rates.memory_latency + _BLOCK_CLOCKS * busiest / resident
    clocks = (moved + cached) ** _SHARP + issued**_SHARP + waited**_SHARP
    return machine.launch_seconds + clocks ** (1 / _SHARP) / _clock(machine)


def _wave(terms: GpuTerms, machine: GpuMachine, resident: Number, blocks: Number, more: Truth) -> Number:
    """Clocks of this many concurrent blocks, `resident` per multiprocessor. With several, other blocks hide the start
    and end of one block."""
    rates = machine.rates
    warps = resident * terms.threads / WARP
    tensor_clock = _tensor_clock(terms, machine, resident, warps)
    scalar_busy = power(least(1.0, warps / _SCALAR_WARPS), _SCALAR_POWER)
    work = most(
        most(
            terms.flops / tensor_clock,
            terms.shared_traffic / rates.shared_bytes_clock,
        ),
        most(
            (terms.scalar / _ISSUE_CLOCK + terms.ordinary / _ORDINARY_CLOCK) / scalar_busy,
            terms.copies / _COPY_CLOCK,
        ),
    )
    between: Number = select(terms.warpgroups > 0, select(terms.roles, _ROLES_STEP, _SLOT_STEP), _STEP)
    if terms.inner is not None:
        work = most(work, _inner(terms, terms.inner, machine, resident) / resident)
        between = select(terms.inner.fused, _FUSED_STEP, _INNER_STEP)
        between = between + select(terms.stages & (terms.stages - 1) != 0, _WRAP, 0.0)
    use = work + between / resident  # of a step, in a block's share of the multiprocessor
    cache = machine.l2_bytes_clock
    memory = _memory_bytes_clock(terms.memory, machine, _MEMORY_SHARE)
    loaded = terms.loaded * blocks
    total = terms.loaded * terms.blocks * terms.steps
    read = most(0.0, terms.memory - terms.written * terms.blocks)
    first = least(1.0, read / most(1.0, total))  # from memory, for all blocks
    missed = loaded * first
    if terms.grid is not None:
        missed = least(
            missed, terms.grid.loaded(blocks)
        )  # the working set of concurrent blocks is loaded once
    arriving = most(loaded / cache, missed / memory)
    load = most(rates.l2_latency, rates.memory_latency * first) + arriving
    in_flight = terms.stages - 1
    step = resident * use
    waited = most(step, (load + use) / most(1, in_flight))
    step = select(load > (in_flight * resident - 1) * use, waited, step)
    loop = terms.steps * most(step, arriving)
    after = most(
        terms.write_flops / tensor_clock,
        terms.write_scalar / (_ISSUE_CLOCK * scalar_busy),
    )
    results = _WRITE_CLOCKS + resident * most(terms.write_shared / rates.shared_bytes_clock, after)
    results = results + blocks * (terms.written + terms.write_loaded) / (_WRITE_SHARE * memory)
    hidden = select(more, power(resident, _HIDDEN), 1.0)
    hidden = hidden * select(terms.persistent & more, _OVERLAPPED, 1.0)
    before = rates.memory_latency * (1.0 + terms.waits_before)
    return loop + (before + arriving + results) / hidden


def _tensor_clock(terms: GpuTerms, machine: GpuMachine, resident: Number, warps: Number) -> Number:
    """Operations per clock of a multiprocessor's tensor cores."""
    by_warps = machine.tensor_flops_clock * power(least(1.0, warps / _TENSOR_WARPS), _TENSOR_POWER)
    peak = machine.rates.peak_tensor_flops_clock * _WARPGROUP_SHARE
    # While the warps of one block write results, those of another multiply; within a block, all do the same.
    busy = power(least(1.0, most(1.0, resident * terms.warpgroups) / _WARPGROUPS), _WARPGROUP_POWER)
    return select(terms.warpgroups > 0, peak * busy, by_warps)


def _inner(terms: GpuTerms, inner: InnerLoop, machine: GpuMachine, resident: Number) -> Number:
    """Clocks of a step of all resident blocks, by the register pipeline: the condition for tiles, with the warps
    of a scheduler as concurrent workers. Without fusion the first part of each step is waited for."""
    warps = terms.threads / WARP
    together = most(1.0, resident * warps / _SCHEDULERS)
    use = terms.flops * _SCHEDULERS / (machine.tensor_flops_clock * warps * inner.parts)
    load = _SHARED_LATENCY + inner.loaded * _SCHEDULERS / machine.rates.shared_bytes_clock
    waited = inner.parts * (load + use) / inner.stages
    clocks = select(load > (inner.stages * together - 1) * use, waited, inner.parts * together * use)
    return clocks + select(inner.fused, 0.0, _FIRST * load)


def _clock(machine: GpuMachine) -> float:
    return machine.clock_mhz * 1e6
