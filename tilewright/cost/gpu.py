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
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.hw.gpu import GpuMachine
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.space import Config
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.space.templates.cuda.template import GpuApplied, GpuTemplate, GpuTerms, GpuWork

# What the vendor does not publish is fitted to the times of 1,700 kernels on one H200: the tasks of
# `benchmarks/gpu_gemm.py`, for each the first of this model's ranking and as many random ones.
_START = 1.6e-6  # seconds of a launch in a graph, and of a block's first instructions
_TOGETHER = 2.0e-6  # seconds more where blocks form clusters
_SHARED_CLOCK = 128.0  # bytes that shared memory gives a multiprocessor
_ISSUE_CLOCK = 1.4  # instructions that a multiprocessor begins, beside all that it waits for
_ORDINARY_CLOCK = 2.8  # of those that wait for nothing
_COPY_CLOCK = 0.44  # copies to shared memory that it begins
_WARPS = 6.4  # warps of a multiprocessor that keep its tensor cores busy
_CACHE_LATENCY, _MEMORY_LATENCY = 200.0, 1350.0  # clocks
_STEP = 70.0  # clocks of a barrier and what it leaves idle
_MEMORY_SHARE = 0.92  # of the data sheet's bandwidth
_WRITE_SHARE = 0.9  # the same while results are written
_WRITE_CLOCKS = 4100.0  # before the first result is written
_OVERLAPPED = 1.1  # how much less they count where a block begins the next tile before it ends one
_HIDDEN = 0.18  # power of the number of blocks beside a block that hide its beginning and end

_ALIKE = 0.001  # relative difference of times that says nothing


@dataclass(frozen=True)
class Ranked:
    """A config with the seconds that it is expected to take; `applied` makes its kernel."""

    seconds: float
    config: Config
    applied: GpuApplied


def rank(
    work: GpuWork, most: int | None = None, templates: Sequence[GpuTemplate] = TEMPLATES
) -> list[Ranked]:
    """The configs of all these templates for a task, fastest first; none where no template applies. Of those that
    differ in one knob and are expected to take as long, a ranking of so many at most has the first alone: to measure
    both would tell little."""
    found: list[Ranked] = []
    for template in templates:
        applied = template.apply(work)
        if applied is not None:
            found += [
                Ranked(seconds(applied.terms(config), work.machine), config, applied)
                for config in applied.space.configs()
            ]
    found.sort(key=lambda ranked: (ranked.seconds, str(ranked.config)))
    if most is None:
        return found
    chosen: list[Ranked] = []
    for each in found:
        if len(chosen) == most:
            break
        if not any(_are_alike(each, other) for other in chosen):
            chosen.append(each)
    return chosen


def _are_alike(a: Ranked, b: Ranked) -> bool:
    if a.config.template != b.config.template or a.seconds > (1 + _ALIKE) * b.seconds:
        return False
    return sum(x != y for x, y in zip(a.config.values, b.config.values, strict=True)) <= 1


def best_of(work: GpuWork) -> Ranked | None:
    """The config of least predicted time: the choice without measurement. Sketches are asked where no template
    applies."""
    return next((best for makers in (TEMPLATES, SKETCHES) for best in rank(work, 1, makers)), None)


def seconds(terms: GpuTerms, machine: GpuMachine) -> float:
    """Infinite where not one block fits."""
    most = machine.resident_blocks(terms.threads, terms.registers, terms.shared_bytes)
    if not most:
        return math.inf
    at_once = machine.sms * most
    waves, rest = divmod(terms.blocks, at_once)
    clocks = waves * _wave(terms, machine, most, at_once, more=waves > 1)
    if rest:
        clocks += _wave(terms, machine, -(-rest // machine.sms), rest, more=waves > 0)
    start = _START + (_TOGETHER if terms.cluster > 1 else 0.0)
    least = terms.memory / (_MEMORY_SHARE * machine.memory_bytes_per_second)
    return start + max(clocks / _clock(machine), least)


def _wave(terms: GpuTerms, machine: GpuMachine, resident: int, blocks: int, more: bool) -> float:
    """Clocks of so many blocks at once, `resident` on a multiprocessor. Where there are more of them, what is before
    and behind the main loop of one block is hidden by those beside it."""
    busy = min(1.0, resident * terms.threads / 32 / _WARPS)
    work = max(
        terms.flops / (machine.tensor_flops_clock * busy),
        terms.shared_traffic / _SHARED_CLOCK,
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
    load = max(_CACHE_LATENCY, _MEMORY_LATENCY * first) + arriving
    under_way = terms.stages - 1
    step = resident * use
    if load > (under_way * resident - 1) * use:
        step = max(step, (load + use) / max(1, under_way))
    loop = terms.steps * max(step, arriving)
    results = resident * terms.write_shared / _SHARED_CLOCK + _WRITE_CLOCKS
    results += blocks * (terms.written + terms.write_loaded) / (_WRITE_SHARE * memory)
    hidden = resident**_HIDDEN if more else 1.0
    if terms.persistent and more:
        hidden *= _OVERLAPPED
    return loop + (_MEMORY_LATENCY + arriving + results) / hidden


def _clock(machine: GpuMachine) -> float:
    return machine.clock_mhz * 1e6
