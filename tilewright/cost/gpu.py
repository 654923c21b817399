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
from dataclasses import dataclass

from tilewright.hw.gpu import GpuMachine
from tilewright.space.space import Config
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.space.templates.cuda.template import GpuApplied, GpuTerms, GpuWork

_START = 2.0e-6  # seconds of a launch in a graph, and of a block's first instructions
_SHARED_CLOCK = 128.0  # bytes that shared memory gives a multiprocessor
_ISSUE_CLOCK = 4.0  # instructions of warps that a multiprocessor begins
_SLOWEST_WARPS = 8.0  # warps of a multiprocessor that keep its tensor cores busy
_CACHE_LATENCY, _MEMORY_LATENCY = 300.0, 800.0  # clocks
_STEP = 40.0  # clocks of a barrier and what it leaves idle
_MEMORY_SHARE = 0.88  # of the data sheet's bandwidth


@dataclass(frozen=True)
class Ranked:
    """A config with the seconds that it is expected to take; `applied` makes its kernel."""

    seconds: float
    config: Config
    applied: GpuApplied


def rank(work: GpuWork, most: int | None = None) -> list[Ranked]:
    """The configs of all templates for a task, fastest first; none where no template applies."""
    found: list[Ranked] = []
    for template in TEMPLATES:
        applied = template.apply(work)
        if applied is not None:
            found += [
                Ranked(seconds(applied.terms(config), work.machine), config, applied)
                for config in applied.space.configs()
            ]
    found.sort(key=lambda ranked: (ranked.seconds, str(ranked.config)))
    return found[:most]


def best_of(work: GpuWork) -> Ranked | None:
    """The config of least predicted time: the choice without measurement."""
    return next(iter(rank(work, most=1)), None)


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
    return _START + max(
        clocks / _clock(machine), terms.memory / (_MEMORY_SHARE * machine.memory_bytes_per_second)
    )


def _wave(terms: GpuTerms, machine: GpuMachine, resident: int, blocks: int, more: bool) -> float:
    """Clocks of so many blocks at once, `resident` on a multiprocessor. Where there are more of them, what is before
    and behind the main loop of one block is hidden by those beside it."""
    warps = resident * terms.threads / 32
    busy = min(1.0, warps / _SLOWEST_WARPS)
    use = max(
        resident * terms.flops / (machine.tensor_flops_clock * busy),
        resident * terms.shared_traffic / _SHARED_CLOCK,
        resident * terms.scalar / _ISSUE_CLOCK,
    )
    use += _STEP
    cache = machine.l2_bytes_clock
    memory = _MEMORY_SHARE * machine.memory_bytes_per_second / _clock(machine)
    loaded = terms.loaded * blocks
    total = terms.loaded * terms.blocks * terms.steps
    first = min(
        1.0, max(0.0, terms.memory - terms.written * terms.blocks) / max(1.0, total)
    )  # from memory, of all
    load = max(_CACHE_LATENCY + loaded / cache, _MEMORY_LATENCY * first + loaded * first / memory)
    under_way = terms.stages - 1
    if load > (under_way * resident - 1) * use / resident:
        step = max(use, (load + use / resident) / under_way)
    else:
        step = use
    loop = terms.steps * max(step, loaded / cache, loaded * first / memory)
    fill = _MEMORY_LATENCY + loaded / cache
    results = resident * terms.write_shared / _SHARED_CLOCK + 2 * _MEMORY_LATENCY
    results += blocks * (terms.written + terms.write_loaded) / memory
    hidden = resident if more else 1
    return loop + (fill + results) / hidden


def _clock(machine: GpuMachine) -> float:
    return machine.clock_mhz * 1e6
